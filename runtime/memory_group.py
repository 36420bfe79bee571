"""The control group that limits this process's memory, and the most that was charged to it: page cache included.

Kernel documentation: admin-guide/cgroup-v2.rst (`memory.max`, `memory.peak`), cgroup-v1/memory.rst
(`memory.limit_in_bytes`, `memory.max_usage_in_bytes`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 1 << 60
"""Version 1 has no word for "no limit": it shows the largest number of pages that it can count."""
_VERSIONS = (
    ("", r"^0::/(.*)$", "memory.max", "memory.peak"),
    ("memory", r"^\d+:(?:\S*,)?memory(?:,\S*)?:/(.*)$", "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
)


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A group with a limit.  `peak_bytes` is the most ever charged to it, by all of its processes; None on kernels before 5.19
    with version 2, which do not tell."""

    limit_bytes: int
    peak_bytes: int | None


def memory_group(proc: Path = _PROC, groups: Path = _GROUPS) -> MemoryGroup | None:
    """The innermost group of this process that has a limit; None where no group limits it."""
    text = (proc / "self/cgroup").read_text(encoding="utf-8", errors="surrogateescape")
    for root, line, limit_name, peak_name in _VERSIONS:
        match = re.search(line, text, re.MULTILINE)
        if match is None:
            continue
        group = Path(match[1])
        for folder in (groups / root / g for g in (group, *group.parents)):
            limit = _number(folder / limit_name)
            if limit is not None and limit < _NO_LIMIT_BYTES:
                return MemoryGroup(limit, _number(folder / peak_name))
    return None


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no such file, or it says `max`."""
    if not path.is_file():
        return None
    text = path.read_text(encoding="ascii").strip()
    return int(text) if text.isdecimal() else None
