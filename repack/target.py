"""Where an output may go: names, refusals before anything is written, free space."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from bel.formats.atomic import read_head
from bel.formats.errors import MachineError, UsageError
from bel.formats.manifest import FORMAT, MANIFEST_NAME
from bel.formats.units import format_bytes

SPARE_BYTES = 2**20  # folders, the manifest, and what the file system needs for itself


def staging_path(target: Path) -> Path:
    """The temporary folder beside a target; always the same name, so that the next run finds what a kill left."""
    return target.with_name(f".{target.name}.bel-tmp")


def check_target(target: Path, inputs: Iterable[Path], *, force: bool, named: Path | None = None) -> None:
    """Refuse an output that exists (without `force`), that is or contains an input, or whose parent does not exist.

    `named` is the target as the user wrote it, for the messages.  Even with `force` a folder that is neither empty nor a
    bundle is refused: `-o ~ --force` must not cost a home.
    """
    real, shown = os.path.realpath(target), str(named or target)
    for path in inputs:
        for form in (os.path.abspath(path), os.path.realpath(path)):
            if form == real or form == os.path.abspath(target):
                raise UsageError("the output is the input itself", path=shown, hint="Give another -o")
            if form.startswith(real + os.sep):
                raise UsageError(f"the output contains the input {path.name}", path=shown, hint="Give another -o")
    if not target.parent.is_dir():
        raise UsageError("the folder that should hold the output does not exist", path=str(target.parent))
    if not os.path.lexists(target):
        return
    if not force:
        raise UsageError("the output exists already", path=shown, hint="Use --force to replace it, or -o for another place")
    if target.is_dir() and not target.is_symlink() and not _replaceable(target):
        raise UsageError(
            "the output exists and is a folder that is not a bundle; it is not replaced even with --force",
            path=shown,
            hint="Remove it yourself, or give another -o",
        )


def _replaceable(folder: Path) -> bool:
    """Whether a folder is empty, or a bundle going by its manifest, or a damaged one going by its files."""
    names = os.listdir(folder)
    if not names:
        return True
    if MANIFEST_NAME in names and (folder / MANIFEST_NAME).is_file():
        head = read_head(folder / MANIFEST_NAME, 256)
        if b'"format"' in head and FORMAT.encode() in head:
            return True
    return all(any(n.endswith(kind) for n in names) for kind in ("-dense.gguf", "-experts.idx"))


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
