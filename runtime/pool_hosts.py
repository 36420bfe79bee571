"""The experts in host memory, from which the slots are filled and missing experts computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from bel.formats.bundle import Bundle
from bel.formats.errors import MachineError
from bel.formats.experts_file import PAGE_BYTES, BlobPart, LayerLayout
from bel.formats.units import align_up, format_bytes
from bel.runtime.file_watch import FileWatch
from bel.runtime.pager import FIRST, REST, Load, Pager
from bel.runtime.pool_home import Home
from bel.runtime.readers import open_reader

_READ_BYTES = 64 << 20
"""Blobs of about so many bytes are read at once."""


class HostExperts:
    """Room for experts of `layers` in memory that the home copies from fast; `read_experts` fills it.

    Layer i has room for `counts[i]` blobs, one behind the other, `strides[i]` bytes apart from `bases[i]` on: expert e is blob
    number `index(i, e)`.  `extra_bytes` stand at `extra`.  Close it once nothing reads it any more.
    """

    def __init__(self, home: Home, layers: Sequence[LayerLayout], counts: Sequence[int], *, extra_bytes: int = 0) -> None:
        self._home = home
        self.layers = tuple(layers)
        self.strides = [layer.stride_bytes for layer in layers]
        sizes = _sizes(layers, counts)
        self.size_bytes = room_bytes(layers, counts) + extra_bytes
        abi = home.abi
        kind = home.host_kind if home.host_kind is not None else abi.lib.ggml_backend_cpu_buffer_type()
        self._buffer: Any = abi.lib.ggml_backend_buft_alloc_buffer(kind, self.size_bytes)
        if self._buffer == abi.ffi.NULL:
            raise MachineError(f"the machine has no {format_bytes(self.size_bytes)} of memory for the experts")
        view = abi.ffi.cast("struct buffer *", self._buffer)
        self.is_pinned = home.host_kind is not None and view.type == home.host_kind
        """Whether the home copies from it by itself.  A device's library takes common memory where it gets no other."""
        start = align_up(abi.number(abi.lib.ggml_backend_buffer_get_base(self._buffer)), PAGE_BYTES)
        self.bases = [start + sum(sizes[:i]) for i in range(len(sizes))]
        self.extra = start + sum(sizes)

    def index(self, i: int, expert: int) -> int:
        """Number of an expert's blob in its layer's memory."""
        del i
        return expert

    def address(self, i: int, expert: int, part: BlobPart | None = None) -> int:
        """Where an expert of layer i, or a part of it, stands in this process."""
        offset = 0 if part is None else part.offset_bytes
        return self.bases[i] + self.index(i, expert) * self.strides[i] + offset

    def close(self) -> None:
        """Give the memory back.  A second call does nothing."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._home.abi.lib.ggml_backend_buffer_free(buffer)


def room_bytes(layers: Sequence[LayerLayout], counts: Sequence[int]) -> int:
    """Bytes of the room for so many experts of each layer."""
    return sum(_sizes(layers, counts)) + PAGE_BYTES  # a buffer need not begin with a page


def _sizes(layers: Sequence[LayerLayout], counts: Sequence[int]) -> list[int]:
    """Kernels read a little behind the last expert of a layer."""
    return [align_up(x.stride_bytes * count, PAGE_BYTES) + PAGE_BYTES for x, count in zip(layers, counts, strict=True)]


def read_experts(
    home: Home, bundle: Bundle, places: Sequence[int], *, reader: str = "auto", checks: bool = True
) -> HostExperts:
    """All experts of the layers at `places` of a bundle, read once."""
    layers = [bundle.manifest.layers[place] for place in places]
    hosts = HostExperts(home, layers, [layer.n_expert for layer in layers])
    try:
        with bundle_pager(bundle, reader, checks) as pager:
            for i, place in enumerate(places):
                _read_layer(hosts, pager, i, place)
    except BaseException:
        hosts.close()
        raise
    return hosts


def _read_layer(hosts: HostExperts, pager: Pager, i: int, place: int) -> None:
    layer = hosts.layers[i]
    step = max(1, _READ_BYTES // layer.stride_bytes)
    for first in range(0, layer.n_expert, step):
        experts = range(first, min(first + step, layer.n_expert))
        loads = [Load(place, expert, hosts.address(i, expert)) for expert in experts]
        for half in (FIRST, REST) if pager.has_rest(place) else (FIRST,):
            pager.finish(pager.start(loads, half))
            pager.check(loads, half)


@contextlib.contextmanager
def bundle_pager(bundle: Bundle, kind: str, checks: bool) -> Iterator[Pager]:
    """A pager of a bundle's files; nothing is on its way any more once it is left."""
    paths = [bundle.path(row.name) for row in bundle.manifest.experts]
    watch = FileWatch(paths)
    try:
        pager = Pager(bundle, open_reader(paths, kind=kind), watch=watch, checks=checks)
        try:
            yield pager
        except BaseException:
            pager.abandon()
            raise
        finally:
            pager.close()
    finally:
        watch.close()
