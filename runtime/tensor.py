"""A tensor of a running llama.cpp graph, seen from Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bel.formats.errors import MachineError
from bel.runtime.llama_abi import OP_MUL_MAT, OP_VIEW, TYPE_F16, TYPE_F32, TYPE_I32

_DTYPES: dict[int, type[np.generic]] = {TYPE_F32: np.float32, TYPE_F16: np.float16, TYPE_I32: np.int32}


class Tensor:
    """A `ggml_tensor`.  Dimensions `ne` and strides `nb` (bytes) are in ggml's order, fastest first, always four.

    A node of a graph is valid only while the observer's call lasts, or until the next node of the same graph for its
    data; a weight (`src(0)` of a matrix product) is valid as long as its model.
    """

    __slots__ = ("_ffi", "_lib", "_t")

    def __init__(self, ffi: Any, lib: Any, pointer: Any) -> None:
        self._ffi, self._lib, self._t = ffi, lib, pointer

    @property
    def raw_name(self) -> bytes:
        """The name as llama.cpp wrote it, such as b'ffn_moe_topk-3'."""
        return self._ffi.string(self._t.name)  # type: ignore[no-any-return]

    @property
    def name(self) -> str:
        """The name as text."""
        return self.raw_name.decode("utf-8", "replace")

    @property
    def op(self) -> str:
        """The operation that makes it, such as 'MUL_MAT_ID'; 'NONE' for a weight."""
        return self._ffi.string(self._lib.ggml_op_name(self._t.op)).decode()  # type: ignore[no-any-return]

    @property
    def type_id(self) -> int:
        """ggml's number of the element type (`formats/ggml_types.py`)."""
        return self._t.type  # type: ignore[no-any-return]

    @property
    def ne(self) -> tuple[int, int, int, int]:
        """Elements in each dimension."""
        return tuple(self._t.ne)

    @property
    def nb(self) -> tuple[int, int, int, int]:
        """Bytes from one element of each dimension to the next; the first one counts blocks of a quantised type."""
        return tuple(self._t.nb)

    @property
    def is_view(self) -> bool:
        """Whether its data lie inside another tensor's."""
        return bool(self._t.op == OP_VIEW)

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product with one weight for all rows."""
        return bool(self._t.op == OP_MUL_MAT)

    @property
    def size_bytes(self) -> int:
        """Bytes from its first element to the end of its last, gaps of a strided view included."""
        return self._lib.ggml_nbytes(self._t)  # type: ignore[no-any-return]

    @property
    def address(self) -> int:
        """Where its data are; 0 before they have a place.  An address of this process only for a CPU buffer."""
        return int(self._ffi.cast("uintptr_t", self._t.data))

    @property
    def identity(self) -> int:
        """The address of the tensor itself: equal for two views of one tensor."""
        return int(self._ffi.cast("uintptr_t", self._t))

    def src(self, index: int) -> Tensor | None:
        """One of the tensors that it is made from, or None."""
        pointer = self._t.src[index]
        return None if pointer == self._ffi.NULL else Tensor(self._ffi, self._lib, pointer)

    def place(self, address: int, nb: tuple[int, int, int, int]) -> None:
        """Point a weight at other memory with other strides, for good.

        Nothing checks it: every later graph reads `address + i * nb[2]` for slice i.  The memory must outlive the model.
        """
        self._t.data = self._ffi.cast("void *", address)
        self._t.nb = nb

    def read(self) -> memoryview:
        """A copy of its data, `size_bytes` of them, from whatever device they are on.  Only once it has been computed."""
        if self._t.data == self._ffi.NULL:
            raise MachineError("the tensor has no data yet", tensor=self.name)
        size = self.size_bytes
        copy = self._ffi.new("char[]", size)
        self._lib.ggml_backend_tensor_get(self._t, copy, 0, size)
        return memoryview(self._ffi.buffer(copy))

    def array(self, n_dims: int = 2) -> npt.NDArray[Any]:
        """A copy of its values with `n_dims` dimensions in numpy's order, so that ne = [k, n] gives shape (n, k).

        Follows the strides of a view.  float32, float16 and int32 only; MachineError for another type, or where the
        tensor has more dimensions than asked for.
        """
        dtype, ne = _DTYPES.get(self.type_id), self.ne
        if dtype is None or any(n != 1 for n in ne[n_dims:]):
            raise MachineError(
                "llama.cpp made a tensor of another kind",
                tensor=self.name,
                found=f"type {self.type_id}, dimensions {list(ne)}",
                expected=f"f32, f16 or i32 with {n_dims} dimensions",
            )
        return np.ndarray(ne[:n_dims][::-1], dtype, self.read(), 0, self.nb[:n_dims][::-1])
