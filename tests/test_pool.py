"""The slot pool, with the CPU in the part of the GPU: it computes what stock llama.cpp computes, to the last bit, however many
slots there are and however misses are met; it counts what the simulator counts; and it fails cleanly."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archs
import counted
import synth
from arch_parts import Shape
from bel.formats.bundle import open_bundle
from bel.formats.errors import DamagedBundleError, MachineError, UsageError
from bel.formats.fingerprint import fingerprint
from bel.formats.trace import TraceWriter
from bel.formats.trace_header import TraceHeader
from bel.profiler.record_worker import Recorder
from bel.profiler.router import RouterObserver
from bel.runtime import pool_loading
from bel.runtime import pool_rows as at
from bel.runtime.context import ContextOptions
from bel.runtime.engine import Engine
from bel.runtime.pager import Pager
from bel.runtime.policies import parse_policy
from bel.runtime.pool_counters import PoolCounts
from bel.runtime.pool_experts import CpuExperts
from bel.runtime.pool_graph import ARCHITECTURES, scratch_bytes
from bel.runtime.pool_home import cpu_home
from bel.runtime.pool_layers import LayerSlots
from bel.runtime.pool_model import open_pool
from bel.runtime.pool_native import NativePool
from bel.runtime.pool_options import PoolOptions, expert_bytes
from bel.runtime.pool_stacks import StackedExperts
from bel.runtime.slot_memory import SlotMemory
from exactness import repack
from pooled import SIZES, Pooled, largest_difference, pool_options, pooled, run_tokens, stock

EXAMPLES = Path(__file__).parent.parent / "examples"
TINY = EXAMPLES / "tiny-moe-q8_0.gguf"
LAYERS, EXPERTS, TOP_K = 6, 32, 4  # of the tiny model
WAYS = (
    ("upload", "lru"),
    ("upload", "lfu-decay:0.98"),
    ("static", "static"),
    ("split", "lru"),
    ("split", "lfu-decay:0.98"),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of the trained example model."""
    return repack(TINY, tmp_path_factory.mktemp("tiny") / "tiny.bel")


