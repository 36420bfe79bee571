"""Slots filled from a real bundle, without llama.cpp: whatever is called in whatever order, the bytes are the file's, the
memory is what was promised, and the counts are the simulator's."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import archs
import synth
from arch_parts import Shape
from bel.formats.bundle import Bundle, open_bundle
from bel.formats.errors import DamagedBundleError, MachineError, UsageError
from bel.formats.experts_file import PAGE_BYTES, LayerLayout
from bel.formats.trace import DECODE
from bel.profiler.replay import layer_stream, replay
from bel.runtime.arena import Arena
from bel.runtime.expert_cache import GUESSED_READS, ExpertCache
from bel.runtime.pager import Pager
from bel.runtime.policies import parse_policy
from bel.runtime.readers import Reader, open_reader
from bel.runtime.reads import Read
from bel.runtime.slot_budget import call_bytes, slots_bytes
from exactness import repack
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
N_EXPERT, TOP_K = 8, 2
REACHED = (0, 1, 2)  # places of the layers that are called; the one behind them is an MTP block


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Three layers, and an MTP block that is never called.  The last layer's blobs are smaller, and come in one read."""
    folder = tmp_path_factory.mktemp("cache")
    make = archs._tensor

    def tensor(name: str, ne: tuple[int, ...], seed: int, expert_type: int, s: Shape) -> synth.Tensor:
        return make(name, ne, seed, archs.type_id("q8_0") if name.startswith("blk.3.ffn_down_exps") else expert_type, s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archs, "_tensor", tensor)
        source = archs.make_model("glm4moe", folder / "m.gguf", quant="f16", n_layer=5, n_embd=256, n_ff_exp=256)
    made = open_bundle(repack(source, folder / "m.bel"))
    layers = made.manifest.layers
    assert [layer.is_mtp for layer in layers] == [False, False, False, True]
    assert len({layer.stride_bytes for layer in layers}) == 2
    return made


@dataclass
class Watched:
    """A reader of the real kind that knows what is in flight, and the most memory that the range held when reads ended."""

    reader: Reader
    arena: GuardedArena
    in_flight: dict[int, list[Read]] = field(default_factory=dict)
    most_bytes: int = 0

    @property
    def name(self) -> str:
        return self.reader.name

    @property
    def why(self) -> str:
        return self.reader.why

    def submit(self, reads: Sequence[Read], tag: int) -> None:
        self.reader.submit(reads, tag)
        self.in_flight.setdefault(tag, []).extend(reads)

    def wait(self, tag: int) -> None:
        try:
            self.reader.wait(tag)
        finally:
            del self.in_flight[tag]
        self.most_bytes = max(self.most_bytes, self.arena.held_bytes())

    def close(self) -> None:
        self.reader.close()


