"""llama.cpp's own expert cache, as far as no GPU is needed: the model under it is stock's to the last bit; its size."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import archs
from bel.formats.bundle import open_bundle
from bel.formats.errors import MachineError, UsageError
from bel.formats.experts import find_experts
from bel.formats.gguf_model import open_model
from bel.runtime import gpu_cache, llama_abi
from bel.runtime.devices import Device
from bel.runtime.engine import Engine
from bel.runtime.gpu_cache import (
    Promise,
    cache_context,
    check_own_cache,
    fitting_cache,
    open_own_cache,
    own_cache_bytes,
    own_cache_sizes,
)
from bel.runtime.policies import parse_policy
from bel.runtime.pool_abi import USAGE_ANY
from bel.runtime.pool_home import cpu_home
from bel.runtime.pool_loading import LoadedPool, load_pool
from bel.runtime.pool_model import open_slots
from bel.runtime.pool_options import PoolOptions, expert_bytes
from bel.runtime.stock_cache import bundle_layers, cache_sizes, gguf_layers, group_slots
from cpu_as_gpu import SMALL, Memories, pinned_home
from cpu_as_gpu import device as device
from exactness import repack
from pooled import SIZES, largest_difference, pool_options, run_tokens, stock
from trained import EXPERTS, LAYERS, TINY
from trained import tiny as tiny


def own(loaded: LoadedPool, device: Device, n_prompt: int, n_decode: int) -> Any:
    """Logits of a context on the stacks; without a cache, which llama.cpp makes on a GPU alone."""
    with open_own_cache(loaded, device, loaded.sizes, 0) as run:
        assert run.slots is None
        return run_tokens(run.context, n_prompt, n_decode, True)


def pool(loaded: LoadedPool, mode: str, n_prompt: int, n_decode: int) -> Any:
    """Logits of slots on the same model."""
    policy = parse_policy("static" if mode == "static" else "lru")
    with open_slots(loaded, dataclasses.replace(loaded.options, mode=mode, policy=policy)) as run:
        return run_tokens(run.context, n_prompt, n_decode, True)


@pytest.mark.parametrize("n_prompt", [1, 300])
def test_it_is_the_model_that_stock_loads(n_prompt: int, tiny: Path, device: Device) -> None:
    """All logits of the prompt and of 64 tokens.  Behind it nothing is left of the stacks in the model."""
    with load_pool(
        Engine.open(), open_bundle(tiny), SIZES, pool_options(tiny, "upload", slots=8), cpu_home(Engine.open())
    ) as loaded:
        ffi = loaded.engine.library.ffi
        tensors = [ffi.cast("struct ggml_tensor *", part.weight) for graph in loaded.graphs for part in graph.parts]
        before = [(x.buffer, x.data) for x in tensors]
        assert largest_difference(own(loaded, device, n_prompt, 64), stock(TINY, n_prompt, 64)) == 0.0
        assert [(x.buffer, x.data) for x in tensors] == before
        assert loaded.home.abi.ffi.cast("struct buffer *", loaded.hosts.buffer).usage == USAGE_ANY


@pytest.mark.parametrize(
    ("arch", "quant"),
    [("qwen3moe", "q4_k"), ("gpt-oss", "mxfp4"), ("glm4moe", "q6_k"), ("deepseek2", "q4_0"), ("llama", "q8_0")],
)
def test_pool_and_stock_layout_take_turns(
    arch: str, quant: str, tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With biases of experts, dense and MTP blocks: each is exact, whatever was before it, and gives back its memory."""
    source = archs.make_model(arch, tmp_path / "model.gguf", quant=quant, n_embd=256, n_ff_exp=256)
    bundle = repack(source, tmp_path / "model.bel")
    n_used = archs.ARCHS[arch].shape.n_used
    memories = Memories(monkeypatch)
    home = cpu_home(Engine.open())
    for n_prompt in (1, 300):
        expected = stock(source, n_prompt, 16)
        with load_pool(Engine.open(), open_bundle(bundle), SIZES, pool_options(bundle, "split", slots=n_used), home) as loaded:
            for mode in ("own", "split", "own", "upload", "static", "own"):
                before = memories.made
                found = own(loaded, device, n_prompt, 16) if mode == "own" else pool(loaded, mode, n_prompt, 16)
                assert largest_difference(found, expected) == 0.0, mode
                assert memories.made == memories.closed == before + (mode != "own"), mode


