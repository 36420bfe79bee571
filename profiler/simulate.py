"""What a cache of experts would have hit on recorded work: exact counts for each policy and budget.

A trace is a run of its own that starts with an empty cache; a cache sees all calls, and those that count are counted.  The
hits of several runs are added.  Sets are loaded before a run: one set serves all runs, hits first uses too, and a miss does
not change it.  So a set may have more hits than Belady's bound, which is for caches that start empty.

In a cache for each layer no policy that starts empty and loads what it misses has more hits than Belady, which must load all
that a call uses.  A set that is chosen anew (repick) may have: misses pass it by, and it uploads ahead of use.  One cache for
all layers holds experts of several sizes: there "farthest next use" is good, but not always the best that is possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from bel.formats.errors import UsageError, printable
from bel.formats.profile import Profile, expert_shares
from bel.formats.trace_header import TraceLayer
from bel.profiler.outcomes import Outcome, Setup, Wanted, outcome, sum_bytes
from bel.profiler.replay import BELADY_POLICY
from bel.profiler.slot_budgets import Budget, SharedBudget, has_sizes, item_sizes
from bel.profiler.work import Work
from bel.runtime.policies import POLICY_NAMES, parse_policy
from bel.runtime.policies import Policy as CachePolicy

LAYER_SCOPE, GLOBAL_SCOPE = "layer", "global"
LRU, BELADY, ORACLE, STATIC, EARLIER = "lru", "belady", "static-oracle", "static:", "static"
POLICIES = f"{BELADY}, {ORACLE}, {STATIC}PROFILE.json, {EARLIER} (with --held-out), {POLICY_NAMES.removeprefix('static, ')}"
KNEE_SHARE = 0.9  # of the best hit rate among the budgets


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy as it was given."""

    name: str

    @property
    def profile(self) -> str | None:
        """The path of the profile behind `static:`."""
        return self.name[len(STATIC) :] if self.name.startswith(STATIC) else None

    @property
    def is_set(self) -> bool:
        """Whether it is a fixed set, loaded beforehand."""
        return self.name in (ORACLE, EARLIER) or self.profile is not None

    @property
    def cache(self) -> CachePolicy:
        """What the cache does.  Raises UsageError for an unknown policy."""
        if self.is_set:
            return parse_policy(EARLIER)
        return BELADY_POLICY if self.name == BELADY else parse_policy(self.name)


@dataclass(frozen=True, slots=True)
class Row:
    """One policy with one budget.

    `slots_by_layer` is None with one cache for all layers.  `slots_bytes`: all slots, or that cache's capacity; None where a
    layer's size is not known.  `experts`: what one cache for all layers holds where it counts experts, else None.  `size`
    orders budgets: the bytes, or the number of slots or experts.

    `regret` is (H_belady - H) / (H_belady - H_random), all with the same budget: 0 for Belady, 1 for a set drawn at random,
    of which the resident share of the accesses is the exact expectation.  It is negative for a set that beats Belady, and
    None where Belady has no more hits than the random set (which is loaded beforehand, so that near all slots it has more).
    """

    policy: str
    scope: str
    phase: str
    slots_by_layer: dict[int, int] | None
    slots_bytes: int | None
    tokens: int
    accesses: int
    found: Outcome
    regret: float | None
    experts: int | None = None

    @property
    def size(self) -> int:
        """Larger for a larger budget of the same table."""
        if self.slots_bytes is not None:
            return self.slots_bytes
        return sum((self.slots_by_layer or {}).values()) if self.experts is None else self.experts

    @property
    def hits(self) -> int:
        """Accesses that found their expert resident."""
        return self.found.hits

    @property
    def misses(self) -> int:
        """Accesses that were no hits."""
        return self.accesses - self.hits

    @property
    def hit_rate(self) -> float | None:
        """Hits over accesses."""
        return self.hits / self.accesses if self.accesses else None

    def per_token(self, amount: float | None) -> float | None:
        """An amount by the tokens; None where it is not known or there are none."""
        return amount / self.tokens if self.tokens and amount is not None else None


