"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

SHARED_BLOCKS = {"btrfs", "xfs", "zfs", "bcachefs"}
"""File systems on which `cp` may share blocks instead of copying them, which makes it no measure of the disk."""


def describe(folder: Path) -> list[tuple[str, str]]:
    """Rows for a table: processor, memory, the file system that holds `folder`, kernel, interpreter, packages, load."""
    kind, device = file_system(folder)
    note = "; cp may share blocks here instead of copying" if kind in SHARED_BLOCKS else ""
    free = shutil.disk_usage(folder).free
    packages = ", ".join(f"{name} {version(name)}" for name in ("bel-toolkit", "blake3", "zstandard", "gguf", "xllamacpp"))
    return [
        ("processor", f"{_first('/proc/cpuinfo', 'model name')}, {len(os.sched_getaffinity(0))} cores usable"),
        ("memory", f"{int(_first('/proc/meminfo', 'MemTotal').split()[0]) / 2**20:.1f} GiB"),
        ("file system", f"{kind} on {device}, {free / 1e9:.0f} GB free{note}"),
        ("kernel", f"{platform.system()} {platform.release()}"),
        ("python", f"{platform.python_implementation()} {platform.python_version()} ({sys.platform})"),
        ("packages", packages),
        ("load", f"{os.getloadavg()[0]:.2f} over the last minute, before the start"),
    ]


def file_system(folder: Path) -> tuple[str, str]:
    """Type and device of the file system that holds `folder`."""
    real = os.path.realpath(folder)
    best = ("", "unknown", "unknown")
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        left, right = line.split(" - ", 1)
        point = left.split()[4].encode().decode("unicode_escape")  # blanks stand as \040
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            kind, device = right.split()[:2]
            best = (point, kind, device)
    return best[1], best[2]


def _first(path: str, key: str) -> str:
    """The value of the first line `key: value` of a file in /proc."""
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "unknown"
