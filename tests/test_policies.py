"""The cache policies: equal to slow models, with and without a compiler, and what holds for all of them."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.errors import UsageError
from bel.runtime.cache_rows import CAPACITY, CONFIG, INCREMENT, NUMBERS, OWN, RESIDENT, SIZE, USED
from bel.runtime.cache_state import CacheState, make_cache, preload, residents, step
from bel.runtime.cache_step import serve
from bel.runtime.policies import parse_policy
from cache_model import ModelCache

NAMES = (
    "static",
    "lru",
    "random",
    "lfu-forget",
    "lfu-ghost",
    "lfu-decay:0.9",
    "lfuda",
    "slru",
    "arc",
    "s3fifo",
    "repick:1",
    "repick:3",
)
N_ITEMS = 9

ids = st.integers(0, N_ITEMS - 3)
calls_of = st.integers(1, 3).flatmap(
    lambda k: st.lists(
        st.tuples(
            st.lists(st.lists(ids, min_size=k, max_size=k), min_size=1, max_size=4), st.sampled_from([0, 0, 2]), st.booleans()
        ),
        max_size=25,
    )
)
sizes_of = st.one_of(st.just([1] * N_ITEMS), st.lists(st.integers(1, 5), min_size=N_ITEMS, max_size=N_ITEMS))


def model_of(name: str, sizes: list[int], capacity: int, *, keep_whole: bool) -> ModelCache:
    base, policy = name.partition(":")[0], parse_policy(name)
    return ModelCache(base, sizes, capacity, policy.decay, policy.period_tokens, keep_whole)


def rows_of(rows: list[list[int]]) -> np.ndarray:
    return np.array(rows, np.uint16)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50)
@given(calls_of, sizes_of, st.integers(0, 30), st.booleans(), st.lists(st.integers(0, N_ITEMS - 1), max_size=6))
def test_each_call_asks_what_a_plain_model_asks(
    name: str,
    calls: list[tuple[list[list[int]], int, bool]],
    sizes: list[int],
    capacity: int,
    keep_whole: bool,
    first: list[int],
) -> None:
    state = make_cache(parse_policy(name), np.array(sizes), capacity, keep_whole=keep_whole)
    model = model_of(name, sizes, capacity, keep_whole=keep_whole)
    assert preload(state, first) == model.preload(first)
    for rows, base, ticks in calls:
        got = step(state, rows_of(rows), base=base, ticks=ticks)
        want = model.call([[base + e for e in row] for row in rows], ticks=ticks)
        own = state.ints[OWN, : got.distinct].tolist()
        assert (own, got.missed) == (want.own, want.missed)
        assert (got.victims, got.cut, got.uploads) == (want.victims, want.cut, want.uploads)
        assert set(residents(state)) == model.resident
        _check_room(state, set(own) if keep_whole else set())
        assert not set(got.victims) & set(own) or name.startswith("repick"), "a set is chosen anew before the call is known"
        assert set(got.cut) <= set(own)


def _check_room(state: CacheState, whole: set[int]) -> None:
    """What is resident is no more than the capacity, but for a call that may stay whole."""
    used = int(state.ints[SIZE, residents(state)].sum())
    assert used == state.ints[CONFIG, USED]
    assert used <= state.ints[CONFIG, CAPACITY] or set(residents(state)) <= whole


@pytest.mark.parametrize("name", [n for n in NAMES if n != "static"])
def test_nothing_is_loaded_twice_and_nothing_lost(name: str) -> None:
    """Loads and evictions of many calls add up to what is resident."""
    random = np.random.default_rng(5)
    state = make_cache(parse_policy(name), random.integers(1, 9, 40), 100)
    held: set[int] = set()
    for _ in range(300):
        got = step(state, random.integers(0, 40, (int(random.integers(1, 4)), 3)).astype(np.uint16))
        assert set(got.victims) <= held
        held = (held - set(got.victims)) | set(got.uploads)
        assert not held & set(got.missed)
        held = (held | set(got.missed)) - set(got.cut)
        assert held == set(residents(state))


TRIAL = """
import hashlib, sys
import numpy as np
if sys.argv[1] == "missing":
    sys.modules["numba"] = None
from bel.runtime import compiled
if sys.argv[1] == "unwanted":
    compiled.stay_plain()
