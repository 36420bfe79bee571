"""The slots of all layers in the home, and the stage: room for all experts of one layer, for calls that need more of them than
there are slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bel.formats.errors import MachineError
from bel.formats.units import align_up, format_bytes
from bel.runtime.pool_graph import BiasGraph, LayerGraph, PartGraph
from bel.runtime.pool_home import Home
from bel.runtime.pool_hosts import HostExperts
from bel.runtime.pool_room import HostRoom
from bel.runtime.slot_stage import StackShape, stage_bytes, stage_groups

_BYTE = 24  # enum ggml_type: I8
SLOT, STAGE = 0, 1


@dataclass(frozen=True, slots=True)
class PartPlace:
    """A projection of a layer in the home: the offsets of its slots and of its stage."""

    part: PartGraph
    slots_bytes: int
    stage_bytes: int


@dataclass(frozen=True, slots=True)
class BiasPlace:
    """The biases of a projection: the offset of its slots, and a copy (experts, bytes) of all of them in host memory."""

    bias: BiasGraph
    slots_bytes: int
    rows: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class HomeBytes:
    """What the home holds: slots of expert weights, the stage, slots of biases, and what alignment and kernels want besides."""

    slots: int
    stage: int
    biases: int
    padding: int

    @property
    def total(self) -> int:
        """Bytes of the home's buffer."""
        return self.slots + self.stage + self.biases + self.padding


