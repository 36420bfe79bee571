"""Running a command with a cold cache, and what it took."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Tells the most memory that the process has held, as the last line on stderr.  ru_maxrss of a child will not do: it
# remembers the process that the child was forked from.
TELL_PEAK = """
import atexit, sys
def tell():
    with open('/proc/self/status') as file:
        sys.stderr.write(next(line for line in file if line.startswith('VmHWM:')))
atexit.register(tell)
"""
BEL_REPACK = TELL_PEAK + "from bel.repack.cli import main\nmain()\n"


@dataclass(frozen=True, slots=True)
class Took:
    """One run: wall time from start to exit, peak memory (None for programs that are not Python), and its output."""

    seconds: float
    peak_rss_bytes: int | None
    stdout: str


def timed(command: Sequence[str]) -> Took:
    """Run a command, which must end well."""
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{command[:2]} ended with {done.returncode}: {done.stderr[-2000:]}")
    last = done.stderr.splitlines()[-1:]
    peak = int(last[0].split()[1]) * 1024 if last and last[0].startswith("VmHWM:") else None
    return Took(seconds, peak, done.stdout)


def timed_python(code: str, *arguments: str | Path) -> Took:
    """Run Python code in a process of its own, with its peak memory."""
    code = code if code.startswith(TELL_PEAK) else TELL_PEAK + code
    return timed([sys.executable, "-c", code, *map(str, arguments)])


def may_drop_caches() -> bool:
    """Whether this process may empty the whole page cache."""
    return os.access("/proc/sys/vm/drop_caches", os.W_OK)


def make_cold(paths: Sequence[Path], *, drop: bool) -> float:
    """Get files out of the page cache: all of it with `drop`, else theirs alone.  The largest share that stayed in."""
    os.sync()
    if drop:
        Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="ascii")
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return max(cached_share(path) for path in paths)


def cached_share(path: Path) -> float:
    """The share of a file's pages that are in the page cache (mincore)."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:
        pages = -(-len(data) // mmap.PAGESIZE)
        marks = ctypes.create_string_buffer(pages)
        start = ctypes.c_char.from_buffer(data)  # a private mapping that nobody writes to: it shows the cache's own pages
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(data)), marks)
        del start
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
        return sum(mark & 1 for mark in marks.raw) / pages
