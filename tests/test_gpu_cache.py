"""llama.cpp's own expert cache over a bundle's host memory, as far as no GPU is needed: the model that it would work on is
stock's to the last bit, the pool comes and goes on it, and what cannot be is said."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import archs
from bel.formats.bundle import open_bundle
from bel.formats.console import run_command
from bel.formats.errors import MachineError, UsageError
from bel.formats.experts import find_experts
from bel.formats.gguf_model import open_model
from bel.runtime import gpu_cache, gpu_choice, gpu_run, gpu_running, llama_abi
from bel.runtime.cli import NAME, main_command
from bel.runtime.context import Context, ContextOptions
from bel.runtime.devices import Device, devices
from bel.runtime.engine import Engine
from bel.runtime.generate import Speed
from bel.runtime.gpu_cache import (
    Promise,
    cache_context,
    check_own_cache,
    fitting_cache,
    open_own_cache,
    own_cache_bytes,
    own_cache_sizes,
)
from bel.runtime.gpu_choice import LEAST_TIMED, MOST_TIMED, WARM_TOKENS, Trial, Way, choose, usual
from bel.runtime.gpu_report import gpu_lines, own_cache_json
from bel.runtime.gpu_run import GpuRun
from bel.runtime.policies import parse_policy
from bel.runtime.pool_abi import USAGE_ANY
from bel.runtime.pool_home import Home, cpu_home
from bel.runtime.pool_loading import LoadedPool, load_pool
from bel.runtime.pool_model import open_slots
from bel.runtime.pool_options import PoolOptions, expert_bytes
from bel.runtime.slot_memory import SlotMemory
from bel.runtime.stock_cache import CacheCounts, bundle_layers, cache_sizes, gguf_layers, group_slots
from exactness import repack
from pooled import SIZES, largest_difference, pool_options, run_tokens, stock

TINY = Path(__file__).parent.parent / "examples" / "tiny-moe-q8_0.gguf"
LAYERS, EXPERTS, TOP_K = 6, 32, 4  # of the tiny model
SMALL = ContextOptions(64, 64, 64, 1)
TOKENS = np.array([5, 6, 7], np.int32)
PROMPT = "def add(a, b):"
FEW = ("-p", PROMPT, "-n", "12", "--threads", "1", "--context", "128")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repack(TINY, tmp_path_factory.mktemp("tiny") / "tiny.bel")


@pytest.fixture(scope="module")
def device() -> Device:
    """The CPU in the part of a GPU."""
    return devices(Engine.open())[0]


def pinned_home() -> Home:
    """The CPU, whose memory passes for pinned."""
    home = cpu_home(Engine.open())
    return dataclasses.replace(home, host_kind=home.kind)


class Memories:
    """Counts the slots' memories that are made and given back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self.closed, self.most = 0, 0, 0
        init, close = SlotMemory.__init__, SlotMemory.close

        def counted(memory: SlotMemory, *arguments: Any) -> None:
            init(memory, *arguments)
            self.made += 1
            self.most = max(self.most, self.made - self.closed)

        def closing(memory: SlotMemory) -> None:
            self.closed += memory._buffer is not None
            close(memory)

        monkeypatch.setattr(SlotMemory, "__init__", counted)
        monkeypatch.setattr(SlotMemory, "close", closing)


# --- the model that llama.cpp's cache would work on -------------------------------------------------------------------


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


# --- its size ---------------------------------------------------------------------------------------------------------


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


# --- what cannot be ---------------------------------------------------------------------------------------------------


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


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.fixture
def without_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's own layout with no cache of it: what is left of the way without a GPU."""
    monkeypatch.setattr(gpu_run, "fitting_cache", lambda *_: 0)


def opened(tiny: Path, device: Device, home: Home, way: str = "auto", **fields: Any) -> Any:
    """A run of 8 slots a layer, not yet entered, in a `with` of its model."""
    options = dataclasses.replace(pool_options(tiny, "split", "lfu-decay:0.98", slots=8), **{"wanted": {}, **fields})

    class Opened:
        def __enter__(self) -> GpuRun:
            self.loading = load_pool(Engine.open(), open_bundle(tiny), SMALL, options, home)
            policy = parse_policy("lfu-decay:0.98")
            promise = Promise(1 << 30, lambda: 0)
            self.run = GpuRun(self.loading.__enter__(), device, way, policy, promise, keeps_promise=False)
            return self.run.__enter__()

        def __exit__(self, *error: Any) -> None:
            self.run.__exit__(*error)
            self.loading.__exit__(*error)

    return Opened()


