"""numba's compiler where it is installed, so that one source serves the running model and the simulator.

The cache policies are a few dozen steps a layer: a running model takes them as plain Python where numba is missing, and a
simulator of millions of calls needs them compiled (`profiler/compiled.py` insists).  The results are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

try:
    import numba
except ModuleNotFoundError:
    HAS_COMPILER = False
else:
    HAS_COMPILER = True

F = TypeVar("F", bound=Callable[..., object])


def compiled_if_possible(function: F) -> F:
    """`function` compiled on its first call, free of the interpreter's lock; as it is without numba.

    The machine code is kept beside the source or in the user's cache folder; where neither can be written, each run
    compiles anew.
    """
    if not HAS_COMPILER:
        return function
    try:
        return cast(F, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # no place for the cache
        return cast(F, numba.njit(nogil=True)(function))