def test_a_pool_that_looks_ahead_can_be_closed(tiny: Path, device: Device) -> None:
    """What it was bringing ahead when it was closed goes nowhere any more."""
    home = cpu_home(Engine.open())
    options = pool_options(tiny, "split", slots=10, n_ahead=4)
    with load_pool(Engine.open(), open_bundle(tiny), SIZES, options, home) as loaded:
        for mode in ("upload", "own", "split", "own", "upload"):
            found = own(loaded, device, 9, 20) if mode == "own" else pool(loaded, mode, 9, 20)
            assert largest_difference(found, stock(TINY, 9, 20)) == 0.0, mode


def test_bytes_of_another_expert_are_found(tiny: Path, device: Device) -> None:
    """The comparison can fail: one projection of one layer has the first expert in every place."""
    home = cpu_home(Engine.open())
    with load_pool(Engine.open(), open_bundle(tiny), SIZES, pool_options(tiny, "upload", slots=8), home) as loaded:
        room = loaded.hosts.parts[4][1]
        for expert in range(1, EXPERTS):
            ctypes.memmove(room.base + expert * room.stride_bytes, room.base, room.stride_bytes)
        assert largest_difference(own(loaded, device, 1, 16), stock(TINY, 1, 16)) > 0.0


def test_a_context_that_fails_leaves_the_model_as_it_was(tiny: Path, device: Device) -> None:
    """Here for want of a GPU.  The pool is made again as if nothing had been."""
    home = cpu_home(Engine.open())
    with load_pool(Engine.open(), open_bundle(tiny), SIZES, pool_options(tiny, "upload", slots=8), home) as loaded:
        with (
            pytest.raises(MachineError, match="MoE cache requires a GPU backend"),
            open_own_cache(loaded, device, SIZES, own_cache_bytes(loaded)),
        ):
            pass
        assert largest_difference(pool(loaded, "upload", 9, 16), stock(TINY, 9, 16)) == 0.0


@pytest.mark.parametrize("arch", ["qwen3moe", "glm4moe", "deepseek2", "gpt-oss", "gemma4", "llama4"])
def test_sizes_of_a_bundle_are_those_of_its_gguf(arch: str, tmp_path: Path) -> None:
    """MTP blocks left out, and merged projections told from others."""
    source = archs.make_model(arch, tmp_path / "model.gguf", quant="q8_0")
    model, bundle = open_model(source), open_bundle(repack(source, tmp_path / "model.bel"))
    of_bundle = bundle_layers(bundle)
    assert of_bundle == gguf_layers(model, find_experts(model))
    assert len(of_bundle) == len(archs.ARCHS[arch].moe_layers(archs.ARCHS[arch].shape))


