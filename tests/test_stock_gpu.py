"""Stock llama.cpp on a GPU, as far as no GPU is needed: what is refused, how a cache is sized, and what it says of itself."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bel.formats.errors import MachineError, UsageError
from bel.formats.experts import find_experts
from bel.formats.gguf_model import open_model
from bel.runtime import llama_abi, stock_gpu
from bel.runtime.context import ContextOptions
from bel.runtime.devices import Device, cpu_buffer_type, devices
from bel.runtime.engine import Engine, ModelOptions
from bel.runtime.stock_cache import CacheCounts, CacheGroup, CacheSizes, cache_sizes, gguf_layers, read_counts, read_slots
from bel.runtime.stock_gpu import EXPERTS, StockGpuOptions, check_options, open_stock_gpu, stock_cache_sizes

SMALL = CacheGroup(12, 64, 96, (18432, 18432, 18432))
"""The experts of the small trained model: 12 layers of 64, top-8, Q4_0."""
SIZES = ContextOptions(16, n_threads=1)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.open("xllamacpp")


@pytest.fixture(scope="module")
def device(engine: Engine) -> Device:
    """The CPU, for what is only asked for its memory."""
    return devices(engine)[0]


# --- which tensors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "is_expert"),
    [
        ("blk.0.ffn_gate_exps.weight", True),
        ("blk.12.ffn_gate_up_exps.weight", True),
        ("blk.3.ffn_down_exps.bias", True),
        ("blk.3.ffn_up_chexps.weight", True),
        ("blk.3.ffn_up_exps.scale", True),
        ("blk.0.ffn_up_shexp.weight", False),
        ("blk.0.ffn_gate_inp.weight", False),
        ("blk.0.ffn_norm_exps.weight", False),
        ("blk.0.exp_probs_b.bias", False),
    ],
)
def test_what_cpu_moe_keeps_on_the_host(name: str, is_expert: bool) -> None:
    """Routed experts, and what is indexed like them; neither shared ones nor the router."""
    assert bool(re.search(EXPERTS, name)) == is_expert


def test_experts_put_aside_compute_the_same(engine: Engine, example: Path) -> None:
    """Given a buffer type of their own, they are no longer mapped, and nothing else changes."""
    logits, buffers = [], []
    for kinds in ((), [(EXPERTS, cpu_buffer_type(engine))]):
        engine.log.clear()
        with engine.load(example, ModelOptions(load_mode="none", buffer_types=kinds)) as model, model.context(SIZES) as context:
            buffers.append([line for _, line in engine.log if "model buffer size" in line])
            context.decode([5, 6, 7])
            logits.append(context.logits.copy())
    assert np.array_equal(*logits)
    assert all(buffers)


# --- no GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", stock_gpu.PLACES)
def test_without_a_gpu_nothing_is_loaded(engine: Engine, experts: str) -> None:
    """The device is looked for before the file is."""
    options = StockGpuOptions(experts, 1 << 30, "none")
    with (
        pytest.raises(MachineError, match="there is no GPU") as caught,
        open_stock_gpu(engine, Path("no-such.gguf"), SIZES, options),
    ):
        pass
    assert caught.value.exit_code == 5


def test_llama_cpp_has_no_cache_without_a_gpu(engine: Engine, example: Path) -> None:
    """The field of the context is the right one: the library itself refuses it."""
    options = dataclasses.replace(SIZES, moe_cache_bytes=1 << 20)
    with engine.load(example) as model, pytest.raises(MachineError, match="MoE cache requires a GPU backend"):
        model.context(options)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_cache_below_one_token_cycle_is_refused(engine: Engine, device: Device, example: Path) -> None:
    """6 layers of top-4 pick 24 experts: with 23 slots each is gone before it is asked for again."""
    source = open_model(example)
    floor = stock_cache_sizes(engine, device, source).cycle_bytes
    check_options(engine, device, source, StockGpuOptions("cache", floor, "none"))
    with pytest.raises(UsageError, match=r"would hit nothing.*23 slots.*at least .*, for the 24 experts of a token"):
        check_options(engine, device, source, StockGpuOptions("cache", floor - 64, "none"))
    check_options(engine, device, source, StockGpuOptions("cache", floor - 64, "none", forced=True))


def test_a_cache_over_a_mapped_file_is_refused(engine: Engine, device: Device, example: Path) -> None:
    """It was measured to be slower than no cache, up to half of the experts."""
    source = open_model(example)
    with pytest.raises(UsageError, match="over a mapped file"):
        check_options(engine, device, source, StockGpuOptions("cache", 1 << 24))
    check_options(engine, device, source, StockGpuOptions("cache", 1 << 22, forced=True))


def test_an_engine_without_a_cache_is_refused(engine: Engine, device: Device, example: Path) -> None:
    """Told by its context parameters, whatever is forced."""
    older = dataclasses.replace(engine.library, context_params=llama_abi.CONTEXT_LAYOUTS[1])
    old: Any = SimpleNamespace(library=older, build="9999")
    with pytest.raises(MachineError, match="too old to have an expert cache of its own; found 9999"):
        check_options(old, device, open_model(example), StockGpuOptions("cache", 1 << 22, "none", forced=True))


def test_more_than_the_gpu_has_is_refused(engine: Engine, device: Device, example: Path) -> None:
    """The message says what would fit: as many bytes of experts as it names pass."""
    source = open_model(example)
    experts = sum(t.size_bytes for t in source.tensors if re.search(EXPERTS, t.name))
    small = dataclasses.replace(device, free_bytes=experts)
    with pytest.raises(UsageError, match=r"does not fit into the GPU's memory.*Experts may have at most"):
        check_options(engine, small, source, StockGpuOptions())
    check_options(engine, small, source, StockGpuOptions("cpu"))
    check_options(engine, small, source, StockGpuOptions("cache", experts // 2, "none"))
    with pytest.raises(UsageError, match="does not fit into the GPU's memory"):
        check_options(engine, small, source, StockGpuOptions("cache", experts, "none"))


@pytest.mark.parametrize("experts", ["cpu", "cache"])
def test_more_than_memory_has_is_refused(
    engine: Engine, device: Device, example: Path, experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied experts need memory, mapped ones do not."""
    monkeypatch.setattr(stock_gpu, "free_bytes", lambda: 1 << 20)
    source = open_model(example)
    with pytest.raises(UsageError, match=r"the experts do not fit into memory; found 1\.00 MiB free"):
        check_options(engine, device, source, StockGpuOptions(experts, 1 << 22, "none"))
    check_options(engine, device, source, StockGpuOptions(experts, 1 << 22, "mmap", forced=True))


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_layers_of_one_layout_share_their_slots(example: Path) -> None:
    """The trained example has one layout in all of its layers."""
    source = open_model(example)
    layers = find_experts(source)
    sizes = cache_sizes(gguf_layers(source, layers), 128)
    assert sizes.groups == (CacheGroup(6, 32, 24, (8704, 8704, 8704)),)
    assert sizes.host_bytes == 6 * 32 * 3 * 8704
    mtp = dataclasses.replace(layers[-1], is_mtp=True)
    assert cache_sizes(gguf_layers(source, (*layers[:-1], mtp)), 128).groups[0].n_layers == 5


