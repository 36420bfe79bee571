"""A limit on address space (ulimit -v) and the libraries that end the process where it is too low, instead of an error."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from bel.formats.errors import MachineError
from bel.formats.units import MIB, format_bytes

NEEDS_BYTES = {"numpy": 160 * MIB, "llvmlite": 384 * MIB}
"""Address space that a library takes beside what is there before.  numpy's OpenBLAS took 85 MiB with the one thread
that `no_blas_threads` leaves it and maps 32 MiB more at a time; LLVM took 300 MiB until numba had compiled our loops."""


class _Needs:
    """Refuses the import of a library that would not find the room it needs."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        """The import system asks this before its own finders."""
        need = NEEDS_BYTES.get(name)
        limit = _limit()
        if need is None or limit is None:
            return
        room = limit - _used_bytes()
        if room < need:
            raise MachineError(
                f"{name} needs more address space than the limit leaves: {format_bytes(need)} of {format_bytes(max(room, 0))}",
                hint="Raise the limit (ulimit -v)",
            )


@contextlib.contextmanager
def needs_checked() -> Iterator[None]:
    """Raise MachineError in the block where a library of NEEDS_BYTES is imported under too low a limit."""
    if _limit() is None:
        yield
        return
    finder = _Needs()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _limit() -> int | None:
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _used_bytes() -> int:
    """Address space of this process: the first number of proc(5), statm."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
