"""What counts as a difference between two runs, and where it is said to be."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bel.formats.errors import MachineError
from bel.runtime.check import random_prompts
from bel.runtime.choices import Choice
from bel.runtime.differences import Differences
from bel.runtime.logit_spool import LogitSpool

BITS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)


def floats(bits: list[int]) -> npt.NDArray[np.float32]:
    return np.array(bits, np.uint32).view(np.float32)


def choice(layer: int, *rows: list[int]) -> Choice:
    return Choice(layer, np.array(rows, np.uint16))


# --- logits ---------------------------------------------------------------------------------------------------------


@given(BITS)
def test_equal_bits_are_equal(bits: list[int]) -> None:
    """Whatever they spell."""
    found = Differences()
    found.logits("p", 3, floats(bits), floats(bits))
    assert (found.first, found.max_logit, found.n_logits) == (None, 0.0, len(bits))


@given(BITS, st.data())
def test_one_bit_is_a_difference(bits: list[int], data: st.DataObject) -> None:
    """Any bit of any logit, and its size is the distance of the two, or infinite where it has none."""
    place, bit = data.draw(st.integers(0, len(bits) - 1)), data.draw(st.integers(0, 31))
    other = [*bits]
    other[place] ^= 1 << bit
    found = Differences()
    found.logits("p", 3, floats(bits), floats(other))
    assert found.first is not None
    assert (found.first.prompt, found.first.position, found.first.layer, found.first.what) == ("p", 3, None, "logits")
    assert f"for token {place}" in found.first.found
    a, b = float(floats(bits)[place]), float(floats(other)[place])
    assert found.max_logit == (math.inf if math.isnan(a - b) else abs(a - b))


def test_zeros_of_two_signs_differ_by_nothing() -> None:
    """The distance is 0, the bits are not the same, and the message shows both."""
    found = Differences()
    found.logits("p", 0, np.array([0.0], np.float32), np.array([-0.0], np.float32))
    assert found.max_logit == 0
    assert found.first is not None
    assert (found.first.found, found.first.expected) == ("0.0 for token 0", "-0.0")


def test_the_largest_difference_and_the_first_one() -> None:
    """They need not be the same, and a number that is none is never forgotten."""
    zero = np.zeros(4, np.float32)
    found = Differences()
    for position, values in enumerate([[0, 0, 0, 0], [0, 0.5, 0, 0.25], [-2, 0, 0, 0], [0, 0, 0, 1]]):
        found.logits("p", position, np.array(values, np.float32), zero)
    assert found.max_logit == 2
    assert found.first is not None and found.first.position == 1
    found.logits("p", 9, np.full(4, np.nan, np.float32), zero)
    found.logits("p", 10, np.ones(4, np.float32), zero)
    assert found.max_logit == math.inf
    assert found.first.position == 1


def test_another_vocabulary() -> None:
    """Rows of other lengths cannot be subtracted."""
    found = Differences()
    found.logits("p", 0, np.zeros(3, np.float32), np.zeros(4, np.float32))
    assert found.max_logit == math.inf
    assert found.first is not None and (found.first.found, found.first.expected) == ("3 logits", "4")


# --- choices and tokens ---------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_a_choice_is_found_at_its_place(n_layers: int, first: int, k: int, ubatches: list[int], data: st.DataObject) -> None:
    """Every row of every layer and ubatch counts once; the position is that of the token, however ubatches cut the text."""
    expected = [
        Choice(first + layer, np.arange(rows * k, dtype=np.uint16).reshape(rows, k))
        for rows in ubatches
        for layer in range(n_layers)
    ]
    found = [Choice(x.layer, x.ids.copy()) for x in expected]
    ubatch = data.draw(st.integers(0, len(ubatches) - 1))
    layer, row = data.draw(st.integers(0, n_layers - 1)), data.draw(st.integers(0, ubatches[ubatch] - 1))
    same, differing = Differences(), Differences()
    same.choices("p", 100, found, expected)
    assert (same.first, same.n_router_records) == (None, n_layers * sum(ubatches))
    found[ubatch * n_layers + layer].ids[row, data.draw(st.integers(0, k - 1))] += 7
    differing.choices("p", 100, found, expected)
    assert differing.n_router_records == same.n_router_records
    assert differing.first is not None
    assert differing.first.layer == first + layer
    assert differing.first.position == 100 + sum(ubatches[:ubatch]) + row
    assert differing.first.what == "router"


def test_a_last_layer_that_computes_the_last_token_only() -> None:
    """Its one row is the last of the ubatch."""
    expected = [choice(0, [1], [2], [3]), choice(1, [4])]
    found = Differences()
    found.choices("p", 10, [expected[0], choice(1, [5])], expected)
    assert found.first is not None
    assert (found.first.position, found.first.layer) == (12, 1)
    assert (found.first.found, found.first.expected) == ("experts [5]", "experts [4]")


def test_other_slot_orders_layers_and_shapes_are_differences() -> None:
    """The same experts in another order are summed in another order."""
    expected = [choice(0, [1, 2]), choice(1, [3, 4])]
    for found, layer in (
        ([choice(0, [2, 1]), expected[1]], 0),
        ([expected[0]], 1),
        ([*expected, choice(2, [5, 6])], 2),
        ([expected[0], choice(3, [3, 4])], 1),
        ([expected[0], choice(1, [3, 4, 5])], 1),
        ([], 0),
    ):
        differences = Differences()
        differences.choices("p", 0, found, expected)
        assert differences.first is not None and differences.first.layer == layer


def test_tokens() -> None:
    """Of prompts, and the best next ones."""
    found = Differences()
    found.prompt("p", np.array([1, 2], np.int32), np.array([1, 2], np.int32))
    found.token("p", 4, 7, 7)
    assert (found.first, found.n_tokens) == (None, 1)
    found.token("p", 5, 7, 8)
    assert found.first is not None
    assert (found.first.position, found.first.what, found.first.found, found.first.expected) == (
        5,
        "token",
        "token 7",
        "token 8",
    )
    cut = Differences()
    cut.prompt("p", np.array([1, 2], np.int32), np.array([1, 2, 3], np.int32))
    assert cut.first is not None and (cut.first.position, cut.first.what) == (2, "prompt")


# --- where logits wait ----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5), max_size=6), st.integers(1, 9))
def test_the_spool_gives_every_row_back(rows: list[int], n_vocab: int) -> None:
    """In any order, to the bit, NaN included."""
    bits = np.random.default_rng(0).integers(0, 2**32, sum(rows) * n_vocab, np.uint32).reshape(-1, n_vocab)
    with LogitSpool() as spool:
        kept, at = [], 0
        for count in rows:
            block = bits[at : at + count]
            place = spool.append(block.view(np.float32))
            kept += [(place, row, block[row]) for row in range(count)]
            at += count
        for place, row, expected in reversed(kept):
            assert np.array_equal(spool.read(place, row, n_vocab).view(np.uint32), expected)


def test_the_spool_leaves_no_file_and_says_what_is_too_much(tmp_path: Path) -> None:
    """Found out before the long run, not in it."""
    with LogitSpool(tmp_path) as spool:
        spool.append(np.zeros((2, 3), np.float32))
        assert list(tmp_path.iterdir()) == []
        spool.reserve(4096)
        with pytest.raises(MachineError, match=r"need 1024\.00 TiB until they are compared.*free.*TMPDIR"):
            spool.reserve(1 << 50)


def test_random_prompts_are_the_same_every_time() -> None:
    """One token, some, and many; never more than there is room for."""
    first, again = random_prompts(1000, 500), random_prompts(1000, 500)
    assert [len(p.text) for p in first] == [1, 40, 300]
    assert all(np.array_equal(a.text, b.text) for a, b in zip(first, again, strict=True))
    assert max(int(np.max(p.text)) for p in first if not isinstance(p.text, str)) < 1000
    assert [len(p.text) for p in random_prompts(10, 20)] == [1, 20]
