"""The slot pool over a host memory that does not hold all experts, with the CPU in the part of the GPU: it computes what stock
llama.cpp computes, to the last bit; every expert is where its tiers say; it counts and moves what the simulator says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import archs
import counted
from bel.formats.bundle import open_bundle
from bel.formats.errors import DamagedBundleError, MachineError, UsageError
from bel.formats.fingerprint import fingerprint
from bel.formats.trace import DECODE, TraceWriter
from bel.formats.trace_calls import read_trace
from bel.formats.trace_header import TraceHeader, TraceLayer
from bel.profiler.outcomes import Outcome, Setup
from bel.profiler.record_worker import Recorder
from bel.profiler.router import RouterObserver
from bel.profiler.simulate import parse_policies, simulate
from bel.profiler.slot_budgets import Budget
from bel.profiler.tier_caches import Room, TierCaches, Tiers
from bel.profiler.tier_links import serve_from, total
from bel.profiler.work import count_work
from bel.runtime.context import ContextOptions
from bel.runtime.engine import Engine
from bel.runtime.policies import parse_policy
from bel.runtime.pool_home import cpu_home
from bel.runtime.pool_layers import layer_slots
from bel.runtime.pool_model import PoolRun, open_pool
from bel.runtime.pool_options import PoolOptions, expert_bytes
from bel.runtime.pool_tiers import HostTier, TierMover
from bel.runtime.pool_tiers_hosts import bounce_bytes, tier_bytes
from bel.runtime.tier_layers import HOST_TIERS, LayerTiers, TierPlan
from exactness import repack
from pooled import SIZES, Pooled, largest_difference, pooled, stock
from routes import layer_calls, some_row

EXAMPLES = Path(__file__).parent.parent / "examples"
TINY = EXAMPLES / "tiny-moe-q8_0.gguf"
LAYERS, EXPERTS, TOP_K = 6, 32, 4  # of the tiny model
POLICIES = ("lru", "lfu-decay:0.98")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of the trained example model."""
    return repack(TINY, tmp_path_factory.mktemp("tiers") / "tiny.bel")


def options(slots: int, policy: str = "lru", **fields: Any) -> PoolOptions:
    return PoolOptions(policy=parse_policy(policy), slots=slots, **fields)


def tier_of(run: Pooled | PoolRun) -> HostTier:
    assert run.pool.tier is not None
    return run.pool.tier


