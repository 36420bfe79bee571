"""Where the slots of a pool are: a buffer type of some device, the CPU's own in tests, a GPU's in earnest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bel.formats.errors import MachineError
from bel.runtime.engine import Engine
from bel.runtime.pool_abi import DEVICE_CPU, PoolAbi, check_type, open_pool_abi


@dataclass(frozen=True, slots=True)
class Home:
    """A device's memory.  `kind` is its `ggml_backend_buffer_type_t`, `host_kind` that of pinned host memory or None.

    `gpu_layers`: what the model's other weights are loaded with, so that they are in the same memory.  `reads_ahead`: kernels
    may read a row up to the next multiple of 512 elements (MATRIX_ROW_PADDING, ggml/src/ggml-cuda/common.cuh).
    """

    name: str
    abi: PoolAbi
    device: Any
    kind: Any
    host_kind: Any
    gpu_layers: int
    reads_ahead: bool


def cpu_home(engine: Engine) -> Home:
    """The CPU in the part of a GPU: the same code, and no GPU needed."""
    abi = open_pool_abi(engine.library)
    device = abi.lib.ggml_backend_dev_by_type(DEVICE_CPU)
    if device == abi.ffi.NULL:
        raise MachineError("llama.cpp has no CPU backend", path=abi.path)
    return Home("CPU", abi, device, abi.lib.ggml_backend_cpu_buffer_type(), None, 0, False)


def device_home(engine: Engine, device: int) -> Home:
    """A GPU's memory; `device` is the address of its `ggml_backend_dev_t`.  Raises MachineError for one that is not fit."""
    abi = open_pool_abi(engine.library)
    pointer = abi.pointer(device)
    kind = abi.lib.ggml_backend_dev_buffer_type(pointer)
    name = abi.ffi.string(abi.lib.ggml_backend_dev_name(pointer)).decode("utf-8", "replace")
    if kind == abi.ffi.NULL:
        raise MachineError(f"the device {name} has no memory of its own", path=abi.path)
    check_type(abi, kind)
    host_kind = abi.lib.ggml_backend_dev_host_buffer_type(pointer)
    return Home(name, abi, pointer, kind, None if host_kind == abi.ffi.NULL else host_kind, -1, True)
