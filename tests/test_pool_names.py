"""The callback finds the nodes that it looks for, and no others, by their names."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bel.runtime import pool_rows as at
from bel.runtime.pool_callback import find_name
from bel.runtime.pool_names import name_table

NAMES = st.binary(min_size=1, max_size=at.NAME_CAPACITY - 1).filter(lambda name: 0 not in name)


@given(known=st.lists(NAMES, unique=True, max_size=40), others=st.lists(NAMES, max_size=10))
def test_names_are_found_and_nothing_else(known: list[bytes], others: list[bytes]) -> None:
    made = name_table({name: value for value, name in enumerate(known)})
    root = np.zeros(at.ROOT_SIZE, np.int64)
    root[at.NAME_KEYS], root[at.NAME_VALUES] = made.keys.ctypes.data, made.values.ctypes.data
    root[at.NAME_BYTES], root[at.NAME_SIZE] = made.text.ctypes.data, len(made.keys)
    for name in {*known, *others}:
        field = np.zeros(at.NAME_CAPACITY, np.uint8)
        field[: len(name)] = np.frombuffer(name, np.uint8)
        assert find_name(root, field) == (known.index(name) if name in known else -1)


@given(names=st.lists(NAMES, unique=True, min_size=1, max_size=12))
def test_beginnings_leave_no_name_out(names: list[bytes]) -> None:
    """Nodes with another beginning are not looked up; where that cannot be told of all names, every node is."""
    starts = name_table({name: value for value, name in enumerate(names)}).starts
    found = {name[:8] for name in names}
    if len(found) > at.MOST_WORDS or any(len(name) < 8 for name in names):
        assert starts is None
    else:
        assert starts is not None
        assert {word.tobytes() for word in starts} == found
