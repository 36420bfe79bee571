"""The control groups of this process, from its own up to the root.

Kernel documentation: admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
V1, V2 = "memory", ""
"""The folder of each version's memory groups below `GROUPS`."""
_LINES = {V2: r"^0::/(.*)$", V1: r"^\d+:(?:\S*,)?memory(?:,\S*)?:/(.*)$"}


def group_folders(version: str, proc: Path = PROC, groups: Path = GROUPS) -> Iterator[Path]:
    """The folders of one version, innermost first; none where this process is in no group of it."""
    text = (proc / "self/cgroup").read_text(encoding="utf-8", errors="surrogateescape")
    match = re.search(_LINES[version], text, re.MULTILINE)
    if match is not None:
        group = Path(match[1])
        yield from (groups / version / g for g in (group, *group.parents))


def read_number(path: Path) -> int | None:
    """The number in a file of a group; None where there is no such file, or it says `max`."""
    if not path.is_file():
        return None
    text = path.read_text(encoding="ascii").strip()
    return int(text) if text.isdecimal() else None
