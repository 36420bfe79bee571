"""Recorded work as the simulator takes it: runs, which of their calls count, and what those ask of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bel.formats.errors import UsageError
from bel.formats.trace import PHASES
from bel.formats.trace_calls import LayerCalls, Trace
from bel.formats.trace_header import TraceLayer
from bel.profiler.belady import belady_hits
from bel.profiler.curves import lru_curves
from bel.profiler.locality import Counts
from bel.profiler.replay import Counted
from bel.profiler.static_sets import BY_PROMPT, BY_RUN, BY_TOKEN, NOT_COUNTED, fold_counts, starts_prompt

FIRST, COUNTED = 0, 1  # the part that sets are made of where some work is held out, and the part that counts
Part = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """The counted accesses of one layer over all runs.  n = n_expert.

    `uses` (n,) i64: the calls that use each expert, `accesses` in all.  `first_uses` (n,) i64: in how many runs the first
    use of the expert is a counted one.  `lru_hits`, `belady_hits` (n + 1,) i64: with 0, 1, .. n slots.  `earlier_uses` (n,)
    i64: as `uses`, in the part of the work before the one that is held out; zero where none is.
    """

    uses: Counts
    first_uses: Counts
    lru_hits: Counts
    belady_hits: Counts
    earlier_uses: Counts

    @property
    def accesses(self) -> int:
        """Distinct experts of each counted call, summed."""
        return int(self.uses.sum())


@dataclass(frozen=True, slots=True)
class Work:
    """What `phase` of all runs asks of a cache.  `tokens` are those of the layer that saw most, in each run.

    `runs[r][l]` are the calls of run r in layer l, `counted[r][l]` (C,) which of them count.  `held_out` says between what
    the work was cut, where only a later part of it counts; else it is None.  `held_out_share` is the share of the phase's
    tokens behind the cut: as near to what was asked as a cut is possible, so maybe far from it.
    """

    phase: str
    tokens: int
    layers: tuple[TraceLayer, ...]
    counts: tuple[LayerCounts, ...]
    runs: tuple[tuple[LayerCalls, ...], ...]
    counted: tuple[tuple[Counted, ...], ...]
    held_out: str | None = None
    held_out_share: float | None = None


def count_work(
    traces: Sequence[Trace], layers: tuple[TraceLayer, ...], phase: str, *, held_out: float = 0.0, threads: int = 2
) -> Work:
    """One pass over traces of one model whose layers are `layers`.  `phase` is a key of PHASES.

    With `held_out` above 0 the last so large share of the phase's tokens counts alone; caches see all calls.  The cut falls
    between runs where there are several, else between prompts, else between tokens, nearest to the share.  Raises
    UsageError where there is nothing to cut.
    """
    # What one trace does not know of a layer, its bytes, another one may.
    runs = tuple(tuple(replace(c, info=info) for c, info in zip(t.layers, layers, strict=True)) for t in traces)
    parts, kind, part = _parts(runs, PHASES[phase], held_out)
    jobs = list(zip(zip(*runs, strict=True), zip(*parts, strict=True), strict=True))
    with ThreadPoolExecutor(threads) as pool:  # the inner loops run without the interpreter's lock
        counts = tuple(pool.map(lambda job: _count_layer(*job), jobs))
    counted = tuple(tuple(part == COUNTED for part in run) for run in parts)
    return Work(phase, sum(_tokens(*x) for x in zip(runs, counted, strict=True)), layers, counts, runs, counted, kind, part)


def _tokens(layers: Sequence[LayerCalls], counted: Sequence[Counted]) -> int:
    return max(int(c.rows_per_call[mask].sum()) for c, mask in zip(layers, counted, strict=True))


def _parts(
    runs: Sequence[Sequence[LayerCalls]], phases: tuple[int, ...], share: float
) -> tuple[list[list[Part]], str | None, float | None]:
    """The part of each call of each run and layer: COUNTED, FIRST or NOT_COUNTED; between what they were cut, and where."""
    if not share:
        marks = [[np.where(np.isin(c.phase, phases), COUNTED, NOT_COUNTED).astype(np.int8) for c in run] for run in runs]
        return marks, None, None
    kind, cut_run, cut_ubatch, part = _cut(runs, phases, share)
    parts = []
    for number, run in enumerate(runs):
        later = [(number > cut_run) | ((number == cut_run) & (c.ubatch >= cut_ubatch)) for c in run]
        folds = [np.where(is_later, COUNTED, FIRST) for is_later in later]
        parts.append(
            [np.where(np.isin(c.phase, phases), f, NOT_COUNTED).astype(np.int8) for c, f in zip(run, folds, strict=True)]
        )
    return parts, kind, part


def _cut(runs: Sequence[Sequence[LayerCalls]], phases: tuple[int, ...], share: float) -> tuple[str, int, int, float]:
    """Between what to cut, the run and the ubatch with which the held-out part begins, in all layers, and its share."""
    busiest = [max(run, key=lambda c: _asked(c, phases)) for run in runs]
    rows = np.concatenate([np.where(np.isin(c.phase, phases), c.rows_per_call, 0) for c in busiest])
    run_of = np.repeat(np.arange(len(runs)), [len(c.phase) for c in busiest])
    ubatch = np.concatenate([c.ubatch for c in busiest])
    before = np.cumsum(rows) - rows
    run_edges = np.diff(run_of, prepend=-1) > 0
    prompt_edges = np.concatenate([starts_prompt(c) for c in busiest])
    ubatch_edges = run_edges | (np.diff(ubatch, prepend=-1) != 0)
    for kind, edges in ((BY_RUN, run_edges), (BY_PROMPT, prompt_edges), (BY_TOKEN, ubatch_edges)):
        cuts = np.flatnonzero(edges & (before > 0) & (before < rows.sum()))
        if len(cuts):
            at = cuts[np.argmin(np.abs(before[cuts] - (1 - share) * rows.sum()))]
            return kind, int(run_of[at]), int(ubatch[at]), float(1 - before[at] / rows.sum())
    raise UsageError("--held-out: there are not two calls to part the work between", hint="Give more or longer traces")


def _asked(calls: LayerCalls, phases: tuple[int, ...]) -> tuple[int, int]:
    """Rows and calls of the phases."""
    is_counted = np.isin(calls.phase, phases)
    return int(calls.rows_per_call[is_counted].sum()), int(is_counted.sum())


def _count_layer(runs: Sequence[LayerCalls], parts: Sequence[Part]) -> LayerCounts:
    uses = np.sum([fold_counts(c, part) for c, part in zip(runs, parts, strict=True)], axis=0)
    counted = [part == COUNTED for part in parts]
    # The passes tell the phases apart: a counted call takes the place of a decode call.
    marked = [replace(c, phase=is_counted.astype(np.uint8)) for c, is_counted in zip(runs, counted, strict=True)]
    return LayerCounts(
        uses=uses[COUNTED],
        first_uses=np.sum([_first_uses(c, is_counted) for c, is_counted in zip(runs, counted, strict=True)], axis=0),
        lru_hits=np.sum([lru_curves(c)[COUNTED].hits for c in marked], axis=0),
        belady_hits=np.sum([belady_hits(c, (COUNTED,)) for c in marked], axis=0),
        earlier_uses=uses[FIRST],
    )


def _first_uses(calls: LayerCalls, is_counted: Counted) -> Counts:
    """(n_expert,): 1 where the first call that uses the expert is in `is_counted` (C,)."""
    experts, first = np.unique(calls.ids, return_index=True)
    call = np.searchsorted(calls.row_start, first // calls.info.top_k, side="right") - 1
    answer = np.zeros(calls.info.n_expert, np.int64)
    answer[experts] = is_counted[call]
    return answer
