"""The range of expert weights, with real memory: blobs stand apart, pages move whole, and what is given back is gone."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.experts_file import PAGE_BYTES, BlobPart, LayerLayout
from bel.runtime import arena as arena_module
from bel.runtime.arena import Arena


def layer(number: int, n_expert: int, n_pages: int) -> LayerLayout:
    stride = n_pages * PAGE_BYTES
    return LayerLayout(number, n_expert, 1, False, 0, 0, stride, (BlobPart("down", 0, 0, stride),))


LAYERS = (layer(0, 6, 3), layer(1, 4, 1), layer(2, 6, 3))
BLOBS = [(place, expert) for place, x in enumerate(LAYERS) for expert in range(x.n_expert)]


@contextmanager
def opened(*layers: LayerLayout, moves_pages: bool = True) -> Iterator[Arena]:
    arena = Arena(layers)
    try:
        assert arena.moves_pages, "this kernel moves pages"
        arena.moves_pages = moves_pages
        yield arena
    finally:
        arena.close()


def memory(address: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """The bytes at an address, which can be written."""
    return np.frombuffer((ctypes.c_ubyte * size_bytes).from_address(address), np.uint8)


def held_bytes(address: int, size_bytes: int) -> int:
    """Bytes of a range that take memory (mincore(2)); reading them would make them do so."""
    pages = (ctypes.c_ubyte * (size_bytes // PAGE_BYTES))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), pages) == 0
    return PAGE_BYTES * int((np.frombuffer(pages, np.uint8) & 1).sum())


def n_mappings() -> int:
    return Path("/proc/self/maps").read_bytes().count(b"\n")


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=6))
def test_blobs_stand_apart(shapes: list[tuple[int, int]]) -> None:
    """In pages of their own, in the range, and with a page behind each layer, of which llama.cpp may read the beginning."""
    layers = [layer(i, *shape) for i, shape in enumerate(shapes)]
    with opened(*layers) as arena:
        end = arena.base
        for place, x in enumerate(layers):
            for expert in range(x.n_expert):
                at = arena.address(place, expert)
                assert at % PAGE_BYTES == 0
                assert at >= end
                assert at == arena.address(place, 0) + expert * x.stride_bytes, "a stack is one tensor with equal strides"
                end = at + x.stride_bytes
            end += PAGE_BYTES
        assert end <= arena.base + arena.size_bytes
        assert held_bytes(arena.base, arena.size_bytes) == 0, "addresses, and no memory"
        memory(arena.base, arena.size_bytes)[:] = 1  # all of it can be written


@pytest.mark.parametrize("source", [(0, 0), (0, 5), (2, 3)])
@pytest.mark.parametrize("target", [(0, 2), (2, 0), (2, 5)])
def test_pages_move_with_what_is_in_them(source: tuple[int, int], target: tuple[int, int]) -> None:
    """The source is empty afterwards, its neighbours as they were, and both places can be used again."""
    size = LAYERS[0].stride_bytes
    with opened(*LAYERS) as arena:
        pattern = np.random.default_rng(1).integers(1, 256, size, np.uint8)
        begin, end = arena.address(*source), arena.address(*target)
        neighbours = memory(begin + size, PAGE_BYTES)
        neighbours[:] = 77
        memory(begin, size)[:] = pattern
        arena.move(begin, end, size)
        assert held_bytes(begin, size) == 0
        assert np.array_equal(memory(end, size), pattern)
        assert (neighbours == 77).all()
        assert not memory(begin, size).any()
        arena.move(end, begin, size)
        assert np.array_equal(memory(begin, size), pattern)


def test_without_moving_the_source_is_given_back() -> None:
    """An old kernel, or too many blobs: the newcomer gets fresh pages, and there are no more of them than before."""
    size = LAYERS[0].stride_bytes
    with opened(*LAYERS, moves_pages=False) as arena:
        begin, end = arena.address(0, 1), arena.address(2, 4)
        memory(begin, size)[:] = 9
        arena.move(begin, end, size)
        assert held_bytes(arena.base, arena.size_bytes) == 0
        memory(end, size)[:] = 8
        assert held_bytes(arena.base, arena.size_bytes) == size
        assert not memory(begin, size).any()


@settings(max_examples=50)
@given(steps=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.booleans()), max_size=60), moves=st.booleans())
def test_any_order_of_moves_and_drops(steps: list[tuple[int, int, bool]], moves: bool) -> None:
    """Beside a dict of what stands where: no blob is touched by what happens to another one."""
    model: dict[tuple[int, int], int] = {}
    with opened(*LAYERS, moves_pages=moves) as arena:
        for number, (a, b, is_drop) in enumerate(steps, 1):
            blob = BLOBS[a % len(BLOBS)]
            size, at = LAYERS[blob[0]].stride_bytes, arena.address(*blob)
            others = [x for x in BLOBS if LAYERS[x[0]].stride_bytes == size and x != blob and x not in model]
            if is_drop:
                arena.drop(at, size)
                model.pop(blob, None)
            elif blob in model and others:
                target = others[b % len(others)]
                arena.move(at, arena.address(*target), size)
                value = model.pop(blob)
                model[target] = value if moves else 0
            else:
                memory(at, size)[:] = number
                model[blob] = number
        live = {x: v for x, v in model.items() if v or moves}
        assert held_bytes(arena.base, arena.size_bytes) == sum(LAYERS[place].stride_bytes for place, _ in live)
        for blob in BLOBS:
            assert (memory(arena.address(*blob), LAYERS[blob[0]].stride_bytes) == model.get(blob, 0)).all(), blob


def test_the_mappings_are_at_most_one_for_each_blob() -> None:
    """However often pages move: a process may have 65,530 of them, and dies in a strange place behind that."""
    many = (layer(0, 200, 2),)
    with opened(*many) as arena:
        before, size, random = n_mappings(), many[0].stride_bytes, np.random.default_rng(0)
        full, empty = list(range(100)), list(range(100, 200))
        for expert in full:
            memory(arena.address(0, expert), size)[:] = expert
        for _ in range(3000):
            i, j = random.integers(0, 100, 2)
            arena.move(arena.address(0, full[i]), arena.address(0, empty[j]), size)
            full[i], empty[j] = empty[j], full[i]
        assert before + 20 < n_mappings() <= before + 2 * 200
        assert held_bytes(arena.base, arena.size_bytes) == 100 * size
        assert sorted(int(memory(arena.address(0, x), 1)[0]) for x in full) == list(range(100))


def test_more_blobs_than_mappings_are_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is the machine's, less what the rest of the process needs."""
    for limit, moves in ((arena_module._SPARE_MAPS + len(BLOBS) + 1, True), (arena_module._SPARE_MAPS + len(BLOBS), False)):
        monkeypatch.setattr(arena_module, "_max_maps", lambda limit=limit: limit)
        arena = Arena(LAYERS)
        assert arena.moves_pages == moves
        arena.close()


