"""Blobs in two halves, and the proof of their bytes: each part is compared once, in the half in which it is complete."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import archs
from bel.formats.bundle import Bundle, open_bundle
from bel.formats.errors import DamagedBundleError
from bel.formats.experts_file import PAGE_BYTES, BlobPart, LayerLayout, blob_layout
from bel.runtime.arena import Arena
from bel.runtime.pager import FIRST, MIN_REST_BYTES, REST, Load, Pager, _first_half_bytes
from bel.runtime.readers import open_reader
from exactness import repack

ROLES = ("gate", "up", "down")


def layout(sizes: list[int], roles: tuple[str, ...] = ROLES) -> LayerLayout:
    offsets, stride = blob_layout(sizes)
    parts = tuple(BlobPart(role, i, at, size) for i, (role, at, size) in enumerate(zip(roles, offsets, sizes, strict=True)))
    return LayerLayout(0, 4, 2, False, 0, PAGE_BYTES, stride, parts)


@pytest.mark.parametrize(
    ("sizes", "first"),
    [
        ([4096, 4096, MIN_REST_BYTES], 8192),  # just worth a read of its own
        ([4096, 4096, MIN_REST_BYTES - PAGE_BYTES], None),  # a page too small
        ([4096, 4096, MIN_REST_BYTES - PAGE_BYTES + 1], 8192),  # padded to a whole page, which is read too
        # Parts that are not page-aligned: down begins at 8320, and its first bytes come with the first half.
        ([4160, 4160, MIN_REST_BYTES], 12288),
        ([4160, 4160, MIN_REST_BYTES - PAGE_BYTES], None),
        ([1 << 20, 1 << 20, 1 << 20], 2 << 20),
    ],
)
def test_where_the_second_half_begins(sizes: list[int], first: int | None) -> None:
    """At the first page with nothing but the last part; or nowhere."""
    layer = layout(sizes)
    assert _first_half_bytes(layer) == (layer.stride_bytes if first is None else first)


def test_only_a_last_part_called_down_comes_later() -> None:
    """No other one is known to be read by the last product alone."""
    big = 1 << 20
    assert _first_half_bytes(layout([big, big], ("gate_up", "down"))) == big
    for roles in (("gate", "down", "up"), ("down", "up", "gate"), ("gate", "up", "down.bias")):
        assert _first_half_bytes(layout([big] * 3, roles)) == 3 * big


def test_such_parts_are_not_page_aligned() -> None:
    assert layout([4160, 4160, MIN_REST_BYTES]).parts[-1].offset_bytes == 8320


@given(st.lists(st.integers(1, 400_000), min_size=2, max_size=3))
def test_what_the_first_products_read_is_in_the_first_half(sizes: list[int]) -> None:
    layer = layout(sizes, ROLES[-len(sizes) :])
    first = _first_half_bytes(layer)
    assert first % PAGE_BYTES == 0
    assert all(part.offset_bytes + part.size_bytes <= first for part in layer.parts[:-1])
    assert first == layer.stride_bytes or layer.stride_bytes - first >= MIN_REST_BYTES


# --- with a real bundle ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Two layers whose blobs come in halves."""
    folder = tmp_path_factory.mktemp("pager")
    source = archs.make_model("qwen3moe", folder / "m.gguf", quant="f16", n_layer=2, n_embd=256, n_ff_exp=256)
    return open_bundle(repack(source, folder / "m.bel"))


@contextmanager
def opened(bundle: Bundle, *, checks: bool = True) -> Iterator[tuple[Pager, Arena]]:
    layers = bundle.manifest.layers
    arena = Arena(layers)
    pager = Pager(bundle, open_reader([bundle.path(row.name) for row in bundle.manifest.experts]), checks=checks)
    try:
        yield pager, arena
    finally:
        pager.close()
        arena.close()


def memory(load: Load, layer: LayerLayout) -> npt.NDArray[np.uint8]:
    return np.frombuffer((ctypes.c_ubyte * layer.stride_bytes).from_address(load.address), np.uint8)


