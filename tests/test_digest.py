"""Digests: what they depend on, what they do not, and that a hole is a run of zeros."""

from __future__ import annotations

import struct

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from bel.formats.digest import (
    SliceHasher,
    content_digest,
    data_digest,
    is_zero,
    leaf_digest,
    slice_count,
    zero_runs,
    zeros_digest,
)
from bel.formats.units import MIB

NAMES = st.binary(max_size=8).map(lambda b: b.decode("utf-8", "surrogateescape"))
TENSORS = st.tuples(
    NAMES, st.integers(0, 50), st.lists(st.integers(0, 9), max_size=4).map(tuple), st.binary(min_size=1, max_size=40)
)


def leaf(tensor: tuple[str, int, tuple[int, ...], bytes]) -> bytes:
    name, type_id, ne, data = tensor
    return leaf_digest(name, type_id, ne, data_digest(blake3(data).digest()))


@given(st.lists(TENSORS, max_size=6), st.randoms(use_true_random=False))
def test_the_content_digest_is_free_of_order(tensors: list[tuple[str, int, tuple[int, ...], bytes]], chance: object) -> None:
    leaves = [leaf(t) for t in tensors]
    digest = content_digest(leaves)
    chance.shuffle(leaves)  # type: ignore[attr-defined]
    assert content_digest(iter(leaves)) == digest
    assert len(digest) == 64


@given(TENSORS, TENSORS)
def test_a_leaf_depends_on_everything(
    one: tuple[str, int, tuple[int, ...], bytes], other: tuple[str, int, tuple[int, ...], bytes]
) -> None:
    """Also where bytes of one field could be read as the next one's."""
    assert (leaf(one) == leaf(other)) is (one == other)
    assert (content_digest([leaf(one)]) == content_digest([leaf(other)])) is (one == other)


@given(TENSORS, st.data())
def test_every_bit_counts(tensor: tuple[str, int, tuple[int, ...], bytes], data: st.DataObject) -> None:
    name, type_id, ne, raw = tensor
    at = data.draw(st.integers(0, 8 * len(raw) - 1))
    flipped = bytearray(raw)
    flipped[at // 8] ^= 1 << at % 8
    assert leaf((name, type_id, ne, bytes(flipped))) != leaf(tensor)
    assert leaf((name + "x", type_id, ne, raw)) != leaf(tensor)
    assert leaf((name, type_id + 1, ne, raw)) != leaf(tensor)
    assert leaf((name, type_id, (*ne, 1), raw)) != leaf(tensor)


def test_the_encoding_is_that_of_the_specification() -> None:
    data = blake3(blake3(b"slice 0").digest() + blake3(b"slice 1").digest()).digest()
    assert data_digest(blake3(b"slice 0").digest() + blake3(b"slice 1").digest()) == data
    raw = struct.pack("<Q", 2) + b"\xffa" + struct.pack("<IIQQQ", 8, 3, 32, 2, 2)
    assert leaf_digest("\udcffa", 8, (32, 2, 2), data) == blake3(raw + data).digest()
    one, two = sorted([blake3(b"1").digest(), blake3(b"2").digest()])
    tag = b"bel-content-1\0" + struct.pack("<Q", 2)
    assert content_digest([two, one]) == blake3(tag + one + two).hexdigest()


def test_one_tensor_twice_is_not_one_tensor() -> None:
    one = blake3(b"1").digest()
    assert len({content_digest([]), content_digest([one]), content_digest([one, one])}) == 3


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 200) | st.integers(0, 3 * MIB)), max_size=6))
def test_holes_hash_like_zeros(steps: list[tuple[bool, int]]) -> None:
    plain, total = blake3(), sum(size for _, size in steps)
    hasher = SliceHasher(total)
    for is_hole, size in steps:
        data = bytes(size) if is_hole else b"\x5a" * size
        plain.update(data)
        if is_hole:
            hasher.update_zeros(size)
        else:
            hasher.update(memoryview(data))
    assert hasher.digest() == plain.digest()


@pytest.mark.parametrize("size", [0, 1, 63, 64, MIB - 1, MIB, MIB + 1, 5 * MIB + 3])
def test_zeros(size: int) -> None:
    assert zeros_digest(size) == blake3(bytes(size)).digest()
    assert sum(len(part) for part in zero_runs(size)) == size
    assert is_zero(bytes(size)) and is_zero(memoryview(bytes(size)))
    for at in {0, size // 2, size - 1} if size else set():
        data = bytearray(size)
        data[at] = 1
        assert not is_zero(bytes(data)) and not is_zero(memoryview(data))


def test_a_whole_hole_costs_nothing_twice() -> None:
    zeros_digest.cache_clear()
    for _ in range(3):
        hasher = SliceHasher(7 * MIB)
        hasher.update_zeros(7 * MIB)
        hasher.digest()
    assert (zeros_digest.cache_info().misses, zeros_digest.cache_info().hits) == (1, 2)


def test_an_unfinished_slice_has_no_digest() -> None:
    hasher = SliceHasher(2)
    hasher.update(memoryview(b"1"))
    with pytest.raises(AssertionError, match="before all of it was read"):
        hasher.digest()


@pytest.mark.parametrize(
    ("ne", "size", "count"),
    [((32, 64, 4), 8704, 4), ((32, 64), 2176, 1), ((), 4, 1), ((7, 1, 3), 100, 1), ((1, 1, 5, 2), 40, 5), ((8, 0, 0), 0, 1)],
)
def test_slices(ne: tuple[int, ...], size: int, count: int) -> None:
    assert slice_count(ne, size) == count


@pytest.mark.parametrize("ne", [(0, 1, 2**62), (32, 0, 3)])
def test_an_empty_tensor_is_one_slice(ne: tuple[int, ...]) -> None:
    assert slice_count(ne, 0) == 1
