"""Metadata values: walking and decoding agree with what was encoded, whatever was."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bel.formats.gguf_values import MAX_ARRAY_DEPTH, SCALAR_BYTES, read_value, skip_value, string_value
from synth import ARRAY, SCALARS, STRING, encode_value

BOUNDS = {0: (0, 2**8), 1: (-(2**7), 2**7), 2: (0, 2**16), 3: (-(2**15), 2**15), 4: (0, 2**32), 5: (-(2**31), 2**31)}
BOUNDS |= {10: (0, 2**64), 11: (-(2**63), 2**63)}
BOOL, FLOAT32, FLOAT64 = 7, 6, 12


def scalars(type_id: int) -> st.SearchStrategy[Any]:
    """Values of a scalar type that come back as they are."""
    if type_id == BOOL:
        return st.booleans()
    if type_id in (FLOAT32, FLOAT64):
        return st.floats(allow_nan=False, width=32)
    low, high = BOUNDS[type_id]
    return st.integers(low, high - 1)


def texts() -> st.SearchStrategy[str]:
    """Strings of arbitrary bytes, as the reader gives them."""
    return st.binary(max_size=12).map(lambda b: b.decode("utf-8", "surrogateescape"))


@st.composite
def values(draw: st.DrawFn, depth: int = MAX_ARRAY_DEPTH) -> tuple[int, Any]:
    """(type id, value); arrays are (item type, list of values)."""
    kind = draw(st.sampled_from([*SCALARS, STRING, ARRAY, ARRAY] if depth else [*SCALARS, STRING]))
    if kind == STRING:
        return STRING, draw(texts())
    if kind != ARRAY:
        return kind, draw(scalars(kind))
    item = draw(st.sampled_from([*SCALARS, STRING, ARRAY] if depth > 1 else [*SCALARS, STRING]))
    one: st.SearchStrategy[Any]
    if item == STRING:
        one = texts()
    elif item == ARRAY:
        one = values(depth=depth - 1).filter(lambda v: v[0] == ARRAY).map(lambda v: v[1])
    else:
        one = scalars(item)
    return ARRAY, (item, draw(st.lists(one, max_size=3)))


def plain(value: Any) -> Any:
    """The value as the reader gives it: arrays are bare lists."""
    return [plain(v) for v in value[1]] if isinstance(value, tuple) else value


def need(buffer: bytearray, end: int) -> None:
    """The bytes end where they end."""
    if end > len(buffer):
        raise EOFError


@given(values(), st.binary(max_size=5), st.binary(max_size=5))
def test_walks_over_and_decodes_any_value(value: tuple[int, Any], before: bytes, behind: bytes) -> None:
    encoded = encode_value(*value)
    buffer = bytearray(before + encoded + behind)
    assert skip_value(buffer, len(before), value[0], need) == len(before) + len(encoded)
    assert read_value(buffer, len(before), value[0]) == plain(value[1])


@given(values())
def test_asks_for_more_at_every_truncation(value: tuple[int, Any]) -> None:
    encoded = encode_value(*value)
    for cut in range(len(encoded)):
        with pytest.raises(EOFError):
            skip_value(bytearray(encoded[:cut]), 0, value[0], need)


@given(st.integers(0, 2**32 - 1), st.binary(max_size=64))
def test_any_bytes_end_in_a_place_or_a_known_error(type_id: int, data: bytes) -> None:
    buffer = bytearray(data)
    try:
        end = skip_value(buffer, 0, type_id, need)
    except (EOFError, ValueError):
        return
    assert 0 < end <= len(data)
    read_value(buffer, 0, type_id)


def test_depth_is_bounded_at_eight() -> None:
    tower = struct.pack("<IQ", ARRAY, 1) * 7 + struct.pack("<IQI", 4, 1, 9)
    assert read_value(tower, 0, ARRAY) == [[[[[[[[9]]]]]]]]
    assert skip_value(bytearray(tower), 0, ARRAY, need) == len(tower)
    with pytest.raises(ValueError, match=r"^arrays are nested more than 8 deep$"):
        skip_value(bytearray(struct.pack("<IQ", ARRAY, 1) + tower), 0, ARRAY, need)


def test_scalar_sizes_match_the_writer() -> None:
    assert {k: struct.calcsize("<" + code) for k, code in SCALARS.items()} == SCALAR_BYTES


@given(texts())
def test_string_value_is_read_back(text: str) -> None:
    assert read_value(string_value(text), 0, STRING) == text
