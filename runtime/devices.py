"""The devices that an engine computes on, and the one that a model shall be put on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bel.formats.errors import MachineError, printable
from bel.formats.units import format_bytes
from bel.runtime.engine import Engine
from bel.runtime.llama_abi_gpu import GpuAbi, open_gpu_abi

KINDS = ("CPU", "GPU", "IGPU", "ACCEL", "META")
"""enum ggml_backend_dev_type (ggml/include/ggml-backend.h): an IGPU shares the host's memory, an ACCEL helps the CPU."""
HOW_TO_GET_A_GPU = "docs/gpu.md says how to build an engine with CUDA, and --engine FOLDER takes it"


@dataclass(frozen=True, slots=True)
class Device:
    """A device.  `kind` is one of `KINDS`; `free_bytes` and `total_bytes` are of its memory, when it was asked; `address` is
    its `ggml_backend_dev_t`."""

    name: str
    description: str
    kind: str
    free_bytes: int
    total_bytes: int
    address: int

    def __str__(self) -> str:
        return f"{printable(self.name)} ({printable(self.description)}, {format_bytes(self.free_bytes)} free)"


def devices(engine: Engine) -> tuple[Device, ...]:
    """All devices of an engine, in its own order.  Raises MachineError for an engine that cannot list them."""
    abi = open_gpu_abi(str(engine.library.path))
    return tuple(_device(abi, abi.lib.ggml_backend_dev_get(index)) for index in range(abi.lib.ggml_backend_dev_count()))


def find_gpu(engine: Engine, number: int = 0) -> Device:
    """The GPU of a number, from 0, among those with a memory of their own.

    Raises MachineError, which says what there is instead, where there is none.
    """
    found = devices(engine)
    gpus = [device for device in found if device.kind == "GPU"]
    if number < len(gpus):
        return gpus[number]
    raise MachineError(
        f"there is no GPU number {number}" if gpus else "there is no GPU that this llama.cpp can use",
        path=str(engine.library.path),
        found=", ".join(map(str, found)) or "no device at all",
        hint=HOW_TO_GET_A_GPU,
    )


def free_device_bytes(engine: Engine, device: Device) -> int:
    """What is free of a device's memory now."""
    abi = open_gpu_abi(str(engine.library.path))
    return _memory(abi, _pointer(abi, device))[0]


def buffer_type(engine: Engine, device: Device) -> Any:
    """The `ggml_backend_buffer_type_t` of a device's own memory: a `void *` for `ModelOptions.buffer_types`."""
    abi = open_gpu_abi(str(engine.library.path))
    return abi.lib.ggml_backend_dev_buffer_type(_pointer(abi, device))


def host_buffer_type(engine: Engine, device: Device) -> Any | None:
    """The type of host memory that the device copies from fastest (pinned, for CUDA); None where it has none."""
    abi = open_gpu_abi(str(engine.library.path))
    found = abi.lib.ggml_backend_dev_host_buffer_type(_pointer(abi, device))
    return None if found == abi.ffi.NULL else found


def cpu_buffer_type(engine: Engine) -> Any:
    """The type of plain host memory."""
    return open_gpu_abi(str(engine.library.path)).lib.ggml_backend_cpu_buffer_type()


def alignment_bytes(engine: Engine, kind: Any) -> int:
    """What the addresses of tensors in buffers of a type are multiples of."""
    return int(open_gpu_abi(str(engine.library.path)).lib.ggml_backend_buft_get_alignment(kind))


def buffer_type_name(engine: Engine, kind: Any) -> str:
    """The name of a buffer type, as the log has it."""
    abi = open_gpu_abi(str(engine.library.path))
    return abi.text(abi.lib.ggml_backend_buft_name(kind))


def _device(abi: GpuAbi, pointer: Any) -> Device:
    number = abi.lib.ggml_backend_dev_type(pointer)
    free, total = _memory(abi, pointer)
    return Device(
        name=abi.text(abi.lib.ggml_backend_dev_name(pointer)),
        description=abi.text(abi.lib.ggml_backend_dev_description(pointer)),
        kind=KINDS[number] if 0 <= number < len(KINDS) else f"kind {number}",
        free_bytes=free,
        total_bytes=total,
        address=int(abi.ffi.cast("uintptr_t", pointer)),
    )


def _memory(abi: GpuAbi, pointer: Any) -> tuple[int, int]:
    sizes = abi.ffi.new("size_t[2]")
    abi.lib.ggml_backend_dev_memory(pointer, sizes, sizes + 1)
    return sizes[0], sizes[1]


def _pointer(abi: GpuAbi, device: Device) -> Any:
    return abi.ffi.cast("void *", device.address)
