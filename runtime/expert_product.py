"""The matrix products of single experts on the CPU, by ggml's own kernels and from weights in any stride of memory.

Declarations: ggml/include/ggml.h and ggml-cpu.h of llama.cpp build 11549.  A running model's `mul_mat_id` reads expert e at
`data + e * nb[2]` and so does this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from bel.formats.errors import MachineError
from bel.formats.ggml_types import GGML_TYPES, tensor_bytes, type_name
from bel.runtime.llama_abi import HOW_TO_INSTALL, PRODUCT_FUNCTIONS, TYPE_F32, TYPE_I32
from bel.runtime.llama_check import check_symbols, compare
from bel.runtime.llama_library import LlamaLibrary

_SPARE_BYTES = 65536  # alignment and the context's own bookkeeping


@dataclass(frozen=True, slots=True)
class Projection:
    """One projection inside every blob: `offset_bytes` counts from the blob's start; rows of `columns` elements."""

    type_id: int
    columns: int
    rows: int
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of one expert's slice.  Raises MachineError for a type whose size is not known, or a row of part blocks."""
        try:
            size = tensor_bytes(self.type_id, (self.columns, self.rows))
        except ValueError as error:
            raise MachineError(f"the CPU cannot multiply it: {error}") from None
        if size is None:
            raise MachineError(f"the CPU cannot multiply it: {type_name(self.type_id)} has no known size")
        return size


class ExpertProducts:
    """A graph of `steps` experts one after the other, each with one token, for every projection.

    `blobs` is uint8 (stacks, experts, stride), C-contiguous; it is used where it lies.  Every projection has an input of its
    own: the products are those of an expert, without the activation between them.  Close it, or use it in a `with`.
    Raises MachineError where the library lacks the functions, or kernels for a type.
    """

    def __init__(
        self, library: LlamaLibrary, blobs: npt.NDArray[np.uint8], parts: Sequence[Projection], *, steps: int, n_threads: int
    ) -> None:
        self._ffi, self._lib = library.ffi, library.lib
        check_symbols(self._ffi, self._lib, str(library.path), PRODUCT_FUNCTIONS)
        _check_blobs(blobs, parts)
        self.inputs = [_input(part.columns, number) for number, part in enumerate(parts)]
        """float32 (columns,) of each projection."""
        self.outputs = [[np.zeros(part.rows, np.float32) for part in parts] for _ in range(steps)]
        """float32 (rows,) of each step and projection, as the last `compute` left them."""
        self._blobs, self._parts, self._ids = blobs, tuple(parts), np.zeros(steps, np.int32)
        # Without this line a type without kernels would be a jump to address 0.
        for part in parts:
            _check_kernels(library, part.type_id)
        tensors, nodes = len(parts) * (2 + steps) + steps, len(parts) * steps
        graph_bytes = self._lib.ggml_graph_overhead_custom(2 * (tensors + nodes), False)
        size = tensors * self._lib.ggml_tensor_overhead() + graph_bytes + _SPARE_BYTES
        self._memory = self._ffi.new("char[]", size)
        self._context = self._lib.ggml_init(self._ffi.new("struct ggml_init_params *", (size, self._memory, True))[0])
        self._graph = self._lib.ggml_new_graph_custom(self._context, 2 * (tensors + nodes), False)
        self._build(parts)
        self._backend = self._lib.ggml_backend_cpu_init()
        self._lib.ggml_backend_cpu_set_n_threads(self._backend, n_threads)

    def _build(self, parts: Sequence[Projection]) -> None:
        self._stacks = stacks = [self._stack(part) for part in parts]
        inputs = [self._tensor(TYPE_F32, (len(x), 1, 1), x) for x in self.inputs]
        for step, outputs in enumerate(self.outputs):
            ids = self._tensor(TYPE_I32, (1, 1, 1), self._ids[step : step + 1])
            for stack, x, output in zip(stacks, inputs, outputs, strict=True):
                node = self._lib.ggml_mul_mat_id(self._context, stack, x, ids)
                node.data = self._address(output)
                self._lib.ggml_build_forward_expand(self._graph, node)

    def _stack(self, part: Projection) -> Any:
        _, experts, stride = self._blobs.shape
        tensor = self._tensor(part.type_id, (part.columns, part.rows, experts), self._blobs)
        tensor.nb[2], tensor.nb[3] = stride, stride * experts
        return tensor

    def _tensor(self, type_id: int, ne: tuple[int, int, int], data: npt.NDArray[Any]) -> Any:
        tensor = self._lib.ggml_new_tensor_3d(self._context, type_id, *ne)
        tensor.data = self._address(data)
        return tensor

    def _address(self, data: npt.NDArray[Any]) -> Any:
        return self._ffi.cast("char *", data.ctypes.data)

    def compute(self, stack: int, experts: Sequence[int]) -> None:
        """Multiply: step i with expert `experts[i]` of a stack.  Raises MachineError where the library fails."""
        stacks, count, _ = self._blobs.shape
        if len(experts) != len(self._ids) or not all(0 <= e < count for e in experts) or not 0 <= stack < stacks:
            raise ValueError("one expert for each step, each of the blobs")
        self._ids[:] = experts
        for tensor, part in zip(self._stacks, self._parts, strict=True):
            tensor.data = self._address(self._blobs[stack]) + part.offset_bytes
        status = self._lib.ggml_backend_graph_compute(self._backend, self._graph)
        if status != 0:
            raise MachineError("llama.cpp could not compute a matrix product", found=f"status {status}")

    def close(self) -> None:
        """Give back what the library holds."""
        if self._backend is not None:
            self._lib.ggml_backend_free(self._backend)
            self._lib.ggml_free(self._context)
            self._backend = None

    def __enter__(self) -> ExpertProducts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _input(columns: int, seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(columns, np.float32)


def _check_blobs(blobs: npt.NDArray[np.uint8], parts: Sequence[Projection]) -> None:
    if blobs.dtype != np.uint8 or blobs.ndim != 3 or not blobs.flags.c_contiguous:
        raise ValueError("the blobs are not a contiguous uint8 (stacks, experts, stride)")
    if not parts or any(part.offset_bytes + part.size_bytes > blobs.shape[2] for part in parts):
        raise ValueError("a projection reaches behind its blob")


def _check_kernels(library: LlamaLibrary, type_id: int) -> None:
    known, ffi, lib = GGML_TYPES[type_id], library.ffi, library.lib
    name = lib.ggml_type_name(type_id)
    shown = ffi.string(name).decode().upper() if name != ffi.NULL else None
    facts = {f"type {type_id}": (shown, lib.ggml_blck_size(type_id), lib.ggml_type_size(type_id))}
    compare(str(library.path), facts, {f"type {type_id}": (known.name.upper(), known.block_elements, known.block_bytes)})
    if lib.ggml_get_type_traits_cpu(type_id).vec_dot == ffi.NULL:
        raise MachineError(f"this llama.cpp has no CPU kernel for {known.name}", path=str(library.path), hint=HOW_TO_INSTALL)
