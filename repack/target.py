"""Where an output may go: names, refusals before anything is written, free space."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from bel.formats.errors import MachineError, UsageError
from bel.formats.manifest import MANIFEST_NAME
from bel.formats.units import format_bytes

SPARE_BYTES = 2**20  # folders, the manifest, and what the file system needs for itself


def staging_path(target: Path) -> Path:
    """The temporary folder beside a target; always the same name, so that the next run finds what a kill left."""
    return target.with_name(f".{target.name}.bel-tmp")


def check_target(target: Path, inputs: Iterable[Path], *, force: bool) -> None:
    """Refuse an output that exists (without `force`), that is or contains an input, or whose parent does not exist.

    Even with `force` a folder that is neither empty nor a bundle is refused: `-o ~ --force` must not cost a home.
    """
    real = os.path.realpath(target)
    for path in inputs:
        for form in (os.path.abspath(path), os.path.realpath(path)):
            if form == real or form == os.path.abspath(target):
                raise UsageError("the output is the input itself", path=str(target), hint="Give another -o")
            if form.startswith(real + os.sep):
                raise UsageError(f"the output contains the input {path.name}", path=str(target), hint="Give another -o")
    if not target.parent.is_dir():
        raise UsageError("the folder that should hold the output does not exist", path=str(target.parent))
    if not os.path.lexists(target):
        return
    if not force:
        raise UsageError(
            "the output exists already", path=str(target), hint="Use --force to replace it, or -o for another place"
        )
    if target.is_dir() and not target.is_symlink() and not _replaceable(target):
        raise UsageError(
            "the output exists and is a folder that is not a bundle; it is not replaced even with --force",
            path=str(target),
            hint="Remove it yourself, or give another -o",
        )


def _replaceable(folder: Path) -> bool:
    names = os.listdir(folder)
    return not names or MANIFEST_NAME in names or any(n.endswith("-dense.gguf") for n in names)


def check_space(folder: Path, need_bytes: int) -> None:
    """Refuse to begin where the file system of `folder` has less than `need_bytes` free for this user."""
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    if free < need_bytes + SPARE_BYTES:
        raise MachineError(
            "no space: the output does not fit on this file system",
            path=str(folder),
            found=f"{format_bytes(free)} free ({free} bytes)",
            expected=f"{format_bytes(need_bytes)} ({need_bytes} bytes)",
            hint="Free some space, or use -o on another disk",
        )
