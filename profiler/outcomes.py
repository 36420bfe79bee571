"""One policy with one budget, served: the hits, the bytes on each link and the time of the calls that count.

LRU, Belady and fixed sets of one layer come from passes that are exact at all sizes (`curves.py`, `belady.py`, counts of
uses); all else is replayed call by call (`replay.py`, `tier_links.py`), to the same numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bel.formats.costs import Costs
from bel.formats.errors import UsageError
from bel.formats.trace import DECODE
from bel.formats.trace_calls import LayerCalls, Trace
from bel.formats.trace_header import TraceLayer
from bel.profiler.clock import Clock, make_clock, price
from bel.profiler.locality import by_use
from bel.profiler.replay import BELADY_POLICY, Counted, Replayed, global_stream, layer_stream, replay
from bel.profiler.slot_budgets import Budget, SharedBudget, has_sizes, item_sizes
from bel.profiler.static_sets import static_hits
from bel.profiler.tier_caches import CPU, Room, Tiers
from bel.profiler.tier_links import Served, serve_tiers, total
from bel.profiler.work import Work
from bel.runtime.policies import LRU, Policy

_SEED = 1
Wanted = npt.NDArray[np.float64]
Each = Callable[[Callable[[int], Any], Iterable[int]], Iterable[Any]]


@dataclass(frozen=True, slots=True)
class Setup:
    """What is the same for all policies and budgets.

    `keep_whole`: a call that is larger than the cache stays in it until the next one has been looked up.  With `host` the
    cache is in VRAM and misses come through a RAM of that size: `host_tier` and `on_miss` as in `tier_caches.Tiers`.
    `clock` prices the misses of decode calls.
    """

    keep_whole: bool = False
    host: Room | None = None
    host_tier: str = "exclusive"
    on_miss: str = "load"
    clock: Clock | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The counted calls.

    `hits` in the cache.  `cold` misses are at the first use of an expert in its run, of whatever phase.  `uploads` experts were
    loaded though no call missed them (repick).  Bytes on each link, None where the size of an expert or the link is not
    known: with one tier every miss and every upload is one read from NVMe.  `seconds` of all steps, where they are priced.
    Of the misses `host_hits` were in RAM, and `on_cpu` were computed on the CPU; None without a tier of RAM.
    """

    hits: int
    cold: int
    uploads: int
    nvme_bytes: int | None
    h2d_bytes: int | None = None
    d2h_bytes: int | None = None
    seconds: float | None = None
    host_hits: int | None = None
    on_cpu: int | None = None


def outcome(
    work: Work, policy: Policy, wanted: Sequence[Wanted] | None, budget: Budget | SharedBudget, setup: Setup, each: Each = map
) -> Outcome:
    """Serve all runs.  `wanted` (n_expert,) of each layer ranks the experts of a fixed set, None for other policies.

    `each` maps over layers, as `map` does or with threads: the inner loops run without the interpreter's lock.
    """
    if setup.host is not None:
        return _tiered(work, policy, _orders(work, wanted, budget), budget, setup.host, setup)
    if isinstance(budget, SharedBudget):
        resident = () if wanted is None else shared_set(wanted, work.layers, budget.capacity)
        return _replayed(
            work, [[_serve_shared(work, run, policy, resident, budget, setup)] for run in range(len(work.runs))], setup
        )
    if setup.clock is None and wanted is not None:
        return _set_outcome(work, wanted, budget)
    if setup.clock is None and not setup.keep_whole and policy.kind in (LRU, BELADY_POLICY.kind):
        return _curve_outcome(work, policy, budget)

    def serve(place: int) -> list[Part]:
        resident = () if wanted is None else by_use(wanted[place])[: budget.slots[place]].tolist()
        return [_serve_layer(work, run, place, policy, resident, budget.slots[place], setup) for run in range(len(work.runs))]

    by_layer = list(each(serve, range(len(work.layers))))
    return _replayed(work, list(zip(*by_layer, strict=True)), setup)


def _set_outcome(work: Work, wanted: Sequence[Wanted], budget: Budget) -> Outcome:
    layers = list(zip(work.counts, wanted, budget.slots, strict=True))
    hits = [int(static_hits(c.uses, w)[slots]) for c, w, slots in layers]
    cold = sum(int(c.first_uses[by_use(w)[slots:]].sum()) for c, w, slots in layers)
    return _from_hits(work, hits, cold)


def _curve_outcome(work: Work, policy: Policy, budget: Budget) -> Outcome:
    curves = [c.lru_hits if policy.kind == LRU else c.belady_hits for c in work.counts]
    hits = [int(curve[slots]) for curve, slots in zip(curves, budget.slots, strict=True)]
    return _from_hits(work, hits, sum(int(c.first_uses.sum()) for c in work.counts))


def _from_hits(work: Work, hits: Sequence[int], cold: int) -> Outcome:
    misses = [c.accesses - h for c, h in zip(work.counts, hits, strict=True)]
    return Outcome(sum(hits), cold, 0, sum_bytes(misses, work.layers))


@dataclass(frozen=True, slots=True)
class Part:
    """A replay of one run in one cache: the layer of each call, which calls count, and what they did."""

    place: npt.NDArray[np.int64]
    counted: Counted
    done: Replayed
    upload_bytes: int | None


def _serve_layer(work: Work, run: int, place: int, policy: Policy, resident: Sequence[int], slots: int, setup: Setup) -> Part:
    stream = layer_stream(work.runs[run][place], work.counted[run][place], place)
    sizes = np.ones(stream.n_items, np.int64)
    done = replay(policy, stream, sizes, slots, keep_whole=setup.keep_whole, preloaded=resident, seed=_SEED + place)
    size = work.layers[place].expert_bytes
    uploaded = None if size is None else int(done.uploaded[stream.counted].sum()) * size
    return Part(stream.place, stream.counted, done, uploaded)


def _serve_shared(work: Work, run: int, policy: Policy, resident: Sequence[int], budget: SharedBudget, setup: Setup) -> Part:
    stream = global_stream(work.runs[run], work.counted[run])
    sizes = np.repeat(item_sizes(work.layers), [x.n_expert for x in work.layers]).astype(np.int64)
    done = replay(policy, stream, sizes, budget.capacity, keep_whole=setup.keep_whole, preloaded=resident, seed=_SEED)
    uploaded = int(done.uploaded[stream.counted].sum()) if has_sizes(work.layers) else None
    return Part(stream.place, stream.counted, done, uploaded)


def _replayed(work: Work, runs: Sequence[Sequence[Part]], setup: Setup) -> Outcome:
    """The sums over all parts of all runs."""
    parts = [part for run in runs for part in run]
    missed = np.zeros(len(work.layers), np.int64)
    for p in parts:
        missed += np.bincount(p.place[p.counted], p.done.misses[p.counted], len(missed)).astype(np.int64)
    read = [sum_bytes(missed.tolist(), work.layers), *(p.upload_bytes for p in parts)]
    known = [x for x in read if x is not None]
    return Outcome(
        hits=sum(c.accesses for c in work.counts) - int(missed.sum()),
        cold=sum(int(p.done.cold[p.counted].sum()) for p in parts),
        uploads=sum(int(p.done.uploads[p.counted].sum()) for p in parts),
        nvme_bytes=sum(known) if len(known) == len(read) else None,
        seconds=None if setup.clock is None else _seconds(work, runs, setup.clock),
    )


def _seconds(work: Work, runs: Sequence[Sequence[Part]], clock: Clock) -> float:
    """Of all steps.  What is uploaded in a call goes over the link with the call's misses.

    An upload takes as long as a miss of the layer that is called: not quite so in one cache for layers of several sizes.
    """
    seconds = 0.0
    for layers, counted, parts in zip(work.runs, work.counted, runs, strict=True):
        place = np.concatenate([p.place for p in parts])
        fetches = np.concatenate([p.done.misses + p.done.uploads for p in parts])
        seconds += float(price(clock, _by_step(layers, counted, place, fetches)).seconds.sum())
    return seconds


def _by_step(
    layers: Sequence[LayerCalls], counted: Sequence[Counted], place: npt.NDArray[np.int64], amount: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """(T, L): an amount of each call by step, which is an ubatch of the run.

    `place` and `amount` are of all calls; those of one layer come in their own order.
    """
    steps = np.unique(np.concatenate([c.ubatch[mask] for c, mask in zip(layers, counted, strict=True)]))
    table = np.zeros((len(steps), len(layers)), np.int32)
    for i, (c, mask) in enumerate(zip(layers, counted, strict=True)):
        np.add.at(table[:, i], np.searchsorted(steps, c.ubatch[mask]), amount[place == i][mask])
    return table


def shared_set(wanted: Sequence[Wanted], layers: Sequence[TraceLayer], capacity: int) -> list[int]:
    """The items of a set for all layers: the most uses per byte first, as far as there is room.

    This is the best set where all experts have one size, else the best but for what the last expert that did not fit holds.
    """
    sizes = np.repeat(item_sizes(layers), [x.n_expert for x in layers]).astype(np.int64)
    room, chosen = capacity, []
    for item in by_use(np.concatenate(wanted) / sizes).tolist():
        if sizes[item] <= room:
            chosen.append(item)
            room -= int(sizes[item])
    return chosen


def _orders(work: Work, wanted: Sequence[Wanted] | None, budget: Budget | SharedBudget) -> tuple[tuple[int, ...], ...]:
    """The experts of a fixed set by layer, most wanted first; empty for other policies."""
    if wanted is None:
        return ()
    if isinstance(budget, Budget):
        return tuple(tuple(by_use(w)[:slots].tolist()) for w, slots in zip(wanted, budget.slots, strict=True))
    firsts = np.cumsum([0, *(x.n_expert for x in work.layers)])
    items = shared_set(wanted, work.layers, budget.capacity)
    return tuple(tuple(i - a for i in items if a <= i < b) for a, b in itertools.pairwise(firsts.tolist()))


def room_of(budget: Budget | SharedBudget) -> Room:
    """The tier that a budget is."""
    return Room(slots=budget.slots) if isinstance(budget, Budget) else Room(shared_bytes=budget.capacity)


def _tiered(
    work: Work, policy: Policy, orders: tuple[tuple[int, ...], ...], budget: Budget | SharedBudget, host: Room, setup: Setup
) -> Outcome:
    tiers = Tiers(
        policy=policy,
        vram=room_of(budget),
        ram=host,
        host_tier=setup.host_tier,
        on_miss=setup.on_miss,
        preloaded=orders,
        keep_whole=setup.keep_whole,
        seed=_SEED,
    )
    runs = [serve_tiers(run, counted, tiers) for run, counted in zip(work.runs, work.counted, strict=True)]
    sums = total(runs)
    return Outcome(
        hits=sums.hits,
        cold=sums.cold,
        uploads=sums.uploads,
        nvme_bytes=sums.nvme_bytes,
        h2d_bytes=sums.h2d_bytes,
        d2h_bytes=sums.d2h_bytes,
        seconds=None if setup.clock is None else _tiered_seconds(work, runs, setup.clock),
        host_hits=sums.from_ram,
        on_cpu=sums.on_cpu,
    )


def _tiered_seconds(work: Work, runs: Sequence[Served], clock: Clock) -> float:
    """Of all steps: reads from NVMe and loads from RAM, uploads among them as in `_seconds`, and what the CPU computes."""
    seconds = 0.0
    for layers, counted, done in zip(work.runs, work.counted, runs, strict=True):
        reads, on_cpu, loads = (
            _by_step(layers, counted, done.place, amount) for amount in (done.nvme_reads, done.on_cpu, done.ram_loads)
        )
        seconds += float(price(clock, reads, on_cpu, loads).seconds.sum())
    return seconds


def sum_bytes(experts: Sequence[int], layers: Sequence[TraceLayer]) -> int | None:
    """The bytes of so many experts of each layer; None where a layer's size is not known."""
    if not has_sizes(layers):
        return None
    return sum(count * size for count, size in zip(experts, item_sizes(layers), strict=True))


def trace_clock(
    costs: Costs, traces: Sequence[Trace], layers: Sequence[TraceLayer], kind: str, setup: Setup | None = None
) -> Clock:
    """A clock for misses as `setup` has them: layer times of the costs, else the median of the traces' decode calls.

    Without a tier of RAM a miss is read from NVMe.  With one an expert goes on to VRAM while the next is read, so that its
    time is that of the slower of the two links, and what RAM has takes the link to VRAM alone.  What leaves VRAM goes the
    other way and takes no time from either.

    Raises UsageError where the time of a layer, the size of an expert, or a measure that the tiers need is not known.
    """
    if not has_sizes(layers):
        raise UsageError("--costs needs the bytes of an expert, and no input knows those of every layer")
    measured = dict(costs.layer_seconds or ())
    seconds = []
    for place, info in enumerate(layers):
        known = measured.get(info.layer) if measured else _median_seconds([t.layers[place] for t in traces])
        if known is None:
            source = "the costs have" if measured else "the traces have"
            cause = f"--costs needs measured layer times, and {source} none of layer {info.layer}"
            raise UsageError(cause, hint="Record with --timing")
        seconds.append(known)
    sizes = np.array(item_sizes(layers))
    read = sizes / costs.nvme_bytes_per_s
    if setup is None or setup.host is None:
        return make_clock(kind, seconds, read)
    rate, cpu = _tier_costs(costs, setup.on_miss)
    return make_clock(kind, seconds, np.maximum(read, sizes / rate), cpu, sizes / rate)


def _tier_costs(costs: Costs, on_miss: str) -> tuple[float, float]:
    """Bytes per second from host to device, and seconds of an expert on the CPU (0 where none is computed there)."""
    if costs.h2d_bytes_per_s is None:
        cause = "with a RAM tier --costs needs h2d_bytes_per_s, the rate from host to device, and the costs have none"
        raise UsageError(cause, hint="Measure them with `bel-profile bandwidth` on the machine with the GPU")
    if on_miss != CPU:
        return costs.h2d_bytes_per_s, 0.0
    if costs.cpu_expert_seconds is None:
        cause = "--on-miss cpu with --costs needs cpu_expert_seconds, one expert on the CPU, and the costs have none"
        raise UsageError(cause, hint="`bel-profile bandwidth MODEL`, with llama.cpp installed, measures it")
    return costs.h2d_bytes_per_s, costs.cpu_expert_seconds


def _median_seconds(runs: Sequence[LayerCalls]) -> float | None:
    times = [c.time_ns[(c.phase == DECODE) & (c.time_ns >= 0)] for c in runs if c.time_ns is not None]
    taken = np.concatenate([np.zeros(0, np.int64), *times])
    return float(np.median(taken)) * 1e-9 if len(taken) else None
