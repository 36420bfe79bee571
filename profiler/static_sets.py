"""Static sets: the experts that one part of the work uses most, held resident for another part.

Everything here is per layer.  A set of c experts is the first c of `locality.by_use`; an access hits where its expert is in
the set, and a miss changes nothing.  Hits stand at every size: (n_expert + 1,).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bel.formats.trace_calls import LayerCalls
from bel.profiler.compiled import compiled
from bel.profiler.locality import Counts, by_use

BY_RUN, BY_PROMPT, BY_TOKEN = "runs", "prompts", "token halves"
NOT_COUNTED = -1
Folds = list[npt.NDArray[np.int8]]


def static_hits(used: Counts, wanted: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> Counts:
    """Hits on accesses `used` (n_expert,) of the sets that rank experts by `wanted` (n_expert,)."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(used[by_use(wanted)])])


def held_out_hits(folds: Counts) -> Counts | None:
    """Hits on all accesses of `folds` (2, n_expert) where the set for each part is made of the other one alone.

    None where a part is empty.
    """
    if not folds.any(axis=1).all():
        return None
    return static_hits(folds[1], folds[0]) + static_hits(folds[0], folds[1])


def random_hits(accesses: int, n_expert: int) -> npt.NDArray[np.float64]:
    """Hits to expect of a set drawn at random: c / n_expert of the accesses with c slots, whatever the accesses are."""
    return accesses * np.arange(n_expert + 1) / n_expert


def equal_mix(counts: Sequence[Counts]) -> npt.NDArray[np.float64]:
    """What a merge with equal weights wants: the mean of the shares of the layer's uses; workloads without any have no say."""
    shares = [c / c.sum() for c in counts if c.any()]
    return np.mean(shares, axis=0) if shares else np.zeros(len(counts[0]))


@dataclass(frozen=True, slots=True)
class Split:
    """Two parts of the counted calls of one layer.

    `folds` has for each run (C,) i8: the part of each call, 0 or 1, or NOT_COUNTED.  `kind` says what was kept whole.
    """

    kind: str
    folds: Folds


def split_calls(runs: Sequence[LayerCalls], phases: Sequence[int]) -> Split:
    """Halve the calls of `phases` by their rows: between runs where there are several, else prompts, else tokens."""
    rows = [np.where(np.isin(c.phase, phases), c.rows_per_call, 0) for c in runs]
    if len(runs) > 1:
        edges = [np.arange(len(r)) == 0 for r in rows]
        folds = _halve(rows, edges)
        if folds is not None:
            return Split(BY_RUN, folds)
    folds = _halve(rows, [starts_prompt(c) for c in runs])
    if folds is not None:
        return Split(BY_PROMPT, folds)
    folds = _halve(rows, [np.ones(len(r), np.bool_) for r in rows])
    return Split(BY_TOKEN, folds if folds is not None else [np.where(r > 0, 0, NOT_COUNTED).astype(np.int8) for r in rows])


def starts_prompt(calls: LayerCalls) -> npt.NDArray[np.bool_]:
    """(C,): calls whose first token does not come after the last one of the call before: a new prompt begins."""
    starts = np.ones(len(calls.phase), np.bool_)
    first, last = calls.token[calls.row_start[:-1]], calls.token[calls.row_start[1:] - 1]
    starts[1:] = first[1:] <= last[:-1]
    return starts


def _halve(rows: Sequence[npt.NDArray[np.int64]], edges: Sequence[npt.NDArray[np.bool_]]) -> Folds | None:
    """Cut at the edge that comes nearest to half of the rows; None where no edge has rows on both sides."""
    flat = np.concatenate([np.zeros(0, np.int64), *rows])
    before = np.cumsum(flat) - flat
    total = int(flat.sum())
    cuts = np.flatnonzero(np.concatenate([np.zeros(0, np.bool_), *edges]) & (before > 0) & (before < total))
    if not len(cuts):
        return None
    cut = cuts[np.argmin(np.abs(2 * before[cuts] - total))]
    fold = np.where(flat > 0, (np.arange(len(flat)) >= cut).astype(np.int8), np.int8(NOT_COUNTED)).astype(np.int8)
    return np.split(fold, np.cumsum([len(r) for r in rows])[:-1])


def fold_counts(calls: LayerCalls, folds: npt.NDArray[np.int8]) -> Counts:
    """(2, n_expert) i64: how many calls of each part use each expert."""
    counts = np.zeros((2, calls.info.n_expert), np.int64)
    _fold_counts(np.ascontiguousarray(calls.ids), calls.row_start, folds, counts)
    return counts


@compiled
def _fold_counts(
    ids: npt.NDArray[np.uint16], row_start: npt.NDArray[np.int64], folds: npt.NDArray[np.int8], counts: npt.NDArray[np.int64]
) -> None:
    called = np.full(counts.shape[1], -1, np.int64)
    for c in range(len(folds)):
        if folds[c] < 0:
            continue
        for r in range(row_start[c], row_start[c + 1]):
            for j in range(ids.shape[1]):
                e = ids[r, j]
                if called[e] != c:
                    called[e] = c
                    counts[folds[c], e] += 1


@dataclass(frozen=True, slots=True)
class Transfer:
    """How sets made from one workload serve another, W workloads, at one size.

    `hit_rates[i][j]`: hit rate on workload j of the set made from i.  `merged[j]`: of the set made from all, with equal
    weights.  `regrets[j]`: what workload j loses by the merge, against its own set.
    """

    hit_rates: tuple[tuple[float | None, ...], ...]
    merged: tuple[float | None, ...]

    @property
    def regrets(self) -> tuple[float | None, ...]:
        """Own hit rate less the merged set's, for each workload."""
        own = [self.hit_rates[j][j] for j in range(len(self.merged))]
        return tuple(None if a is None or b is None else a - b for a, b in zip(own, self.merged, strict=True))

    @property
    def worst_regret(self) -> float | None:
        """The largest of the regrets."""
        return max((r for r in self.regrets if r is not None), default=None)


def transfer(folds: Sequence[Sequence[Counts]], slots: Sequence[int], *, held_out: bool) -> Transfer:
    """`folds[w][l]` (2, n_expert) are the accesses of workload w in layer l by part, `slots[l]` the size of its set.

    With `held_out` each part is served by sets made of the other part (of every workload), else by sets made of both.
    """
    works, layers = range(len(folds)), range(len(slots))
    tests = (0, 1) if held_out else (None,)
    hits = np.zeros((len(folds) + 1, len(folds)))
    accesses = np.zeros(len(folds))
    for place in layers:
        for test in tests:
            made = [_part(folds[w][place], None if test is None else 1 - test) for w in works]
            used = [_part(folds[w][place], test) for w in works]
            hits[:-1] += [[static_hits(u, wanted)[slots[place]] for u in used] for wanted in made]
            hits[-1] += [static_hits(u, equal_mix(made))[slots[place]] for u in used]
            accesses += [u.sum() for u in used]
    rates = [tuple(float(h / a) if a else None for h, a in zip(row, accesses, strict=True)) for row in hits]
    return Transfer(tuple(rates[:-1]), rates[-1])


def _part(folds: Counts, which: int | None) -> Counts:
    both: Counts = folds.sum(axis=0)
    return both if which is None else folds[which]
