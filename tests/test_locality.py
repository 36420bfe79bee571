"""Measures of unevenness and of locality in time, each against its definition in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.trace import DECODE
from bel.profiler.belady import belady_hits
from bel.profiler.locality import (
    MAX_GAP,
    MAX_SCH_ROWS,
    by_use,
    entropy,
    gap_quantile,
    reuse,
    segment_cache_hits,
    segment_routing,
    top_overlap,
    top_share,
)
from routes import draw_rows, layer_calls

seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(("n_expert", "share"), [(64, 6 / 64), (32, 3 / 32), (8, 1 / 8), (5, 1 / 5)])
def test_flat_usage(n_expert: int, share: float) -> None:
    counts = np.full(n_expert, 7)
    assert top_share(counts) == pytest.approx(share)
    assert entropy(counts) == pytest.approx(1)


def test_one_expert_has_it_all() -> None:
    counts = np.array([0, 0, 9, 0])
    assert (top_share(counts), entropy(counts)) == (1.0, 0.0)


def test_a_known_share_and_entropy() -> None:
    counts = np.array([8, 4, 2, 2])
    assert top_share(counts) == 0.5
    assert entropy(counts) == pytest.approx(1.75 / 2)


def test_nothing_is_known_of_no_selections() -> None:
    none = np.zeros(8, np.int64)
    assert (top_share(none), entropy(none), top_overlap(none, none)) == (None, None, None)
    assert entropy(np.array([5])) is None


def test_the_lower_id_comes_first_among_equals() -> None:
    assert by_use(np.array([3, 5, 3, 5])).tolist() == [1, 3, 0, 2]


def test_overlap_of_top_halves() -> None:
    one, other = np.array([9, 8, 7, 6, 1, 1, 1, 1]), np.array([1, 1, 9, 9, 9, 9, 1, 1])
    assert (top_overlap(one, one), top_overlap(one, other), top_overlap(one, one[::-1])) == (1.0, 0.5, 0.0)


@settings(max_examples=40)
@given(seeds, st.integers(1, 60), st.integers(2, 9))
def test_reuse(seed: int, count: int, n_expert: int) -> None:
    random = np.random.default_rng(seed)
    ids = draw_rows(random, count, n_expert, 2)
    token = np.cumsum(random.integers(0, 2, count))  # with 0 a row does not follow the one before
    counted = random.random(count) < 0.7
    found = reuse(ids, token, counted, n_expert)
    last: dict[int, int] = {}
    gaps = [0] * (MAX_GAP + 1)
    repeated = repeatable = 0
    for r, row in enumerate(ids.tolist()):
        for e in row:
            if counted[r]:
                gaps[r - last[e] if e in last else 0] += 1
                if r and token[r] == token[r - 1] + 1:
                    repeatable += 1
                    repeated += e in ids[r - 1]
        last.update(dict.fromkeys(row, r))
    assert (found.gaps.tolist(), found.repeated, found.repeatable) == (gaps, repeated, repeatable)


def test_gap_quantiles() -> None:
    gaps = np.zeros(MAX_GAP + 1, np.int64)
    assert gap_quantile(gaps, 0.5) is None
    gaps[[0, 1, 2, 10]] = [100, 5, 3, 2]
    assert [gap_quantile(gaps, q) for q in (0.1, 0.5, 0.51, 0.8, 0.81, 1)] == [1, 1, 2, 2, 10, 10]


@settings(max_examples=40)
@given(seeds, st.integers(0, 50), st.integers(2, 9), st.integers(1, 12))
def test_segment_routing(seed: int, count: int, n_expert: int, tokens: int) -> None:
    ids = draw_rows(np.random.default_rng(seed), count, n_expert, 2)
    total, segments = segment_routing(ids, n_expert, tokens)
    assert segments == count // tokens
    best = 0.0
    for s in range(segments):
        uses = np.bincount(ids[s * tokens : (s + 1) * tokens].ravel(), minlength=n_expert).tolist()
        chosen = [[c for c in uses if c >= t] for t in range(1, tokens + 1)]
        best += max(2 * sum(c) / (tokens * len(c) + sum(uses)) for c in chosen)
    assert total == pytest.approx(best)
    assert 0 <= total <= segments


def test_segment_routing_of_many_segments_is_chunked_without_a_seam() -> None:
    ids = draw_rows(np.random.default_rng(1), 500, 6, 2)
    rows = np.tile(ids, (20, 1))  # 10 000 rows, over 4096 segments of one token or two
    assert segment_routing(rows, 6, 1) == (10000, 10000)
    once, many = segment_routing(ids, 6, 2), segment_routing(rows, 6, 2)
    assert many[1] == 20 * once[1]
    assert many[0] == pytest.approx(20 * once[0])


@settings(max_examples=60)
@given(seeds, st.integers(1, 50), st.integers(3, 9), st.sampled_from([1, 4, 16, 100]), st.integers(2, 9))
def test_segment_cache(seed: int, count: int, n_expert: int, tokens: int, slots: int) -> None:
    ids = draw_rows(np.random.default_rng(seed), count, n_expert, 2)
    hits, accesses = segment_cache_hits(ids, n_expert, tokens, slots)
    cache: dict[int, int] = {}  # expert -> last use
    want = 0
    for r, row in enumerate(ids.tolist()):
        want += len(cache.keys() & set(row))
        cache.update({e: 2 * r + j for j, e in enumerate(row)})
        ahead = ids[r + 1 : r + 1 + tokens].ravel().tolist()
        others = sorted(cache.keys() - set(row), key=lambda e: (ahead.count(e), cache[e]))
        for e in others[: max(0, len(cache) - slots)]:
            del cache[e]
    assert (hits, accesses) == (want, 2 * count)
    best = belady_hits(layer_calls([(DECODE, [row]) for row in ids.tolist()], n_expert, 2))
    assert hits <= best[min(slots, n_expert)]


def test_segment_cache_looks_at_a_bounded_number_of_rows() -> None:
    rows = np.zeros((MAX_SCH_ROWS + 5, 1), np.uint16)
    assert segment_cache_hits(rows, 2, 4, 1) == (MAX_SCH_ROWS - 1, MAX_SCH_ROWS)


def test_segment_cache_needs_room_for_a_token() -> None:
    with pytest.raises(ValueError, match="1 slots do not hold the 2 experts"):
        segment_cache_hits(np.zeros((3, 2), np.uint16), 4, 4, 1)


def test_local_work_has_more_reuse_than_shuffled_work() -> None:
    random = np.random.default_rng(5)
    ids = draw_rows(random, 2000, 32, 4)
    shuffled = random.permutation(ids)
    counted, token = np.ones(2000, np.bool_), np.arange(2000)
    local, mixed = (reuse(x, token, counted, 32) for x in (ids, shuffled))
    assert local.repeated > 1.2 * mixed.repeated
    assert segment_routing(ids, 32, 4)[0] > segment_routing(shuffled, 32, 4)[0]
    assert top_share(np.bincount(ids.ravel())) == top_share(np.bincount(shuffled.ravel()))
    assert math.isclose(entropy(np.bincount(ids.ravel())) or 0, entropy(np.bincount(shuffled.ravel())) or 1)
