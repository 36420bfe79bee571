"""Slots out of a memory budget: the sum is right, it is spent as far as it goes, and a message names what would do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bel.formats.bundle import Bundle, open_bundle
from bel.formats.errors import UsageError
from bel.formats.experts_file import PAGE_BYTES, BlobPart, LayerLayout
from bel.runtime.bundle_model import SlotOptions, open_run
from bel.runtime.context import ContextOptions
from bel.runtime.engine import Engine, Model
from bel.runtime.policies import parse_policy
from bel.runtime.slot_budget import MARGIN_BYTES, call_bytes, check_floor, fitting_slots, slots_bytes, uniform_slots
from exactness import repack

MIB = 1 << 20


def layer(number: int, n_expert: int, n_used: int | None, n_pages: int, *, is_mtp: bool = False) -> LayerLayout:
    stride = n_pages * PAGE_BYTES
    return LayerLayout(number, n_expert, n_used, is_mtp, 0, 0, stride, (BlobPart("down", 0, 0, stride),))


@st.composite
def models(draw: st.DrawFn, min_layers: int = 1) -> tuple[LayerLayout, ...]:
    shapes = draw(
        st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 3000)), min_size=min_layers, max_size=5)
    )
    return tuple(layer(i, e, min(k, e), pages) for i, (e, k, pages) in enumerate(shapes))


def brute_force(layers: Sequence[LayerLayout], slots: Sequence[int], rows: int, ahead: int) -> int:
    """The most that any call, and any reading ahead beside it, can hold beyond the slots."""
    most = max(
        min(rows * (x.n_used or x.n_expert), x.n_expert - c) * x.stride_bytes for x, c in zip(layers, slots, strict=True)
    )
    counts = [(c, x) for x, c in zip(layers, slots, strict=True)]
    return most + max(
        max(n * x.stride_bytes for n in range(x.n_expert - c + 1) if n * x.stride_bytes <= ahead) for c, x in counts
    )


@given(models(), st.integers(1, 30), st.integers(0, 200 * MIB), st.data())
def test_what_a_call_needs(layers: tuple[LayerLayout, ...], rows: int, ahead: int, data: st.DataObject) -> None:
    slots = [data.draw(st.integers(0, x.n_expert)) for x in layers]
    found = call_bytes(layers, slots, rows, ahead)
    assert found == brute_force(layers, slots, rows, ahead)
    assert found <= 2 * max(x.size_bytes for x in layers), "of a small model not the 96 MiB that may be read ahead"
    assert call_bytes(layers, [x.n_expert for x in layers], rows, ahead) == 0, "what is there is not loaded"
    mtp = layer(9, 64, 8, 5000, is_mtp=True)
    assert call_bytes([*layers, mtp], [*slots, 0], rows, ahead) == found, "an MTP block is never called"


@given(models(), st.integers(1, 30), st.integers(0, 200 * MIB), st.integers(0, 500 * MIB), st.integers(0, 900 * MIB))
def test_a_budget_is_spent_as_far_as_it_goes(
    layers: tuple[LayerLayout, ...], rows: int, ahead: int, other: int, ram: int
) -> None:
    """The most slots with which the sum stays within it; where there are none, the memory named is enough."""

    def total(count: int) -> int:
        slots = uniform_slots(layers, count)
        return other + slots_bytes(layers, slots) + call_bytes(layers, slots, rows, ahead) + MARGIN_BYTES

    floor = max(x.n_used or 1 for x in layers)
    counts = range(floor, max(x.n_expert for x in layers) + 1)
    fitting = [n for n in counts if total(n) <= ram]
    if fitting:
        assert fitting_slots(layers, other, ram, rows, ahead) == uniform_slots(layers, fitting[-1])
        return
    with pytest.raises(UsageError, match="does not fit into --ram") as caught:
        fitting_slots(layers, other, ram, rows, ahead)
    named = re.search(r"Give --ram (\d+)M or more", str(caught.value))
    assert named is not None
    assert min(map(total, counts)) < int(named[1]) * MIB <= min(map(total, counts)) + 6 * MIB
    check_floor(layers, fitting_slots(layers, other, int(named[1]) * MIB, rows, ahead))


def test_more_slots_may_need_less() -> None:
    """One layer: what a prompt needs beside the slots shrinks with each of them, and so does what is read ahead."""
    layers, ram = [layer(0, 8, 2, 256)], 24 * MIB + 10 * MIB
    assert call_bytes(layers, [2], 30, 6 * MIB) == 12 * MIB  # 14 with the slots
    assert fitting_slots(layers, 0, ram, 30, 6 * MIB) == (8,)


@given(models(min_layers=2), st.data())
def test_the_floor_is_one_tokens_need(layers: tuple[LayerLayout, ...], data: st.DataObject) -> None:
    floors = [x.n_used or 1 for x in layers]
    check_floor(layers, floors)
    short = data.draw(st.integers(0, len(layers) - 1))
    slots = [n - (i == short) for i, n in enumerate(floors)]
    with pytest.raises(UsageError, match=f"{slots[short]} slots in layer {short} .*Give at least --slots {floors[short]}"):
        check_floor(layers, slots)


def test_uniform_slots_are_at_most_all() -> None:
    layers = (layer(0, 4, 2, 1), layer(1, 64, 2, 3))
    assert uniform_slots(layers, 10) == (4, 10)
    assert slots_bytes(layers, (4, 10)) == (4 + 30) * PAGE_BYTES


# --- in a run -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The example model as a bundle."""
    example = Path(__file__).parent.parent / "examples" / "tiny-moe-q8_0.gguf"
    return open_bundle(repack(example, tmp_path_factory.mktemp("tiny") / "tiny.bel"))


