"""Facts about this process."""

from __future__ import annotations

import resource
from pathlib import Path


def peak_rss_bytes() -> int:
    """The most memory that this process has held.

    VmHWM of /proc where it exists: ru_maxrss also remembers the parent that this process was forked from.
    """
    try:
        with Path("/proc/self/status").open(encoding="ascii") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
