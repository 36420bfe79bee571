"""Facts about this process."""

from __future__ import annotations

import resource
from pathlib import Path


def peak_rss_bytes() -> int:
    """The most memory that this process has held.

    VmHWM of /proc where it exists: ru_maxrss also remembers the parent that this process was forked from.
    """
    return _status_bytes("VmHWM:") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rss_bytes() -> int:
    """The memory that this process holds now, or where the system does not tell the most that it has held."""
    return _status_bytes("VmRSS:") or peak_rss_bytes()


def major_faults() -> int:
    """Page faults of this process that had to wait for a disk, until now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _status_bytes(key: str) -> int | None:
    try:
        with Path("/proc/self/status").open(encoding="ascii") as file:
            for line in file:
                if line.startswith(key):
                    return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    return None
