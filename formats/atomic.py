"""Whole reads and writes at offsets, flushed, with errors that name their file."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with named_errors(folder):
            os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot; nothing more to do there
            raise
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file whole and flush it to the disk.  Its folder must be a staging folder."""
    with named_errors(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_all(fd, memoryview(data), 0)
            os.fsync(fd)
        finally:
            os.close(fd)


def write_all(fd: int, data: memoryview, offset_bytes: int) -> None:
    """pwrite all of `data` at an offset."""
    while data:
        done = os.pwrite(fd, data, offset_bytes)
        data, offset_bytes = data[done:], offset_bytes + done


def read_all(fd: int, size_bytes: int, offset_bytes: int) -> bytes:
    """pread up to `size_bytes` at an offset; shorter only at the end of the file."""
    parts = []
    while size_bytes:
        data = os.pread(fd, size_bytes, offset_bytes)
        if not data:
            break
        parts.append(data)
        size_bytes, offset_bytes = size_bytes - len(data), offset_bytes + len(data)
    return b"".join(parts)


def read_head(path: Path, size_bytes: int) -> bytes:
    """The first bytes of a file; shorter only where the file is."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with named_errors(path):
            return read_all(fd, size_bytes, 0)
    finally:
        os.close(fd)


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Give an OSError from a call on a descriptor the name of its file, which a message needs and the call does not know."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise
