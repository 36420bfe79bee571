"""The slot pool, with the CPU in the part of the GPU: what stock llama.cpp computes, to the last bit, in every way."""

from __future__ import annotations

import ctypes
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archs
from bel.formats.bundle import open_bundle
from bel.formats.errors import UsageError
from bel.runtime import pool_loading
from bel.runtime.context import ContextOptions
from bel.runtime.engine import Engine
from bel.runtime.policies import parse_policy
from bel.runtime.pool_counters import PoolCounts
from bel.runtime.pool_experts import CpuExperts
from bel.runtime.pool_graph import ARCHITECTURES
from bel.runtime.pool_home import cpu_home
from bel.runtime.pool_layers import LayerSlots
from bel.runtime.pool_model import open_pool
from bel.runtime.pool_stacks import StackedExperts
from exactness import repack
from pooled import SIZES, Pooled, largest_difference, pool_options, pooled, run_tokens, stock
from trained import EXPERTS, LAYERS, TINY, TOP_K
from trained import tiny as tiny

WAYS = (
    ("upload", "lru"),
    ("upload", "lfu-decay:0.98"),
    ("static", "static"),
    ("split", "lru"),
    ("split", "lfu-decay:0.98"),
)


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
