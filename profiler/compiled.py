"""numba's compiler with a cache where the machine allows one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """`function` compiled on its first call, free of the interpreter's lock.

    The machine code is kept beside the source or in the user's cache folder; where neither can be written, each run
    compiles anew.
    """
    try:
        return cast(F, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # no place for the cache
        return cast(F, numba.njit(nogil=True)(function))
