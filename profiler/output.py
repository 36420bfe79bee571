"""What a command of bel-profile may read and where it may write."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from bel.formats.errors import BadInputError, UsageError
from bel.formats.profile_json import FORMAT as PROFILE

_HEAD_BYTES = 256


def check_inputs(paths: Iterable[Path]) -> None:
    """Raises BadInputError for a file that is not there, UsageError for one that is named twice: it would count twice."""
    seen: dict[tuple[int, int], Path] = {}
    for path in paths:
        try:
            state = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise BadInputError("no such file", path=str(path)) from None
        first = seen.setdefault((state.st_dev, state.st_ino), path)
        if first is not path:
            raise UsageError(f"the file is named twice, also as {first}: it would count twice", path=str(path))


def check_output(path: Path, inputs: Iterable[Path], *, force: bool, replaces: str = PROFILE) -> None:
    """Raises UsageError where writing `path` would change an input, or lose a file that cannot be made again with a command.

    A JSON file of the format `replaces` is replaced without asking: it can be made again.  '' for none.
    """
    if not path.parent.is_dir():
        raise UsageError("the folder of the output does not exist", path=str(path.parent))
    if not os.path.lexists(path):
        return
    if path.exists() and not path.is_file():
        raise UsageError("the output exists and is not a file", path=str(path))
    for other in inputs:
        if path.exists() and other.exists() and path.samefile(other):
            raise UsageError("the output is also an input, which is never overwritten", path=str(path), hint="Use another -o")
    if not force and not (replaces and _is_of(path, replaces)):
        raise UsageError("the output exists already", path=str(path), hint="Use --force to replace it")


def _is_of(path: Path, format_name: str) -> bool:
    try:
        with path.open("rb") as file:
            return f'"format": "{format_name}"'.encode() in file.read(_HEAD_BYTES)
    except FileNotFoundError:  # a link to nothing
        return False
