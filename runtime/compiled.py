"""numba's compiler where it is wanted and installed, so that one source serves the running model and the simulator.

The cache policies are a few dozen steps a layer.  A simulator of millions of calls needs them compiled (`profiler/compiled.py`
insists).  A running model takes them as plain Python, 15 to 50 microseconds a layer: to load the compiler would cost it
a hundred megabytes of the memory that it is to save, and a fresh installation half a minute.  The results are the same.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TypeVar, cast

F = TypeVar("F", bound=Callable[..., object])


_is_wanted = True


def stay_plain() -> None:
    """Compile nothing in this process.  To be called before the modules of the policies are imported."""
    global _is_wanted  # noqa: PLW0603 - it is about this process
    _is_wanted = False


def is_compiling() -> bool:
    """Whether what is decorated now is compiled."""
    return _is_wanted and importlib.util.find_spec("numba") is not None


def compiled_if_possible(function: F) -> F:
    """`function` compiled on its first call, free of the interpreter's lock; as it is without numba or after `stay_plain`.

    The machine code is kept beside the source or in the user's cache folder; where neither can be written, each run
    compiles anew.
    """
    if not is_compiling():
        return function
    import numba

    try:
        return cast(F, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # no place for the cache
        return cast(F, numba.njit(nogil=True)(function))


def inlined_if_possible(function: F) -> F:
    """As `compiled_if_possible`, copied into its callers: in the innermost loops a call costs more than what it does."""
    if not is_compiling():
        return function
    import numba

    return cast(F, numba.njit(nogil=True, inline="always")(function))