@dataclass(frozen=True, slots=True)
class Simulated:
    """All rows, budget after budget, and what they are of."""

    rows: tuple[Row, ...]
    work: Work
    setup: Setup
    model_name: str


def parse_policies(text: str) -> tuple[Policy, ...]:
    """`lru,static:code.json` as policies, each once.  Raises UsageError for one that is unknown."""
    return tuple(_policy(name) for name in dict.fromkeys(part.strip() for part in text.split(",")))


def _policy(name: str) -> Policy:
    try:
        if name != STATIC:
            _ = Policy(name).cache
            return Policy(name)
    except UsageError as error:
        if ":" in name:  # a known one with a wrong number says which numbers are right
            raise
        raise UsageError(error.cause, hint=f"Policies: {POLICIES}") from None
    raise UsageError(f"the policy '{printable(name)}' is not known", hint=f"Policies: {POLICIES}")


def simulate(
    work: Work,
    policies: Sequence[Policy],
    budgets: Sequence[Budget] | Sequence[SharedBudget],
    profiles: dict[str, Profile],
    setup: Setup | None = None,
    *,
    threads: int = 2,
) -> tuple[Row, ...]:
    """One row for each budget and policy.  `profiles` by the path in `static:PATH`, of the same model as the work.

    Raises UsageError for a profile that has no selections of the phase in a layer that is used.
    """
    chosen = setup or Setup()
    wanted = [_wanted(policy, work, profiles) for policy in policies]
    bound = Setup(keep_whole=chosen.keep_whole)
    sizes: tuple[Budget | SharedBudget, ...] = tuple(budgets)
    jobs = [(b, policy.cache, w, chosen) for b in sizes for policy, w in zip(policies, wanted, strict=True)]
    jobs += [(b, BELADY_POLICY, None, bound) for b in sizes]
    with ThreadPoolExecutor(threads) as pool:
        if isinstance(sizes[0], SharedBudget) or chosen.host is not None:  # whole caches share the cores
            found = list(pool.map(lambda job: outcome(work, job[1], job[2], job[0], job[3]), jobs))
        else:
            found = [outcome(work, policy, w, b, s, pool.map) for b, policy, w, s in jobs]
    best = found[len(policies) * len(sizes) :]
    return tuple(
        _row(work, policy, budget, found[number * len(policies) + i], best[number].hits)
        for number, budget in enumerate(sizes)
        for i, policy in enumerate(policies)
    )


def _wanted(policy: Policy, work: Work, profiles: dict[str, Profile]) -> list[Wanted] | None:
    """For each layer how much each expert is wanted in a set; None where the policy keeps none."""
    if policy.name == ORACLE:
        return [c.uses.astype(np.float64) for c in work.counts]
    if policy.name == EARLIER:
        if work.held_out is None:
            raise UsageError(
                "static is a set made of the part before the held-out one", hint=f"Give --held-out, or {STATIC}PROFILE.json"
            )
        return [c.earlier_uses.astype(np.float64) for c in work.counts]
    if policy.profile is None:
        return None
    answer = []
    for place, (info, counts) in enumerate(zip(work.layers, work.counts, strict=True)):
        shares = expert_shares(profiles[policy.profile], place, work.phase)
        if counts.accesses and shares is None:
            what = "selections" if work.phase == "all" else f"{work.phase} selections"
            cause = f"the profile has no {what} in layer {info.layer} to make a set from"
            raise UsageError(cause, path=policy.profile, hint="Use another --phase, or a profile of such work")
        shown = np.zeros(info.n_expert) if shares is None else np.array(shares)
        answer.append(shown * info.top_k)  # uses per token, so that layers can be compared
    return answer


def _row(work: Work, policy: Policy, budget: Budget | SharedBudget, found: Outcome, best_hits: int) -> Row:
    return Row(
        policy=policy.name,
        scope=GLOBAL_SCOPE if isinstance(budget, SharedBudget) else LAYER_SCOPE,
        phase=work.phase,
        slots_by_layer=None if isinstance(budget, SharedBudget) else slots_by_layer(budget, work.layers),
        slots_bytes=budget_bytes(budget, work.layers),
        tokens=work.tokens,
        accesses=sum(c.accesses for c in work.counts),
        found=found,
        regret=_regret(work, budget, found.hits, best_hits),
        experts=budget.capacity if isinstance(budget, SharedBudget) and not has_sizes(work.layers) else None,
    )


def slots_by_layer(budget: Budget, layers: Sequence[TraceLayer]) -> dict[int, int]:
    """Slots by the layer's number."""
    return {x.layer: slots for x, slots in zip(layers, budget.slots, strict=True)}


def budget_bytes(budget: Budget | SharedBudget, layers: Sequence[TraceLayer]) -> int | None:
    """The bytes of a budget; None where a layer's size is not known."""
    if isinstance(budget, SharedBudget):
        return budget.capacity if has_sizes(layers) else None
    return sum_bytes(budget.slots, layers)


def _regret(work: Work, budget: Budget | SharedBudget, hits: int, best: int) -> float | None:
    if isinstance(budget, SharedBudget):
        total = sum(x.n_expert * size for x, size in zip(work.layers, item_sizes(work.layers), strict=True))
        drawn = Fraction(sum(c.accesses for c in work.counts) * budget.capacity, total)
    else:
        layers = zip(work.counts, budget.slots, work.layers, strict=True)
        drawn = sum((Fraction(c.accesses * slots, x.n_expert) for c, slots, x in layers), Fraction(0))
    return float((best - hits) / (best - drawn)) if best > drawn else None


def knees(rows: Sequence[Row]) -> dict[str, Row]:
    """For each policy the smallest budget whose hit rate is within 10 % of its best one.

    None where nothing was hit, or where there are not two sizes: a knee is a bend of a curve.
    """
    answer: dict[str, Row] = {}
    for policy in dict.fromkeys(row.policy for row in rows):
        own = [row for row in rows if row.policy == policy and row.hit_rate is not None]
        best = max((row.hits for row in own), default=0)
        enough = [row for row in own if row.hits >= KNEE_SHARE * best]
        if best and len({row.size for row in own}) > 1:
            answer[policy] = min(enough, key=lambda row: row.size)
    return answer


def rows_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as they are printed with `--json`.  A tier or link that is not simulated and a time that is not priced are None."""
    return [
        {
            "policy": r.policy,
            "scope": r.scope,
            "slots_by_layer": _keyed(r.slots_by_layer),
            "bytes": r.slots_bytes,
            "phase": r.phase,
            "accesses": r.accesses,
            "hits": r.hits,
            "misses": r.misses,
            "cold_misses": r.found.cold,
            "uploads": r.found.uploads,
            "host_hits": r.found.host_hits,
            "on_cpu": r.found.on_cpu,
            "hit_rate": r.hit_rate,
            "bytes_per_token": {
                "nvme": r.per_token(r.found.nvme_bytes),
                "h2d": r.per_token(r.found.h2d_bytes),
                "d2h": r.per_token(r.found.d2h_bytes),
            },
            "regret": r.regret,
            "seconds_per_token": r.per_token(r.found.seconds),
        }
        for r in rows
    ]


def knees_json(rows: Sequence[Row]) -> dict[str, Any]:
    """The knee of each policy, with its budget and hit rate."""
    return {
        policy: {"slots_by_layer": _keyed(r.slots_by_layer), "bytes": r.slots_bytes, "hit_rate": r.hit_rate}
        for policy, r in knees(rows).items()
    }


def _keyed(slots: dict[int, int] | None) -> dict[str, int] | None:
    return None if slots is None else {str(layer): n for layer, n in slots.items()}
