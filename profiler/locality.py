"""How uneven and how local in time the choices of a layer are.  A quantity without data is None.

Counts are (n_expert,) integers.  Rows are the ids of successive tokens in one layer, (R, top_k) u16, each row without repeats.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bel.profiler.compiled import compiled

Counts = npt.NDArray[np.int64]
Rows = npt.NDArray[np.uint16]

SEGMENTS = (4, 16, 64, 256)  # tokens
MAX_GAP = 1 << 16  # tokens between two uses that are told apart; a longer gap counts as this long
MAX_SCH_ROWS = 1 << 15  # `segment_cache_hits` costs top_k * slots steps a row: this bounds it to seconds for a large model
_CHUNK_SEGMENTS = 1 << 12  # 4096 segments of 512 experts are counted in 16 MiB


def top_tenth(n_expert: int) -> int:
    """How many experts are the top 10 %: rounded down, and at least one."""
    return max(1, n_expert // 10)


def top_share(counts: Counts) -> float | None:
    """Share of the selections that the top 10 % of the experts carry; `top_tenth(n) / n` where usage is flat."""
    total = int(counts.sum())
    if not total:
        return None
    return int(np.sort(counts)[::-1][: top_tenth(len(counts))].sum()) / total


def entropy(counts: Counts) -> float | None:
    """Entropy of the choice over its largest value, log(n_expert): 1 where usage is flat, 0 where one expert has it all."""
    total = int(counts.sum())
    if not total or len(counts) < 2:
        return None
    share = counts[counts > 0] / total
    return abs(float(-(share * np.log(share)).sum() / np.log(len(counts))))


def by_use(counts: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Experts, the most used first; of equals the lower id first."""
    return np.argsort(-counts, kind="stable").astype(np.int64)


def top_overlap(one: Counts, other: Counts) -> float | None:
    """Share of the more used half of the experts of `one` that is in that half of `other` too; about 0.5 by chance."""
    half = len(one) // 2
    if not half or not one.any() or not other.any():
        return None
    return len(np.intersect1d(by_use(one)[:half], by_use(other)[:half])) / half


@dataclass(frozen=True, slots=True)
class Reuse:
    """When experts are used again.

    `gaps` (MAX_GAP + 1,) i64: uses by the number of tokens since the same expert's use before; place 0 counts first uses.
    `repeated` of `repeatable` ids were chosen by the token before too, where that token was recorded.
    """

    gaps: Counts
    repeated: int
    repeatable: int


def reuse(ids: Rows, token: npt.NDArray[np.int64], is_counted: npt.NDArray[np.bool_], n_expert: int) -> Reuse:
    """The uses of the rows in `is_counted` (R,); the others make experts recent.  `token` (R,) are positions."""
    gaps = np.zeros(MAX_GAP + 1, np.int64)
    repeats = np.zeros(2, np.int64)
    _reuse(np.ascontiguousarray(ids), token, is_counted, n_expert, gaps, repeats)
    return Reuse(gaps, int(repeats[0]), int(repeats[1]))


@compiled
def _reuse(
    ids: npt.NDArray[np.uint16],
    token: npt.NDArray[np.int64],
    is_counted: npt.NDArray[np.bool_],
    n_expert: int,
    gaps: npt.NDArray[np.int64],
    repeats: npt.NDArray[np.int64],
) -> None:
    last = np.full(n_expert, -1, np.int64)
    for r in range(len(ids)):
        follows = r > 0 and token[r] == token[r - 1] + 1
        for j in range(ids.shape[1]):
            e = ids[r, j]
            if is_counted[r]:
                gap = 0 if last[e] < 0 else min(r - last[e], len(gaps) - 1)
                gaps[gap] += 1
                if follows:
                    repeats[1] += 1
                    repeats[0] += gap == 1
            last[e] = r


def gap_quantile(gaps: Counts, quantile: float) -> int | None:
    """The smallest number of tokens within which `quantile` of the repeated uses come."""
    again = np.cumsum(gaps[1:])
    if not len(again) or not again[-1]:
        return None
    return int(np.searchsorted(again, quantile * int(again[-1]), side="left")) + 1


def segment_routing(ids: Rows, n_expert: int, tokens: int) -> tuple[float, int]:
    """SRP of the whole segments of `tokens` rows: their sum, and how many they are.

    SRP of a segment is the best F1 score of "these experts, for every token of the segment" (Liang et al., "Not All Models
    Suit Expert Offloading: On Local Routing Consistency of Mixture-of-Expert Models", 2025): with c the uses of an expert,
    the maximum over t of 2 * sum(c where c >= t) / (tokens * #(c >= t) + sum(c)).
    """
    count = len(ids) // tokens
    total = 0.0
    for at in range(0, count, _CHUNK_SEGMENTS):
        size = min(_CHUNK_SEGMENTS, count - at)
        rows = ids[at * tokens : (at + size) * tokens].astype(np.int64).reshape(size, -1)
        flat = (rows + np.arange(size)[:, None] * n_expert).ravel()
        uses = np.sort(np.bincount(flat, minlength=size * n_expert).reshape(size, n_expert), axis=1)[:, ::-1]
        covered = np.cumsum(uses, axis=1)
        # A cut between equal counts is never better than both of its ends, so that every prefix may be tried.
        scores = 2 * covered / (tokens * np.arange(1, n_expert + 1) + covered[:, -1:])
        total += float(scores.max(axis=1).sum())
    return total, count


def segment_cache_hits(ids: Rows, n_expert: int, tokens: int, slots: int) -> tuple[int, int]:
    """SCH of at most the first MAX_SCH_ROWS rows, one call each, as hits and accesses.

    The cache of `slots` (at least top_k) starts empty.  It takes in the experts of each row and drops those that the next
    `tokens` rows use least, of equals the one used longest ago.
    """
    rows = np.ascontiguousarray(ids[:MAX_SCH_ROWS])
    if slots < rows.shape[1]:
        raise ValueError(f"{slots} slots do not hold the {rows.shape[1]} experts of a token")
    return int(_segment_cache_hits(rows, n_expert, tokens, slots)), rows.size


@compiled
def _segment_cache_hits(ids: npt.NDArray[np.uint16], n_expert: int, tokens: int, slots: int) -> int:
    ahead = np.zeros(n_expert, np.int64)
    last = np.full(n_expert, -1, np.int64)
    place = np.full(n_expert, -1, np.int64)  # in `cache`
    cache = np.empty(slots + ids.shape[1], np.int64)
    size = 0
    hits = 0
    for r in range(min(tokens, len(ids))):
        for j in range(ids.shape[1]):
            ahead[ids[r, j]] += 1
    for r in range(len(ids)):
        for j in range(ids.shape[1]):
            e = ids[r, j]
            ahead[e] -= 1
            if r + tokens < len(ids):
                ahead[ids[r + tokens, j]] += 1
            last[e] = r * ids.shape[1] + j  # ids of a row are used in slot order
            if place[e] >= 0:
                hits += 1
            else:
                place[e] = size
                cache[size] = e
                size += 1
        while size > slots:
            worst = -1
            for i in range(size):
                e = cache[i]
                if last[e] >= r * ids.shape[1]:
                    continue
                if worst < 0 or ahead[e] < ahead[worst] or (ahead[e] == ahead[worst] and last[e] < last[worst]):
                    worst = e
            size -= 1
            moved = cache[size]
            cache[place[worst]] = moved
            place[moved] = place[worst]
            place[worst] = -1
    return hits
