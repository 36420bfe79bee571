"""Where an output may go: names, refusals before anything is written, free space."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from bel.formats.errors import MachineError, UsageError
from bel.formats.manifest import MANIFEST_NAME
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
    if target.is_symlink():
        return
    strange = _strangers(target) if target.is_dir() else [target.name]
    if strange:
        raise UsageError(
            f"what exists there is not a bundle, or holds more than one: {', '.join(strange[:5])}; "
            "it is not replaced even with --force",
            path=shown,
            hint="Move or remove it yourself, or give another -o",
        )


_BUNDLE_NAMES = re.compile(
    r"(manifest\.json|.*-dense\.gguf|.*-ple\.gguf|.*-experts(-\d{5}-of-\d{5})?\.bin|.*-experts\.idx"
    r"|profile\.json|plan\.json|README\.md|SHA256SUMS|LICENSE(\.md|\.txt)?)",
    re.DOTALL,
)


def _strangers(folder: Path) -> list[str]:
    """What a folder holds that is no part of a bundle; a folder without any part of one is all strange."""
    names = os.listdir(folder)
    strange = [n for n in names if not _BUNDLE_NAMES.fullmatch(n) and n != "source"]
    if (folder / "source").is_dir():
        strange += [f"source/{n}" for n in os.listdir(folder / "source") if not n.endswith(".hdr.zst")]
    elif "source" in names:
        strange.append("source")
    is_bundle = MANIFEST_NAME in names or any(n.endswith("-experts.idx") for n in names)
    return sorted(strange) if is_bundle else sorted(names)


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
