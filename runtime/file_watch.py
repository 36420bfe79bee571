"""Whether files are still what they were: what was checked once and is read again must not have been written to meanwhile.

A model is watched from before its headers are read until its last token: llama.cpp maps the files and reads them again and
again, so bytes that change under it would become wrong text without a word.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from bel.formats.bundle import Bundle, is_bundle, open_bundle
from bel.formats.errors import BadInputError, BelError, DamagedBundleError
from bel.formats.gguf_model import GgufModel, open_model
from bel.formats.shards import check_file


class FileState(NamedTuple):
    """What tells a file from others, and its bytes of now from those of before.  `modified_ns`: its time of change."""

    path: str
    device: int
    inode: int
    size_bytes: int
    modified_ns: int

    @property
    def file(self) -> tuple[int, int]:
        """Which file it is, by whatever name."""
        return self.device, self.inode

    @property
    def content(self) -> tuple[int, int]:
        """What is another one when it was written to."""
        return self.size_bytes, self.modified_ns


class FileWatch:
    """Files with their size and time of change; a file that was replaced under its name is still the one that was opened.

    `kind` is the class of the error that a change is: that of a damaged bundle, or of a bad input.  Use it in a `with`.
    """

    def __init__(self, paths: Sequence[Path], kind: type[BelError] = DamagedBundleError) -> None:
        self.kind = kind
        self._fds: list[int] = []
        self.states: list[FileState] = []
        """How the files were when the watch began."""
        self.add(paths)

    @property
    def is_bundle(self) -> bool:
        """Whether the files are a bundle's."""
        return self.kind is DamagedBundleError

    def add(self, paths: Sequence[Path]) -> None:
        """Watch more files, from now on."""
        try:
            for path in paths:  # a pipe in a file's place must not be waited for
                self._fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
                self.states.append(_state(os.fspath(path), os.fstat(self._fds[-1])))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> FileWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def check(self) -> None:
        """Raise DamagedBundleError, or BadInputError for a GGUF, for a file that was written to since the watch began."""
        path = self.changed()
        if path is not None:
            raise file_changed(path, self.kind)

    def changed(self) -> str | None:
        """The path of the first file that was written to since the watch began."""
        for fd, state in zip(self._fds, self.states, strict=True):
            now = os.fstat(fd)
            if now.st_mtime_ns != state.modified_ns or now.st_size != state.size_bytes:
                return state.path
        return None

    def check_names(self) -> None:
        """`check`, and that the names still lead to these files: for what was opened by name meanwhile, as by llama.cpp."""
        self.check()
        for state in self.states:
            if _file_by_name(state.path) != state.file:
                raise file_changed(state.path, self.kind)

    def close(self) -> None:
        """Close the files; nothing is watched any more.  A second call does nothing."""
        self.states = []
        while self._fds:
            os.close(self._fds.pop())


def watch_bundle(bundle: Bundle) -> FileWatch:
    """The files of a bundle that a run reads more than once: dense weights, per-layer embeddings, experts."""
    manifest = bundle.manifest
    rows = [manifest.dense, *([manifest.ple] if manifest.ple else []), *manifest.experts]
    try:
        return FileWatch([bundle.path(row.name) for row in rows])
    except FileNotFoundError as error:
        raise DamagedBundleError("the file is missing from the bundle", path=os.fsdecode(error.filename)) from None


def watch_gguf(path: Path) -> tuple[FileWatch, GgufModel]:
    """All files of the model that `path` belongs to, and their headers, which were read behind the beginning of the watch.

    Raises what opening the model raises.
    """
    check_file(path)
    watch = FileWatch([path], BadInputError)
    try:
        model = open_model(path)
        others = [header.path for header in model.files if header.path != path]
        if others:  # known by now alone: their headers are read again behind the beginning of their watch
            watch.add(others)
            model = open_model(path)
        return watch, model
    except BaseException:
        watch.close()
        raise


def watch_model(path: Path) -> FileWatch:
    """The files of a bundle, or of a GGUF.  Raises what opening it raises."""
    return watch_bundle(open_bundle(path)) if is_bundle(path) else watch_gguf(path)[0]


def file_changed(path: str, kind: type[BelError], and_so: str = "") -> BelError:
    """The error for a file of a model that was written to; `and_so` stands behind the cause."""
    is_in_bundle = kind is DamagedBundleError
    hint = "Run `bel-repack verify` on the bundle" if is_in_bundle else "Wait until its download or copy is done"
    return kind(f"the file was changed while the model runs from it{and_so}", path=path, hint=hint)


def first_changed(states: Iterable[FileState]) -> str | None:
    """The path of the first file that was written to since; of one that has gone from under its name nothing is known."""
    for state in states:
        try:
            now = _state(state.path, os.stat(state.path))
        except OSError:
            continue
        if now.file == state.file and now.content != state.content:
            return state.path
    return None


def _file_by_name(path: str) -> tuple[int, int] | None:
    try:
        return _state(path, os.stat(path)).file
    except FileNotFoundError:
        return None


def _state(path: str, found: os.stat_result) -> FileState:
    return FileState(path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
