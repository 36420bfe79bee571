"""A lock on a folder, held while a run works in it: two downloads into one place would remove each other's files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from bel.formats.atomic import named_errors
from bel.formats.errors import MachineError


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock; it ends with the process, however that ends.

    Raises MachineError where another run holds it, OSError where `folder` is no folder; a link is none.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        with named_errors(folder):
            _take(fd, folder)
        yield
    finally:
        os.close(fd)


def _take(fd: int, folder: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise MachineError(
                "another run is writing this output at this moment", path=str(folder), hint="Wait for it to end"
            ) from None
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):  # no locks on this file system
            raise
