"""Holes of sparse files: ranges that were never written and read as zeros."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of a file, in bytes, that either holds data or is a hole."""

    start_bytes: int
    size_bytes: int
    is_hole: bool


def extents(fd: int, start_bytes: int, end_bytes: int) -> Iterator[Extent]:
    """[start, end) of an open file as alternating data and hole ranges.

    A file system that knows no holes yields data only.  Call `settle` once before trusting a hole.
    """
    at = start_bytes
    while at < end_bytes:
        data = _seek(fd, at, os.SEEK_DATA, end_bytes)
        if data > at:
            yield Extent(at, data - at, True)
        if data < end_bytes:
            hole = _seek(fd, data, os.SEEK_HOLE, end_bytes)
            yield Extent(data, hole - data, False)
            data = hole
        at = data


def hole_bytes(fd: int, size_bytes: int) -> int:
    """How many of the first `size_bytes` bytes lie in holes."""
    return sum(e.size_bytes for e in extents(fd, 0, size_bytes) if e.is_hole)


def settle(fd: int) -> None:
    """Flush a file that reports holes, so that no page still on its way to the disk is taken for one.

    Without this a file that was written a moment ago can lose data on file systems that answer SEEK_HOLE from the
    disk's state alone (the fault behind openzfs/zfs#15526, which made `cp` lose bytes).
    """
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EROFS, errno.ENOTSUP, errno.EBADF):
            raise


def _seek(fd: int, at: int, whence: int, end: int) -> int:
    try:
        return min(os.lseek(fd, at, whence), end)
    except OSError as error:
        if error.errno == errno.ENXIO:  # no data behind `at`: a hole up to the end
            return end
        if error.errno in (errno.EINVAL, errno.ENOTSUP):  # no such query here: all is data
            return at if whence == os.SEEK_DATA else end
        raise
