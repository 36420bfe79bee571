"""What a cache of experts would have hit on recorded work: exact counts for each policy and budget.

Every number comes from a pass that is exact at all sizes (`curves.py`, `belady.py`, counts of uses), none from a sample.  A
trace is a run of its own that starts with an empty cache; a cache sees all calls, and those of the phase are counted.  The
hits of several runs are added.  Sets are loaded before a run: one set serves all runs, hits first uses too, and a miss does
not change it.  So a set may have more hits than Belady's bound, which is for caches that start empty.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from bel.formats.errors import UsageError, printable
from bel.formats.profile import Profile
from bel.formats.trace import PHASES
from bel.formats.trace_calls import LayerCalls, Trace
from bel.formats.trace_header import TraceLayer
from bel.profiler.belady import belady_hits
from bel.profiler.curves import lru_curves
from bel.profiler.locality import Counts, by_use
from bel.profiler.slot_budgets import Budget
from bel.profiler.static_sets import NOT_COUNTED, fold_counts, static_hits

LAYER_SCOPE = "layer"
LRU, BELADY, ORACLE, STATIC = "lru", "belady", "static-oracle", "static:"
POLICIES = f"{LRU}, {BELADY}, {ORACLE}, {STATIC}PROFILE.json"
_NOT_BUILT = re.compile(r"random|lfu-forget|lfu-ghost|lfuda|lfu-decay(:.*)?|slru|arc|s3fifo|repick(:.*)?")

Wanted = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy as it was given; `profile` is the file behind `static:`, else None."""

    name: str

    @property
    def profile(self) -> str | None:
        """The path of the profile that a static set is made from."""
        return self.name[len(STATIC) :] if self.name.startswith(STATIC) else None


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """The counted accesses of one layer over all runs.  n = n_expert.

    `uses` (n,) i64: the calls that use each expert, `accesses` in all.  `first_uses` (n,) i64: in how many runs the first
    use of the expert is a counted one.  `lru_hits`, `belady_hits` (n + 1,) i64: with 0, 1, .. n slots.
    """

    uses: Counts
    first_uses: Counts
    lru_hits: Counts
    belady_hits: Counts

    @property
    def accesses(self) -> int:
        """Distinct experts of each counted call, summed."""
        return int(self.uses.sum())