def blob(bundle: Bundle, place: int, expert: int) -> npt.NDArray[np.uint8]:
    """What stands in the file."""
    layer = bundle.manifest.layers[place]
    path = bundle.path(bundle.manifest.experts[layer.shard].name)
    return np.fromfile(path, np.uint8, layer.stride_bytes, offset=layer.offset_bytes + expert * layer.stride_bytes)


def test_each_half_brings_its_bytes_and_no_others(bundle: Bundle) -> None:
    with opened(bundle) as (pager, arena):
        for place, layer in enumerate(bundle.manifest.layers):
            assert pager.has_rest(place)
            first = layer.parts[-1].offset_bytes
            loads = [Load(place, expert, arena.address(place, expert)) for expert in (0, 3, 7)]
            pager.finish(pager.start(loads, FIRST))
            for load in loads:
                expected, found = blob(bundle, place, load.expert), memory(load, layer)
                assert np.array_equal(found[:first], expected[:first])
                assert not found[first:].any()
            pager.check(loads, FIRST)
            pager.finish(pager.start(loads, REST))
            pager.check(loads, REST)
            for load in loads:
                assert np.array_equal(memory(load, layer), blob(bundle, place, load.expert))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("byte", ["first", "last"])
def test_a_wrong_byte_is_named(bundle: Bundle, role: str, byte: str, tmp_path: Path) -> None:
    """Layer, expert and part, and the file; in the half that the part belongs to, and in no other blob."""
    copy = open_bundle(Path(shutil.copytree(bundle.folder, tmp_path / "copy.bel")))
    layer = copy.manifest.layers[1]
    part = next(part for part in layer.parts if part.role == role)
    path = copy.path(copy.manifest.experts[layer.shard].name)
    with path.open("r+b") as file:
        file.seek(layer.part_offset(5, part) + (0 if byte == "first" else part.size_bytes - 1))
        value = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([value ^ 1]))
    with opened(copy) as (pager, arena):
        load, other = (Load(1, expert, arena.address(1, expert)) for expert in (5, 6))
        for half in (FIRST, REST):
            pager.finish(pager.start([load, other], half))
        wrong, right = (REST, FIRST) if role == "down" else (FIRST, REST)
        pager.check([load], right)
        pager.check([other], wrong)
        with pytest.raises(DamagedBundleError, match=rf"expert 5 of layer {layer.layer} \({role}\)") as caught:
            pager.check([load], wrong)
        assert caught.value.path == str(path)
        with pytest.raises(DamagedBundleError):  # it does not count as checked
            pager.check([load], wrong)
    with opened(copy, checks=False) as (pager, arena):
        load = Load(1, 5, arena.address(1, 5))
        for half in (FIRST, REST):
            pager.finish(pager.start([load], half))
            pager.check([load], half)


def test_each_half_of_each_blob_is_checked_once(bundle: Bundle) -> None:
    """A second load costs no checksum; that the first half was right says nothing of the other one, or of another blob."""
    layer = bundle.manifest.layers[0]
    with opened(bundle) as (pager, arena):
        load, other = (Load(0, expert, arena.address(0, expert)) for expert in (2, 3))
        for half in (FIRST, REST):
            pager.finish(pager.start([load, other], half))
        pager.check([load], FIRST)
        memory(load, layer)[:] ^= 1
        memory(other, layer)[:] ^= 1
        pager.check([load], FIRST)
        for damaged, half in ((load, REST), (other, FIRST), (other, REST)):
            with pytest.raises(DamagedBundleError):
                pager.check([damaged], half)
        memory(load, layer)[:] ^= 1
        pager.check([load], REST)
        memory(load, layer)[:] ^= 1
        pager.check([load], REST)


def test_abandoning_waits_for_all_that_was_started(bundle: Bundle) -> None:
    """The memory may be given to something else behind it."""
    with opened(bundle) as (pager, arena):
        loads = [Load(1, expert, arena.address(1, expert)) for expert in range(8)]
        tags = [pager.start(loads, half) for half in (FIRST, REST)]
        pager.abandon()
        for load in loads:
            assert np.array_equal(memory(load, bundle.manifest.layers[1]), blob(bundle, 1, load.expert))
        for tag in tags:
            with pytest.raises(ValueError, match="no reads were submitted"):
                pager.finish(tag)
        pager.abandon()
