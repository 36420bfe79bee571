"""llama.cpp's own GGUF parser and model loader, driven through ctypes: a reader that shares no code with this project.

Both come from the shared object of the `xllamacpp` wheel.  Source of the declarations: ggml/include/gguf.h and
include/llama.h of the llama.cpp in that wheel's sdist (build 11549).  Run as a script it works in a process of its own,
where a crash of the library is an exit status: `llama_reader.py parse|load FILE` prints one JSON object.
"""

from __future__ import annotations

import ctypes
import functools
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
SCALAR_BYTES = {U8: 1, I8: 1, U16: 2, I16: 2, U32: 4, I32: 4, F32: 4, BOOL: 1, U64: 8, I64: 8, F64: 8}
LOAD_MODE_MMAP = 1  # enum llama_load_mode


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


class _ModelParams(ctypes.Structure):
    _fields_ = (
        ("devices", ctypes.c_void_p),
        ("tensor_buft_overrides", ctypes.c_void_p),
        ("n_gpu_layers", ctypes.c_int32),
        ("split_mode", ctypes.c_int),
        ("load_mode", ctypes.c_int),
        ("lazy_mode", ctypes.c_int),
        ("main_gpu", ctypes.c_int32),
        ("tensor_split", ctypes.c_void_p),
        ("progress_callback", ctypes.c_void_p),
        ("progress_callback_user_data", ctypes.c_void_p),
        ("kv_overrides", ctypes.c_void_p),
        ("vocab_only", ctypes.c_bool),
        ("check_tensors", ctypes.c_bool),
        ("use_extra_bufts", ctypes.c_bool),
        ("no_host", ctypes.c_bool),
        ("no_alloc", ctypes.c_bool),
        ("load_mtp", ctypes.c_bool),
    )


@dataclass(frozen=True, slots=True)
class ParsedTensor:
    """A tensor as llama.cpp sees it; `offset_bytes` is absolute, `ne` has four dimensions, fastest first."""

    name: str
    type_id: int
    ne: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ParsedGguf:
    """A GGUF as llama.cpp sees it.  `keys`: name -> (value type, item type or None, raw value bytes or list of strings)."""

    version: int
    alignment: int
    data_start_bytes: int
    keys: dict[str, tuple[int, int | None, bytes | list[bytes]]]
    tensors: tuple[ParsedTensor, ...]


@functools.cache
def library() -> ctypes.CDLL:
    """The shared object, with the signatures of the functions that are used here."""
    spec = find_spec("xllamacpp")
    assert spec is not None and spec.origin is not None, "xllamacpp is in the extra 'llama', which the tests need"
    lib = ctypes.CDLL(str(next(Path(spec.origin).parent.glob("xllamacpp*.so"))))
    pointer, number, size, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_char_p
    for name, result, arguments in (
        ("gguf_init_from_file", pointer, [text, _InitParams]),
        ("gguf_free", None, [pointer]),
        ("gguf_get_version", ctypes.c_uint32, [pointer]),
        ("gguf_get_alignment", size, [pointer]),
        ("gguf_get_data_offset", size, [pointer]),
        ("gguf_get_n_kv", number, [pointer]),
        ("gguf_get_key", text, [pointer, number]),
        ("gguf_get_kv_type", ctypes.c_int, [pointer, number]),
        ("gguf_get_arr_type", ctypes.c_int, [pointer, number]),
        ("gguf_get_arr_n", size, [pointer, number]),
        ("gguf_get_arr_data", pointer, [pointer, number]),
        ("gguf_get_arr_str", text, [pointer, number, size]),
        ("gguf_get_val_str", text, [pointer, number]),
        ("gguf_get_val_data", pointer, [pointer, number]),
        ("gguf_get_n_tensors", number, [pointer]),
        ("gguf_get_tensor_name", text, [pointer, number]),
        ("gguf_get_tensor_type", ctypes.c_int, [pointer, number]),
        ("gguf_get_tensor_ne", ctypes.POINTER(ctypes.c_int64), [pointer, number]),
        ("gguf_get_tensor_offset", size, [pointer, number]),
        ("gguf_get_tensor_size", size, [pointer, number]),
        ("llama_backend_init", None, []),
        ("llama_model_default_params", _ModelParams, []),
        ("llama_model_load_from_file", pointer, [text, _ModelParams]),
        ("llama_model_free", None, [pointer]),
        ("llama_model_n_params", ctypes.c_uint64, [pointer]),
        ("llama_model_size", ctypes.c_uint64, [pointer]),
        ("llama_model_n_layer", ctypes.c_int32, [pointer]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    context = library().gguf_init_from_file(bytes(path), _InitParams(True, None))
    if not context:
        raise ValueError(f"llama.cpp does not open {path}")
    try:
        yield context
    finally:
        library().gguf_free(context)


def parse(path: Path) -> ParsedGguf:
    """Read a GGUF's header with llama.cpp's parser.  Raises ValueError where it refuses the file."""
    lib = library()
    with _opened(path) as g:
        start = lib.gguf_get_data_offset(g)
        return ParsedGguf(
            lib.gguf_get_version(g),
            lib.gguf_get_alignment(g),
            start,
            {lib.gguf_get_key(g, i).decode(): _value(g, i) for i in range(lib.gguf_get_n_kv(g))},
            tuple(
                ParsedTensor(
                    lib.gguf_get_tensor_name(g, i).decode(),
                    lib.gguf_get_tensor_type(g, i),
                    tuple(lib.gguf_get_tensor_ne(g, i)[:4]),
                    start + lib.gguf_get_tensor_offset(g, i),
                    lib.gguf_get_tensor_size(g, i),
                )
                for i in range(lib.gguf_get_n_tensors(g))
            ),
        )


def _value(g: int, i: int) -> tuple[int, int | None, bytes | list[bytes]]:
    lib = library()
    kind = lib.gguf_get_kv_type(g, i)
    if kind == STRING:
        return kind, None, lib.gguf_get_val_str(g, i)
    if kind != ARRAY:
        return kind, None, ctypes.string_at(lib.gguf_get_val_data(g, i), SCALAR_BYTES[kind])
    item, count = lib.gguf_get_arr_type(g, i), lib.gguf_get_arr_n(g, i)
    if item == STRING:
        return kind, item, [lib.gguf_get_arr_str(g, i, j) for j in range(count)]
    return kind, item, ctypes.string_at(lib.gguf_get_arr_data(g, i), SCALAR_BYTES[item] * count)


def parse_seconds(path: Path) -> float:
    """How long llama.cpp's parser takes for a header, the loading of the library left out."""
    library()
    began = time.perf_counter()
    with _opened(path):
        return time.perf_counter() - began


def load(path: Path) -> dict[str, int]:
    """Load a whole model as an engine does.  Raises ValueError where llama.cpp refuses it."""
    lib = library()
    lib.llama_backend_init()
    params = lib.llama_model_default_params()
    params.n_gpu_layers, params.load_mode, params.check_tensors = 0, LOAD_MODE_MMAP, True
    model = lib.llama_model_load_from_file(bytes(path), params)
    if not model:
        raise ValueError(f"llama.cpp does not load {path}")
    answer = {
        "n_params": lib.llama_model_n_params(model),
        "size_bytes": lib.llama_model_size(model),
        "n_layer": lib.llama_model_n_layer(model),
    }
    lib.llama_model_free(model)
    return answer


if __name__ == "__main__":
    what, file = sys.argv[1], Path(sys.argv[2])
    print(json.dumps(load(file) if what == "load" else {"seconds": parse_seconds(file)}))