@dataclass(frozen=True, slots=True)
class Work:
    """What `phase` of all runs asks of a cache.  `tokens` are those of the layer that saw most, in each run."""

    phase: str
    tokens: int
    layers: tuple[TraceLayer, ...]
    counts: tuple[LayerCounts, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One policy with one budget.

    `slots_bytes` of all slots and `missed_bytes`, the misses at the size of an expert of their layer; both None where a
    layer's size is not known.  `cold_misses` are misses at the first use of an expert in its run, of whatever phase.

    `regret` is (H_belady - H) / (H_belady - H_random), all with the same slots: 0 for Belady, 1 for a set drawn at random,
    of which c / n_expert of the accesses are the exact expectation.  It is negative for a set that beats Belady, and None
    where Belady has no more hits than the random set (which is loaded beforehand, so that near all slots it has more).
    """

    policy: str
    scope: str
    phase: str
    slots_by_layer: dict[int, int]
    slots_bytes: int | None
    tokens: int
    accesses: int
    hits: int
    cold_misses: int
    missed_bytes: int | None
    regret: float | None

    @property
    def misses(self) -> int:
        """Accesses that were no hits."""
        return self.accesses - self.hits

    @property
    def hit_rate(self) -> float | None:
        """Hits over accesses."""
        return self.hits / self.accesses if self.accesses else None

    @property
    def misses_per_token(self) -> float | None:
        """Of all layers."""
        return self.misses / self.tokens if self.tokens else None

    @property
    def missed_bytes_per_token(self) -> float | None:
        """Of all layers: each miss is one read of an expert."""
        return self.missed_bytes / self.tokens if self.tokens and self.missed_bytes is not None else None


def parse_policies(text: str) -> tuple[Policy, ...]:
    """`lru,static:code.json` as policies.  Raises UsageError for one that is unknown or not built yet."""
    return tuple(_policy(name.strip()) for name in text.split(","))


def _policy(name: str) -> Policy:
    if name in (LRU, BELADY, ORACLE) or (name.startswith(STATIC) and name != STATIC):
        return Policy(name)
    cause = "is not built yet" if _NOT_BUILT.fullmatch(name) else "is not known"
    raise UsageError(f"the policy '{printable(name)}' {cause}", hint=f"Supported: {POLICIES}")


def count_work(traces: Sequence[Trace], layers: tuple[TraceLayer, ...], phase: str, *, threads: int = 2) -> Work:
    """One pass over traces of one model whose layers are `layers`.  `phase` is a key of PHASES."""
    phases = PHASES[phase]
    runs = list(zip(*(t.layers for t in traces), strict=True))
    with ThreadPoolExecutor(threads) as pool:
        counts = tuple(pool.map(lambda calls: _count_layer(calls, phases), runs))
    tokens = sum(max(int(c.rows_per_call[np.isin(c.phase, phases)].sum()) for c in t.layers) for t in traces)
    return Work(phase, tokens, layers, counts)


def _count_layer(runs: Sequence[LayerCalls], phases: tuple[int, ...]) -> LayerCounts:
    counted = [np.isin(c.phase, phases) for c in runs]
    folds = [np.where(is_counted, 0, NOT_COUNTED).astype(np.int8) for is_counted in counted]
    curves = [lru_curves(c)[phase] for c in runs for phase in phases]
    return LayerCounts(
        uses=np.sum([fold_counts(c, f)[0] for c, f in zip(runs, folds, strict=True)], axis=0),
        first_uses=np.sum([_first_uses(c, f) for c, f in zip(runs, counted, strict=True)], axis=0),
        lru_hits=np.sum([c.hits for c in curves], axis=0),
        belady_hits=np.sum([belady_hits(c, phases) for c in runs], axis=0),
    )


def _first_uses(calls: LayerCalls, is_counted: npt.NDArray[np.bool_]) -> Counts:
    """(n_expert,): 1 where the first call that uses the expert is in `is_counted` (C,)."""
    experts, first = np.unique(calls.ids, return_index=True)
    call = np.searchsorted(calls.row_start, first // calls.info.top_k, side="right") - 1
    answer = np.zeros(calls.info.n_expert, np.int64)
    answer[experts] = is_counted[call]
    return answer


def simulate(
    work: Work, policies: Sequence[Policy], budgets: Sequence[Budget], profiles: dict[str, Profile]
) -> tuple[Row, ...]:
    """One row for each budget and policy.  `profiles` by the path in `static:PATH`, of the same model as the work.

    Raises UsageError for a profile that has no selections of the phase in a layer that is used.
    """
    wanted = [_wanted(policy, work, profiles) for policy in policies]
    return tuple(
        _row(work, policy, ranks, budget) for budget in budgets for policy, ranks in zip(policies, wanted, strict=True)
    )


def _wanted(policy: Policy, work: Work, profiles: dict[str, Profile]) -> list[Wanted] | None:
    """For each layer how much each expert is wanted in a set; None where the policy keeps none."""
    if policy.name == ORACLE:
        return [c.uses.astype(np.float64) for c in work.counts]
    if policy.profile is None:
        return None
    answer = []
    for place, (info, counts) in enumerate(zip(work.layers, work.counts, strict=True)):
        shares = _shares(profiles[policy.profile], place, work.phase)
        if counts.accesses and not shares.any():
            what = "selections" if work.phase == "all" else f"{work.phase} selections"
            cause = f"the profile has no {what} in layer {info.layer} to make a set from"
            raise UsageError(cause, path=policy.profile, hint="Use another --phase, or a profile of such work")
        answer.append(shares)
    return answer


def _shares(profile: Profile, place: int, phase: str) -> Wanted:
    """(n_expert,): the share of each expert in the selections of `phase`, the weighted mean over the workloads."""
    mean = np.zeros(profile.layers[place].n_expert)
    for work in profile.workloads:
        stats = (work.layers[place].prompt, work.layers[place].decode)
        counts = np.sum([stats[p].counts for p in PHASES[phase]], axis=0)
        if counts.any():
            mean += work.weight * (counts / counts.sum())
    return mean


def _row(work: Work, policy: Policy, wanted: list[Wanted] | None, budget: Budget) -> Row:
    hits, cold = [], 0
    for place, (counts, slots) in enumerate(zip(work.counts, budget.slots, strict=True)):
        if wanted is None:
            curve = counts.lru_hits if policy.name == LRU else counts.belady_hits
            cold += int(counts.first_uses.sum())
        else:
            curve = static_hits(counts.uses, wanted[place])
            cold += int(counts.first_uses[by_use(wanted[place])[slots:]].sum())
        hits.append(int(curve[slots]))
    accesses = [c.accesses for c in work.counts]
    return Row(
        policy=policy.name,
        scope=LAYER_SCOPE,
        phase=work.phase,
        slots_by_layer={x.layer: slots for x, slots in zip(work.layers, budget.slots, strict=True)},
        slots_bytes=_bytes(budget.slots, work.layers),
        tokens=work.tokens,
        accesses=sum(accesses),
        hits=sum(hits),
        cold_misses=cold,
        missed_bytes=_bytes([a - h for a, h in zip(accesses, hits, strict=True)], work.layers),
        regret=_regret(work, budget, sum(hits)),
    )


def _bytes(experts: Sequence[int], layers: Sequence[TraceLayer]) -> int | None:
    """The bytes of so many experts of each layer; None where a layer's size is not known."""
    if any(x.expert_bytes is None for x in layers):
        return None
    return sum(count * (x.expert_bytes or 0) for count, x in zip(experts, layers, strict=True))


def _regret(work: Work, budget: Budget, hits: int) -> float | None:
    layers = list(zip(work.counts, budget.slots, work.layers, strict=True))
    best = sum(int(c.belady_hits[slots]) for c, slots, _ in layers)
    drawn = sum((Fraction(c.accesses * slots, x.n_expert) for c, slots, x in layers), Fraction(0))
    return float((best - hits) / (best - drawn)) if best > drawn else None


def rows_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as they are printed with `--json`.  No link but NVMe and no clock is modelled yet: those are None."""
    return [
        {
            "policy": r.policy,
            "scope": r.scope,
            "slots_by_layer": {str(layer): slots for layer, slots in r.slots_by_layer.items()},
            "bytes": r.slots_bytes,
            "phase": r.phase,
            "accesses": r.accesses,
            "hits": r.hits,
            "misses": r.misses,
            "cold_misses": r.cold_misses,
            "hit_rate": r.hit_rate,
            "bytes_per_token": {"nvme": r.missed_bytes_per_token, "h2d": None, "d2h": None},
            "regret": r.regret,
            "seconds_per_token": None,
        }
        for r in rows
    ]
