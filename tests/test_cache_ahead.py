"""What a cache of experts reads before it is used: the next layer, what is likely, and the second half of a blob."""

from __future__ import annotations

import numpy as np
import pytest

from bel.formats.bundle import Bundle
from bel.runtime.expert_cache import GUESSED_READS
from bel.runtime.slot_budget import call_bytes, slots_bytes
from guarded import N_EXPERT, REACHED, everything, made
from guarded import bundle as bundle


def test_a_prompt_reads_the_next_layer_ahead_and_nothing_behind_the_last(bundle: Bundle) -> None:
    """The MTP block is never called: to read it would be gigabytes of a large model in vain."""
    stride = bundle.manifest.layers[0].stride_bytes
    with made(bundle, "lru", [2, 2, 2, 0], prefetch_bytes=3 * stride) as it:
        counters, reads = it.cache.counters.now, []
        for place in REACHED:
            it.cache.serve(place, everything(30))
            reads.append(counters.read_bytes)
            assert bool(it.reader.in_flight) == (place < 2)
        it.cache.settle()
        assert counters.prefetched_hits >= 6
        assert counters.wasted == 0
        assert reads[-1] == N_EXPERT * sum(layer.stride_bytes for layer in it.layers[:3])


@pytest.mark.parametrize("n_ahead", [0, 3])
def test_blobs_of_different_sizes_are_not_held_beside_each_other(bundle: Bundle, n_ahead: int) -> None:
    """What the last layer needed is given back where the next one cannot use it; with full slots nothing else hides it."""
    layers, slots, ahead = bundle.manifest.layers, [2, 2, 2, 0], n_ahead * bundle.manifest.layers[0].stride_bytes
    with made(bundle, "lru", slots, prefetch_bytes=ahead) as it:
        it.cache.preload([[0, 1], [0, 1], [0, 1], []])
        for _ in range(2):
            for place in REACHED:
                it.cache.serve(place, everything(30))
            it.cache.settle()
        assert it.reader.most_bytes <= slots_bytes(layers, slots) + call_bytes(layers, slots, 30, ahead)
        assert it.arena.held_bytes() == slots_bytes(layers, slots)


def test_a_token_reads_ahead_what_is_likely_and_missing(bundle: Bundle) -> None:
    """A few of them, in the order given; what came in vain goes, and its pages serve the next guess."""
    one = np.array([[1, 2]], np.uint16)
    with made(bundle, "lru", [2, 2, 2, 0], prefetch_bytes=1 << 30) as it:
        it.cache.serve(0, one)
        assert not it.reader.in_flight, "nothing is likely"
        it.cache.settle()
        it.cache.preload([[], [1], [], []])
        counters, asked = it.cache.counters.now, []

        def likely(following: int) -> list[int]:
            asked.append(following)
            return [1, 2, 7, 3]

        it.cache.serve(0, one, likely=likely)
        assert it.reader.in_flight
        it.cache.serve(1, one, likely=likely)
        assert (counters.prefetched_hits, counters.missed, counters.wasted) == (1, 1, 1), "2 came ahead, 7 was not wanted"
        it.assert_there(1, [1, 2])
        it.cache.serve(2, one, likely=likely)
        assert asked == [1, 2], "behind the last layer comes another token"
        it.cache.settle()
        assert it.arena.held_bytes() <= slots_bytes(it.layers, it.cache.slots) + GUESSED_READS * it.layers[0].stride_bytes


def test_without_room_nothing_is_guessed(bundle: Bundle) -> None:
    """Not even asked for: a guess takes time."""
    with made(bundle, "lru", [2, 2, 2, 0]) as it:
        it.cache.serve(0, np.array([[1, 2]], np.uint16), likely=lambda _: pytest.fail("asked"))


def test_the_second_half_may_come_later(bundle: Bundle) -> None:
    """Unless the whole is asked for: what the first products need is there, and `finish` brings the rest."""
    with made(bundle, "lru", [2, 2, 2, 0]) as it:
        assert it.pager.has_rest(0)
        it.cache.serve(0, np.array([[3, 5]], np.uint16), whole=False)
        assert len(it.reader.in_flight) == 1
        it.cache.finish()
        assert not it.reader.in_flight
        it.assert_there(0, [3, 5])


def test_a_graph_that_ended_early_leaves_nothing_on_its_way_into_moved_pages(bundle: Bundle) -> None:
    """Its reads end before their pages go to another expert (`GuardedArena` looks)."""
    with made(bundle, "lru", [2, 2, 2, 0]) as it:
        it.cache.serve(0, np.array([[3, 5]], np.uint16), whole=False)
        it.cache.serve(0, np.array([[1, 2]], np.uint16), whole=False)
        it.cache.finish()
        it.assert_there(0, [1, 2])
