"""Durable outputs: everything is made under a temporary name beside its target and renamed only when it is complete."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from bel.formats.atomic import fsync_folder, named_errors, write_file
from bel.formats.errors import MachineError, UsageError
from bel.formats.signals import INTERRUPTS, signals_held

_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100
_LOG = logging.getLogger(__name__)


class StagingFolder:
    """A temporary folder, locked while its maker lives, and gone on every way out.

    A folder of the same name whose maker is dead (kill -9, power loss) is emptied first; one whose maker still runs is
    refused with MachineError.  Use as a context manager; `path` is the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self._made = False
        self.is_published = False

    def __enter__(self) -> StagingFolder:
        try:
            with signals_held():
                self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._remove()
        except OSError as problem:
            if error is not None or not self.is_published:
                raise
            # The output is complete: an error now would say that it is not.
            _LOG.warning("%s could not be removed (%s); the next run for this output removes it", self.path, problem.strerror)

    def _make(self) -> None:
        for _ in range(8):
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path)
                self._made = True
            if self._take_lock():
                break
            self._made = False
        else:
            raise MachineError("the temporary folder keeps changing under this run", path=str(self.path))
        self._made = True  # a dead run's folder is ours from here on
        for entry in os.scandir(self.path):
            _remove(Path(entry.path))

    def _take_lock(self) -> bool:
        """Lock the folder; False where it vanished in between, so that it must be made again."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            with named_errors(self.path):
                self._flock(fd)
                same = os.path.samestat(os.fstat(fd), os.stat(self.path, follow_symlinks=False))
        except FileNotFoundError:
            same = False
        except BaseException:
            os.close(fd)
            raise
        if not same:
            os.close(fd)
            return False
        self._lock = fd
        return True

    def _flock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                self._made = False
                raise MachineError(
                    "another run is writing this output at this moment", path=str(self.path), hint="Wait for it to end"
                ) from None
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):  # no locks on this file system
                raise

    def _remove(self) -> None:
        """Remove the folder, or what `publish` put in its place; a second Ctrl-C does not stop it."""
        with signals_held(then_raise=False):
            try:
                if self._made and os.path.lexists(self.path):
                    _remove(self.path)
            finally:
                self._made = False
                if self._lock is not None:
                    os.close(self._lock)
                    self._lock = None

    def publish(self, target: Path, *, replace: bool, is_last: bool) -> None:
        """Give the folder its final name, durably; after an error or a signal the names are what they were.

        `is_last` is that of `publish_files`.  Raises UsageError where the target exists and may not be replaced.
        """
        fsync_folder(self.path)
        exists = os.path.lexists(target)
        if exists and not replace:
            raise UsageError("the output exists already", path=str(target), hint="Use --force to replace it")
        done = False
        try:
            with signals_held():
                if exists:
                    exchange(self.path, target)  # what was there has our temporary name now, and goes with it
                else:
                    os.rename(self.path, target)
                done = True
                fsync_folder(target.parent)
                if is_last:
                    INTERRUPTS.done()
            self.is_published = True
        except BaseException:
            if done and exists:
                exchange(self.path, target)
            elif done:
                os.rename(target, self.path)
            raise


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        with named_errors(path):
            for folder, _, _ in os.walk(path):
                if not os.access(folder, os.W_OK | os.X_OK):  # a write-protected bundle that --force replaced
                    os.chmod(folder, 0o700)
            shutil.rmtree(path)
    else:
        os.unlink(path)


def exchange(one: Path, other: Path) -> None:
    """Swap two names in one step (renameat2 RENAME_EXCHANGE); in three renames on a file system that cannot."""
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


def publish_files(staging: StagingFolder, folder: Path, names: list[str], *, is_last: bool) -> None:
    """Move files from a staging folder to their final names, all or none; what they replace goes to the staging folder.

    `is_last`: the command makes nothing else, so that no signal that comes with the names or later says otherwise.
    """
    moved: list[tuple[Path, Path, bool]] = []
    try:
        with signals_held():
            for name in names:
                fresh, final = staging.path / name, folder / name
                exists = os.path.lexists(final)
                if exists:
                    exchange(fresh, final)
                else:
                    os.rename(fresh, final)
                moved.append((fresh, final, exists))
            fsync_folder(folder)
            if is_last:
                INTERRUPTS.done()
        staging.is_published = True
    except BaseException:
        for fresh, final, exists in reversed(moved):
            if exists:
                exchange(fresh, final)
            else:
                os.rename(final, fresh)
        raise


@contextlib.contextmanager
def staged_file(path: Path, *, is_last: bool = True) -> Iterator[Path]:
    """A path to write a file at, which becomes `path` at the end of the block, durably; nothing is left after an error.

    An existing `path` is replaced in one step, and stays as it was after an error.  `is_last` is that of `publish_files`.
    """
    with StagingFolder(path.with_name(f".{path.name}.bel-tmp")) as staging:
        yield staging.path / path.name
        publish_files(staging, path.parent, [path.name], is_last=is_last)


def replace_file(path: Path, data: bytes, *, is_last: bool = True) -> None:
    """Write a file whole and flush it to the disk; one that exists is replaced in one step.  `is_last`: see `publish_files`."""
    with staged_file(path, is_last=is_last) as fresh:
        write_file(fresh, data)