def test_slots_are_counted_by_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of another type has a list of its own, wherever it stands; each group gets what its layers would have."""
    make = archs._tensor

    def tensor(name: str, ne: tuple[int, ...], seed: int, expert_type: int, s: Any) -> Any:
        return make(name, ne, seed, archs.type_id("q8_0") if name.startswith("blk.1.ffn_down_exps") else expert_type, s)

    monkeypatch.setattr(archs, "_tensor", tensor)
    source = archs.make_model("qwen3moe", tmp_path / "model.gguf", quant="q4_0")
    model, bundle = open_model(source), open_bundle(repack(source, tmp_path / "model.bel"))
    layers = bundle_layers(bundle)
    assert layers == gguf_layers(model, find_experts(model))
    assert group_slots(layers, [3, 4, 5]) == [8, 4]
    sizes = cache_sizes(layers, 128)
    assert [group.n_layers for group in sizes.groups] == [2, 1]
    assert all(have >= want for have, want in zip(sizes.slots(sizes.size_for([8, 4])), [8, 4], strict=True))


@pytest.fixture
def loaded(tiny: Path) -> Iterator[LoadedPool]:
    """By a budget that gives 8 slots a layer."""
    bundle = open_bundle(tiny)
    each, stage = sum(map(expert_bytes, bundle.manifest.layers)), EXPERTS * expert_bytes(bundle.manifest.layers[0])
    options = pool_options(tiny, "upload", budget_bytes=8 * each + stage + (1 << 20))
    with load_pool(Engine.open(), bundle, SMALL, options, pinned_home()) as made:
        assert set(made.counts) == {8}
        yield made


def test_a_cache_has_as_many_experts_as_the_pool(loaded: LoadedPool) -> None:
    assert own_cache_sizes(loaded).slots(own_cache_bytes(loaded)) == (8 * LAYERS,)
    assert own_cache_sizes(loaded).slots(own_cache_bytes(loaded) - 64) == (8 * LAYERS - 1,)


def test_a_token_wakes_no_threads_and_a_batch_all(loaded: LoadedPool) -> None:
    many = dataclasses.replace(loaded, options=dataclasses.replace(loaded.options, n_threads=7))
    sizes = cache_context(many)
    assert (sizes.n_threads_single, sizes.n_threads) == (1, 7)


def test_a_budget_is_kept_by_a_smaller_cache(
    loaded: LoadedPool, device: Device, monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    """What is used beside the cache is only known with a context; slots that were asked for are not made fewer."""
    beside, asked = 5 << 20, own_cache_bytes(loaded)
    tried = []

    def used(_loaded: Any, _device: Any, _sizes: Any, size: int, _promise: Any) -> int:
        tried.append(size)
        return beside + size

    monkeypatch.setattr(gpu_cache, "_used", used)  # llama.cpp makes no cache without a GPU
    floor = own_cache_sizes(loaded).cycle_bytes

    def fitted(size: int) -> int:
        tried.clear()
        return fitting_cache(loaded, device, SMALL, Promise(size, lambda: 0))

    assert fitting_cache(loaded, device, SMALL, None) == asked
    assert (fitted(beside + asked), tried) == (asked, [asked])
    assert (fitted(beside + asked - 999), tried) == (asked - 999, [asked, asked - 999])
    assert fitted(beside + floor) == floor
    with pytest.raises(UsageError, match=r"does not keep to the memory.*at most .*: no cache of a token's experts fits"):
        fitted(beside + floor - 1)
    bundle = open_bundle(tiny)
    with load_pool(Engine.open(), bundle, SMALL, pool_options(tiny, "upload", slots=8), pinned_home()) as by_slots:
        promise = Promise(beside + asked - 1000, lambda: 0)
        with pytest.raises(UsageError, match=r"with a cache of 48 experts.*: 47 experts would fit.*fewer slots"):
            fitting_cache(by_slots, device, SMALL, promise)


def test_what_it_needs_is_named(tiny: Path, loaded: LoadedPool) -> None:
    """Pinned memory, all experts in it, and an engine that has the cache."""
    check_own_cache(loaded)
    older = dataclasses.replace(loaded.engine.library, context_params=llama_abi.CONTEXT_LAYOUTS[1])
    old: Any = SimpleNamespace(library=older, build="9999")
    with pytest.raises(MachineError, match="too old to have an expert cache of its own"):
        check_own_cache(dataclasses.replace(loaded, engine=old))
    bundle, home = open_bundle(tiny), cpu_home(Engine.open())
    with (
        load_pool(Engine.open(), bundle, SMALL, pool_options(tiny, "upload", slots=8), home) as common,
        pytest.raises(MachineError, match=r"not in pinned memory.*ulimit -l"),
    ):
        check_own_cache(common)
    with (
        load_pool(Engine.open(), bundle, SMALL, PoolOptions(slots=8, host_slots=4), pinned_home()) as some,
        pytest.raises(UsageError, match="needs all experts in host memory"),
    ):
        check_own_cache(some)