# --- every mode, policy and number of slots -------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "policy"), WAYS)
@pytest.mark.parametrize("slots", [TOP_K, EXPERTS // 4, EXPERTS // 2, EXPERTS])
@pytest.mark.parametrize("n_prompt", [1, 300])
def test_every_way_is_exact(mode: str, policy: str, slots: int, n_prompt: int, tiny: Path) -> None:
    """A token's top-k, a quarter, half and all of the experts have slots; all logits of the prompt and of 64 tokens."""
    answer = pooled(tiny, pool_options(tiny, mode, policy, slots=slots), n_prompt, 64)
    assert largest_difference(answer.logits, stock(TINY, n_prompt, 64)) == 0.0
    prompt, decode = answer.counters.prompt, answer.counters.decode
    assert (prompt.calls, decode.calls) == (LAYERS, 64 * LAYERS)
    assert decode.accesses == 64 * LAYERS * TOP_K
    assert (prompt.stage_calls, decode.stage_calls) == (LAYERS if n_prompt > 1 else 0, 0)
    assert (decode.missed > 0) == (slots < EXPERTS), "experts were swapped or computed while the tokens were compared"
    assert (decode.absent > 0) == (slots < EXPERTS and mode != "upload")
    assert (decode.uploaded_bytes > 0 or decode.in_time > 0) == (slots < EXPERTS and mode != "static")


@pytest.mark.parametrize(("mode", "policy"), WAYS)
def test_the_compiled_callback_is_the_plain_one(mode: str, policy: str, tiny: Path) -> None:
    """The same logits, counts, and experts in the same slots."""
    plain, native = (
        pooled(tiny, pool_options(tiny, mode, policy, slots=10, share=0.6, is_native=is_native, n_ahead=0), 40, 40)
        for is_native in (False, True)
    )
    assert largest_difference(plain.logits, native.logits) == 0.0
    for one, other in zip(both_phases(plain), both_phases(native), strict=True):
        assert dataclasses.replace(one, wait_ns=0) == dataclasses.replace(other, wait_ns=0)
    assert [x.in_slots for x in plain.pool.slots] == [x.in_slots for x in native.pool.slots]
    assert any(x.in_slots != list(range(10)) for x in native.pool.slots) == (mode != "static")


def both_phases(run: Pooled) -> tuple[PoolCounts, PoolCounts]:
    return run.counters.prompt, run.counters.decode


@pytest.mark.parametrize("mode", ["upload", "static", "split"])
@pytest.mark.parametrize("is_native", [True, False])
def test_several_graphs_as_a_generation_runs(mode: str, is_native: bool, tiny: Path) -> None:
    """A prompt in ubatches of 24: of those before the last no logits are wanted, so the last layer chooses for no token."""
    sizes = ContextOptions(512, 512, 24, 1)
    options = pool_options(tiny, mode, slots=TOP_K, is_native=is_native)
    answer = pooled(tiny, options, 100, 16, sizes, all_logits=False)
    assert largest_difference(answer.logits, stock(TINY, 100, 16, sizes, False)) == 0.0
    assert answer.counters.prompt.calls == (LAYERS - 1) * 5 + 1
    assert answer.counters.prompt.stage_calls == (LAYERS - 1) * 5


def test_more_threads(tiny: Path) -> None:
    """Two threads compute missing experts, and the one that calls them sleeps between two layers."""
    answer = pooled(tiny, pool_options(tiny, "static", slots=TOP_K, n_threads=2, spin_us=0), 1, 4)
    assert largest_difference(answer.logits, stock(TINY, 1, 4)) == 0.0


def test_slots_that_differ_by_layer(tiny: Path) -> None:
    """As a plan gives them."""
    slots = {layer: TOP_K + 5 * layer % 29 for layer in range(LAYERS)}
    answer = pooled(tiny, pool_options(tiny, "split", slots_by_layer=slots), 20, 20)
    assert largest_difference(answer.logits, stock(TINY, 20, 20)) == 0.0
    assert answer.pool.counts == tuple(slots.values())


def test_two_sequences_in_one_pool(tiny: Path) -> None:
    """What the first one left in the slots is what the second one begins with."""
    engine = Engine.open()
    options = pool_options(tiny, "upload", slots=TOP_K)
    with open_pool(engine, open_bundle(tiny), lambda _model: SIZES, options, cpu_home(engine)) as run:
        first = run_tokens(run.context, 30, 10, True)
        run.context.clear()
        again = run_tokens(run.context, 30, 10, True)
    assert largest_difference(first, stock(TINY, 30, 10)) == 0.0
    assert np.array_equal(first, again)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("quant", ["f32", "q4_k"])
def test_architectures(arch: str, quant: str, tmp_path: Path) -> None:
    """With biases of experts, shared experts, dense and MTP blocks, scaled and normed weights; in kernels of both kinds."""
    shape = {} if quant == "f32" else {"n_embd": 256, "n_ff_exp": 256}
    source = archs.make_model(arch, tmp_path / "model.gguf", quant=quant, **shape)
    bundle = repack(source, tmp_path / "model.bel")
    kind = archs.ARCHS[arch]
    n_expert, n_used = kind.shape.n_expert, kind.shape.n_used
    for n_prompt in (1, 300):
        for mode in ("upload", "static", "split"):
            for slots in sorted({n_used, max(n_used, n_expert // 4), n_expert // 2, n_expert}):
                answer = pooled(bundle, pool_options(bundle, mode, "lfu-decay:0.98", slots=slots), n_prompt, 64)
                assert largest_difference(answer.logits, stock(source, n_prompt, 64)) == 0.0, (mode, slots)
                assert (answer.counters.decode.missed > 0) == (slots < n_expert)
                assert answer.counters.decode.calls == 64 * len(kind.moe_layers(kind.shape))


# --- the comparison can fail ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["upload", "static"])
@pytest.mark.parametrize("is_native", [True, False])
def test_bytes_of_another_expert_are_found(mode: str, is_native: bool, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One expert of one layer is read to its neighbour's place, and taken from there, whether it is uploaded or computed."""
    read = pool_loading.read_experts

    def wrong(*arguments: Any, **options: Any) -> StackedExperts:
        hosts = read(*arguments, **options)
        for part, own, other in zip(hosts.parts[4], hosts.addresses(4, 9), hosts.addresses(4, 10), strict=True):
            ctypes.memmove(own, other, part.stride_bytes)
        return hosts

    monkeypatch.setattr(pool_loading, "read_experts", wrong)
    options = pool_options(tiny, mode, slots=TOP_K, is_native=is_native, checks=False)
    assert largest_difference(pooled(tiny, options, 1, 64).logits, stock(TINY, 1, 64)) > 0.0


def test_an_expert_that_never_came_is_found(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is believed to hold an expert that was not copied."""

    def forgetting(self: LayerSlots, wanted: Any) -> list[tuple[int, int]]:
        return preload(self, wanted)[1:]

    preload = LayerSlots.preload
    monkeypatch.setattr(LayerSlots, "preload", forgetting)
    answer = pooled(tiny, pool_options(tiny, "upload", slots=EXPERTS), 1, 64)
    assert largest_difference(answer.logits, stock(TINY, 1, 64)) > 0.0


def test_rows_that_the_cpu_did_not_compute_are_found(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the slots that stood in for missing experts are wrong until they are written over."""
    monkeypatch.setattr(CpuExperts, "compute", lambda *_: None)
    answer = pooled(tiny, pool_options(tiny, "static", slots=TOP_K, is_native=False), 1, 8)
    assert largest_difference(answer.logits, stock(TINY, 1, 8)) > 0.0


# --- counts and bytes -----------------------------------------------------------------------------------------------


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


# --- refusals and failures ------------------------------------------------------------------------------------------


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    """By name, before anything is loaded."""
    source = archs.make_model("gemma4", tmp_path / "model.gguf")
    bundle = repack(source, tmp_path / "model.bel")
    with pytest.raises(UsageError, match="does not know the architecture gemma4; expected qwen3moe"):
        pooled(bundle, PoolOptions(), 1, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "magic"}, "no pool mode 'magic'"),
        ({"mode": "upload", "policy": "static"}, "policy static does not go with the pool mode upload"),
        ({"mode": "static", "policy": "lru"}, "policy lru does not go with the pool mode static"),
        ({"mode": "split", "policy": "repick:5"}, "policy repick:5 does not go"),
        ({"slots": TOP_K - 1}, "3 slots in layer 0 are fewer than its top-k"),
        ({"slots": 8, "budget_bytes": 1 << 30}, "exclude each other"),
        ({"slots_by_layer": {0: 8}}, "the plan has no slots for layer 1"),
        ({"share": 1.5}, "not between 0 and 1; found 1.5"),
        ({"n_threads": 0}, "need a thread"),
    ],
)
def test_options_that_do_not_do(fields: dict[str, Any], message: str, tiny: Path) -> None:
    """Refused before anything is loaded."""
    given = {**fields, "policy": parse_policy(fields.get("policy", "lru"))}
    with pytest.raises(UsageError, match=message):
        pooled(tiny, PoolOptions(**given), 1, 1)


def test_slots_of_a_fixed_set_are_all_used(tiny: Path) -> None:
    """A plan's order comes first, the rest by number; and an expert that there is not is refused."""
    pool = pooled(tiny, pool_options(tiny, "static", slots=6, wanted={0: (9, 2, 9), 1: ()}), 1, 1).pool
    assert [set(x.in_slots) for x in pool.slots[:2]] == [{9, 2, 0, 1, 3, 4}, {0, 1, 2, 3, 4, 5}]
    with pytest.raises(UsageError, match="an expert is wanted that layer 0 does not have; expected 0 to 31"):
        pooled(tiny, pool_options(tiny, "upload", slots=6, wanted={0: (32,)}), 1, 1)


def test_a_damaged_blob_ends_the_loading(tiny: Path, tmp_path: Path) -> None:
    """Its checksum is compared before a byte of it goes to the home."""
    bundle = tmp_path / "copy.bel"
    subprocess.run(["cp", "-r", str(tiny), str(bundle)], check=True)
    path = next(bundle.glob("*experts.bin"))
    data = bytearray(path.read_bytes())
    layer = open_bundle(bundle).manifest.layers[3]
    data[layer.offset_bytes + 5 * layer.stride_bytes + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedBundleError, match="expert 5 of layer 3"):
        pooled(bundle, PoolOptions(), 1, 1)


def test_a_failed_read_ends_the_loading(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves nothing behind that the next one would stumble over."""
    descriptors = len(os.listdir("/proc/self/fd"))
    finish = Pager.finish

    def failing(self: Pager, tag: int) -> None:
        finish(self, tag)
        if tag == 4:
            raise MachineError("reading 4096 bytes failed: Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Pager, "finish", failing)
        with pytest.raises(MachineError, match="Input/output error"):
            pooled(tiny, pool_options(tiny, "split", slots=TOP_K), 1, 1)
    answer = pooled(tiny, pool_options(tiny, "split", slots=TOP_K), 1, 8)
    assert largest_difference(answer.logits, stock(TINY, 1, 8)) == 0.0
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert "bel-cpu-experts" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("mode", ["upload", "static"])
def test_an_error_within_is_raised_behind_the_decode(mode: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the callback takes an expert of layer 2 for one that does not exist.  The graph is left, the context emptied."""
    fill = NativePool._fill_layer
    rows = []

    def narrowed(self: NativePool, i: int, *rest: Any) -> None:
        fill(self, i, *rest)
        if i == 2:
            rows.append(self._layers[i])

    monkeypatch.setattr(NativePool, "_fill_layer", narrowed)
    engine = Engine.open()
    with open_pool(engine, open_bundle(tiny), SIZES, pool_options(tiny, mode, slots=TOP_K), cpu_home(engine)) as run:
        run.context.decode([5, 6])
        rows[0][at.N_EXPERT] = 1
        with pytest.raises(MachineError, match=r"tensor ffn_moe_topk-2: llama\.cpp chose an expert that does not exist"):
            run.context.decode([7, 8, 9])
        assert run.context.n_past == 0
        rows[0][at.N_EXPERT] = EXPERTS
        again = run_tokens(run.context, 30, 10, True)
    assert largest_difference(again, stock(TINY, 30, 10)) == 0.0


@pytest.mark.parametrize("is_native", [True, False])
def test_a_layer_that_was_not_served_is_an_error(is_native: bool, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products read whatever stands in the slots of the experts' numbers."""
    from bel.runtime import pool_model

    learn = pool_loading._learn

    def forgetful(*arguments: Any) -> Any:
        graphs, taken = learn(*arguments)
        graphs[3].router = b"no such node"
        return graphs, taken

    monkeypatch.setattr(pool_loading, "_learn", forgetful)
    monkeypatch.setattr(pool_model, "self_test", lambda *_: None)  # which would be the first to notice
    with pytest.raises(MachineError, match="did not choose experts in 1 layers"):
        pooled(tiny, pool_options(tiny, "upload", slots=EXPERTS, is_native=is_native), 1, 1)


@pytest.mark.parametrize("is_native", [True, False])
def test_the_self_test_finds_slots_that_hold_something_else(
    is_native: bool, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At start, before a token of the user's is computed: the stage of a layer is filled wrongly, and its slots are not."""
    stage = SlotMemory.stage

    def wrong(self: SlotMemory, i: int, expert: int) -> int:
        return stage(self, i, expert ^ (i == 4))

    monkeypatch.setattr(SlotMemory, "stage", wrong)
    with pytest.raises(MachineError, match="self-test of the slot pool failed"):
        pooled(tiny, pool_options(tiny, "upload", slots=EXPERTS, is_native=is_native), 1, 1)


def test_the_mode_changes_between_decodes(tiny: Path) -> None:
    """With slots as at the start: each way is exact, and counts what it would have counted from the start."""
    engine = Engine.open()
    first = pool_options(tiny, "split", slots=8)
    missed: dict[str, list[int]] = {}
    with open_pool(engine, open_bundle(tiny), SIZES, first, cpu_home(engine)) as run:
        assert run.can_change
        for mode, policy in (
            ("upload", "lfu-decay:0.98"),
            ("static", "static"),
            ("split", "lru"),
            ("upload", "lfu-decay:0.98"),
        ):
            run.use(mode, parse_policy(policy))
            run.context.clear()
            before = run.pool.counters.prompt.missed
            assert largest_difference(run_tokens(run.context, 9, 20, True), stock(TINY, 9, 20)) == 0.0
            assert (run.pool.mode, run.pool.policy) == (mode, policy)
            missed.setdefault(mode, []).append(run.pool.counters.prompt.missed - before)
        with pytest.raises(UsageError, match="does not go with"):
            run.use("static", parse_policy("lru"))
    assert missed["upload"][0] == missed["upload"][1] > 0
    with open_pool(engine, open_bundle(tiny), SIZES, pool_options(tiny, "upload", slots=8), cpu_home(engine)) as run:
        assert not run.can_change
        with pytest.raises(UsageError, match="stays in the mode"):
            run.use("upload", parse_policy("lru"))


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


def test_products_of_another_device_are_refused(tiny: Path) -> None:
    """Where llama.cpp computes the experts elsewhere than in the home, rows and ids would be written to the wrong memory."""
    home = cpu_home(Engine.open())
    other = home.abi.ffi.new("struct buffer_type *", home.abi.ffi.cast("struct buffer_type *", home.kind)[0])
    moved = dataclasses.replace(home, name="GPU7", kind=home.abi.ffi.cast("void *", other))
    with pytest.raises(MachineError, match=r"does not compute .* on GPU7"):
        pooled(tiny, pool_options(tiny, "upload", slots=TOP_K), 1, 1, home=moved)


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from pooled import largest_difference, pool_options, pooled, stock
from bel.formats.errors import MachineError
tiny, source = Path(sys.argv[2]), Path(sys.argv[3])
answer = pooled(tiny, pool_options(tiny, "split", slots=4, share=0.5, is_native=False), 20, 8)
assert largest_difference(answer.logits, stock(source, 20, 8)) == 0.0
try:
    pooled(tiny, pool_options(tiny, "upload", slots=4), 1, 1)
except MachineError as error:
    print(error)
"""


def test_without_a_compiler(tiny: Path) -> None:
    """The plain callback computes the same; the compiled one says what it lacks."""
    command = [sys.executable, "-c", WITHOUT_NUMBA, str(Path(__file__).parent), str(tiny), str(TINY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "the slot pool needs numba" in done.stdout
    assert "pip install" in done.stdout
