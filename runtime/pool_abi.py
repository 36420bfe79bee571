"""What the slot pool needs of ggml's backend interface, private structs of it included, and the proof that they are so.

Declarations: ggml/include/ggml.h, ggml-backend.h, ggml-cpu.h and ggml/src/ggml-backend-impl.h of llama.cpp build 11549.  They
stand in an `FFI` of their own, with every pointer a `void *`, so that they meet no other module's declarations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from bel.formats.errors import MachineError
from bel.runtime.llama_abi import HOW_TO_INSTALL, OBJECT_BYTES
from bel.runtime.llama_check import check_symbols, compare
from bel.runtime.llama_library import LlamaLibrary

_STRUCTS = """
struct buffer_type {
    void * get_name;
    void * alloc_buffer;
    void * alloc_buffer_n;
    void * get_alignment;
    void * get_max_size;
    void * get_alloc_size;
    void * get_alloc_size_n;
    void * is_host;
    void * device;
    void * context;
};
struct buffer {
    void * free_buffer;
    void * get_base;
    void * init_tensor;
    void * memset_tensor;
    void * set_tensor;
    void * get_tensor;
    void * set_tensor_2d;
    void * get_tensor_2d;
    void * cpy_tensor;
    void * clear;
    void * reset;
    void * type;
    void * context;
    size_t size;
    int usage;
};
struct device {
    void * get_name;
    void * get_description;
    void * get_memory;
    void * get_type;
    void * get_props;
    void * init_backend;
    void * get_buffer_type;
};
struct backend {
    void * guid;
    void * get_name;
    void * free_backend;
    void * set_tensor_async;
    void * get_tensor_async;
    void * set_tensor_2d_async;
    void * get_tensor_2d_async;
    void * cpy_tensor_async;
    void * synchronize;
    void * graph_plan_create;
    void * graph_plan_free;
    void * graph_plan_update;
    void * graph_plan_compute;
    void * graph_compute;
    void * event_record;
    void * event_wait;
    void * graph_optimize;
    void * device;
    void * context;
};
typedef const char * (*name_function)(void * type);
typedef void * (*type_function)(void * device);
typedef void * (*init_function)(void * device, const char * params);
typedef void * (*alloc_function)(void * type, size_t size);
typedef size_t (*alloc_size_function)(void * type, void * tensor);
typedef bool (*is_host_function)(void * type);
typedef void (*set_function)(void * buffer, void * tensor, void * data, size_t offset, size_t size);
typedef void (*memset_function)(void * buffer, void * tensor, uint8_t value, size_t offset, size_t size);
"""

_FUNCTIONS = """
void * ggml_backend_cpu_buffer_type(void);
const char * ggml_backend_buft_name(void * type);
void * ggml_backend_buft_get_device(void * type);
size_t ggml_backend_buft_get_alignment(void * type);
size_t ggml_backend_buft_get_alloc_size(void * type, void * tensor);
void * ggml_backend_buft_alloc_buffer(void * type, size_t size);
void ggml_backend_buffer_free(void * buffer);
void * ggml_backend_buffer_get_base(void * buffer);
size_t ggml_backend_buffer_get_size(void * buffer);
void * ggml_backend_buffer_get_type(void * buffer);
void ggml_backend_buffer_clear(void * buffer, uint8_t value);
void ggml_backend_buffer_set_usage(void * buffer, int usage);
void * ggml_backend_dev_by_type(int type);
void * ggml_backend_dev_buffer_type(void * device);
void * ggml_backend_dev_host_buffer_type(void * device);
void * ggml_backend_dev_init(void * device, const char * params);
const char * ggml_backend_dev_name(void * device);
const char * ggml_backend_name(void * backend);
void * ggml_backend_get_device(void * backend);
void ggml_backend_free(void * backend);
void ggml_backend_synchronize(void * backend);
void ggml_backend_tensor_set(void * tensor, void * data, size_t offset, size_t size);
void ggml_backend_tensor_get(void * tensor, void * data, size_t offset, size_t size);
void ggml_backend_tensor_set_async(void * backend, void * tensor, void * data, size_t offset, size_t size);
void ggml_backend_tensor_set_2d_async(void * backend, void * tensor, void * data, size_t offset, size_t size, size_t n_copies,
                                      size_t stride_tensor, size_t stride_data);