def test_a_run_keeps_to_its_sum(tiny: Bundle) -> None:
    """The sum fits into the budget; of a small model's there is no line larger than the model."""
    sizes = ContextOptions(64, 64, 64, 1)
    largest = max(x.size_bytes for x in tiny.manifest.layers)
    with open_run(Engine.open(), tiny, sizes, SlotOptions(parse_policy("lru"), slots=8)) as run:
        assert run.memory.call <= 2 * largest
        need, eight = run.memory.total, run.cache.slots
    ram = need + 16 * MIB  # the process has grown a little meanwhile
    with open_run(Engine.open(), tiny, sizes, SlotOptions(parse_policy("lru"), ram_bytes=ram)) as run:
        assert run.memory.total <= ram
        assert run.cache.slots >= eight
        assert run.cache.prefetch_bytes <= ram // 16


def test_the_context_may_depend_on_the_model(tiny: Bundle) -> None:
    """As its tokens do: `open_run` asks for the sizes once the model is there, and their buffers are in the sum."""
    asked: list[int] = []

    def sizes(model: Model) -> ContextOptions:
        asked.append(len(model.tokenize("def f(x):")))
        return ContextOptions(asked[-1], asked[-1], asked[-1], 1)

    with open_run(Engine.open(), tiny, sizes, SlotOptions(parse_policy("lru"), slots=8)) as run:
        assert asked == [run.context.n_ctx]
        assert run.memory.kv > 0
        assert run.memory.compute > 0
        run.context.decode(run.model.tokenize("def f(x):"))


def test_slots_are_given_in_one_way(tiny: Bundle) -> None:
    slots = SlotOptions(parse_policy("lru"), slots=8, ram_bytes=1 << 30)
    with (
        pytest.raises(UsageError, match="exclude each other"),
        open_run(Engine.open(), tiny, ContextOptions(8, 8, 8, 1), slots),
    ):
        pass
    slots = SlotOptions(parse_policy("lru"), slots_by_layer={0: 4})
    with (
        pytest.raises(UsageError, match="no slots for layer 1"),
        open_run(Engine.open(), tiny, ContextOptions(8, 8, 8, 1), slots),
    ):
        pass
