"""The type table against the gguf package's."""

from __future__ import annotations

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bel.formats.ggml_types import GGML_TYPES, tensor_bytes, type_name

Q8_1, Q2_0 = 9, 42
THEIRS = {int(kind): gguf.GGML_QUANT_SIZES[kind] for kind in gguf.GGMLQuantizationType}


def test_holds_every_type_of_the_gguf_package_and_one_more() -> None:
    """Type 42 came to ggml after the package's release."""
    assert set(GGML_TYPES) - set(THEIRS) == {Q2_0}
    assert set(THEIRS) <= set(GGML_TYPES)


@pytest.mark.parametrize("type_id", sorted(set(THEIRS) - {Q8_1}))
def test_agrees_with_the_gguf_package(type_id: int) -> None:
    ours = GGML_TYPES[type_id]
    assert (ours.block_elements, ours.block_bytes) == THEIRS[type_id]
    assert ours.name == gguf.GGMLQuantizationType(type_id).name
    assert ours.type_id == type_id


def test_the_two_exceptions_have_ggml_sizes() -> None:
    """block_q8_1 is two halves and 32 bytes; the package still counts two floats.  block_q2_0 is a half and 64 times 2 bits."""
    assert (THEIRS[Q8_1], GGML_TYPES[Q8_1].block_bytes) == ((32, 4 + 4 + 32), 2 + 2 + 32)
    assert (GGML_TYPES[Q2_0].block_elements, GGML_TYPES[Q2_0].block_bytes) == (64, 2 + 64 * 2 // 8)


@given(st.sampled_from(sorted(GGML_TYPES)), st.integers(0, 9), st.lists(st.integers(0, 9), max_size=3))
def test_bytes_of_whole_rows(type_id: int, blocks: int, rest: list[int]) -> None:
    kind, rows = GGML_TYPES[type_id], 1
    for n in rest:
        rows *= n
    assert tensor_bytes(type_id, (blocks * kind.block_elements, *rest)) == blocks * kind.block_bytes * rows


@given(st.sampled_from([k for k, t in GGML_TYPES.items() if t.block_elements > 1]), st.integers(0, 2000))
def test_part_of_a_block_is_refused(type_id: int, elements: int) -> None:
    kind = GGML_TYPES[type_id]
    if elements % kind.block_elements == 0:
        assert tensor_bytes(type_id, (elements, 3)) == elements // kind.block_elements * kind.block_bytes * 3
        return
    with pytest.raises(ValueError, match=f"rows of {elements} elements are not whole {kind.name} blocks"):
        tensor_bytes(type_id, (elements, 3))


@pytest.mark.parametrize("type_id", [4, 5, 31, 32, 33, 36, 37, 38, 43, 153, 2**31 - 1])
def test_unknown_types_have_no_size(type_id: int) -> None:
    assert tensor_bytes(type_id, (256, 256)) is None
    assert type_name(type_id) == f"type {type_id}"


def test_a_scalar_has_no_dimensions() -> None:
    assert tensor_bytes(0, ()) == 4
