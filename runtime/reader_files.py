"""The open files of a reader, with direct I/O or without, probed by a real read."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from bel.formats.errors import MachineError
from bel.runtime.reads import PAGE_BYTES

NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
"""What file systems without direct I/O say: some to the open, some only to the first read."""


class RefusedError(Exception):
    """This machine has no such way of reading; the text, a clause, says why.  Never reaches a user as it is."""


class ReaderFiles:
    """Files open for reading, in the order of their paths.

    Without `is_direct` they go through the page cache, with the kernel's own reading ahead turned off.
    Raises MachineError where one cannot be opened or read, RefusedError where it has no direct I/O.
    """

    def __init__(self, paths: Sequence[Path], *, is_direct: bool) -> None:
        self.paths = [str(path) for path in paths]
        self.is_direct = is_direct
        self.step_bytes = PAGE_BYTES if is_direct else 1
        self.fds: list[int] = []
        try:
            for path in self.paths:
                self.fds.append(_open(path, is_direct))
                _probe(self.fds[-1], path, is_direct)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close them; nothing may be in flight."""
        while self.fds:
            os.close(self.fds.pop())


def _open(path: str, is_direct: bool) -> int:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would let the open wait for ever
            raise MachineError("is not a regular file", path=path)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if is_direct else 0))
    except OSError as error:
        if is_direct and error.errno in NO_DIRECT:
            raise no_direct(path) from error
        raise MachineError(f"cannot be opened: {error.strerror}", path=path) from error
    if not is_direct:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # else the cache fills with what nobody asked for
    return fd


def _probe(fd: int, path: str, is_direct: bool) -> None:
    with mmap.mmap(-1, PAGE_BYTES) as page:  # begins at a page, as a direct read must
        try:
            os.preadv(fd, [page], 0)
        except OSError as error:
            if is_direct and error.errno in NO_DIRECT:
                raise no_direct(path) from error
            raise MachineError(f"cannot be read: {error.strerror}", path=path, offset_bytes=0) from error


def no_direct(path: str) -> RefusedError:
    """The file system of a file has no direct I/O."""
    return RefusedError(f"the file system of {path} has no direct I/O")