class GuardedArena(Arena):
    """Refuses to take or give pages while a read is on its way into them: it would end in another expert."""

    reads: Watched

    def move(self, source: int, target: int, size_bytes: int) -> None:
        self._assert_quiet(source, size_bytes)
        self._assert_quiet(target, size_bytes)
        super().move(source, target, size_bytes)

    def drop(self, address: int, size_bytes: int) -> None:
        if hasattr(self, "reads"):  # not yet while it tries itself
            self._assert_quiet(address, size_bytes)
        super().drop(address, size_bytes)

    def _assert_quiet(self, address: int, size_bytes: int) -> None:
        for read in (read for reads in self.reads.in_flight.values() for read in reads):
            assert read.address + read.size_bytes <= address or address + size_bytes <= read.address, read

    def held_bytes(self) -> int:
        """Memory that stands in the range (mincore(2))."""
        pages = (ctypes.c_ubyte * (self.size_bytes // PAGE_BYTES))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(self.base), ctypes.c_size_t(self.size_bytes), pages) == 0
        return PAGE_BYTES * int((np.frombuffer(pages, np.uint8) & 1).sum())


@dataclass
class Made:
    """A cache of a bundle, and the parts that it is made of."""

    layers: tuple[LayerLayout, ...]
    cache: ExpertCache
    arena: GuardedArena
    reader: Watched
    pager: Pager
    files: list[npt.NDArray[np.uint8]]

    def assert_there(self, place: int, experts: Sequence[int]) -> None:
        layer = self.layers[place]
        for expert in experts:
            at = layer.offset_bytes + expert * layer.stride_bytes
            expected = self.files[layer.shard][at : at + layer.stride_bytes]
            memory = (ctypes.c_ubyte * layer.stride_bytes).from_address(self.arena.address(place, expert))
            assert np.array_equal(np.frombuffer(memory, np.uint8), expected), (place, expert)


@contextmanager
def made(
    bundle: Bundle,
    policy: str,
    slots: Sequence[int],
    *,
    prefetch_bytes: int = 0,
    reader: str = "threads",
    moves_pages: bool = True,
    checks: bool = True,
) -> Iterator[Made]:
    layers = bundle.manifest.layers
    paths = [bundle.path(row.name) for row in bundle.manifest.experts]
    with ExitStack() as stack:
        arena = GuardedArena(layers)
        stack.callback(arena.close)
        arena.moves_pages = arena.moves_pages and moves_pages
        watched = Watched(open_reader(paths, kind=reader), arena)
        stack.callback(watched.close)
        arena.reads = watched
        pager = Pager(bundle, watched, checks=checks)
        cache = ExpertCache(pager, arena, parse_policy(policy), slots, prefetch_bytes=prefetch_bytes)
        yield Made(layers, cache, arena, watched, pager, [np.memmap(path, np.uint8, "r") for path in paths])


# --- any work -------------------------------------------------------------------------------------------------------


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


# --- reading ahead --------------------------------------------------------------------------------------------------


def everything(rows: int = N_EXPERT // TOP_K) -> npt.NDArray[np.uint16]:
    """A call that uses every expert."""
    return (np.arange(rows * TOP_K) % N_EXPERT).astype(np.uint16).reshape(rows, TOP_K)


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


# --- failures -------------------------------------------------------------------------------------------------------


@contextmanager
def cut_short(bundle: Bundle, tmp_path: Path, keep_bytes: int, **options: Any) -> Iterator[Made]:
    """A cache on a copy of the bundle whose experts file was cut after it was opened."""
    copy = open_bundle(Path(shutil.copytree(bundle.folder, tmp_path / "copy.bel")))
    (row,) = copy.manifest.experts
    whole = np.fromfile(copy.path(row.name), np.uint8)
    with made(copy, "lru", [4, 4, 4, 0], **options) as it:
        it.files = [whole]
        os.truncate(copy.path(row.name), keep_bytes)
        yield it


@pytest.mark.parametrize("kind", ["threads", "buffered", "auto"])
@pytest.mark.parametrize("half", ["first", "rest", "ahead"])
def test_a_failed_read_ends_the_cache(bundle: Bundle, kind: str, half: str, tmp_path: Path) -> None:
    """Nothing is left in flight, and nothing is served any more: the policy believes that the blob is there."""
    layer, following = bundle.manifest.layers[:2]
    end = {
        "first": layer.offset_bytes + 7 * layer.stride_bytes,
        "rest": layer.offset_bytes + 8 * layer.stride_bytes - PAGE_BYTES,
        "ahead": following.offset_bytes + PAGE_BYTES,
    }[half]
    ahead = 8 * layer.stride_bytes if half == "ahead" else 0
    with cut_short(bundle, tmp_path, end, reader=kind, prefetch_bytes=ahead) as it:
        it.cache.serve(0, np.array([[0, 1]], np.uint16))
        with pytest.raises(DamagedBundleError, match="the file ends"):
            if half == "ahead":
                it.cache.serve(0, everything(30))
                it.cache.settle()
            else:
                it.cache.serve(0, np.array([[7, 2]], np.uint16))
        assert not it.reader.in_flight
        it.cache.finish()  # there is nothing to wait for
        for again in (
            lambda: it.cache.serve(0, np.array([[0, 1]], np.uint16)),
            lambda: it.cache.serve(1, np.array([[0, 1]], np.uint16)),
            lambda: it.cache.preload([[3], [], [], []]),
            it.cache.settle,
        ):
            with pytest.raises(MachineError, match="cannot be trusted"):
                again()
            assert not it.reader.in_flight


def test_a_rest_that_fails_later_ends_the_cache(bundle: Bundle, tmp_path: Path) -> None:
    """The first half came, its products may have been computed; the last product never is."""
    layer = bundle.manifest.layers[0]
    with cut_short(bundle, tmp_path, layer.offset_bytes + 8 * layer.stride_bytes - PAGE_BYTES) as it:
        it.cache.serve(0, np.array([[7, 2]], np.uint16), whole=False)
        with pytest.raises(DamagedBundleError, match="the file ends"):
            it.cache.finish()
        assert not it.reader.in_flight
        with pytest.raises(MachineError, match="cannot be trusted"):
            it.cache.serve(1, np.array([[0, 1]], np.uint16))


def test_a_preload_that_fails_leaves_nothing_in_flight(bundle: Bundle, tmp_path: Path) -> None:
    layer = bundle.manifest.layers[0]
    with cut_short(bundle, tmp_path, layer.offset_bytes + PAGE_BYTES) as it:
        with pytest.raises(DamagedBundleError, match="the file ends"):
            it.cache.preload([[0, 1, 2], [], [], []])
        assert not it.reader.in_flight


@pytest.mark.parametrize("count", [-1, N_EXPERT + 1])
def test_slots_that_a_layer_cannot_have(bundle: Bundle, count: int) -> None:
    with pytest.raises(UsageError, match=f"has 8 experts, not room for {count} slots"), made(bundle, "lru", [2, count, 2, 0]):
        pass
