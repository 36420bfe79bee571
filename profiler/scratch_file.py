"""A file of random bytes on the disk that is to be measured, gone on every way out."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from bel.formats.atomic import named_errors, write_all
from bel.formats.errors import MachineError
from bel.formats.staging import StagingFolder
from bel.formats.units import MIB, format_bytes

CHUNK_BYTES = 32 * MIB
SPARE_SHARE = 4  # at most this part of the free space is used


@contextlib.contextmanager
def scratch_file(
    folder: Path, *, size_bytes: int, least_bytes: int, seconds: float, check: Callable[[Path], None], seed: int = 0
) -> Iterator[Path]:
    """A file in `folder` of up to `size_bytes`, on the disk; fewer where space or `seconds` are short, `least_bytes` at least.

    Random, since disks and file systems squeeze what is not.  `check` sees the file when it has its first bytes, and raises
    where the rest is not worth writing.  A run that was killed leaves a folder `.bel-bandwidth.bel-tmp`, which the next one
    removes.  Raises MachineError where there is no space.
    """
    with StagingFolder(folder / ".bel-bandwidth.bel-tmp") as staging:
        room = os.statvfs(folder)
        size = min(size_bytes, room.f_bavail * room.f_frsize // SPARE_SHARE)
        if size < least_bytes:
            raise MachineError(
                "too little free space for the file to be read",
                path=str(folder),
                found=format_bytes(room.f_bavail * room.f_frsize),
                expected=f"at least {format_bytes(SPARE_SHARE * least_bytes)}",
            )
        path = staging.path / "random.bin"
        with named_errors(path):
            _write(path, size, least_bytes, time.monotonic() + seconds, check, np.random.default_rng(seed))
        yield path


def _write(
    path: Path, size: int, least: int, deadline: float, check: Callable[[Path], None], random: np.random.Generator
) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        at = 0
        while at < size and (at < least or time.monotonic() < deadline):
            write_all(fd, memoryview(random.bytes(min(CHUNK_BYTES, size - at))), at)
            # Flushed chunk by chunk: else the deadline would only see the page cache, and the disk come behind it.
            os.fsync(fd)
            if at == 0:
                check(path)
            at += CHUNK_BYTES
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
