"""Run a command under a cap on memory, page cache included: python tests/bench/capped.py 1536M COMMAND ...

A control group of its own for each run (version 1 or 2), as root.  The most that was charged to it is known afterwards.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bel.formats.units import parse_bytes

GROUPS = Path("/sys/fs/cgroup")
REMOVE_SECONDS = 5.0  # a group is busy until the kernel has done away with its last process


@dataclass(frozen=True, slots=True)
class _Version:
    """The files of a group in one version of control groups."""

    root: Path
    limit: str
    swap: str
    peak: str
    failures: str


V1 = _Version(
    GROUPS / "memory",
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "memory.max_usage_in_bytes",
    "memory.oom_control",
)
V2 = _Version(GROUPS, "memory.max", "memory.swap.max", "memory.peak", "memory.events")


@dataclass(frozen=True, slots=True)
class Group:
    """A control group."""

    folder: Path
    version: _Version

    def join(self) -> None:
        """Move this process into it: what a child does before it becomes the command."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

    @property
    def peak_bytes(self) -> int | None:
        """The most ever charged to it; None on kernels that do not tell."""
        path = self.folder / self.version.peak
        return int(path.read_text(encoding="ascii")) if path.is_file() else None

    @property
    def kills(self) -> int:
        """Processes that the kernel ended for want of memory."""
        rows = (line.split() for line in (self.folder / self.version.failures).read_text(encoding="ascii").splitlines())
        return sum(int(value) for name, value in rows if name == "oom_kill")


@contextlib.contextmanager
def capped(limit_bytes: int | None) -> Iterator[Group]:
    """A group with a limit, gone afterwards; with None it has none, and only counts.  Raises OSError where none can be made."""
    version = V1 if V1.root.is_dir() else V2
    folder = version.root / f"bel-bench-{os.getpid()}"
    folder.mkdir()
    try:
        if limit_bytes is not None:
            (folder / version.limit).write_text(str(limit_bytes), encoding="ascii")
            swap = folder / version.swap
            if swap.is_file():  # without this line what does not fit would go to swap, and not count
                swap.write_text(str(limit_bytes if version is V1 else 0), encoding="ascii")
        yield Group(folder, version)
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    end = time.monotonic() + REMOVE_SECONDS
    while True:
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)
        else:
            return


def why_not() -> str | None:
    """Why no command can be capped here; None where it can."""
    try:
        with capped(1 << 30) as group:
            found = (group.folder / group.version.limit).read_text(encoding="ascii").strip()
            return None if found == str(1 << 30) else f"a limit is not taken (it reads {found})"
    except OSError as error:
        return f"no control group can be made: {error.strerror} ({error.filename})"


def run(command: Sequence[str | Path], limit_bytes: int | None) -> int:
    """Run a command under a limit; its exit status."""
    with capped(limit_bytes) as group:
        status = subprocess.run(command, preexec_fn=group.join, check=False).returncode
        print(f"capped: at most {group.peak_bytes} bytes charged, {group.kills} processes ended for memory", file=sys.stderr)
        return status


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(run(sys.argv[2:], parse_bytes(sys.argv[1])))
