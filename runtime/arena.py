"""The range of addresses in which expert weights stand: laid out like the experts file, and empty but for the resident blobs.

It is anonymous memory without reserve, so it costs address space and not memory.  A blob that is given up leaves its pages to
the next one (mremap moves them in microseconds, where dropping and faulting them in again costs a zeroed page for every
4 KiB), or gives them back to the machine.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from bel.formats.errors import MachineError
from bel.formats.experts_file import PAGE_BYTES, LayerLayout
from bel.formats.units import align_up, format_bytes

_MAP_NORESERVE = 0x4000  # asm-generic/mman.h; Python names it from 3.13 on
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4  # linux/mman.h
_SPARE_MAPS = 2000  # mappings that the rest of the process may need
_DEFAULT_MAX_MAPS = 65530


class Arena:
    """Room for every blob of `layers`.  `moves_pages`: whether `move` moves them, or drops and starts anew.

    Raises MachineError where the machine grants no such range of addresses.
    """

    def __init__(self, layers: Sequence[LayerLayout]) -> None:
        # llama.cpp may read 512 bytes behind the last expert of a stack (ggml-backend.cpp): there is a page behind each layer.
        starts = [0]
        for layer in layers:
            starts.append(starts[-1] + align_up(layer.n_expert * layer.stride_bytes, PAGE_BYTES) + PAGE_BYTES)
        self._starts, self._strides = starts, [layer.stride_bytes for layer in layers]
        self.size_bytes = starts[-1]
        try:
            self._memory = mmap.mmap(-1, self.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        except OSError as error:
            raise MachineError(
                f"the system grants no {format_bytes(self.size_bytes)} of addresses: {error.strerror}",
                hint="Raise `ulimit -v`, or set vm.overcommit_memory to 0",
            ) from None
        self._view = ctypes.c_char.from_buffer(self._memory)
        self.base = ctypes.addressof(self._view)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mremap.restype = ctypes.c_void_p
        self._libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        blobs = sum(layer.n_expert for layer in layers)
        # Each moved blob is a mapping of its own for ever.
        self.moves_pages = blobs < _max_maps() - _SPARE_MAPS and self._can_move()

    def close(self) -> None:
        """Give the range back.  Nothing may use it any more: neither the model nor a read."""
        view = self.__dict__.pop("_view", None)
        del view
        if not self._memory.closed:
            self._memory.close()

    def address(self, place: int, expert: int) -> int:
        """Where a blob of the layer at `place` (in the order given) stands."""
        return self.base + self._starts[place] + expert * self._strides[place]

    def move(self, source: int, target: int, size_bytes: int) -> None:
        """Take the pages of one blob for another one, whose address must be empty; what stands in them is lost."""
        if not self.moves_pages:
            self.drop(source, size_bytes)
            return
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
        if self._libc.mremap(source, size_bytes, size_bytes, flags, target) != target:
            self._failed("move pages of the expert slots")

    def drop(self, address: int, size_bytes: int) -> None:
        """Give the pages of a blob back to the machine."""
        if self._libc.madvise(address, size_bytes, mmap.MADV_DONTNEED) != 0:
            self._failed("give back pages of the expert slots")

    def _can_move(self) -> bool:
        """Tried on the page behind the first layer and an empty place.  The kernel can since 5.7."""
        source, target = self.base + self._starts[1] - PAGE_BYTES, self.base
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
        ctypes.c_char.from_address(source).value = b"x"
        moved = self._libc.mremap(source, PAGE_BYTES, PAGE_BYTES, flags, target) == target
        is_right = moved and ctypes.c_char.from_address(target).value == b"x"
        self.drop(target, PAGE_BYTES)
        return is_right

    @staticmethod
    def _failed(what: str) -> None:
        raise MachineError(f"the system cannot {what}: {os.strerror(ctypes.get_errno())}")


@cache
def _max_maps() -> int:
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))
    except OSError:
        return _DEFAULT_MAX_MAPS
