"""Runs over three tiers that hypothesis makes, and what a replay of one counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from hypothesis import strategies as st

from bel.formats.trace import DECODE
from bel.formats.trace_calls import LayerCalls
from bel.formats.trace_header import TraceLayer
from bel.profiler.tier_caches import LOAD, Orders, Room, Tiers
from bel.profiler.tier_links import Served, serve_tiers
from bel.runtime.policies import parse_policy
from routes import layer_calls, some_row

Call = tuple[int, list[list[int]]]  # place of the layer, rows of ids
LISTS = ("lru", "lfu-ghost", "lfu-forget")
OTHERS = ("lfu-decay:0.5", "lfuda", "slru", "arc", "s3fifo", "repick:3", "random")


@dataclass(frozen=True, slots=True)
class Run:
    """A run that hypothesis made."""

    layers: tuple[TraceLayer, ...]
    calls: tuple[Call, ...]

    @property
    def bases(self) -> list[int]:
        """The item of expert 0 of each layer."""
        return [sum(x.n_expert for x in self.layers[:place]) for place in range(len(self.layers))]

    @property
    def sizes(self) -> list[int]:
        """The bytes of each item."""
        return [x.expert_bytes or 0 for x in self.layers for _ in range(x.n_expert)]

    def recorded(self, many: int | None = None) -> list[LayerCalls]:
        """The first `many` calls as a trace has them."""
        calls = list(enumerate(self.calls[:many]))
        answer = []
        for place, info in enumerate(self.layers):
            own = [(number, rows) for number, (where, rows) in calls if where == place]
            bare = layer_calls([(DECODE, rows) for _, rows in own], info.n_expert, info.top_k)
            answer.append(replace(bare, info=info, order=np.array([number for number, _ in own], np.int64)))
        return answer


@st.composite
def runs(draw: st.DrawFn, sizes: Sequence[int] = (1, 2, 3)) -> Run:
    layers = []
    for place in range(draw(st.integers(1, 3))):
        n_expert = draw(st.integers(2, 7))
        layers.append(TraceLayer(place, n_expert, draw(st.integers(1, min(3, n_expert))), draw(st.sampled_from(sizes))))
    many = draw(st.integers(1, 25))
    some = st.one_of(*(calls_of(place, x.n_expert, x.top_k) for place, x in enumerate(layers)))
    return Run(tuple(layers), tuple(draw(st.lists(some, min_size=many, max_size=many))))


@cache
def calls_of(place: int, n_expert: int, top_k: int) -> st.SearchStrategy[Call]:
    """Calls of one layer; made once, since to make a strategy takes longer than to draw from it."""
    row = some_row(n_expert, top_k)
    one, many = st.lists(row, min_size=1, max_size=1), st.lists(row, min_size=1, max_size=4)
    return st.tuples(st.just(place), st.one_of(one, one, many))


def rooms(run: Run, *, is_shared: bool | None = None) -> st.SearchStrategy[Room]:
    per_layer = st.tuples(*(st.integers(0, x.n_expert) for x in run.layers)).map(lambda s: Room(slots=s))
    shared = st.integers(0, sum(run.sizes) + 1).map(lambda b: Room(shared_bytes=b))
    return st.one_of(*([per_layer] if not is_shared else []), *([shared] if is_shared is not False else []))


def orders(run: Run) -> st.SearchStrategy[Orders]:
    return st.tuples(*(st.lists(st.integers(0, x.n_expert - 1), unique=True).map(tuple) for x in run.layers))


def all_counted(layers: Sequence[LayerCalls]) -> list[np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    return [np.ones(len(x.phase), np.bool_) for x in layers]


def served(run: Run, tiers: Tiers, many: int | None = None) -> Served:
    layers = run.recorded(many)
    return serve_tiers(layers, all_counted(layers), tiers)


def columns(answer: Served) -> list[tuple[int, ...]]:
    links = [answer.nvme_bytes, answer.h2d_bytes, answer.d2h_bytes]
    counts = [answer.hits, answer.from_ram, answer.from_nvme, answer.cold, answer.on_cpu]
    return [tuple(int(x) for x in row) for row in zip(*counts, *(x for x in links if x is not None), strict=True)]


def tiers_for(run: Run, policies: Sequence[str], host: str, on_miss: str = LOAD) -> st.SearchStrategy[Tiers]:
    return st.builds(
        Tiers,
        policy=st.sampled_from([parse_policy(name) for name in policies]),
        vram=rooms(run),
        ram=rooms(run),
        host_tier=st.just(host),
        on_miss=st.just(on_miss),
        preloaded=st.one_of(st.just(()), orders(run)),
        ram_preloaded=st.one_of(st.just(()), orders(run)),
    )
