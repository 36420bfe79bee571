"""A cache of a real bundle without llama.cpp, whose reader and memory are watched: no read may end in another expert."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

import archs
import synth
from arch_parts import Shape
from bel.formats.bundle import Bundle, open_bundle
from bel.formats.experts_file import PAGE_BYTES, LayerLayout
from bel.runtime.arena import Arena
from bel.runtime.expert_cache import ExpertCache
from bel.runtime.pager import Pager
from bel.runtime.policies import parse_policy
from bel.runtime.readers import Reader, open_reader
from bel.runtime.reads import Read
from exactness import repack

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


def everything(rows: int = N_EXPERT // TOP_K) -> npt.NDArray[np.uint16]:
    """A call that uses every expert."""
    return (np.arange(rows * TOP_K) % N_EXPERT).astype(np.uint16).reshape(rows, TOP_K)
