"""Any work of a cache of experts: the bytes are the file's, the memory is what was promised, the counts are the simulator's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.bundle import Bundle
from bel.formats.trace import DECODE
from bel.profiler.replay import layer_stream, replay
from bel.runtime.expert_cache import GUESSED_READS
from bel.runtime.policies import parse_policy
from bel.runtime.slot_budget import call_bytes, slots_bytes
from guarded import N_EXPERT, REACHED, TOP_K, Made, made
from guarded import bundle as bundle
from routes import layer_calls

POLICIES = (
    "static",
    "lru",
    "lfu-forget",
    "lfu-ghost",
    "lfu-decay:0.9",
    "lfuda",
    "slru",
    "arc",
    "s3fifo",
    "repick:3",
    "random",
)


@dataclass(frozen=True)
class Graph:
    """One ubatch: ids (rows, top_k) for each layer that is called.  Fewer layers than there are: it ended early.

    `is_whole` for each call: all of the experts is wanted at once.  Else `finishes` says whether the rest is waited for
    before the next layer, as in a graph that goes on.
    """

    calls: tuple[npt.NDArray[np.uint16], ...]
    is_whole: tuple[bool, ...]
    ends_last_call: bool
    likely: tuple[list[int], ...]
    """What is guessed for each next layer; right, wrong or nothing."""


@st.composite
def graphs(draw: st.DrawFn) -> list[Graph]:
    """A prompt or two, and tokens; sometimes an ubatch that ends in the middle."""
    found = []
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    for _ in range(draw(st.integers(1, 8))):
        rows = draw(st.sampled_from([1, 1, 1, 2, 5, 30]))
        n = draw(st.sampled_from([3, 3, 3, 1, 2]))
        favourites = random.permutation(N_EXPERT)[: draw(st.sampled_from([3, 5, N_EXPERT]))]
        calls = tuple(
            np.stack([random.choice(favourites, TOP_K, replace=False) for _ in range(rows)]).astype(np.uint16) for _ in range(n)
        )
        is_whole = tuple(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
        likely = tuple(random.permutation(N_EXPERT)[: draw(st.integers(0, 3))].tolist() for _ in range(n))
        found.append(Graph(calls, is_whole, n == len(REACHED) or draw(st.booleans()), likely))
    return found


def run(it: Made, work: Sequence[Graph], most_bytes: int) -> None:
    """Serve graphs, and look at memory after each step."""
    for graph in work:
        for place, (ids, is_whole) in enumerate(zip(graph.calls, graph.is_whole, strict=True)):
            guess = graph.likely[place]
            it.cache.serve(place, ids, whole=is_whole, likely=lambda _, guess=guess: guess)  # type: ignore[misc]
            assert max(it.arena.held_bytes(), it.reader.most_bytes) <= most_bytes
            if not is_whole and (place + 1 < len(graph.calls) or graph.ends_last_call):
                it.cache.finish()
            if is_whole or place + 1 < len(graph.calls) or graph.ends_last_call:
                it.assert_there(place, np.unique(ids).tolist())
        if len(graph.calls) == len(REACHED):
            it.cache.settle()
            kept = min(GUESSED_READS * it.layers[0].stride_bytes, it.cache.prefetch_bytes)
            assert it.arena.held_bytes() <= slots_bytes(it.layers, it.cache.slots) + kept
            assert not it.reader.in_flight
            for place in REACHED:
                it.assert_there(place, it.cache.resident(place))
    it.cache.settle()


@settings(max_examples=60)
@given(data=st.data())
def test_any_work_has_its_bytes_in_its_memory(bundle: Bundle, data: st.DataObject) -> None:
    """All policies, single rows and prompts larger than the slots, reading ahead or not, pages moved or not."""
    layers = bundle.manifest.layers
    policy = data.draw(st.sampled_from(POLICIES))
    slots = [*data.draw(st.lists(st.integers(TOP_K, N_EXPERT), min_size=3, max_size=3)), 0]
    ahead = data.draw(st.sampled_from([0, 2, 5, 100])) * layers[0].stride_bytes
    preloaded = [*(list(data.draw(st.permutations(range(N_EXPERT))))[: data.draw(st.integers(0, 8))] for _ in range(3)), []]
    work = data.draw(graphs())
    kind = data.draw(st.sampled_from(["threads", "buffered", "auto"]))
    with made(bundle, policy, slots, prefetch_bytes=ahead, reader=kind, moves_pages=data.draw(st.integers(0, 3)) > 0) as it:
        uploaded = it.cache.preload(preloaded)
        assert uploaded == sum(min(s, len(p)) * x.stride_bytes for s, p, x in zip(slots, preloaded, layers, strict=True))
        rows = max(len(ids) for graph in work for ids in graph.calls)
        run(it, work, slots_bytes(layers, slots) + call_bytes(layers, slots, rows, ahead))
        counters = it.cache.counters.now
        assert (counters.accesses, counters.missed, counters.uploads) == simulated(policy, slots, preloaded, work)
        assert counters.calls == sum(len(graph.calls) for graph in work)
        assert counters.prefetched_hits <= counters.missed
        assert ahead or not counters.wasted + counters.prefetched_hits
        if len({layers[place].stride_bytes for place in range(max(len(g.calls) for g in work))}) == 1:
            blobs = counters.missed + counters.uploads + counters.wasted
            assert counters.read_bytes == blobs * layers[0].stride_bytes, "what was preloaded belongs to no call"


def simulated(policy: str, slots: Sequence[int], preloaded: Sequence[list[int]], work: Sequence[Graph]) -> tuple[int, int, int]:
    """Accesses, misses and uploads of all layers, as the simulator replays the same calls."""
    totals = np.zeros(3, np.int64)
    for place in REACHED:
        calls = [graph.calls[place] for graph in work if place < len(graph.calls)]
        if calls:
            recorded = layer_calls([(DECODE, ids.tolist()) for ids in calls], N_EXPERT, TOP_K)
            stream = layer_stream(recorded, np.ones(len(calls), np.bool_))
            ones = np.ones(N_EXPERT, np.int64)
            found = replay(parse_policy(policy), stream, ones, slots[place], preloaded=preloaded[place])
            totals += [int(x.sum()) for x in (found.distinct, found.misses, found.uploads)]
    return int(totals[0]), int(totals[1]), int(totals[2])
