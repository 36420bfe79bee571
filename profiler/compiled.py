"""The compiler for passes over millions of calls, which would take hours as plain Python: numba must be there."""

from __future__ import annotations

import numba  # noqa: F401 - a missing numba is said by name here, and not by a pass that seems to hang

from bel.runtime.compiled import compiled_if_possible as compiled

__all__ = ["compiled"]