class SlotMemory:
    """One buffer of the home.  Its memory is only touched through the library, which knows how.

    Copies are only begun; `wait` returns once they have arrived.  Close it once nothing computes with it any more.
    """

    def __init__(self, home: Home, ffi: Any, graphs: Sequence[LayerGraph], counts: Sequence[int], hosts: HostExperts) -> None:
        self._home, self._ffi, self._hosts = home, ffi, hosts
        abi = home.abi
        self._alignment = abi.lib.ggml_backend_buft_get_alignment(home.kind)
        self._end = 0
        self._sums = {"slots": 0, "stage": 0, "biases": 0}
        self._rooms: list[HostRoom] = []
        self._buffer: Any = None
        try:
            self._make(graphs, counts)
        except BaseException:
            self.close()
            raise

    def _make(self, graphs: Sequence[LayerGraph], counts: Sequence[int]) -> None:
        home, abi, ffi = self._home, self._home.abi, self._ffi
        pairs = list(zip(graphs, counts, strict=True))
        slots = [[self._plan_slots(part, count) for part in graph.parts] for graph, count in pairs]
        self.biases = [[self._plan_bias(graph, bias, count) for bias in graph.biases] for graph, count in pairs]
        # The stage comes last: ggml takes a weight for as long as all its experts are, and a GPU's backend does not fuse nodes
        # whose memory seems to overlap.  So every stack of slots ends inside of this buffer however long it seems to be.
        stages = self._plan_stages(graphs)
        self.parts = [
            [PartPlace(*places) for places in zip(graph.parts, slots[i], stages[i], strict=True)]
            for i, graph in enumerate(graphs)
        ]
        self.bytes = HomeBytes(**self._sums, padding=self._end - sum(self._sums.values()))
        self._buffer = abi.lib.ggml_backend_buft_alloc_buffer(home.kind, self._end)
        if self._buffer == abi.ffi.NULL:
            self._buffer = None
            raise MachineError(
                f"{home.name} has no {format_bytes(self._end)} for the slots", hint="Give fewer slots, or a smaller context"
            )
        self.base = abi.number(abi.lib.ggml_backend_buffer_get_base(self._buffer))
        # Kernels may read behind the last row of a stack: what is there must not be a NaN.
        abi.lib.ggml_backend_buffer_clear(self._buffer, 0)
        self._all = self._tensor(self.base, self._end)
        self._source, self._target = self._tensor(self.base, 1), self._tensor(self.base, 1)
        self.whole, self.source, self.target = (int(ffi.cast("uintptr_t", x)) for x in (self._all, self._source, self._target))
        """Addresses of tensors of bytes: of all of the buffer, and two that are pointed at what is copied within it."""
        self.backend: Any = abi.lib.ggml_backend_dev_init(home.device, abi.ffi.NULL)
        """A stream of the home's device for copies alone."""
        self.other: Any = abi.lib.ggml_backend_dev_init(home.device, abi.ffi.NULL)
        """A second one, for who begins many copies at once."""
        if abi.ffi.NULL in (self.backend, self.other):
            raise MachineError(f"llama.cpp cannot use {home.name}", path=abi.path)
        self.backend_address, self.other_address = abi.number(self.backend), abi.number(self.other)

    def _take(self, size_bytes: int) -> int:
        start = align_up(self._end, self._alignment)
        self._end = start + size_bytes
        return start

    def _padded(self, part: PartGraph, count: int) -> int:
        """Bytes of a stack of `count` experts with what the home's kernels may read behind it."""
        abi = self._home.abi
        weight = self._ffi.cast("struct ggml_tensor *", part.weight)
        whole = part.stride_bytes * weight.ne[2]
        spare = abi.lib.ggml_backend_buft_get_alloc_size(self._home.kind, abi.pointer(part.weight)) - whole
        return count * part.stride_bytes + int(spare)

    def _plan_slots(self, part: PartGraph, count: int) -> int:
        self._sums["slots"] += count * part.stride_bytes
        return self._take(self._padded(part, count))

    def _plan_stages(self, graphs: Sequence[LayerGraph]) -> list[list[int]]:
        """Offsets of each layer's parts on its stage, which is as large as the largest layer there."""
        shapes = [
            [StackShape(part.type_id, part.ne[0], part.stride_bytes, graph.n_expert) for part in graph.parts]
            for graph in graphs
        ]
        groups = stage_groups(shapes, self._home.reads_ahead)
        self._sums["stage"] = stage_bytes(shapes, self._home.reads_ahead)
        places: list[list[int]] = [[] for _ in graphs]
        for group in range(max(groups) + 1):
            start = end = self._end
            for i, graph in enumerate(graphs):
                if groups[i] == group:
                    self._end = start
                    places[i] = [self._take(self._padded(part, graph.n_expert)) for part in graph.parts]
                    end = max(end, self._end)
            self._end = end
        return places

    def _plan_bias(self, graph: LayerGraph, bias: BiasGraph, count: int) -> BiasPlace:
        abi, size = self._home.abi, graph.n_expert * bias.stride_bytes
        room = HostRoom(self._home, size)  # from common memory the home would copy while we wait
        self._rooms.append(room)
        pointer = abi.pointer(room.address)
        abi.lib.ggml_backend_tensor_get(abi.pointer(bias.tensor), pointer, 0, size)
        rows = np.frombuffer(abi.ffi.buffer(pointer, size), np.uint8).reshape(graph.n_expert, bias.stride_bytes)
        self._sums["biases"] += count * bias.stride_bytes
        return BiasPlace(bias, self._take(count * bias.stride_bytes), rows)

    def _tensor(self, address: int, size_bytes: int) -> Any:
        tensor = self._ffi.new("struct ggml_tensor *")
        tensor.type, tensor.ne, tensor.nb = _BYTE, (size_bytes, 1, 1, 1), (1, size_bytes, size_bytes, size_bytes)
        tensor.buffer = self._ffi.cast("void *", self._home.abi.number(self._buffer))
        tensor.data = self._ffi.cast("void *", address)
        return tensor

    def point(self, i: int, where: int) -> None:
        """Let the products of layer i read its slots, or the stage."""
        for place in self.parts[i]:
            offset = place.slots_bytes if where == SLOT else place.stage_bytes
            self._point(place.part.weight, self.base + offset)
        for bias in self.biases[i]:
            self._point(bias.bias.tensor, self.base + bias.slots_bytes if where == SLOT else bias.bias.data)

    def _point(self, tensor: int, address: int) -> None:
        self._ffi.cast("struct ggml_tensor *", tensor).data = self._ffi.cast("void *", address)

    def upload(self, i: int, expert: int, slot: int) -> int:
        """Begin to copy an expert of layer i from host memory into a slot.  Returns the bytes."""
        size = 0
        addresses = self._hosts.addresses(i, expert)
        for place in self.parts[i]:
            part = place.part
            self._set(addresses[part.number], place.slots_bytes + slot * part.stride_bytes, part.stride_bytes)
            size += part.stride_bytes
        self._upload_biases(i, expert, slot)
        return size

    def _upload_biases(self, i: int, expert: int, slot: int) -> None:
        for place in self.biases[i]:
            stride = place.bias.stride_bytes
            self._set(place.rows.ctypes.data + expert * stride, place.slots_bytes + slot * stride, stride)

    def stage(self, i: int, expert: int) -> int:
        """Begin to copy an expert of layer i from host memory to its place on the stage.  Returns the bytes."""
        addresses = self._hosts.addresses(i, expert)
        for place in self.parts[i]:
            part = place.part
            self._set(addresses[part.number], place.stage_bytes + expert * part.stride_bytes, part.stride_bytes)
        return sum(place.part.stride_bytes for place in self.parts[i])

    def stage_slot(self, i: int, expert: int, slot: int) -> None:
        """Copy an expert from its slot to the stage, within the home."""
        for place in self.parts[i]:
            stride = place.part.stride_bytes
            self._copy(place.slots_bytes + slot * stride, place.stage_bytes + expert * stride, stride)

    def keep(self, i: int, expert: int, slot: int) -> None:
        """Copy an expert from the stage into a slot, within the home."""
        for place in self.parts[i]:
            stride = place.part.stride_bytes
            self._copy(place.stage_bytes + expert * stride, place.slots_bytes + slot * stride, stride)
        self._upload_biases(i, expert, slot)

    def _set(self, address: int, offset: int, size: int) -> None:
        abi = self._home.abi
        data = abi.ffi.cast("void *", address)
        abi.lib.ggml_backend_tensor_set_async(self.backend, self._all, data, offset, size)

    def _copy(self, source: int, target: int, size: int) -> None:
        for tensor, offset in ((self._source, source), (self._target, target)):
            tensor.data = self._ffi.cast("void *", self.base + offset)
            tensor.ne, tensor.nb = (size, 1, 1, 1), (1, size, size, size)
        self._home.abi.lib.ggml_backend_tensor_copy_async(self.backend, self.backend, self._source, self._target)

    def wait(self) -> None:
        """Wait until everything begun has arrived."""
        self._home.abi.lib.ggml_backend_synchronize(self.backend)

    def close(self) -> None:
        """Give the home its memory back, once nothing is copied there any more.  A second call does nothing."""
        buffer, self._buffer = self._buffer, None
        lib = self._home.abi.lib
        made = [getattr(self, name, None) for name in ("backend", "other")]
        streams = [stream for stream in made if stream is not None and stream != self._home.abi.ffi.NULL]
        self.backend = self.other = None
        for stream in streams:
            lib.ggml_backend_synchronize(stream)
        if buffer is not None:
            lib.ggml_backend_buffer_free(buffer)
        for stream in streams:
            lib.ggml_backend_free(stream)
        while self._rooms:
            self._rooms.pop().close()
