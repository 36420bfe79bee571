"""What the machine is, in words, and whether something else is using it.  Linux: proc(5) and sysfs."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from bel.formats.costs import MAX_MACHINE_CHARS
from bel.formats.units import GIB, MIB

BUSY_SHARE = 0.1
"""More of the CPUs than this for other programs is said: a product waits for its slowest thread, copies share the memory."""
_PROC, _SYS = Path("/proc"), Path("/sys")
_DEFAULT_CACHE_BYTES = 32 * MIB  # where the kernel does not tell (some ARM boards, some containers)


def cpu_count() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def load_warning() -> str | None:
    """A sentence where other programs keep the CPUs busy, by the load average of the last minute; else None."""
    load, cpus = os.getloadavg()[0], cpu_count()
    if load < 0.5 * cpus:
        return None
    return f"the machine is busy (load {load:.1f} on {cpus} CPUs): the figures may be worse than those of an idle one"


def others_warning(cores: float) -> str | None:
    """A sentence where other programs kept more than a tenth of the CPUs busy (`cores` of them, in the mean); else None."""
    if cores <= BUSY_SHARE * (os.cpu_count() or 1):
        return None
    return f"other programs kept {cores:.1f} of {os.cpu_count()} CPUs busy meanwhile: measure again when the machine is idle"


def cache_bytes() -> int:
    """The largest CPU cache that CPU 0 reports; 32 MiB where it reports none."""
    sizes = [_size(path) for path in (_SYS / "devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=_DEFAULT_CACHE_BYTES)


def _size(path: Path) -> int:
    match = re.match(r"(\d+)([KM]?)", path.read_text())
    return int(match[1]) * {"": 1, "K": 1024, "M": MIB}[match[2]] if match else 0


def describe(folder: Path, reader: str, n_threads: int) -> str:
    """The machine for people: CPU, memory, kernel, file system of `folder`, reader, threads.  No host name and no path."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = (
        f"{_cpu_name()}, {os.cpu_count()} CPUs, {memory / GIB:.1f} GiB of memory, {platform.system()} {platform.release()}, "
        f"{file_system(folder)} read by {reader}, {n_threads} thread{'s' if n_threads > 1 else ''}"
    )
    return "".join(c for c in text if c.isprintable())[:MAX_MACHINE_CHARS]


def _cpu_name() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", (_PROC / "cpuinfo").read_text(errors="replace"), re.MULTILINE)
    return " ".join(match[1].split()) if match else platform.machine()


def file_system(folder: Path) -> str:
    """The type of the file system that holds a folder, such as 'ext4'; 'unknown' where no mount point matches."""
    inside = os.fsencode(folder.resolve())
    best, kind = -1, "unknown"
    for line in (_PROC / "self/mountinfo").read_bytes().splitlines():
        mounted, _, rest = line.partition(b" - ")
        point = re.sub(rb"\\(\d{3})", lambda m: bytes([int(m[1], 8)]), mounted.split()[4])
        # Of two mounts on one point the later one is seen.
        if (inside == point or inside.startswith(point.rstrip(b"/") + b"/")) and len(point) >= best:
            best, kind = len(point), rest.split()[0].decode("ascii", "replace")
    return kind
