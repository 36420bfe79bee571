"""Loading a model whose experts get no memory: a buffer type of our own stands in for the home's until the model is loaded.

What the loader does with it (llama.cpp build 11549): `create_tensor` of src/llama-model-loader.cpp takes the type that an
override names as it is and keys its contexts by the type's name; `ggml_backend_alloc_ctx_tensors_from_buft`
(ggml/src/ggml-alloc.c) sums `get_alloc_size` and calls `alloc_buffer`; `ggml_tallocr_alloc` asks the buffer's own type again,
so the buffer must be of our type by then; `load_all_data` writes all of a tensor with `set_tensor`, as the buffer is not a
host's.  Later the scheduler gives each product to the backend that knows the type of its weight's buffer
(ggml/src/ggml-backend.cpp), so the home's own type is put back before a context is made.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from bel.formats.errors import MachineError
from bel.runtime.pool_abi import check_buffer, check_type
from bel.runtime.pool_home import Home

_NAME = b"bel-slots"
CLAIMED_BYTES = 256
"""What a tensor claims while it loads: its place in the home is given to it afterwards.  With nothing at all there would be
no buffer, and the scheduler would not know whose the tensor is."""


class SlotType:
    """The type in a `with`: within it the model is loaded, at its end all that was changed is put back.

    `pointer` is for `ModelOptions.buffer_types`.
    """

    def __init__(self, home: Home) -> None:
        abi = home.abi
        ffi = abi.ffi
        check_type(abi, home.kind)
        self._home = home
        self._buffers: list[tuple[Any, Any, Any]] = []
        self._error: BaseException | None = None
        self._refused_bytes = 0
        self._name = ffi.new("char[]", _NAME)
        # The library keeps their addresses only: without these references they would be freed under it.
        self._functions = (
            ffi.callback("name_function", lambda _type: self._name),
            ffi.callback("alloc_function", self._allocate),
            ffi.callback("alloc_size_function", lambda _type, _tensor: CLAIMED_BYTES),
            ffi.callback("is_host_function", lambda _type: False),
            ffi.callback("set_function", lambda *_: None),
            ffi.callback("memset_function", lambda *_: None),
        )
        self._type = ffi.new("struct buffer_type *", ffi.cast("struct buffer_type *", home.kind)[0])
        name, allocate, size, is_host, self._set, self._memset = (ffi.cast("void *", x) for x in self._functions)
        self._type.get_name, self._type.alloc_buffer, self._type.alloc_buffer_n = name, allocate, ffi.NULL
        self._type.get_alloc_size, self._type.get_alloc_size_n, self._type.is_host = size, ffi.NULL, is_host
        self.pointer = ffi.cast("void *", self._type)

    def _allocate(self, _type: Any, size: int) -> Any:
        """A real buffer of the home that takes itself for one of our type, and writes nothing."""
        abi = self._home.abi
        try:
            buffer = abi.lib.ggml_backend_buft_alloc_buffer(self._home.kind, size)
            if buffer == abi.ffi.NULL:
                self._refused_bytes = size
                return abi.ffi.NULL
            check_buffer(abi, buffer, self._home.kind)
            view = abi.ffi.cast("struct buffer *", buffer)
            self._buffers.append((view, view.set_tensor, view.memset_tensor))
            view.type, view.set_tensor, view.memset_tensor = self.pointer, self._set, self._memset
        except BaseException as error:
            self._error = error
            return abi.ffi.NULL
        return buffer

    def __enter__(self) -> SlotType:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        buffers, self._buffers = self._buffers, []
        if error is None:  # else the loader has freed them
            for view, set_tensor, memset_tensor in buffers:
                view.type, view.set_tensor, view.memset_tensor = self._home.kind, set_tensor, memset_tensor
        if self._error is not None:
            raise self._error from error
        if self._refused_bytes:
            raise MachineError(f"{self._home.name} has no {self._refused_bytes} bytes of memory") from error
        if error is None and not buffers:
            raise MachineError("llama.cpp did not ask for memory for the experts", path=self._home.abi.path)
