"""ggml's devices and the versions of a library: what only runs on a GPU, and engines in a folder, need.

Declarations: ggml/include/ggml.h, ggml-backend.h and include/llama.h of llama.cpp build 11549, with every pointer to a struct
of the library as a `void *`.  They are checked when they are used: an engine without them runs on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from bel.runtime.llama_check import check_symbols

_FUNCTIONS = """
const char * ggml_version(void);
const char * ggml_commit(void);
const char * llama_version(void);
void ggml_backend_load_all_from_path(const char * folder);
size_t ggml_backend_dev_count(void);
void * ggml_backend_dev_get(size_t index);
const char * ggml_backend_dev_name(void * device);
const char * ggml_backend_dev_description(void * device);
void ggml_backend_dev_memory(void * device, size_t * free, size_t * total);
int ggml_backend_dev_type(void * device);
void * ggml_backend_dev_buffer_type(void * device);
void * ggml_backend_dev_host_buffer_type(void * device);
void * ggml_backend_cpu_buffer_type(void);
const char * ggml_backend_buft_name(void * type);
size_t ggml_backend_buft_get_alignment(void * type);
"""


@dataclass(frozen=True, slots=True)
class GpuAbi:
    """cffi's `ffi` and `lib` for the declarations above; `path` is the library's."""

    ffi: Any
    lib: Any
    path: str

    def text(self, pointer: Any) -> str:
        """A C string; empty for none."""
        return "" if pointer == self.ffi.NULL else self.ffi.string(pointer).decode("utf-8", "replace")


@cache
def open_gpu_abi(path: str) -> GpuAbi:
    """The declarations above for the library at `path`.  Raises MachineError where it lacks one, OSError where it cannot be
    opened, ModuleNotFoundError without cffi."""
    from cffi import FFI

    ffi = FFI()
    ffi.cdef(_FUNCTIONS)
    lib = ffi.dlopen(path)
    check_symbols(ffi, lib, path, _FUNCTIONS)
    return GpuAbi(ffi, lib, path)
