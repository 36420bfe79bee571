"""How busy the machine is with other things: a measurement on a loaded machine says little."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE_FIELDS = (3, 4)  # proc(5): idle and iowait; a core that waits for a disk is free to compute


class OtherLoad:
    """Counts from its making on what others compute."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.perf_counter(), _busy_seconds(), _own_seconds()

    def cores(self) -> float:
        """How many cores other processes kept busy since then, in the mean."""
        seconds = time.perf_counter() - self._began
        busy = _busy_seconds() - self._busy - (_own_seconds() - self._own)
        return max(0.0, busy / seconds)


def _busy_seconds() -> float:
    """Seconds that all cores together have computed since the machine started; guests are in the time of their host."""
    fields = [int(x) for x in _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    return sum(x for i, x in enumerate(fields) if i not in _IDLE_FIELDS) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