def test_closing_gives_the_addresses_back_and_may_be_repeated() -> None:
    before, arena = n_mappings(), Arena(LAYERS)
    memory(arena.address(0, 1), PAGE_BYTES)[:] = 1
    base = arena.base
    arena.close()
    assert n_mappings() == before
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(base), ctypes.c_size_t(PAGE_BYTES), (ctypes.c_ubyte * 1)()) != 0
    arena.close()


_TOO_LARGE = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
from bel.formats.errors import MachineError
from bel.formats.experts_file import BlobPart, LayerLayout
from bel.runtime.arena import Arena
try:
    Arena((LayerLayout(0, 2**12, 1, False, 0, 0, 2**20, (BlobPart("down", 0, 0, 2**20),)),))
except MachineError as error:
    print(error)
"""


def test_a_machine_that_grants_no_such_range_is_named() -> None:
    said = subprocess.run([sys.executable, "-c", _TOO_LARGE], capture_output=True, text=True, check=True).stdout
    assert "grants no 4.00 GiB of addresses" in said
    assert "ulimit -v" in said


@pytest.mark.parametrize("call", [lambda a: a.drop(a.base + 1, PAGE_BYTES), lambda a: a.move(a.base + 1, a.base, PAGE_BYTES)])
def test_a_call_that_the_kernel_refuses_is_an_error(call: Callable[[Arena], None]) -> None:
    with opened(*LAYERS) as arena, pytest.raises(arena_module.MachineError, match="pages of the expert slots: Invalid"):
        call(arena)
