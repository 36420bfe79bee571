"""How much memory this process may still take: what the machine has free, and what the limits of its control groups leave.

proc(5) for meminfo; the kernel's admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst for the files of a group.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from bel.runtime.control_group import GROUPS, PROC, V1, V2, group_folders, read_number

_VERSIONS = ((V2, "memory.max", "anon"), (V1, "memory.limit_in_bytes", "total_rss"))
"""Where each version keeps a group's limit, and the key of its anonymous memory in `memory.stat`."""


def free_bytes(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Bytes that can be had without swapping; caches of files count as free, in the machine and in the groups."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", (proc / "meminfo").read_text(encoding="ascii"), re.MULTILINE)
    free = int(match[1]) * 1024 if match else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([free, *_rooms(proc, groups)]))


def _rooms(proc: Path, groups: Path) -> Iterator[int]:
    """What each limit from this process's group upwards leaves."""
    for version, limit_name, used_key in _VERSIONS:
        for folder in group_folders(version, proc, groups):
            limit, stat = read_number(folder / limit_name), folder / "memory.stat"
            if limit is not None and stat.is_file():
                used = re.search(rf"^{used_key} (\d+)$", stat.read_text(encoding="ascii"), re.MULTILINE)
                yield limit - (int(used[1]) if used else 0)