from bel.runtime.cache_state import make_cache, preload, step
from bel.runtime.policies import parse_policy
assert compiled.is_compiling() == (sys.argv[1] == "compiled")
for name in sys.argv[2:]:
    digest = hashlib.sha256()
    for seed in range(12):
        random = np.random.default_rng(seed)
        n, keep_whole = int(random.integers(6, 30)), bool(seed % 2)
        sizes = random.integers(1, 6, n) if seed % 3 else np.ones(n, np.int64)
        policy = parse_policy(name)
        state = make_cache(policy, sizes, int(random.integers(0, sizes.sum() + 1)), keep_whole=keep_whole, seed=seed)
        preload(state, random.permutation(n)[:4].tolist())
        for _ in range(60):
            rows = random.integers(0, n, (int(random.integers(1, 4)), 3)).astype(np.uint16)
            digest.update(repr(step(state, rows)).encode())
        digest.update(state.ints.tobytes() + state.reals.tobytes())
    print(name, digest.hexdigest())
"""


def test_without_a_compiler_all_is_the_same_to_the_bit() -> None:
    names = [*NAMES, "lfu-decay:0.000000000000000001"]  # counts are scaled down every ten tokens
    told = [
        subprocess.run([sys.executable, "-c", TRIAL, mode, *names], capture_output=True, text=True, check=True).stdout
        for mode in ("compiled", "missing", "unwanted")
    ]
    assert told[0] == told[1] == told[2]
    assert len(set(told[0].split()[1::2])) == len(names), "each policy does something else"


@pytest.mark.parametrize(("decay", "tokens"), [("0.98", 200_000), ("0.5", 20_000)])
def test_decayed_counts_keep_their_order_over_many_tokens(decay: str, tokens: int) -> None:
    """These many tokens pass the largest double several times; the model has 60 digits and no such bound."""
    n, slots = 12, 5
    random = np.random.default_rng(7)
    rows = np.argsort(random.random((tokens, n)) * np.linspace(1, 3, n), axis=1)[:, :2].astype(np.uint16)
    state = make_cache(parse_policy(f"lfu-decay:{decay}"), np.ones(n, np.int64), slots)
    held: set[int] = set()
    scaled = 0
    with localcontext() as context:
        context.prec, context.Emax, context.Emin = 60, 10**8, -(10**8)
        growth = 1 / Decimal(decay)
        weight, count, used = Decimal(1), [Decimal(0)] * n, [-1] * n
        for t, row in enumerate(rows.tolist()):
            weight *= growth
            for slot, e in enumerate(row):
                count[e] += weight
                used[e] = 2 * t + slot
            held |= set(row)
            if len(held) > slots:
                free = sorted(held - set(row), key=lambda e: (count[e], used[e]))
                held -= set(free[: len(held) - slots])
            before = state.reals[NUMBERS, INCREMENT]
            serve(state.ints, state.reals, rows, t, t + 1, 0, True)
            scaled += bool(state.reals[NUMBERS, INCREMENT] < before)
            assert all(state.ints[RESIDENT, e] for e in held), f"token {t}"
            assert state.ints[CONFIG, USED] == len(held)
    assert scaled > 5


def test_a_preloaded_item_is_older_than_any_used_one() -> None:
    """LFU counts are equal: the tie goes to the one used longest ago, which is the last one preloaded."""
    for name in ("lru", "lfu-ghost", "lfuda", "lfu-decay:0.98"):
        state = make_cache(parse_policy(name), np.ones(8, np.int64), 5)
        assert preload(state, [0, 1, 2, 3]) == [0, 1, 2, 3]
        gone = [step(state, rows_of([[4 + i % 4]])).victims for i in range(4)]
        assert gone == [[], [3], [2], [1]], name


def test_a_repick_swaps_items_of_other_sizes() -> None:
    """One cache for layers whose experts differ in size: a small member must not stop a large newcomer for good."""
    state = make_cache(parse_policy("repick:4"), np.array([2, 3, 3, 2]), 5)
    assert preload(state, [0, 1]) == [0, 1]
    for _ in range(4):
        step(state, rows_of([[0, 2]]))
    got = step(state, rows_of([[2, 0]]))
    assert (got.uploads, got.victims, got.missed) == ([2], [1], [])


BAD_NAMES = "|LRU|lfu-decay|lfu-decay:|lfu-decay:0|lfu-decay:1.1|lfu-decay:nan|lfu-decay:-1|repick|repick:0|repick:x|belady"
WORSE_NAMES = ("repick:99999999999", "static:x", "lru:2", "lfu-decay:\N{ARABIC-INDIC DIGIT ONE}")


@pytest.mark.parametrize("name", [*BAD_NAMES.split("|"), *WORSE_NAMES])
def test_names_that_are_no_policy(name: str) -> None:
    with pytest.raises(UsageError):
        parse_policy(name)
