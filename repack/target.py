"""Where an output may go: names, refusals before anything is written, free space."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from bel.formats.errors import MachineError, UsageError, printable
from bel.formats.units import format_bytes
from bel.repack.own_files import Contents, contents, foreign_leftovers

SPARE_BYTES = 2**20  # folders, the manifest, and what the file system needs for itself
SHOWN_NAMES = 8  # of files in a refusal; a person looks for the others


def staging_path(target: Path) -> Path:
    """The temporary folder beside a target; always the same name, so that the next run finds what a kill left."""
    return target.with_name(f".{target.name}.bel-tmp")


def resolve_target(named: Path) -> Path:
    """Where an output goes: links are followed, the last part's too, as the user who links to another disk expects."""
    return Path(os.path.realpath(named))


def default_folder(model: Path) -> Path:
    """The folder beside the model.  Raises UsageError where a model is named that has no place of its own there."""
    folder = os.path.realpath(model.parent)
    if folder == "/dev" or f"{folder}/".startswith("/proc/"):  # /dev/stdin, /dev/fd/N, /proc/self/fd/N
        raise UsageError(
            "a bundle is not written beside a device or an open file", path=str(model), hint="Say with -o where it goes"
        )
    return model.parent


def check_target(target: Path, inputs: Iterable[Path], *, force: bool, named: Path | None = None) -> None:
    """Refuse an output that exists (without `force`), that is or contains an input, or whose parent does not exist.

    `target` is resolved; `named` is it as the user wrote it, for the messages.  Even with `force` a folder is refused that is
    not a bundle, or that holds more than one: `-o ~ --force` must not cost a home, nor a profile that took hours.
    """
    real, shown = os.path.realpath(target), str(named or target)
    inside = real if real.endswith(os.sep) else real + os.sep  # the root ends with one
    staging = staging_path(target) if target.name else target
    for path in inputs:
        for form in (os.path.abspath(path), os.path.realpath(path)):
            if form == real or form == os.path.abspath(target):
                raise UsageError("the output is the input itself", path=shown, hint="Give another -o")
            if form.startswith(inside):
                raise UsageError(f"the output contains the input {path.name}", path=shown, hint="Give another -o")
            if form.startswith(f"{staging}{os.sep}"):  # which is emptied first
                raise UsageError(f"the input {path.name} is in the temporary folder of the output", path=str(staging))
    if not target.parent.is_dir():
        raise UsageError("the folder that should hold the output does not exist", path=str(target.parent))
    check_leftover(staging, foreign_leftovers(staging))
    _check_aside(staging.with_name(f"{staging.name}.old"))
    if not os.path.lexists(target):
        return
    if not force:
        raise UsageError("the output exists already", path=shown, hint="Use --force to replace it, or -o for another place")
    _check_replaceable(target, shown)


def _check_replaceable(target: Path, shown: str) -> None:
    if target.is_symlink():
        raise UsageError("the output is a link that leads nowhere", path=shown, hint="Give another -o")
    found = contents(target) if target.is_dir() else Contents(False, (target.name,))
    if found.foreign and not found.is_bundle:
        raise UsageError(
            f"what exists there is not a bundle: {listed(found.foreign)}; it is not replaced even with --force",
            path=shown,
            hint="Move or remove it yourself, or give another -o",
        )
    if found.foreign:
        raise UsageError(
            f"the bundle there holds what is not its own, and --force would delete it: {listed(found.foreign)}",
            path=shown,
            hint="Move it out first, or give another -o",
        )
    if os.path.ismount(target):  # the system would refuse to rename it, after the hours that a conversion takes
        raise UsageError("the output is a mount point, which cannot be replaced", path=shown, hint="Name a folder inside it")


def _check_aside(aside: Path) -> None:
    """Refuse where a kill left the old bundle aside (`exchange` on a file system that cannot swap two names)."""
    if os.path.lexists(aside):
        raise UsageError(
            "a run that was killed while it replaced a bundle left the old one here",
            path=str(aside),
            hint="Give it its name again, or remove it",
        )


def check_leftover(staging: Path, foreign: Sequence[str]) -> None:
    """Refuse to empty a folder that has the name of a temporary one of ours and holds `foreign`, which no run put there."""
    if foreign:
        raise UsageError(
            f"the folder has the name of a temporary one of this command, and holds what is not of it: {listed(foreign)}",
            path=str(staging),
            hint="Move it away, or give another -o",
        )


def listed(names: Sequence[str]) -> str:
    """The first of some names, for a message."""
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(printable(name) for name in names[:SHOWN_NAMES]) + more


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