# --- what is computed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_tier", HOST_TIERS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [TOP_K, EXPERTS // 4])
@pytest.mark.parametrize("host_slots", [0, EXPERTS // 4, EXPERTS * 3 // 4])
@pytest.mark.parametrize("n_prompt", [1, 300])
def test_every_tier_is_exact(n_prompt: int, host_slots: int, slots: int, policy: str, host_tier: str, tiny: Path) -> None:
    """All logits of the prompt and of 64 tokens."""
    answer = pooled(tiny, options(slots, policy, host_slots=host_slots, host_tier=host_tier), n_prompt, 64)
    assert largest_difference(answer.logits, stock(TINY, n_prompt, 64)) == 0.0
    decode, tiers = answer.counters.decode, tier_of(answer).counters.decode
    assert decode.accesses == 64 * LAYERS * TOP_K
    assert tiers.from_ram + tiers.from_nvme == decode.missed > 0
    assert (tiers.from_ram > 0) == (host_slots > 0), "experts came from where the test says while the tokens were compared"
    assert (tiers.from_nvme > 0) == (slots + host_slots < EXPERTS or host_tier == "inclusive" or n_prompt == 1)
    assert (tiers.demoted > 0) == (host_slots > 0 and host_tier == "exclusive")
    assert answer.pool.is_pinned is False


@pytest.mark.parametrize("arch", ["gpt-oss", "deepseek2", "granitemoe"])
@pytest.mark.parametrize("host_tier", HOST_TIERS)
def test_architectures(arch: str, host_tier: str, tmp_path: Path) -> None:
    """With biases of experts, shared experts and dense blocks, scaled weights."""
    source = archs.make_model(arch, tmp_path / "model.gguf", quant="q4_k", n_embd=256, n_ff_exp=256)
    bundle = repack(source, tmp_path / "model.bel")
    n_used = archs.ARCHS[arch].shape.n_used
    for n_prompt, n_decode in ((1, 64), (300, 8)):
        asked = options(n_used, "lfu-decay:0.98", host_slots=n_used + 1, host_tier=host_tier)
        answer = pooled(bundle, asked, n_prompt, n_decode)
        assert largest_difference(answer.logits, stock(source, n_prompt, n_decode)) == 0.0
        counts = tier_of(answer).counters
        assert counts.prompt.from_nvme > 0
        assert counts.decode.from_ram > 0


def test_sequences_and_ubatches_with_the_owners_checked(tiny: Path) -> None:
    """Prompts in several graphs, from what the sequence before left; every expert is in its place behind each decode."""
    sizes = ContextOptions(512, 64, 64, 1)
    engine, random = Engine.open(), np.random.default_rng(1)
    tokens = random.integers(0, 4096, 200)
    with engine.load(TINY) as model, model.context(sizes) as context:
        expected = [x for _ in range(2) for x in decoded(context, tokens)]
    for host_tier in HOST_TIERS:
        asked = options(6, "lfu-decay:0.98", host_slots=9, host_tier=host_tier)
        with open_pool(engine, open_bundle(tiny), sizes, asked, cpu_home(engine)) as run:
            found = []
            for _ in range(2):
                for logits in decoded(run.context, tokens):
                    found.append(logits)
                    for layer in tier_of(run).layers:
                        layer.check()
        assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


def decoded(context: Any, tokens: np.ndarray[Any, Any]) -> Any:
    """A prompt of 150 tokens in three ubatches, of which the last token's logits are wanted, and the rest one by one."""
    context.clear()
    for start in range(0, 150, 64):
        context.decode(tokens[start : min(start + 64, 150)])
        yield context.logits.copy()
    for token in tokens[150:]:
        context.decode([token])
        yield context.logits.copy()


def test_a_demotion_that_copies_nothing_is_found(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory is believed to hold an expert that never came: here another one's bytes are where it should be."""
    monkeypatch.setattr(TierMover, "_demote", lambda *_: None)
    answer = pooled(tiny, options(TOP_K, host_slots=8), 30, 64)
    assert not np.array_equal(answer.logits, stock(TINY, 30, 64))


# --- counts and bytes -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray[Any, Any]]:
    """The trace of 160 tokens in stock llama.cpp, the first 100 in ubatches of 64; and the tokens."""
    bundle = open_bundle(tiny)
    layers, arch = counted.trace_layers(bundle), bundle.manifest.arch or ""
    tokens = np.random.default_rng(3).integers(0, 4096, 160)
    observer = RouterObserver(arch, layers)
    trace = tmp_path_factory.mktemp("trace") / "pool.trace"
    with (
        Engine.open().load(TINY) as model,
        model.context(ContextOptions(256, 64, 64, 1), observer) as context,
        TraceWriter(trace, TraceHeader("pool", arch, fingerprint(bundle), layers, "pool")) as writer,
    ):
        recorder = Recorder(context, observer, writer)
        for _ in recorder.prompt(tokens[:100]):
            pass
        for token in tokens[100:]:
            recorder.decode(int(token))
        recorder.flush()
    return trace, tokens


def run_recorded(tiny: Path, tokens: np.ndarray[Any, Any], asked: PoolOptions) -> PoolRun:
    """The recorded tokens through a pool, which is closed: its counters are final."""
    engine = Engine.open()
    with open_pool(engine, open_bundle(tiny), ContextOptions(256, 64, 64, 1), asked, cpu_home(engine)) as run:
        for start in range(0, 100, 64):
            run.context.decode(tokens[start : min(start + 64, 100)], all_logits=True)
        run.pool.counters.begin_decode()
        for token in tokens[100:]:
            run.context.decode([token])
        return run


def check_counts(run: PoolRun, phase: str, accesses: int, found: Outcome, layer: Any) -> None:
    """What a pool counted is what the simulator found, whose experts are blobs on every link."""
    blob, weights = layer.stride_bytes, expert_bytes(layer)
    pool, tiers = getattr(run.pool.counters, phase), getattr(tier_of(run).counters, phase)
    assert (pool.accesses, pool.hits) == (accesses, found.hits)
    assert (tiers.from_ram, tiers.cold) == (found.host_hits, found.cold)
    assert tiers.nvme_bytes == found.nvme_bytes == tiers.from_nvme * blob
    assert found.h2d_bytes == pool.missed * blob
    assert tiers.h2d_bytes == pool.uploaded_bytes + pool.staged_bytes == pool.missed * weights
    assert found.d2h_bytes == (tiers.demoted + tiers.spared) * blob
    assert tiers.d2h_bytes == tiers.demoted * weights


@pytest.mark.parametrize("policy", [*POLICIES, "arc"])
@pytest.mark.parametrize(
    ("host_tier", "slots", "host_slots"),
    [(tier, *slots) for tier in HOST_TIERS for slots in ((TOP_K, 0), (8, 8), (6, 20))] + [("exclusive", TOP_K, 2)],
)
def test_counts_are_those_of_the_simulator(
    slots: int, host_slots: int, policy: str, host_tier: str, tiny: Path, recorded: tuple[Path, Any]
) -> None:
    """What `bel-profile simulate --slots S --host-slots N --host-tier T` says of the same choices, prompt and decode apart."""
    path, tokens = recorded
    trace, layer = read_trace(path), open_bundle(tiny).manifest.layers[0]
    run = run_recorded(tiny, tokens, options(slots, policy, host_slots=host_slots, host_tier=host_tier))
    setup = Setup(host=Room(slots=(host_slots,) * LAYERS), host_tier=host_tier)
    for phase in counted.PHASES:
        work = count_work([trace], trace.header.layers, phase)
        (row,) = simulate(work, parse_policies(policy), (Budget((slots,) * LAYERS),), {}, setup)
        check_counts(run, phase, row.accesses, row.found, layer)
    tiers = tier_of(run).counters
    assert host_slots == 2 or tiers.decode.spared == 0, "a token's demotions are never undone by themselves"
    assert host_slots == 0 or host_tier == "inclusive" or tiers.prompt.demoted + tiers.prompt.spared > 0


@pytest.mark.parametrize("host_tier", HOST_TIERS)
def test_a_warm_start_counts_likewise(host_tier: str, tiny: Path, recorded: tuple[Path, Any]) -> None:
    """The wanted experts fill the slots, then host memory."""
    path, tokens = recorded
    bundle, layers = open_bundle(tiny), read_trace(path).layers
    orders = tuple(tuple(np.random.default_rng(i).permutation(EXPERTS).tolist()) for i in range(LAYERS))
    asked = options(6, host_slots=10, host_tier=host_tier, wanted=dict(zip(range(LAYERS), orders, strict=True)))
    run = run_recorded(tiny, tokens, asked)
    sizes = Room(slots=(6,) * LAYERS), Room(slots=(10,) * LAYERS)
    tiers = Tiers(parse_policy("lru"), *sizes, host_tier, preloaded=orders, ram_preloaded=orders)
    caches = TierCaches(layers, tiers)
    answer = total([serve_from(caches, layers, [x.phase == DECODE for x in layers], tiers)])
    found = Outcome(answer.hits, answer.cold, 0, answer.nvme_bytes, answer.h2d_bytes, answer.d2h_bytes, None, answer.from_ram)
    check_counts(run, "decode", answer.accesses, found, bundle.manifest.layers[0])
    assert run.pool.preloaded_bytes == 6 * sum(map(expert_bytes, bundle.manifest.layers))
    in_vram, in_ram = caches.vram_items(), caches.ram_items()
    for item in range(LAYERS * EXPERTS):
        place = tier_of(run).layers[item // EXPERTS].owners.place(item % EXPERTS)
        assert (place.vram_slot is not None, place.ram_slot is not None) == (item in in_vram, item in in_ram)


def test_an_exclusive_tier_reads_less(tiny: Path, recorded: tuple[Path, Any]) -> None:
    """Of the same memory: host memory does not hold again what has slots."""
    reads = {}
    for host_tier in HOST_TIERS:
        run = run_recorded(tiny, recorded[1], options(8, host_slots=8, host_tier=host_tier))
        reads[host_tier] = tier_of(run).counters.decode.nvme_bytes
    assert reads["exclusive"] < 0.75 * reads["inclusive"]


def test_host_memory_for_a_budget(tiny: Path) -> None:
    """As many slots as fit with the room for reads; one byte less is one slot less; and a message that says what would do."""
    layers = open_bundle(tiny).manifest.layers
    budget = tier_bytes(layers, (11,) * LAYERS)
    for host_bytes, slots in ((budget, 11), (budget - 1, 10), (1 << 40, EXPERTS), (tier_bytes(layers, (0,) * LAYERS), 0)):
        answer = pooled(tiny, options(TOP_K, host_bytes=host_bytes), 1, 2)
        tier = tier_of(answer)
        assert tier.counts == (slots,) * LAYERS
        assert tier.bounce_bytes == bounce_bytes(layers) == 16 * layers[0].stride_bytes
        assert answer.pool.host_bytes == tier_bytes(layers, tier.counts) <= host_bytes
    assert budget < 0.6 * sum(layer.size_bytes for layer in layers)
    with pytest.raises(UsageError, match=r"the room for reads does not fit into 1\.00 KiB of host memory: it needs"):
        pooled(tiny, options(TOP_K, host_bytes=1024), 1, 1)


WITHOUT_NUMBA = """
import dataclasses, sys
sys.modules["numba"] = None
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from pooled import largest_difference, pooled, stock
from bel.runtime.policies import parse_policy
from bel.runtime.pool_options import PoolOptions
tiny, source = Path(sys.argv[2]), Path(sys.argv[3])
for host_tier in ("exclusive", "inclusive"):
    options = PoolOptions(policy=parse_policy("lfu-decay:0.98"), slots=6, host_slots=9, host_tier=host_tier)
    answer = pooled(tiny, options, 20, 8)
    assert largest_difference(answer.logits, stock(source, 20, 8)) == 0.0
    counts = answer.pool.tier.counters.decode
    print(counts.from_ram, counts.from_nvme, counts.demoted)
"""


def test_without_a_compiler(tiny: Path) -> None:
    """The same source as plain Python moves the same experts."""
    command = [sys.executable, "-c", WITHOUT_NUMBA, str(Path(__file__).parent), str(tiny), str(TINY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for host_tier, line in zip(HOST_TIERS, done.stdout.splitlines(), strict=True):
        answer = pooled(tiny, options(6, "lfu-decay:0.98", host_slots=9, host_tier=host_tier), 20, 8)
        counts = tier_of(answer).counters.decode
        assert line == f"{counts.from_ram} {counts.from_nvme} {counts.demoted}"


# --- step by step ---------------------------------------------------------------------------------------------------


class Memories:
    """What stands in the slots of a layer while plans are carried out in the order in which a mover does it."""

    def __init__(self) -> None:
        self.vram: dict[int, int] = {}
        self.ram: dict[int, int] = {}

    def carry_out(self, plan: TierPlan) -> None:
        for expert, slot in plan.hits:
            assert self.vram[slot] == expert
        for fetch in plan.from_nvme:
            if fetch.ram_slot is not None and not fetch.is_late:
                self.ram[fetch.ram_slot] = fetch.expert
        for expert, slot in plan.from_ram:
            assert self.ram[slot] == expert, "reads that came early left alone what the call loads"
        for demotion in plan.demoted:
            assert self.vram[demotion.vram_slot] == demotion.expert
            self.ram[demotion.ram_slot] = demotion.expert
        for fetch in plan.from_nvme:
            if fetch.ram_slot is not None and fetch.is_late:
                self.ram[fetch.ram_slot] = fetch.expert
        for expert, slot in plan.loads:
            self.vram[slot] = expert


@settings(max_examples=150, deadline=None)
@given(st.data())
@pytest.mark.parametrize("host_tier", HOST_TIERS)
def test_each_call_leaves_every_expert_in_its_place(host_tier: str, data: st.DataObject) -> None:
    """Whatever the router chooses: one place each, with the expert's bytes in it, and the simulator's tiers and counts."""
    n_expert, top_k = data.draw(st.integers(3, 8)), data.draw(st.integers(1, 3))
    n_slots, n_ram = data.draw(st.integers(top_k, n_expert)), data.draw(st.integers(0, n_expert))
    if host_tier == "inclusive" and n_ram:
        n_ram = max(n_ram, n_slots)
    policy = parse_policy(data.draw(st.sampled_from(["lru", "lfu-decay:0.5", "arc", "slru"])))
    rows = st.lists(some_row(n_expert, top_k), min_size=1, max_size=4)
    calls = data.draw(st.lists(st.one_of(rows.map(lambda x: x[:1]), rows), min_size=1, max_size=20))
    layer, memories = LayerTiers(layer_slots(n_expert, n_slots, top_k, policy), n_ram, host_tier), Memories()
    layers = [layer_of_calls(calls, n_expert, top_k)]
    tiers = Tiers(policy, Room(slots=(n_slots,)), Room(slots=(n_ram,)), host_tier)
    caches = TierCaches(layers, tiers)
    answer = serve_from(caches, layers, [np.ones(len(calls), np.bool_)], tiers)
    assert answer.d2h_bytes is not None
    for c, call in enumerate(calls):
        plan = layer.serve(np.array(call, np.uint16))
        memories.carry_out(plan)
        layer.check()
        assert set(plan.distinct) == {expert for row in call for expert in row}
        assert len(call) > 1 or [memories.vram[slot] for slot in plan.slots.tolist()] == call[0]
        assert (len(plan.hits), len(plan.from_ram)) == (answer.hits[c], answer.from_ram[c])
        assert (len(plan.from_nvme), plan.cold) == (answer.from_nvme[c], answer.cold[c])
        assert len(plan.demoted) + plan.spared == answer.d2h_bytes[c]
        assert plan.spared >= 0
        check_places(layer, memories)
    assert places_of(layer) == (caches.vram_items(), caches.ram_items())


def layer_of_calls(calls: Sequence[Sequence[Sequence[int]]], n_expert: int, top_k: int) -> Any:
    """One layer's calls, with experts of one byte."""
    return replace(layer_calls([(DECODE, call) for call in calls], n_expert, top_k), info=TraceLayer(0, n_expert, top_k, 1))


def places_of(layer: LayerTiers) -> tuple[set[int], set[int]]:
    places = {expert: layer.owners.place(expert) for expert in range(layer.slots.n_expert)}
    in_vram = {expert for expert, place in places.items() if place.vram_slot is not None}
    return in_vram, {expert for expert, place in places.items() if place.ram_slot is not None}


def check_places(layer: LayerTiers, memories: Memories) -> None:
    for expert in range(layer.slots.n_expert):
        place = layer.owners.place(expert)
        assert place.vram_slot is None or memories.vram[place.vram_slot] == expert
        assert place.ram_slot is None or memories.ram[place.ram_slot] == expert


def test_an_expert_in_two_places_is_found() -> None:
    """The check of the owners can fail."""
    layer = LayerTiers(layer_slots(6, 2, 1, parse_policy("lru")), 2, "exclusive")
    for expert in (0, 1, 2):
        layer.serve(np.array([[expert]], np.uint16))
    layer.check()
    assert places_of(layer) == ({1, 2}, {0})
    layer.ram.ints[2, 0] = 0  # RESIDENT
    with pytest.raises(AssertionError, match="the tables are not the caches"):
        layer.check()


# --- refusals and failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "split", "host_slots": 8}, "pool mode split needs all experts in host memory"),
        ({"mode": "static", "policy": "static", "host_bytes": 1 << 30}, "pool mode static needs all experts"),
        ({"host_slots": 8, "host_bytes": 1 << 30}, "slots of host memory and its bytes exclude each other"),
        ({"host_slots": -1}, "no less than no slots; found -1"),
        ({"host_slots": 8, "host_tier": "copy-on-read"}, "no host tier 'copy-on-read'; expected exclusive or inclusive"),
        ({"host_slots": 5, "host_tier": "inclusive"}, "it has 5 slots in a layer, and the home 6"),
    ],
)
def test_options_that_do_not_do(fields: dict[str, Any], message: str, tiny: Path) -> None:
    """Refused before anything is loaded."""
    given_fields = {"slots": 6, **fields, "policy": parse_policy(fields.get("policy", "lru"))}
    with pytest.raises(UsageError, match=message):
        pooled(tiny, PoolOptions(**given_fields), 1, 1)


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A bundle to be damaged."""
    bundle = tmp_path / "copy.bel"
    subprocess.run(["cp", "-r", str(tiny), str(bundle)], check=True)
    return bundle


@pytest.mark.parametrize("host_slots", [0, 8])
def test_a_damaged_blob_ends_the_run(host_slots: int, copy: Path) -> None:
    """Its checksum is compared before a byte of it goes to the home."""
    path = next(copy.glob("*experts.bin"))
    data = bytearray(path.read_bytes())
    layer = open_bundle(copy).manifest.layers[3]
    data[layer.offset_bytes + 5 * layer.stride_bytes + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedBundleError, match="expert 5 of layer 3"):
        pooled(copy, options(TOP_K, host_slots=host_slots), 64, 1)


@pytest.mark.parametrize("reader", ["auto", "buffered"])
@pytest.mark.parametrize("host_tier", HOST_TIERS)
def test_a_failed_read_ends_the_run(host_tier: str, reader: str, copy: Path) -> None:
    """The file is cut short while the model runs.  The error names an expert; no decode is trusted after that; and nothing is
    left behind."""
    descriptors = len(os.listdir("/proc/self/fd"))
    layer = open_bundle(copy).manifest.layers[3]
    engine = Engine.open()
    asked = options(TOP_K, host_slots=8, host_tier=host_tier, reader=reader)
    with open_pool(engine, open_bundle(copy), SIZES, asked, cpu_home(engine)) as run:
        run.context.decode(range(5), all_logits=True)
        os.truncate(next(copy.glob("*experts.bin")), layer.offset_bytes)
        with pytest.raises(DamagedBundleError, match=r"expert \d+ of layer [345] cannot be read: the file ends|was changed"):
            run.context.decode(range(100, 400), all_logits=True)
        assert run.context.n_past == 0
        for tokens in ([1], range(20)):
            with pytest.raises(MachineError, match="a read of experts failed before"):
                run.context.decode(tokens)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_failed_read_names_the_expert(copy: Path) -> None:
    """The reader knows files and offsets alone."""
    layer = open_bundle(copy).manifest.layers[0]
    engine = Engine.open()
    with open_pool(engine, open_bundle(copy), SIZES, options(TOP_K, host_slots=2), cpu_home(engine)) as run:
        os.truncate(next(copy.glob("*experts.bin")), layer.offset_bytes)
        with pytest.raises(DamagedBundleError, match=r"expert \d+ of layer 0 cannot be read: the file ends") as raised:
            run.context.decode([9])
    offset = raised.value.offset_bytes
    assert offset is not None
    assert f"expert {(offset - layer.offset_bytes) // layer.stride_bytes} of" in str(raised.value)


def test_a_bundle_that_cannot_be_opened_leaves_nothing(copy: Path) -> None:
    """The memory and the files are given back where the second half of opening fails."""
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UsageError, match="an expert is wanted that layer 0 does not have"):
        pooled(copy, options(TOP_K, host_slots=2, wanted={0: (EXPERTS,)}), 1, 1)
    assert len(os.listdir("/proc/self/fd")) == descriptors
