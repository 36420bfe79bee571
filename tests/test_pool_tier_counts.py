"""What a pool of three tiers counts and moves: what the simulator says of the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import counted
from bel.formats.bundle import open_bundle
from bel.formats.errors import UsageError
from bel.formats.fingerprint import fingerprint
from bel.formats.trace import DECODE, TraceWriter
from bel.formats.trace_calls import read_trace
from bel.formats.trace_header import TraceHeader
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
from bel.runtime.pool_model import PoolRun, open_pool
from bel.runtime.pool_options import PoolOptions, expert_bytes
from bel.runtime.pool_tiers_hosts import bounce_bytes, tier_bytes
from bel.runtime.tier_layers import HOST_TIERS
from pooled import pooled
from tiered import POLICIES, options, tier_of
from trained import EXPERTS, LAYERS, TINY, TOP_K
from trained import tiny as tiny


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
