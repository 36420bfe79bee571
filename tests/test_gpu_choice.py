"""Which way `--gpu auto` takes: what is timed, what is told, and that nothing of it is left."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bel.formats.bundle import open_bundle
from bel.runtime import gpu_choice
from bel.runtime.devices import Device
from bel.runtime.engine import Engine
from bel.runtime.gpu_cache import Promise
from bel.runtime.gpu_choice import LEAST_TIMED, MOST_TIMED, WARM_TOKENS, Trial, Way, choose, usual
from bel.runtime.gpu_report import gpu_lines
from bel.runtime.gpu_run import GpuRun
from bel.runtime.policies import parse_policy
from bel.runtime.pool_home import Home, cpu_home
from bel.runtime.pool_loading import load_pool
from cpu_as_gpu import SMALL, Memories, pinned_home, speeds
from cpu_as_gpu import device as device
from cpu_as_gpu import without_cache as without_cache
from pooled import largest_difference, pool_options, run_tokens, stock
from trained import LAYERS, TINY
from trained import tiny as tiny

TOKENS = np.array([5, 6, 7], np.int32)


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