@pytest.mark.parametrize(("share", "slots"), [(0.2, 153), (0.5, 384), (1.0, 768)])
def test_slots_are_those_that_a_gpu_made(share: float, slots: int) -> None:
    """Seen on an H200, whose alignment is 128 bytes: llama.cpp logged these for these sizes; and 8.12 MiB for 153."""
    sizes = CacheSizes((SMALL,), 128)
    assert sizes.slots(sizes.size_for_share(share)) == (slots,)
    assert round(SMALL.device_bytes(153, 128) / 2**20, 2) == 8.12


GROUPS = st.builds(
    CacheGroup,
    st.integers(1, 90),
    st.integers(2, 300),
    st.integers(1, 800),
    st.lists(st.integers(18, 10**7), min_size=2, max_size=3).map(tuple),
)


@given(st.lists(GROUPS, min_size=1, max_size=3), st.sampled_from([32, 128, 4096]), st.data())
def test_a_size_holds_what_it_was_made_for(groups: list[CacheGroup], alignment: int, data: st.DataObject) -> None:
    """Each group gets its slots; and a little less does not do for one of them."""
    sizes = CacheSizes(tuple(groups), alignment)
    wanted = [data.draw(st.integers(1, group.n_experts)) for group in groups]
    size = sizes.size_for(wanted)
    assert all(have >= want for have, want in zip(sizes.slots(size), wanted, strict=True))
    assert any(have < want for have, want in zip(sizes.slots(size - 2), wanted, strict=True))