void * ggml_backend_event_new(void * device);
void ggml_backend_event_free(void * event);
void ggml_backend_event_record(void * event, void * backend);
void ggml_backend_event_wait(void * backend, void * event);
void ggml_backend_tensor_copy_async(void * from, void * to, void * source, void * target);
int ggml_backend_graph_compute(void * backend, void * graph);
void * ggml_add_id(void * ctx, void * a, void * b, void * ids);
void * ggml_mul(void * ctx, void * a, void * b);
void * ggml_mul_mat(void * ctx, void * a, void * b);
void * ggml_swiglu_split(void * ctx, void * a, void * b);
void * ggml_swiglu_oai(void * ctx, void * a, void * b, float alpha, float limit);
"""

DEVICE_CPU = 0  # enum ggml_backend_dev_type
USAGE_ANY, USAGE_WEIGHTS = 0, 1  # enum ggml_backend_buffer_usage
_PROBE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PoolAbi:
    """cffi's `ffi` and `lib` for the declarations above, of a library that was checked."""

    ffi: Any
    lib: Any
    path: str

    def number(self, pointer: Any) -> int:
        """The address that a pointer holds."""
        return int(self.ffi.cast("uintptr_t", pointer))

    def pointer(self, address: int) -> Any:
        """An address as a `void *`."""
        return self.ffi.cast("void *", address)

    def function(self, name: str) -> int:
        """The address of a function, for compiled code."""
        return self.number(self.ffi.addressof(self.lib, name))


@cache
def open_pool_abi(library: LlamaLibrary) -> PoolAbi:
    """The backend interface of an opened llama.cpp.

    Raises MachineError where a symbol is missing, or where the private structs are not the declared ones: a CPU buffer is
    made and read back through them.
    """
    from cffi import FFI

    ffi = FFI()
    ffi.cdef(_STRUCTS + _FUNCTIONS)
    lib: Any = ffi.dlopen(str(library.path))
    check_symbols(ffi, lib, str(library.path), _FUNCTIONS)
    abi = PoolAbi(ffi, lib, str(library.path))
    kind = lib.ggml_backend_cpu_buffer_type()
    check_type(abi, kind)
    buffer = lib.ggml_backend_buft_alloc_buffer(kind, _PROBE_BYTES)
    if buffer == ffi.NULL:
        raise MachineError("llama.cpp cannot allocate a buffer of 4096 bytes", path=abi.path)
    try:
        check_buffer(abi, buffer, kind)
    finally:
        lib.ggml_backend_buffer_free(buffer)
    return abi


def check_type(abi: PoolAbi, kind: Any) -> None:
    """Refuse a buffer type whose struct is not ours: its own functions must give what the library's public ones give."""
    ffi, lib = abi.ffi, abi.lib
    view = ffi.cast("struct buffer_type *", kind)
    name = ffi.string(ffi.cast("name_function", view.get_name)(kind)) if view.get_name != ffi.NULL else None
    found = {"buffer_type.get_name": name, "buffer_type.device": view.device == lib.ggml_backend_buft_get_device(kind)}
    expected = {"buffer_type.get_name": ffi.string(lib.ggml_backend_buft_name(kind)), "buffer_type.device": True}
    compare(abi.path, found, expected)


def check_buffer(abi: PoolAbi, buffer: Any, kind: Any) -> None:
    """Refuse a buffer whose struct is not ours.  `kind` is the type that it was made of."""
    ffi, lib = abi.ffi, abi.lib
    view = ffi.cast("struct buffer *", buffer)
    before = view.usage
    lib.ggml_backend_buffer_set_usage(buffer, USAGE_WEIGHTS)
    found = {
        "buffer.type": view.type == kind and lib.ggml_backend_buffer_get_type(buffer) == kind,
        "buffer.size": view.size,
        "buffer.usage": (before, view.usage),
        "buffer.set_tensor": view.set_tensor != ffi.NULL and view.get_tensor != ffi.NULL,
    }
    lib.ggml_backend_buffer_set_usage(buffer, before)
    size = lib.ggml_backend_buffer_get_size(buffer)
    compare(
        abi.path,
        found,
        {"buffer.type": True, "buffer.size": size, "buffer.usage": (USAGE_ANY, USAGE_WEIGHTS), "buffer.set_tensor": True},
    )


def check_tensor_struct(library: LlamaLibrary) -> None:
    """Refuse a library whose tensors have another size than the struct that compiled code reads by its offsets."""
    size = OBJECT_BYTES + library.ffi.sizeof("struct ggml_tensor")
    if library.lib.ggml_tensor_overhead() != size:
        raise MachineError(
            "this llama.cpp has another binary interface: ggml_tensor differs",
            path=str(library.path),
            found=library.lib.ggml_tensor_overhead(),
            expected=size,
            hint=HOW_TO_INSTALL,
        )
