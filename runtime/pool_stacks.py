"""All experts in host memory, in stacks as llama.cpp has them: a projection of all experts of a layer, one behind the other."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence

from bel.formats.bundle import Bundle
from bel.formats.experts_file import PAGE_BYTES, LayerLayout
from bel.formats.units import align_up
from bel.runtime.pager import FIRST, REST, Load, Pager
from bel.runtime.pool_home import Home
from bel.runtime.pool_hosts import HostExperts, PartRoom, bundle_pager

READ_BYTES = 64 << 20
"""Blobs of about so many bytes are read at once, while those before them are put in their places."""


class StackedExperts(HostExperts):
    """Stacks for all experts of `layers`; `read_experts` fills them."""

    def __init__(self, home: Home, layers: Sequence[LayerLayout]) -> None:
        super().__init__(home, layers, sum(_stack_bytes(size, layer.n_expert) for layer in layers for size in _sizes(layer)))
        end = self.address
        for layer in layers:
            rooms = []
            for size in _sizes(layer):
                rooms.append(PartRoom(end, size))
                end += _stack_bytes(size, layer.n_expert)
            self.parts.append(rooms)


def _sizes(layer: LayerLayout) -> list[int]:
    return [part.size_bytes for part in layer.parts]


def _stack_bytes(size_bytes: int, n_expert: int) -> int:
    """Kernels and copies read a little behind the last expert of a stack."""
    return align_up(size_bytes * n_expert, PAGE_BYTES) + PAGE_BYTES


def read_experts(
    home: Home, bundle: Bundle, places: Sequence[int], *, reader: str = "auto", checks: bool = True
) -> StackedExperts:
    """All experts of the layers at `places` of a bundle, read once."""
    hosts = StackedExperts(home, [bundle.manifest.layers[place] for place in places])
    try:
        with bundle_pager(bundle, reader, checks) as pager:
            _read_all(hosts, pager, places)
    except BaseException:
        hosts.close()
        raise
    return hosts


def _read_all(hosts: StackedExperts, pager: Pager, places: Sequence[int]) -> None:
    """Blobs are read into two rooms by turns; from there their parts go to the stacks."""
    room_bytes = max([READ_BYTES, *(layer.stride_bytes for layer in hosts.layers)])
    with mmap.mmap(-1, 2 * room_bytes) as memory:
        view = ctypes.c_char.from_buffer(memory)
        base = ctypes.addressof(view)
        try:
            coming: tuple[int, list[Load], list[int]] | None = None
            for number, (i, experts) in enumerate(_batches(hosts.layers, room_bytes)):
                stride, start = hosts.layers[i].stride_bytes, base + number % 2 * room_bytes
                loads = [Load(places[i], expert, start + n * stride) for n, expert in enumerate(experts)]
                halves = (FIRST, REST) if pager.has_rest(places[i]) else (FIRST,)
                started = (i, loads, [pager.start(loads, half) for half in halves])
                if coming is not None:
                    _place(hosts, pager, *coming)
                coming = started
            if coming is not None:
                _place(hosts, pager, *coming)
        except BaseException:
            pager.abandon()  # what is under way writes to this memory
            raise
        finally:
            del view


def _batches(layers: Sequence[LayerLayout], room_bytes: int) -> Iterator[tuple[int, range]]:
    for i, layer in enumerate(layers):
        step = room_bytes // layer.stride_bytes
        for first in range(0, layer.n_expert, step):
            yield i, range(first, min(first + step, layer.n_expert))


def _place(hosts: StackedExperts, pager: Pager, i: int, loads: Sequence[Load], tags: Sequence[int]) -> None:
    """Wait for blobs of layer i, compare their checksums, and copy their parts."""
    for half, tag in zip((FIRST, REST), tags, strict=False):
        pager.finish(tag)
        pager.check(loads, half)
    for load in loads:
        for part, address in zip(hosts.layers[i].parts, hosts.addresses(i, load.expert), strict=True):
            ctypes.memmove(address, load.address + part.offset_bytes, part.size_bytes)
