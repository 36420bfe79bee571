"""Plain memory for compiled code: words at an address, and C functions called by theirs.

Arguments are 64-bit integers throughout: C functions of the platforms that the engine is built for take them in registers
whatever their declared width, and ignore those that they do not have.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from bel.runtime import pool_rows as at

F = TypeVar("F", bound=Callable[..., Any])
_ir: Any = importlib.import_module("llvmlite.ir")  # which has no types
_WORD = _ir.IntType(64)


def compiled(function: F) -> F:
    """`function` as machine code that needs no interpreter, made on its first use."""
    return cast(F, numba.njit(nogil=True)(function))


def _call(_context: Any, _address: Any, _a: Any, _b: Any, _c: Any, _d: Any, _e: Any) -> Any:
    def generate(_codegen: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = _ir.FunctionType(_WORD, [_WORD] * 5)
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    integer = types.int64
    return integer(integer, integer, integer, integer, integer, integer), generate


def _call_8(_context: Any, _address: Any, _a: Any, _b: Any, _c: Any, _d: Any, _e: Any, _f: Any, _g: Any, _h: Any) -> Any:
    def generate(_codegen: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = _ir.FunctionType(_WORD, [_WORD] * 8)
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    integer = types.int64
    return integer(*([integer] * 9)), generate


def _pointer(_context: Any, _address: Any) -> Any:
    def generate(_codegen: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


def _load(_context: Any, _address: Any) -> Any:
    def generate(_codegen: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], _WORD.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


def _store(_context: Any, _address: Any, _value: Any) -> Any:
    def generate(codegen: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], builder.inttoptr(arguments[0], _WORD.as_pointer()), "release", 8)
        return codegen.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _swap(_context: Any, _address: Any, _old: Any, _new: Any) -> Any:
    def generate(_codegen: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _WORD.as_pointer())
        both = builder.cmpxchg(place, arguments[1], arguments[2], "seq_cst", "seq_cst")
        return builder.extract_value(both, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


call: Any = intrinsic(_call)
"""`call(address, a, b, c, d, e)`: the C function there, with five integers."""
call_8: Any = intrinsic(_call_8)
"""The same with eight."""
pointer: Any = intrinsic(_pointer)
"""`pointer(address)` for `carray`."""
load: Any = intrinsic(_load)
"""`load(address)`: a word that another thread stores, and with it all that it wrote before."""
store: Any = intrinsic(_store)
"""`store(address, value)`: a word that another thread loads."""
swap: Any = intrinsic(_swap)
"""`swap(address, old, new)`: puts a word in the place of another one; False where that one was not there any more."""


@compiled
def words(address: int, count: int) -> Any:
    """`count` words i64 at an address."""
    return carray(pointer(address), (count,), np.int64)


@compiled
def table(address: int, rows: int, columns: int) -> Any:
    """Words i64 (rows, columns) at an address."""
    return carray(pointer(address), (rows, columns), np.int64)


_CLOCK_MONOTONIC = 1


@compiled
def now(root: Any, room: int) -> int:
    """Nanoseconds of a clock that only goes forward.  Each thread has a room of 16 bytes of its own."""
    call(root[at.CLOCK_GETTIME], _CLOCK_MONOTONIC, room, 0, 0, 0)
    time = words(room, 2)
    return int(time[0] * 1000000000 + time[1])
