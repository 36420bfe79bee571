"""The control group that limits this process's memory, and the most that was charged to it: page cache included.

Kernel documentation: admin-guide/cgroup-v2.rst (`memory.max`, `memory.peak`), cgroup-v1/memory.rst
(`memory.limit_in_bytes`, `memory.max_usage_in_bytes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bel.runtime.control_group import GROUPS, PROC, V1, V2, group_folders, read_number

_NO_LIMIT_BYTES = 1 << 60
"""Version 1 has no word for "no limit": it shows the largest number of pages that it can count."""
_VERSIONS = ((V2, "memory.max", "memory.peak"), (V1, "memory.limit_in_bytes", "memory.max_usage_in_bytes"))


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A group with a limit.  `peak_bytes` is the most ever charged to it, by all of its processes; None on kernels before 5.19
    with version 2, which do not tell."""

    limit_bytes: int
    peak_bytes: int | None


def memory_group(proc: Path = PROC, groups: Path = GROUPS) -> MemoryGroup | None:
    """The innermost group of this process that has a limit; None where no group limits it."""
    for version, limit_name, peak_name in _VERSIONS:
        for folder in group_folders(version, proc, groups):
            limit = read_number(folder / limit_name)
            if limit is not None and limit < _NO_LIMIT_BYTES:
                return MemoryGroup(limit, read_number(folder / peak_name))
    return None
