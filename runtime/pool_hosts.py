"""Experts in host memory, from which the slots are filled and missing experts computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bel.formats.bundle import Bundle
from bel.formats.errors import MachineError
from bel.formats.experts_file import PAGE_BYTES, LayerLayout
from bel.formats.units import align_up, format_bytes
from bel.runtime.file_watch import FileWatch
from bel.runtime.pager import Pager
from bel.runtime.pool_home import Home
from bel.runtime.readers import open_reader


@dataclass(frozen=True, slots=True)
class PartRoom:
    """A projection of all experts of a layer: that of number n begins at `base + n * stride_bytes`."""

    base: int
    stride_bytes: int


class HostExperts:
    """Memory that the home copies from fast, `size_bytes` from `address` on, a page's beginning.

    `parts[i][p]` is where projection p of layer i stands, in the order of the layer's blobs; expert e is number `index(i, e)`
    there.  Close it once nothing reads it any more.
    """

    def __init__(self, home: Home, layers: Sequence[LayerLayout], size_bytes: int) -> None:
        self._home = home
        self.layers = tuple(layers)
        self.parts: list[list[PartRoom]] = []
        self.size_bytes = size_bytes + PAGE_BYTES  # a buffer need not begin with a page
        abi = home.abi
        kind = home.host_kind if home.host_kind is not None else abi.lib.ggml_backend_cpu_buffer_type()
        self._buffer: Any = abi.lib.ggml_backend_buft_alloc_buffer(kind, self.size_bytes)
        if self._buffer == abi.ffi.NULL:
            raise MachineError(f"the machine has no {format_bytes(self.size_bytes)} of memory for the experts")
        view = abi.ffi.cast("struct buffer *", self._buffer)
        self.is_pinned = home.host_kind is not None and view.type == home.host_kind
        """Whether the home copies from it by itself.  A device's library takes common memory where it gets no other."""
        self.address = align_up(abi.number(abi.lib.ggml_backend_buffer_get_base(self._buffer)), PAGE_BYTES)

    @property
    def buffer(self) -> int:
        """The address of the `ggml_backend_buffer`."""
        return self._home.abi.number(self._buffer)

    def index(self, i: int, expert: int) -> int:
        """Number of an expert in its layer's memory."""
        del i
        return expert

    def addresses(self, i: int, expert: int) -> list[int]:
        """Where each part of an expert of layer i stands in this process."""
        number = self.index(i, expert)
        return [part.base + number * part.stride_bytes for part in self.parts[i]]

    def close(self) -> None:
        """Give the memory back.  A second call does nothing."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._home.abi.lib.ggml_backend_buffer_free(buffer)


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
