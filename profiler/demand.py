"""What each workload asks of the slots of a model while it decodes, from a profile or from traces: the planner's input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bel.formats.errors import BadInputError
from bel.formats.profile import LayerStats, Profile, Workload
from bel.formats.trace import DECODE
from bel.formats.trace_calls import Trace
from bel.formats.trace_header import TraceLayer
from bel.profiler.decode_steps import Steps, drawn_steps, step_keys, traced_steps
from bel.profiler.locality import Counts, by_use
from bel.profiler.miss_tables import BELADY_MEASURE, MEASURE, MissParts, belady_from_json, misses_from_json
from bel.profiler.static_sets import split_calls

Curve = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Demand:
    """The decode tokens of one workload, or of a half of it.

    For each layer `accesses`, the distinct experts per token, and `misses` (n_expert + 1,), those missed per token with 0, 1,
    .. slots.  `tables` (n_expert + 1, width) and `steps` say how misses are spread over calls and tokens; they are None
    where only counts are known, and `misses` then are those of the experts used most, held as a fixed set.
    """

    tokens: int
    accesses: tuple[float, ...]
    misses: tuple[Curve, ...]
    tables: tuple[npt.NDArray[np.float64], ...] | None
    steps: Steps | None


@dataclass(frozen=True, slots=True)
class WorkDemand:
    """One workload.  `split` says how `halves` were made; both are None where there is nothing to split, or only counts.

    `belady`: for each layer the most hits per token of any cache, with 0, 1, .. slots.
    """

    name: str
    weight: float
    whole: Demand
    split: str | None
    halves: tuple[Demand, Demand] | None
    belady: tuple[Curve, ...] | None


def profile_demand(profile: Profile, *, by_counts: bool, path: str) -> tuple[WorkDemand, ...]:
    """The demand of each workload with decode tokens; their weights add up to 1.

    Raises BadInputError where a measure of the profile is not valid, or no workload has any decode tokens.
    """
    works = [w for w in profile.workloads if _decode_tokens(w) and w.weight]
    _check_any(works, path)
    total = sum(w.weight for w in works)
    return tuple(_of_workload(w, w.weight / total, profile.layers, by_counts=by_counts, path=path) for w in works)


def traced_demand(profile: Profile, traces: Sequence[Trace], path: str) -> tuple[WorkDemand, ...]:
    """As `profile_demand`, for the profile of these traces, with the decode steps as they were recorded."""
    answer = []
    works = [w for w in profile.workloads if _decode_tokens(w) and w.weight]
    _check_any(works, path)
    total = sum(w.weight for w in works)
    for work in works:
        runs = [t for t in traces if t.header.workload == work.name]
        steps = traced_steps(runs, profile.layers, _step_folds(runs))
        parts = _miss_parts(work, profile.layers, path)
        answer.append(_of_parts(work, work.weight / total, profile.layers, parts, steps, path))
    return tuple(answer)


def missing_tables(profile: Profile) -> list[str]:
    """The workloads with decode tokens of which the profile has counts but not how misses are spread over calls."""
    needed = {MEASURE, BELADY_MEASURE}
    return [w.name for w in profile.workloads if _decode_tokens(w) and any(needed - set(x.locality) for x in w.layers)]


def _check_any(works: Sequence[Workload], path: str) -> None:
    if not works:
        hint = "Plans are made for decoding: record with -n above 0"
        raise BadInputError("there are no decode tokens to plan for", path=path, hint=hint)


def _decode_tokens(work: Workload) -> int:
    return max(x.decode.tokens for x in work.layers)


def _of_workload(work: Workload, weight: float, layers: Sequence[TraceLayer], *, by_counts: bool, path: str) -> WorkDemand:
    if by_counts:
        return WorkDemand(work.name, weight, _counted(work), None, None, None)
    return _of_parts(work, weight, layers, _miss_parts(work, layers, path), None, path)


def _counted(work: Workload) -> Demand:
    tokens = _decode_tokens(work)
    counts = [np.array(x.decode.counts, np.int64) for x in work.layers]
    hits = [np.concatenate([np.zeros(1, np.int64), np.cumsum(c[by_use(c)])]) for c in counts]
    return Demand(
        tokens,
        tuple(int(c.sum()) / tokens for c in counts),
        tuple((h[-1] - h) / tokens for h in hits),
        None,
        None,
    )


def _of_parts(
    work: Workload, weight: float, layers: Sequence[TraceLayer], parts: Sequence[MissParts], steps: Steps | None, path: str
) -> WorkDemand:
    whole = _demand(_decode_tokens(work), [p.whole for p in parts], steps)
    tokens = [max(p.tokens[i] for p in parts) for i in (0, 1)]
    halves = None
    if all(tokens):
        one, other = (_demand(tokens[i], [p.tables[i] for p in parts], _half(steps, i, tokens[i])) for i in (0, 1))
        halves = (one, other)
    belady = tuple(_belady(x, info, path) / _decode_tokens(work) for x, info in zip(work.layers, layers, strict=True))
    return WorkDemand(work.name, weight, whole, parts[0].split if halves else None, halves, belady)


def _half(steps: Steps | None, part: int, tokens: int) -> Steps | None:
    return None if steps is None or not (steps.parts == part).any() else steps.half(part, tokens)


def _demand(tokens: int, tables: Sequence[Counts], steps: Steps | None) -> Demand:
    misses = [t @ np.arange(t.shape[1]) / tokens for t in tables]
    spread = tuple(t.astype(np.float64) for t in tables)
    return Demand(
        tokens,
        tuple(float(m[0]) for m in misses),
        tuple(misses),
        spread,
        drawn_steps(spread, tokens) if steps is None else steps,
    )


def _miss_parts(work: Workload, layers: Sequence[TraceLayer], path: str) -> list[MissParts]:
    parts = []
    for stats, info in zip(work.layers, layers, strict=True):
        try:
            parts.append(misses_from_json(stats.locality[MEASURE], info))
            _check_sums(parts[-1], stats)
        except (ValueError, KeyError) as error:
            raise _not_valid(MEASURE, work.name, info, error, path) from None
    return parts


def _check_sums(parts: MissParts, stats: LayerStats) -> None:
    """Raises ValueError where the table does not belong to the profile's own LRU curve."""
    if sum(parts.tokens) != stats.decode.tokens:
        raise ValueError(f"it has {sum(parts.tokens)} tokens and the layer {stats.decode.tokens}")
    misses = parts.whole @ np.arange(parts.tables.shape[2])
    hits, accesses = stats.decode.lru_hits, stats.decode.accesses
    if hits is not None and accesses is not None and misses.tolist() != [accesses - h for h in hits]:
        raise ValueError("its misses are not those of the LRU hits")


def _belady(stats: LayerStats, info: TraceLayer, path: str) -> Counts:
    try:
        return belady_from_json(stats.locality[BELADY_MEASURE], info)
    except (ValueError, KeyError) as error:
        raise _not_valid(BELADY_MEASURE, "", info, error, path) from None


def _not_valid(measure: str, work: str, info: TraceLayer, error: Exception, path: str) -> BadInputError:
    cause = f"the profile's {measure} of layer {info.layer}{f', workload {work},' if work else ''} is not valid: {error}"
    return BadInputError(cause, path=path, hint="`bel-profile summarize` makes the profile anew from its traces")


def _step_folds(runs: Sequence[Trace]) -> list[npt.NDArray[np.int8]]:
    """For each run the half of each of its decode steps, in their order; -1 where the layer that was split has no call."""
    rows = [sum(int(t.layers[i].rows_per_call[t.layers[i].phase == DECODE].sum()) for t in runs) for i in _places(runs)]
    fullest = int(np.argmax(rows))
    split = split_calls([t.layers[fullest] for t in runs], (DECODE,))
    answer = []
    for trace, folds in zip(runs, split.folds, strict=True):
        keys = [step_keys(c) for c in trace.layers]
        everything = np.unique(np.concatenate(keys), axis=0)
        half = {(int(a), int(b)): fold for (a, b), fold in zip(keys[fullest], folds[folds >= 0], strict=True)}
        answer.append(np.array([half.get((int(a), int(b)), -1) for a, b in everything], np.int8))
    return answer


def _places(runs: Sequence[Trace]) -> range:
    return range(len(runs[0].layers))
