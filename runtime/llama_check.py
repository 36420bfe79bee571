"""The proof that a library has the interface that `llama_abi.py` declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bel.formats.errors import MachineError
from bel.formats.ggml_types import GGML_TYPES
from bel.runtime.llama_abi import (
    CONTEXT_LAYOUTS,
    FUNCTIONS,
    HOW_TO_INSTALL,
    OBJECT_BYTES,
    OP_VIEW,
    OPS,
    TYPE_F16,
    TYPE_F32,
    TYPE_I32,
)

_TYPES = {TYPE_F32: "f32", TYPE_F16: "f16", 2: "q4_0", 8: "q8_0", 12: "q4_K", 14: "q6_K", TYPE_I32: "i32", 39: "mxfp4"}

# llama_model_default_params (src/llama-model.cpp) and llama_context_default_params (src/llama-context.cpp)
_MODEL_DEFAULTS: dict[str, object] = {
    "devices": None,
    "tensor_buft_overrides": None,
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "main_gpu": 0,
    "tensor_split": None,
    "progress_callback": None,
    "progress_callback_user_data": None,
    "kv_overrides": None,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
    "no_alloc": False,
    "load_mtp": False,
}
_CONTEXT_DEFAULTS: dict[str, object] = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_rs_seq": 0,
    "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1,
    "n_threads": 4,
    "n_threads_batch": 4,
    "ctx_type": 0,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "attention_type": -1,
    "flash_attn_type": -1,
    "rope_freq_base": 0.0,
    "rope_freq_scale": 0.0,
    "yarn_ext_factor": -1.0,
    "yarn_attn_factor": -1.0,
    "yarn_beta_fast": -1.0,
    "yarn_beta_slow": -1.0,
    "yarn_orig_ctx": 0,
    "defrag_thold": -1.0,
    "cb_eval": None,
    "cb_eval_user_data": None,
    "type_k": TYPE_F16,
    "type_v": TYPE_F16,
    "moe_cache_size": 0,
    "abort_callback": None,
    "abort_callback_data": None,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
    "samplers": None,
    "n_samplers": 0,
    "ctx_other": None,
}


def check_abi(ffi: Any, lib: Any, library: str) -> str:
    """Refuse a library whose structs are not ours; the name of its layout of `llama_context_params`.

    Nothing is believed: ggml makes a tensor and a view, and the library its default parameters, which are read back
    through our declarations and must have the known values.  Raises MachineError, naming the first thing that differs.
    """
    check_symbols(ffi, lib, library, FUNCTIONS)
    compare(library, _static_facts(ffi, lib), _expected_static(ffi))
    compare(library, *_tensor_facts(ffi, lib))
    model = ffi.new("struct any_params *", lib.llama_model_default_params())
    compare(library, _read(ffi, "llama_model_params", model), _MODEL_DEFAULTS, "llama_model_default_params().")
    return _context_layout(ffi, lib, library)


def compare(library: str, found: Mapping[str, object], expected: Mapping[str, object], prefix: str = "") -> None:
    """Raise MachineError for the first fact of a library that is not as expected.  `expected` may hold more than `found`."""
    for name, value in found.items():
        if value != expected[name]:
            raise MachineError(
                f"this llama.cpp has another binary interface: {prefix}{name} differs",
                path=library,
                found=value,
                expected=expected[name],
                hint=HOW_TO_INSTALL,
            )


def check_symbols(ffi: Any, lib: Any, library: str, functions: str) -> None:
    """Raise MachineError for the first of the declared `functions` that a library does not export."""
    names = [line.split("(")[0].split()[-1].lstrip("*") for line in functions.split(";") if "(" in line]
    for name in names:
        try:
            ffi.addressof(lib, name)
        except AttributeError:
            raise MachineError(
                f"this llama.cpp has another interface: it exports no {name}", path=library, hint=HOW_TO_INSTALL
            ) from None


def _static_facts(ffi: Any, lib: Any) -> dict[str, object]:
    facts: dict[str, object] = {"ggml_tensor_overhead()": lib.ggml_tensor_overhead()}
    for op in OPS:
        facts[f"ggml_op_name({op})"] = ffi.string(lib.ggml_op_name(op)).decode()
    for number in _TYPES:
        name = ffi.string(lib.ggml_type_name(number)).decode()
        facts[f"type {number}"] = (name, lib.ggml_blck_size(number), lib.ggml_type_size(number))
    return facts


def _expected_static(ffi: Any) -> dict[str, object]:
    facts: dict[str, object] = {"ggml_tensor_overhead()": OBJECT_BYTES + ffi.sizeof("struct ggml_tensor")}
    facts |= {f"ggml_op_name({op})": name for op, name in OPS.items()}
    for number, name in _TYPES.items():
        known = GGML_TYPES[number]
        facts[f"type {number}"] = (name, known.block_elements, known.block_bytes)
    return facts


def _tensor_facts(ffi: Any, lib: Any) -> tuple[dict[str, object], dict[str, object]]:
    """A tensor of 3 x 5 integers and a view of its columns 1 and 2: what our struct reads, and what it must read."""
    memory = ffi.new("char[]", 8192)
    context = lib.ggml_init(ffi.new("struct ggml_init_params *", (8192, memory, True))[0])
    base = lib.ggml_new_tensor_2d(context, TYPE_I32, 3, 5)
    view = lib.ggml_set_name(lib.ggml_view_2d(context, base, 2, 5, 12, 4), b"bel-view-7")
    token = ffi.new("int32_t[]", [7])
    batch = lib.llama_batch_get_one(token, 1)
    found = {
        "ggml_tensor.type": view.type,
        "ggml_tensor.ne": list(view.ne),
        "ggml_tensor.nb": list(view.nb),
        "ggml_tensor.op": view.op,
        "ggml_tensor.view_offs": view.view_offs,
        "ggml_tensor.name": ffi.string(view.name),
        "ggml_tensor.view_src": view.view_src == base,
        "ggml_tensor.src": [source == base for source in view.src],
        "ggml_tensor.data": view.data == ffi.NULL and base.extra == ffi.NULL,
        "ggml_nbytes": lib.ggml_nbytes(view),
        "llama_batch": (batch.n_tokens, batch.token == token, *(x == ffi.NULL for x in (batch.embd, batch.pos, batch.logits))),
    }
    lib.ggml_free(context)
    expected = {
        "ggml_tensor.type": TYPE_I32,
        "ggml_tensor.ne": [2, 5, 1, 1],
        "ggml_tensor.nb": [4, 12, 60, 60],
        "ggml_tensor.op": OP_VIEW,
        "ggml_tensor.view_offs": 4,
        "ggml_tensor.name": b"bel-view-7",
        "ggml_tensor.view_src": True,
        "ggml_tensor.src": [True] + [False] * 9,
        "ggml_tensor.data": True,
        "ggml_nbytes": 4 * 12 + 2 * 4,
        "llama_batch": (1, True, True, True, True),
    }
    return found, expected


def _context_layout(ffi: Any, lib: Any, library: str) -> str:
    params = ffi.new("struct any_params *", lib.llama_context_default_params())
    newest: MachineError | None = None
    for layout in CONTEXT_LAYOUTS:
        try:
            compare(library, _read(ffi, layout, params), _CONTEXT_DEFAULTS, "llama_context_default_params().")
        except MachineError as error:
            newest = newest or error
        else:
            return layout
    assert newest is not None, "there is at least one layout"
    raise newest


def _read(ffi: Any, struct: str, params: Any) -> dict[str, object]:
    view = ffi.cast(f"struct {struct} *", params)
    return {name: _plain(ffi, view, name) for name, _ in ffi.typeof(f"struct {struct}").fields}


def _plain(ffi: Any, struct: Any, name: str) -> object:
    """A field that is a number or truth value as it is; None for a null pointer, True for another one."""
    try:
        value = getattr(struct, name)
    except ValueError as error:  # a truth value that is neither 0 nor 1
        return str(error)
    if isinstance(value, ffi.CData):
        return None if value == ffi.NULL else True
    return value
