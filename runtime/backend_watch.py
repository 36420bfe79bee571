"""The stream that llama.cpp computes a context's graphs in.

It keeps its backends to itself.  But it makes each by a function that the device holds (`ggml_backend_device` in
ggml/src/ggml-backend-impl.h of llama.cpp build 11549): while a context is made that one is ours, and calls the device's own.
Of the backend's functions (`ggml_backend` there) the one that waits for the stream can be taken away for a while.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from bel.formats.errors import MachineError
from bel.runtime.llama_check import compare
from bel.runtime.pool_home import Home


class BackendWatch:
    """While entered, it notes the backends that are made on the home's device.

    Raises MachineError where the device's struct is not the declared one, or a backend was made another way.
    """

    def __init__(self, home: Home) -> None:
        ffi = home.abi.ffi
        self._home = home
        self._made: list[int] = []
        self._view = ffi.cast("struct device *", home.device)
        self._check()
        self._own = ffi.cast("init_function", self._view.init_backend)
        # The device keeps the address alone: without this reference the function would be freed under it.
        self._noting = ffi.callback("init_function", self._make)

    def _check(self) -> None:
        """The struct's functions must give what the library's public ones give."""
        abi, view = self._home.abi, self._view
        ffi, lib, device = abi.ffi, abi.lib, self._home.device
        found = {
            "device.get_name": ffi.cast("name_function", view.get_name)(device) == lib.ggml_backend_dev_name(device),
            "device.init_backend": view.init_backend != ffi.NULL,
            "device.get_buffer_type": ffi.cast("type_function", view.get_buffer_type)(device)
            == lib.ggml_backend_dev_buffer_type(device),
        }
        compare(abi.path, found, dict.fromkeys(found, True))

    def _make(self, device: Any, params: Any) -> Any:
        backend = self._own(device, params)
        self._made.append(self._home.abi.number(backend))
        return backend

    @property
    def backend(self) -> int:
        """The address of the one backend that was made."""
        if len(self._made) != 1:
            raise MachineError(
                f"llama.cpp does not compute with one stream on {self._home.name}",
                path=self._home.abi.path,
                found=len(self._made),
                expected=1,
            )
        return self._made[0]

    @property
    def waiting(self) -> tuple[int, int]:
        """Where the backend keeps the function that waits for all of its stream, and that function; 0 for one without any.

        Raises MachineError where its struct is not the declared one.
        """
        abi = self._home.abi
        pointer = abi.pointer(self.backend)
        view = abi.ffi.cast("struct backend *", pointer)
        found = {
            "backend.get_name": abi.ffi.cast("name_function", view.get_name)(pointer) == abi.lib.ggml_backend_name(pointer),
            "backend.device": view.device == abi.lib.ggml_backend_get_device(pointer) == self._home.device,
        }
        compare(abi.path, found, dict.fromkeys(found, True))
        return abi.number(abi.ffi.addressof(view, "synchronize")), abi.number(view.synchronize)

    def __enter__(self) -> BackendWatch:
        self._view.init_backend = self._home.abi.ffi.cast("void *", self._noting)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._view.init_backend = self._home.abi.ffi.cast("void *", self._own)
