"""What the slot pool counts and what it takes: as the simulator says, and no more than a budget."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import archs
import counted
import synth
from arch_parts import Shape
from bel.formats.bundle import open_bundle
from bel.formats.errors import UsageError
from bel.formats.fingerprint import fingerprint
from bel.formats.trace import TraceWriter
from bel.formats.trace_header import TraceHeader
from bel.profiler.record_worker import Recorder
from bel.profiler.router import RouterObserver
from bel.runtime.context import ContextOptions
from bel.runtime.engine import Engine
from bel.runtime.policies import parse_policy
from bel.runtime.pool_graph import scratch_bytes
from bel.runtime.pool_home import cpu_home
from bel.runtime.pool_model import open_pool
from bel.runtime.pool_options import PoolOptions, expert_bytes
from exactness import repack
from pooled import SIZES, largest_difference, pool_options, pooled, stock
from trained import EXPERTS, LAYERS, TINY, TOP_K
from trained import tiny as tiny


@pytest.mark.parametrize("policy", ["lru", "lfu-decay:0.98", "slru", "arc"])
@pytest.mark.parametrize("slots", [TOP_K, 12])
def test_uploads_are_those_of_the_simulator(policy: str, slots: int, tiny: Path, tmp_path: Path) -> None:
    """A policy that went another way in the pool than in the simulator would make every plan a guess."""
    sizes, bundle, engine = ContextOptions(256, 64, 64, 1), open_bundle(tiny), Engine.open()
    layers, arch = counted.trace_layers(bundle), bundle.manifest.arch or ""
    tokens = np.random.default_rng(3).integers(0, 4096, 160)
    observer = RouterObserver(arch, layers)
    header = TraceHeader("pool", arch, fingerprint(bundle), layers, "pool")
    trace = tmp_path / "pool.trace"
    with (
        engine.load(TINY) as model,
        model.context(sizes, observer) as context,
        TraceWriter(trace, header) as writer,
    ):
        recorder = Recorder(context, observer, writer)
        for _ in recorder.prompt(tokens[:100]):
            pass
        for token in tokens[100:]:
            recorder.decode(int(token))
        recorder.flush()
    options = PoolOptions(policy=parse_policy(policy), slots=slots)
    with open_pool(engine, bundle, sizes, options, cpu_home(engine)) as run:
        for start in range(0, 100, 64):
            run.context.decode(tokens[start : min(start + 64, 100)], all_logits=True)
        run.pool.counters.begin_decode()
        for token in tokens[100:]:
            run.context.decode([token])
        found = {"prompt": run.pool.counters.prompt, "decode": run.pool.counters.decode}
    for phase, counts in found.items():
        row = counted.simulated(trace, policy, [slots] * LAYERS, phase)[0]
        assert (counts.accesses, counts.hits) == (row.accesses, row.hits), phase
    decode, size = found["decode"], expert_bytes(bundle.manifest.layers[0])
    assert 0 < decode.hits < decode.accesses
    assert decode.uploaded_bytes == (decode.missed - decode.in_time) * size
    prompt = found["prompt"]
    without_slot = LAYERS * (EXPERTS + EXPERTS - slots)  # of both graphs; the first begins with empty slots
    assert prompt.staged_bytes <= without_slot * size, "what was in a slot came from there"
    assert prompt.moved_bytes > 0


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("is_varied", [True, False])
def test_a_stage_is_filled_early_where_a_prompt_uses_nearly_all_experts(tiny: Path, is_native: bool, is_varied: bool) -> None:
    """One token again and again picks few experts: then only those are brought, once they are known."""
    engine, bundle = Engine.open(), open_bundle(tiny)
    tokens = list(range(3, 83)) if is_varied else [3] * 80
    with open_pool(engine, bundle, SIZES, pool_options(tiny, "upload", slots=8, is_native=is_native), cpu_home(engine)) as run:
        run.context.decode(tokens, all_logits=True)
        logits = run.context.logits.copy()
        counts, missed_bytes = (
            run.pool.counters.prompt,
            run.pool.counters.prompt.missed * expert_bytes(bundle.manifest.layers[0]),
        )
    assert (counts.accesses > 0.75 * EXPERTS * LAYERS) == is_varied
    assert counts.staged_bytes > missed_bytes if is_varied else counts.staged_bytes == missed_bytes
    with engine.load(TINY) as model, model.context(SIZES) as context:
        context.decode(tokens, all_logits=True)
        assert largest_difference(logits, context.logits) == 0.0


def test_the_home_holds_slots_and_one_stage(tiny: Path) -> None:
    """Of all experts' bytes the slots' share, and a layer's."""
    layers = open_bundle(tiny).manifest.layers
    whole = sum(x.n_expert * expert_bytes(x) for x in layers)
    for slots in (4, 8, 16):
        found = pooled(tiny, pool_options(tiny, "upload", slots=slots), 1, 1).pool.bytes
        assert found.slots == whole * slots // EXPERTS
        assert found.stage == whole // LAYERS
        assert found.biases == 0
        assert found.padding < 4096
        assert found.total == found.slots + found.stage + found.padding


