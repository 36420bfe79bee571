"""Durable writing: everything is made under a temporary name beside its target and renamed only when it is complete."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from bel.formats.errors import MachineError, UsageError

_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100


class StagingFolder:
    """A temporary folder, locked while its maker lives, and gone on every way out.

    A folder of the same name whose maker is dead (kill -9, power loss) is removed first; one whose maker still runs is
    refused with MachineError.  Use as a context manager; `path` is the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def __enter__(self) -> StagingFolder:
        for _ in range(8):
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path)
            if self._take_lock():
                break
        else:
            raise MachineError("the temporary folder keeps changing under this run", path=str(self.path))
        if os.listdir(self.path):
            _empty(self.path)
        return self

    def _take_lock(self) -> bool:
        """Lock the folder; False where it vanished in between, so that it must be made again."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(fd)
                raise MachineError(
                    "another run is writing this output at this moment", path=str(self.path), hint="Wait for it to end"
                ) from None
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
                os.close(fd)
                raise
        try:
            same = os.path.samestat(os.fstat(fd), os.stat(self.path, follow_symlinks=False))
        except FileNotFoundError:
            same = False
        if not same:
            os.close(fd)
            return False
        self._lock = fd
        return True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self.path.is_dir() and not self.path.is_symlink():
                shutil.rmtree(self.path)
            elif os.path.lexists(self.path):  # a file or link that stood where the output is now
                os.unlink(self.path)
        finally:
            if self._lock is not None:
                os.close(self._lock)

    def publish(self, target: Path, *, replace: bool) -> None:
        """Give the folder its final name, durably.  An existing target is replaced only where `replace` is true.

        Raises UsageError where the target exists and may not be replaced.
        """
        fsync_folder(self.path)
        with signals_held():
            if os.path.lexists(target):
                if not replace:
                    raise UsageError("the output exists already", path=str(target), hint="Use --force to replace it")
                exchange(self.path, target)  # what was there now has our temporary name, and goes with it
            else:
                os.rename(self.path, target)
            fsync_folder(target.parent)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Hold back Ctrl-C and termination for the few renames that must not be torn apart, or be reported as undone."""
    held = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _empty(folder: Path) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def exchange(one: Path, other: Path) -> None:
    """Swap two names in one step (renameat2 RENAME_EXCHANGE); in two renames on a file system that cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    if done == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OSError(code, os.strerror(code), str(other))
    aside = one.with_name(one.name + ".old")
    os.rename(other, aside)
    try:
        os.rename(one, other)
    except OSError:
        os.rename(aside, other)
        raise
    os.rename(aside, one)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
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


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Give an OSError from a call on a descriptor the name of its file, which a message needs and the call does not know."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise
