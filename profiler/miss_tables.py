"""How often a decode call misses 0, 1, 2, .. experts with c LRU slots: exact for every c, from one pass over a layer.

The cache is that of `curves.py`: all experts of a call are looked up before it, at the place where the recency list has
them.  A distinct expert of the call misses with c slots exactly when that place is behind c, or when it was never used.
Sums over calls (the hits curve) price misses one by one; a stall does not grow in step with the misses of a call, so the
planner needs how they are spread over calls: `table[c, n]` calls with n misses at c slots.

A call of several rows counts once, with its distinct experts: the table is as wide as the largest call asks for, and not
less than top_k + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bel.formats.manifest_fields import read_int, read_list, read_text
from bel.formats.trace import DECODE
from bel.formats.trace_calls import LayerCalls
from bel.formats.trace_header import TraceLayer
from bel.profiler.compiled import compiled
from bel.profiler.locality import Counts
from bel.profiler.static_sets import BY_PROMPT, BY_RUN, BY_TOKEN, split_calls

MEASURE, BELADY_MEASURE = "decode_misses", "decode_belady_hits"  # names among the measures of a layer in a profile
SPLITS = (BY_RUN, BY_PROMPT, BY_TOKEN)
Distances = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class MissParts:
    """The decode calls of one layer in two parts.  `tables` (2, n_expert + 1, width) i64, `tokens` the rows of each part.

    `split` says what was kept whole: runs, prompts, or only the order of the tokens.  The second part is empty where there
    is nothing to split.  The cache of the second part is warm from the first where both are of one run.
    """

    split: str
    tokens: tuple[int, int]
    tables: Counts

    @property
    def whole(self) -> Counts:
        """(n_expert + 1, width): both parts."""
        whole: Counts = self.tables.sum(axis=0)
        return whole


def call_distances(calls: LayerCalls, phase: int = DECODE) -> Distances:
    """(calls of `phase`, widest call) i32: the place in the recency list, 1 for the top, of each distinct expert of a call.

    An expert that was never used has place n_expert + 1; 0 fills the rows of smaller calls.  The cache is empty before the
    first call and sees the calls of both phases.
    """
    rows = calls.rows_per_call[calls.phase == phase]
    width = min(int(rows.max(initial=1)) * calls.info.top_k, calls.info.n_expert)
    distances = np.zeros((len(rows), width), np.int32)
    _distances(np.ascontiguousarray(calls.ids), calls.row_start, calls.phase, phase, calls.info.n_expert, distances)
    return distances


def miss_table(distances: Distances, info: TraceLayer) -> Counts:
    """(n_expert + 1, width) i64: the calls with n misses at c slots, for calls of these distances."""
    table = np.zeros((info.n_expert + 1, max(distances.shape[1], info.top_k) + 1), np.int64)
    _count(np.sort(distances, axis=1), table)
    return np.cumsum(table, axis=0)


def decode_misses(calls: LayerCalls) -> MissParts:
    """The decode calls of one run of a layer, halved between its prompts, else between tokens."""
    split = split_calls([calls], (DECODE,))
    is_decode = calls.phase == DECODE
    fold, distances = split.folds[0][is_decode], call_distances(calls)
    rows = calls.rows_per_call[is_decode]
    parts = [fold == part for part in (0, 1)]
    tables = np.stack([miss_table(distances[p], calls.info) for p in parts])
    return MissParts(split.kind, (int(rows[parts[0]].sum()), int(rows[parts[1]].sum())), tables)


def pool(runs: Sequence[MissParts]) -> MissParts:
    """Several runs of a layer, halved between runs where more than one has decode tokens."""
    busy = [r for r in runs if sum(r.tokens)]
    if len(busy) < 2:
        return busy[0] if busy else runs[0]
    width = max(r.tables.shape[2] for r in busy)
    wholes = [np.pad(r.whole, ((0, 0), (0, width - r.tables.shape[2]))) for r in busy]
    split = split_calls([_as_one_call(sum(r.tokens)) for r in busy], (DECODE,))
    tables, tokens = np.zeros((2, *wholes[0].shape), np.int64), [0, 0]
    for whole, run, fold in zip(wholes, busy, split.folds, strict=True):
        tables[fold[0]] += whole
        tokens[fold[0]] += sum(run.tokens)
    return MissParts(split.kind, (tokens[0], tokens[1]), tables)


def _as_one_call(rows: int) -> LayerCalls:
    """A run of which only the number of its rows matters."""
    none = np.zeros(1, np.int64)
    starts, ids = np.array([0, rows], np.int64), np.zeros((0, 1), np.uint16)
    info = TraceLayer(0, 1, 1, None)
    return LayerCalls(info, none, np.array([DECODE], np.uint8), none, starts, none, ids, None, None)


def misses_to_json(parts: MissParts) -> dict[str, Any]:
    """As a profile keeps it; a column of the table that is 0 in both parts and behind all others is left out."""
    used = np.flatnonzero(parts.tables.any(axis=(0, 1)))
    width = int(used[-1]) + 1 if len(used) else 1
    return {
        "split": parts.split,
        "parts": [
            {"tokens": tokens, "calls": table[:, :width].tolist()}
            for tokens, table in zip(parts.tokens, parts.tables, strict=True)
        ],
    }


def misses_from_json(body: Any, info: TraceLayer) -> MissParts:
    """The table of a layer in a profile, which may come from anywhere.  Raises ValueError or KeyError."""
    if not isinstance(body, dict) or read_text(body, "split") not in SPLITS:
        raise ValueError(f"its split is not one of {', '.join(SPLITS)}")
    rows = read_list(body, "parts")
    if len(rows) != 2 or not all(isinstance(r, dict) for r in rows):
        raise ValueError("it has not two parts")
    tables = [_table(read_list(r, "calls"), info) for r in rows]
    if tables[0].shape != tables[1].shape:
        raise ValueError("its two parts have tables of different width")
    parts = MissParts(body["split"], (read_int(rows[0], "tokens"), read_int(rows[1], "tokens")), np.stack(tables))
    for tokens, table in zip(parts.tokens, parts.tables, strict=True):
        _check(tokens, table)
    short = max(info.top_k + 1 - parts.tables.shape[2], 0)
    return replace(parts, tables=np.pad(parts.tables, ((0, 0), (0, 0), (0, short))))


def belady_from_json(body: Any, info: TraceLayer) -> Counts:
    """(n_expert + 1,) i64: Belady's hits with 0, 1, .. slots.  Raises ValueError."""
    if not isinstance(body, list) or len(body) != info.n_expert + 1:
        raise ValueError(f"it is not a list of {info.n_expert + 1} numbers")
    if not all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 48 for v in body):
        raise ValueError("it holds something that is not a number of hits")
    hits = np.array(body, np.int64)
    if hits[0] or (np.diff(hits) < 0).any():
        raise ValueError("the hits do not start at 0, or fall")
    return hits


def _table(rows: list[Any], info: TraceLayer) -> Counts:
    width = len(rows[0]) if rows and isinstance(rows[0], list) else 0
    if len(rows) != info.n_expert + 1 or not 1 <= width <= info.n_expert + 1:
        raise ValueError(f"a table has not {info.n_expert + 1} rows of 1 to {info.n_expert + 1} numbers")
    if not all(isinstance(row, list) and len(row) == width for row in rows):
        raise ValueError("the rows of a table have different lengths")
    for row in rows:
        for value in row:
            # Below 2^40, so that no sum over a table leaves 64 bits.
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 40:
                raise ValueError("a table holds something that is not a number of calls")
    return np.array(rows, np.int64)


def _check(tokens: int, table: Counts) -> None:
    calls = table.sum(axis=1)
    if (calls != calls[0]).any() or calls[0] > tokens or (tokens and not calls[0]):
        raise ValueError(f"the rows of a table add up to different numbers of calls, or do not fit {tokens} tokens")
    at_least = np.cumsum(table[:, ::-1], axis=1)  # calls with n misses or more
    if (np.diff(at_least, axis=0) > 0).any():
        raise ValueError("more slots have more misses in a table")


@compiled
def _distances(
    ids: npt.NDArray[np.uint16],
    row_start: npt.NDArray[np.int64],
    phase: npt.NDArray[np.uint8],
    wanted: int,
    n_expert: int,
    distances: Distances,
) -> None:
    """Fill `distances`: an expert's place is one more than the number of experts that were used after it."""
    used_at = np.zeros(n_expert, np.int64)  # 0 is never
    called = np.full(n_expert, -1, np.int64)
    now = 0
    at = 0
    for c in range(len(phase)):
        if phase[c] == wanted:
            size = 0
            for r in range(row_start[c], row_start[c + 1]):
                for j in range(ids.shape[1]):
                    e = ids[r, j]
                    if called[e] == c:
                        continue
                    called[e] = c
                    place = 1
                    last = used_at[e]
                    for other in range(n_expert):
                        place += used_at[other] > last
                    distances[at, size] = place if last else n_expert + 1
                    size += 1
            at += 1
        for r in range(row_start[c], row_start[c + 1]):
            for j in range(ids.shape[1]):
                now += 1
                used_at[ids[r, j]] = now


@compiled
def _count(distances: Distances, table: Counts) -> None:
    """Add to `table` at which slots the misses of a call change; summed down, these are the calls.  Rows are sorted."""
    slots = table.shape[0]
    for c in range(distances.shape[0]):
        misses = 0
        for j in range(distances.shape[1]):
            misses += distances[c, j] > 0
        table[0, misses] += 1
        for j in range(distances.shape[1]):
            place = distances[c, j]
            if 0 < place < slots:
                table[place, misses] -= 1
                misses -= 1
                table[place, misses] += 1
