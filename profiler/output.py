"""What a command of bel-profile may read and where it may write."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from bel.formats.bundle import is_bundle
from bel.formats.errors import BadInputError, UsageError
from bel.formats.gguf_header import MAGIC as GGUF_MAGIC
from bel.formats.manifest import FORMAT as BUNDLE
from bel.formats.manifest import MANIFEST_NAME
from bel.formats.profile_json import FORMAT as PROFILE

_HEAD_BYTES = 256
_ELSEWHERE = "Use another name"


def check_inputs(paths: Iterable[Path], *, files: bool = False) -> None:
    """Raises BadInputError for a file that is not there, UsageError for one that is named twice: it would count twice.

    `files`: a folder is refused too.
    """
    seen: dict[tuple[int, int], Path] = {}
    for path in paths:
        try:
            state = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise BadInputError("no such file", path=str(path)) from None
        if files and stat.S_ISDIR(state.st_mode):
            raise BadInputError("this is a folder, not a file", path=str(path))
        first = seen.setdefault((state.st_dev, state.st_ino), path)
        if first is not path:
            raise UsageError(f"the file is named twice, also as {first}: it would count twice", path=str(path))


def check_output(path: Path, inputs: Iterable[Path], *, force: bool, replaces: str = PROFILE) -> None:
    """Raises UsageError where writing `path` would change an input, or lose a file that cannot be made again with a command.

    A JSON file of the format `replaces` is replaced without asking: it can be made again.  '' for none.  Nothing is written
    into a bundle, input or not, and no GGUF is replaced, also not with `force`: one such file less and a model is lost.
    """
    if not path.parent.is_dir():
        raise UsageError("the folder of the output does not exist", path=str(path.parent))
    inputs = list(inputs)
    _check_outside_bundles(path, inputs)
    if not os.path.lexists(path):
        return
    if path.exists() and not path.is_file():
        raise UsageError("the output exists and is not a file", path=str(path))
    for other in inputs:
        if path.exists() and other.exists() and path.samefile(other):
            raise UsageError("the output is also an input, which is never overwritten", path=str(path), hint=_ELSEWHERE)
    if path.exists() and _head(path).startswith(GGUF_MAGIC):
        raise UsageError("the output is a GGUF, which is never overwritten", path=str(path), hint=_ELSEWHERE)
    if not force and not (replaces and _is_of(path, replaces)):
        raise UsageError("the output exists already", path=str(path), hint="Use --force to replace it")


def file_identity(path: Path) -> tuple[int, ...] | None:
    """What tells a file from another one that had its name before; None where there is none."""
    try:
        state = path.stat()
    except OSError:
        return None
    return (state.st_ino, state.st_size, state.st_mtime_ns)


def is_same_output(one: Path, other: Path) -> bool:
    """Whether two outputs, which need not be there yet, would be one file."""
    return os.path.realpath(one) == os.path.realpath(other)


def _check_outside_bundles(path: Path, inputs: Iterable[Path]) -> None:
    """Where the name is, and where a link of that name leads: writing replaces the one, and must not reach the other."""
    places = {Path(os.path.realpath(path.parent)) / path.name, Path(os.path.realpath(path))}
    near = {place.parent for place in places} | {Path(os.path.realpath(x)) for x in inputs}
    for folder in {folder for place in places for folder in place.parents}:
        # A manifest.json farther up may be of something else, such as a web page.
        if is_bundle(folder) and (folder in near or _is_of(folder / MANIFEST_NAME, BUNDLE)):
            cause = f"the output is inside the bundle {folder}, which is never written to"
            raise UsageError(cause, path=str(path), hint="Use a name in another folder")


def _is_of(path: Path, format_name: str) -> bool:
    try:
        return f'"format": "{format_name}"'.encode() in _head(path)
    except FileNotFoundError:  # a link to nothing
        return False


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)
