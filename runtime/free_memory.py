"""How much memory this process may still take: what the machine has free, and what the limits of its control groups leave.

proc(5) for meminfo; the kernel's admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst for the files of a group.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class _Version:
    """Where one version of control groups keeps a group's limit, and the key of its anonymous memory in `memory.stat`."""

    root: str
    line: str
    limit: str
    used: str


_VERSIONS = (
    _Version("", r"^0::/(.*)$", "memory.max", "anon"),
    _Version("memory", r"^\d+:(?:\S*,)?memory(?:,\S*)?:/(.*)$", "memory.limit_in_bytes", "total_rss"),
)


def free_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Bytes that can be had without swapping; caches of files count as free, in the machine and in the groups."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", (proc / "meminfo").read_text(encoding="ascii"), re.MULTILINE)
    free = int(match[1]) * 1024 if match else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = (proc / "self/cgroup").read_text(encoding="utf-8", errors="surrogateescape")
    rooms = [room for version in _VERSIONS for room in _rooms(version, text, groups)]
    return max(0, min([free, *rooms]))


def _rooms(version: _Version, text: str, groups: Path) -> Iterator[int]:
    """What each limit from this process's group upwards leaves."""
    match = re.search(version.line, text, re.MULTILINE)
    if match is None:
        return
    group = Path(match[1])
    for folder in (groups / version.root / g for g in (group, *group.parents)):
        limit, stat = folder / version.limit, folder / "memory.stat"
        if limit.is_file() and stat.is_file() and (number := limit.read_text(encoding="ascii").strip()) != "max":
            used = re.search(rf"^{version.used} (\d+)$", stat.read_text(encoding="ascii"), re.MULTILINE)
            yield int(number) - (int(used[1]) if used else 0)