def speeds(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> list[str]:
    """All ways are computed, and said to have taken so long.  Returns the list of what was timed, in order."""
    measure, timed = Trial.seconds_per_token, []
    order = iter(seconds)

    def told(trial: Trial, context: Context) -> float:
        assert measure(trial, context) > 0
        timed.append(next(order))
        return seconds[timed[-1]]

    monkeypatch.setattr(Trial, "seconds_per_token", told)
    return timed


def is_fresh(run: GpuRun) -> bool:
    """Nothing of the trial is left."""
    if run.context.n_past:
        return False
    if run.pool is None:
        return True
    counters = run.pool.pool.counters
    return counters.prompt.accesses == counters.decode.accesses == 0


def words(run: GpuRun) -> str:
    return "\n".join(gpu_lines(run))


@pytest.mark.usefixtures("without_cache")
@pytest.mark.parametrize("fastest", ["upload", "split", "static", "cache"])
def test_the_fastest_of_all_ways_is_taken(fastest: str, tiny: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is closed for the cache's trial and made again where it wins, with the slots of the start."""
    memories = Memories(monkeypatch)
    timed = speeds(monkeypatch, {way: 0.001 if way == fastest else 0.004 for way in ("upload", "split", "static", "cache")})
    wanted = {layer: range(7, 12) for layer in range(LAYERS)}
    with opened(tiny, device, pinned_home(), wanted=wanted) as run:
        costs = run.pool.pool.costs
        assert costs is not None
        run.choose(TOKENS)
        assert timed == ["upload", "split", "static", "cache"]
        assert (run.mode, run.tried[0].mode, run.left_out) == (fastest, fastest, {})
        assert is_fresh(run)
        assert (run.pool is None) == (fastest == "cache")
        assert f"way {fastest}: the fastest on the first tokens of the prompt (tokens/s: {fastest} 1000.0, " in words(run)
        assert memories.made - memories.closed == (fastest != "cache")
        if run.pool is not None:
            assert all(set(range(7, 12)) <= set(slots.in_slots) for slots in run.pool.pool.slots)
            assert run.pool.pool.policy == ("static" if fastest == "static" else "lfu-decay:0.98")
            assert run.pool.pool.costs == (costs if fastest == "split" else None), "they are measured once"
        found = run_tokens(run.context, 9, 20, True)
        run.choose(TOKENS)
        assert len(timed) == 4, "a choice is made once"
    assert largest_difference(found, stock(TINY, 9, 20)) == 0.0
    assert memories.most == 1, "the device's memory does not do for two"
    assert memories.made == memories.closed == (1 if fastest == "cache" else 2)


@pytest.mark.parametrize(
    ("order", "taken"),
    [
        ([("split", 1.0), ("upload", 1.049), ("cache", 1.0495)], "upload"),
        ([("static", 1.0), ("split", 1.001), ("cache", 1.02), ("upload", 1.03)], "cache"),
        ([("split", 1.0), ("static", 1.01), ("upload", 1.06)], "split"),
        ([("upload", 1.0), ("split", 1.0)], "upload"),
        ([("cache", 1.0), ("upload", 1.01)], "cache"),
        ([("static", 1.0)], "static"),
    ],
)
def test_an_exact_way_that_is_nearly_as_fast_is_taken(order: list[tuple[str, float]], taken: str) -> None:
    """Who does not ask for speed alone gets stock's bits where they cost next to nothing."""
    assert choose([Way(mode, "lru", seconds) for mode, seconds in order]).mode == taken


@pytest.mark.usefixtures("without_cache")
def test_people_are_told_of_an_exact_way(tiny: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds(monkeypatch, {"upload": 0.00102, "split": 0.001, "static": 0.004, "cache": 0.004})
    with opened(tiny, device, pinned_home()) as run:
        run.choose(TOKENS)
        assert (run.mode, run.tried[0].mode) == ("upload", "split")
        assert "way upload: exact, and nearly as fast as split, on the first tokens of the prompt" in words(run)


def test_what_llama_cpp_refuses_is_left_out(tiny: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Really asked for its cache, it says that it has none without a GPU; the pool is made again, and people are told."""
    memories = Memories(monkeypatch)
    with opened(tiny, device, pinned_home()) as run:
        run.choose(TOKENS)
        assert {way.mode for way in run.tried} == {"upload", "split"}
        assert run.mode == choose(run.tried).mode
        assert "MoE cache requires a GPU backend" in run.left_out["cache"]
        assert "way cache was left out: " in words(run)
        assert is_fresh(run)
        assert all(slots.in_slots == [-1] * 8 for slots in run.pool.pool.slots)
        found = run_tokens(run.context, 9, 20, True)
    assert largest_difference(found, stock(TINY, 9, 20)) == 0.0
    assert (memories.made, memories.closed, memories.most) == (2, 2, 1)


def test_where_it_cannot_be_the_pool_stays_open(tiny: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not pinned is known before anything is closed."""
    memories = Memories(monkeypatch)
    with opened(tiny, device, cpu_home(Engine.open())) as run:
        run.choose(TOKENS)
        assert "not in pinned memory" in run.left_out["cache"]
        taken = choose(run.tried)
        assert (run.mode, run.pool.pool.policy) == (taken.mode, taken.policy)
        assert [way.seconds for way in run.tried] == sorted(way.seconds for way in run.tried)
        assert is_fresh(run)
        assert all(slots.in_slots == [-1] * 8 for slots in run.pool.pool.slots)
        assert memories.made == 1


@pytest.mark.usefixtures("without_cache")
@pytest.mark.parametrize("way", ["split", "cache"])
def test_a_way_by_name_costs_no_trial(way: str, tiny: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are slots made for llama.cpp's own cache."""
    memories, timed = Memories(monkeypatch), speeds(monkeypatch, {})
    with opened(tiny, device, pinned_home(), way) as run:
        context = run.context
        run.choose(TOKENS)
        assert run.context is context
        assert (run.mode, run.tried, timed, memories.made) == (way, [], [], int(way != "cache"))
        assert f"way {way}: asked for" in words(run)


@dataclasses.dataclass
class Fed:
    """Stands where a context is measured: keeps what it is given, and goes on with the next number."""

    seconds: float = 0.0
    given: list[int] = dataclasses.field(default_factory=list)

    def clear(self) -> None:
        self.given.clear()

    def decode(self, tokens: list[int]) -> None:
        self.given += tokens
        time.sleep(self.seconds)

    @property
    def logits(self) -> np.ndarray:
        return np.eye(64, dtype=np.float32)[None, (self.given[-1] + 1) % 64]


def test_a_trial_ends_where_the_context_does() -> None:
    """And goes on with what the model says where there are too few tokens, all ways with the same."""
    first, second = Fed(), Fed()
    trial = Trial(TOKENS, 6)
    assert trial.seconds_per_token(first) > 0
    assert first.given == [5, 6, 7, 8, 9, 10]
    trial.tokens[4] = 40
    trial.seconds_per_token(second)
    assert second.given == [5, 6, 7, 8, 40, 10], "the first way's words, not its own"
    Trial(np.zeros(0, np.int32), 2).seconds_per_token(first)
    assert first.given == [0, 1]


def test_a_trial_of_a_fast_way_is_longer_than_that_of_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine is not kept from its work for long; and the second way computes as many tokens as the first."""
    monkeypatch.setattr(gpu_choice, "TIMED_SECONDS", 0.05)
    fast, slow, second = Fed(), Fed(0.005), Fed()
    Trial(TOKENS, 4096).seconds_per_token(fast)
    assert len(fast.given) == WARM_TOKENS + MOST_TIMED
    trial = Trial(TOKENS, 4096)
    trial.seconds_per_token(slow)
    assert len(slow.given) == WARM_TOKENS + LEAST_TIMED
    trial.seconds_per_token(second)
    assert second.given == slow.given


def test_one_that_was_in_the_way_does_not_count_and_many_misses_do() -> None:
    even = [1.0] * 40
    assert usual([*even[:-1], 100.0]) == 1.0
    assert usual([1.0, 3.0] * 20) == pytest.approx(2, abs=0.1)
    assert usual([2.0]) == 2.0


# --- the command ------------------------------------------------------------------------------------------------------


def as_gpu(monkeypatch: pytest.MonkeyPatch, home: Home) -> None:
    """The first GPU is the CPU."""
    monkeypatch.setattr(gpu_running, "find_gpu", lambda _engine, _number: devices(Engine.open())[0])
    monkeypatch.setattr(gpu_running, "device_home", lambda _engine, _address: home)


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = run_command(main_command, NAME, [str(x) for x in arguments])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.usefixtures("without_cache")
@pytest.mark.parametrize("way", ["cache", "auto"])
def test_the_command_writes_what_stock_writes(
    way: str, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generation goes on in the context of the way that was taken."""
    _, out, _ = run_cli(capsys, TINY, "--stock", *FEW, "--json")
    expected = json.loads(out)["tokens"]
    as_gpu(monkeypatch, pinned_home())
    speeds(monkeypatch, {"upload": 0.003, "split": 0.002, "cache": 0.001})
    status, out, err = run_cli(capsys, tiny, "--gpu", way, "--slots", "8", *FEW, "--json")
    assert status == 0, err
    answer = json.loads(out)
    assert answer["tokens"] == expected
    load = answer["load"]
    assert (load["asked"], load["way"], load["policy"], load["left_out"]) == (way, "cache", "lru", {})
    assert [x["way"] for x in load["tried"]] == (["cache", "split", "upload"] if way == "auto" else [])
    assert load["memory"]["host_is_pinned"]
    assert answer["cache"] is None, "there was none to count"
    assert "llama.cpp's own cache" in err


@pytest.mark.usefixtures("without_cache")
@pytest.mark.parametrize("way", ["cache", "auto"])
def test_its_speed_is_measured(
    way: str, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a context too small for a whole trial."""
    as_gpu(monkeypatch, pinned_home())
    numbers = ("--prompt-tokens", "16", "-n", "8", "--threads", "1")
    status, out, err = run_cli(capsys, tiny, "--bench", "--gpu", way, "--slots", "8", *numbers, "--json")
    assert status == 0, err
    answer = json.loads(out)
    assert [one["name"] for one in answer["passes"]] == ["cold", "warm"]
    assert all(one["decode_tokens_per_s"] > 0 for one in answer["passes"])


def test_the_command_says_what_cannot_be(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its exit code too: the machine's fault is 5, the user's 2."""
    as_gpu(monkeypatch, cpu_home(Engine.open()))
    status, _, err = run_cli(capsys, tiny, "--gpu", "cache", "--slots", "8", *FEW)
    assert (status, "not in pinned memory" in err) == (5, True), err
    as_gpu(monkeypatch, pinned_home())
    status, _, err = run_cli(capsys, tiny, "--gpu", "cache", "--slots", "8", *FEW)
    assert (status, "MoE cache requires a GPU backend" in err) == (5, True), err
    monkeypatch.setattr(gpu_running, "rss_bytes", lambda: 0)
    ram = str(gpu_running.HOST_MARGIN_BYTES + (4 << 20))
    status, _, err = run_cli(capsys, tiny, "--gpu", "cache", "--slots", "8", "--ram", ram, *FEW)
    assert (status, "needs all experts in host memory" in err) == (2, True), err


def test_counts_of_llama_cpp_are_reported() -> None:
    """Batches of up to 8 tokens as decode, of 9 to 32 as prompt; what it does not tell is None."""
    counts = CacheCounts(2362, 1494, 82_600_000, 22, 279, 15_400_000, 17)
    answer = own_cache_json(counts, Speed(20, 1.0, 40, 2.0))
    assert (answer["accesses"], answer["hits"], answer["misses"]) == (3856, 2362, 1494)
    assert answer["hit_rate"] == pytest.approx(0.6126, abs=1e-4)
    assert answer["bytes_per_token"] == {"h2d": 82_600_000 / 40}
    assert (answer["prompt"]["hits"], answer["prompt"]["bytes_per_token"]["h2d"]) == (22, 770_000)
    assert answer["wait_seconds"] is answer["from_nvme"] is None
    assert own_cache_json(CacheCounts(), Speed())["hit_rate"] is None
