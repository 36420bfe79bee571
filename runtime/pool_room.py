"""A room in host memory that a device writes to and copies from by itself, where it has such memory."""

from __future__ import annotations

from typing import Any

from bel.formats.errors import MachineError
from bel.formats.experts_file import PAGE_BYTES
from bel.formats.units import align_up, format_bytes
from bel.runtime.pool_home import Home


class HostRoom:
    """`size_bytes` from `address` on, a page's beginning.  Close it once nothing uses it any more."""

    def __init__(self, home: Home, size_bytes: int) -> None:
        self._abi = abi = home.abi
        self.size_bytes = size_bytes + PAGE_BYTES  # a buffer need not begin with a page
        kind = home.host_kind if home.host_kind is not None else abi.lib.ggml_backend_cpu_buffer_type()
        self._buffer: Any = abi.lib.ggml_backend_buft_alloc_buffer(kind, self.size_bytes)
        if self._buffer == abi.ffi.NULL:
            raise MachineError(f"the machine has no {format_bytes(self.size_bytes)} of memory for experts or their biases")
        view = abi.ffi.cast("struct buffer *", self._buffer)
        self.is_pinned = home.host_kind is not None and view.type == home.host_kind
        """Whether the home copies from it by itself.  A device's library takes common memory where it gets no other."""
        self.is_reached = self.is_pinned or (home.host_kind is None and home.kind == abi.lib.ggml_backend_cpu_buffer_type())
        """Whether the home's kernels may read and write it: a GPU's fail at common memory."""
        self.address = align_up(abi.number(abi.lib.ggml_backend_buffer_get_base(self._buffer)), PAGE_BYTES)

    @property
    def buffer(self) -> int:
        """The address of the `ggml_backend_buffer`."""
        return self._abi.number(self._buffer)

    def close(self) -> None:
        """Give the memory back.  A second call does nothing."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._abi.lib.ggml_backend_buffer_free(buffer)