def test_layers_of_other_types_have_stages_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels read behind a row, as a GPU's do, they must find weights of the same type there; else one does for all."""
    make = archs._tensor

    def tensor(name: str, ne: tuple[int, ...], seed: int, expert_type: int, s: Shape) -> synth.Tensor:
        return make(name, ne, seed, archs.type_id("q8_0") if name.startswith("blk.1.ffn_down_exps") else expert_type, s)

    monkeypatch.setattr(archs, "_tensor", tensor)
    source = archs.make_model("qwen3moe", tmp_path / "model.gguf", quant="q4_0")
    bundle = repack(source, tmp_path / "model.bel")
    layers = open_bundle(bundle).manifest.layers
    plain, other, last = (x.n_expert * expert_bytes(x) for x in layers)
    assert plain == last < other
    home = cpu_home(Engine.open())
    for reads_ahead, size in ((False, other), (True, plain + other)):
        likewise = dataclasses.replace(home, reads_ahead=reads_ahead)
        answer = pooled(bundle, pool_options(bundle, "upload", slots=2), 40, 8, home=likewise)
        assert largest_difference(answer.logits, stock(source, 40, 8)) == 0.0
        assert answer.pool.bytes.stage == size
        budget = size + sum(map(expert_bytes, layers)) * 3 + (1 << 20)
        by_budget = pooled(bundle, pool_options(bundle, "upload", budget_bytes=budget), 1, 1, home=likewise)
        assert by_budget.pool.counts == (3, 3, 3)
        assert by_budget.pool.bytes.total <= budget


def test_slots_for_a_budget(tiny: Path) -> None:
    """As many as fit with the stage; one byte less is one slot less; and a message that says what would do."""
    layers = open_bundle(tiny).manifest.layers
    each, stage = sum(map(expert_bytes, layers)), EXPERTS * expert_bytes(layers[0])
    budget = 9 * each + stage + (1 << 20)
    for budget_bytes, slots in ((budget, 9), (budget - 1, 8), (1 << 40, EXPERTS)):
        run = pooled(tiny, pool_options(tiny, "upload", budget_bytes=budget_bytes), 1, 1)
        assert run.pool.counts == (slots,) * LAYERS
    with pytest.raises(UsageError, match=r"does not fit into .*: 4 slots a layer"):
        pooled(tiny, pool_options(tiny, "upload", budget_bytes=1 << 20), 1, 1)


def test_the_share_is_measured_where_none_is_given(tiny: Path) -> None:
    """Split needs to know what either way costs here; with a share it does not ask."""
    measured = pooled(tiny, pool_options(tiny, "split", slots=TOP_K), 1, 8).pool
    assert measured.costs is not None
    assert 0 < measured.share == measured.costs.share < 1
    given = pooled(tiny, pool_options(tiny, "split", slots=TOP_K, share=1.0), 1, 8).pool
    assert (given.costs, given.share, given.counters.decode.absent) == (None, 1.0, 0)
    none = pooled(tiny, pool_options(tiny, "split", slots=TOP_K, share=0.0, n_ahead=0), 1, 8).pool
    assert none.counters.decode.absent == none.counters.decode.missed > 0
    third = pooled(tiny, pool_options(tiny, "split", slots=TOP_K, share=1 / 3, n_ahead=0), 1, 8).pool.counters.decode
    assert 0 < third.absent < 2 * third.missed / 3 + 1, "of three misses one is uploaded, of one too"


def test_a_budget_is_for_everything_where_the_rest_is_known(tiny: Path) -> None:
    """What the model and its context take is no longer the slots'."""
    engine = Engine.open()
    alone = pool_options(tiny, "upload", budget_bytes=4 << 20)

    def counts(taken: int) -> tuple[int, ...]:
        scratch = scratch_bytes(open_bundle(tiny).manifest.layers)
        with open_pool(engine, open_bundle(tiny), SIZES, alone, cpu_home(engine), used_bytes=lambda: taken + scratch) as run:
            return run.pool.counts

    free, less = counts(0), counts(1 << 20)
    assert sum(free) > sum(less) >= TOP_K * len(less)
    with pytest.raises(UsageError, match=r"take 5.00 MiB of the device's memory, and 4.00 MiB are allowed"):
        counts(5 << 20)