@given(st.lists(GROUPS, min_size=1, max_size=3), st.integers(0, 10**12))
def test_a_cache_stays_within_its_size(groups: list[CacheGroup], size: int) -> None:
    """However a size is shared out, the groups together take no more, and none has more slots than experts."""
    sizes = CacheSizes(tuple(groups), 128)
    slots = sizes.slots(size)
    taken = sum(g.device_bytes(count, 128) for g, count in zip(groups, slots, strict=True) if count)
    assert taken <= size
    assert all(count <= g.n_experts for g, count in zip(groups, slots, strict=True))


# --- what it says of itself -------------------------------------------------------------------------------------------

# As build 11549 logged them on an H200.
MADE = """\
impl:      CUDA0 MoE cache size =     8.12 MiB for 40.50 MiB of host experts
impl: 12 layers, q4_0:   153 slots (19.9%)
""".splitlines()
FREED = """\
llama_moe_cache: ubatch <= 8: hits = 2362, misses = 1494, hit rate = 61.26%, uploaded = 78.79 MiB
llama_moe_cache: ubatch  > 8: hits = 22, misses = 279, hit rate = 7.31%, uploaded = 14.71 MiB
""".splitlines()


def test_counts_are_read_back() -> None:
    """Both kinds of graphs, and what each uploaded: 1494 and 279 experts of 55,296 bytes, as printed."""
    counts = read_counts(["something else", *FREED])
    assert (counts.hits, counts.misses, counts.batch_hits, counts.batch_misses) == (2362, 1494, 22, 279)
    assert abs(counts.uploaded_bytes - 1494 * 3 * 18432) < 0.01 * 2**20
    assert abs(counts.batch_uploaded_bytes - 279 * 3 * 18432) < 0.01 * 2**20
    assert counts.hit_rate == pytest.approx(0.6126, abs=1e-4)


def test_copies_are_read_back() -> None:
    """The wording is that of the source, `log_stats`."""
    line = "llama_moe_cache: large batches: 17 experts copied from the cache, 0.90 MiB"
    assert read_counts([line]) == CacheCounts(copied=17)


def test_a_cache_that_was_never_asked_says_nothing() -> None:
    """No line is no error, and no rate either."""
    assert read_counts([]) == CacheCounts()
    assert read_counts([]).hit_rate is None


@pytest.mark.parametrize(("old", "new"), [("hits = ", "hits: "), ("uploaded", "sent"), ("<= 8", "1 to 8")])
def test_another_wording_is_an_error(old: str, new: str) -> None:
    """Counts that cannot be read must not look like none."""
    with pytest.raises(MachineError, match="in another way"):
        read_counts([FREED[0].replace(old, new)])


def test_slots_are_read_back() -> None:
    """Of all groups together."""
    assert read_slots(MADE) == 153
    assert read_slots([*MADE, "impl:  3 layers, q6_K:    20 slots (7.5%)"]) == 173


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("impl: no layer has all of its experts in host memory, MoE cache is disabled", "is disabled"),
        ("impl: MoE cache budget is too small for 3 layers, they are not cached", "budget is too small"),
        ("", "made no expert cache"),
    ],
)
def test_a_cache_that_is_none_is_an_error(line: str, says: str) -> None:
    """llama.cpp only warns, and goes on without."""
    with pytest.raises(MachineError, match=says):
        read_slots([*MADE, line] if line else [])
