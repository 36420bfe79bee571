"""llama.cpp's C interface as far as this toolkit uses it, and the proof that a library really has it.

Declarations: include/llama.h, ggml/include/ggml.h, ggml-backend.h and ggml-cpu.h of llama.cpp build 11549.  The library
is opened without a compiler (cffi in ABI mode), so nothing but `check_abi` stands between a struct that grew a field and
a model that computes nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from bel.formats.errors import MachineError
from bel.formats.ggml_types import GGML_TYPES

HOW_TO_INSTALL = (
    "Install the tested one: pip install 'bel-toolkit[llama]'; where --engine names a folder, build it (docs/gpu.md)"
)
OBJECT_BYTES = 32  # struct ggml_object (ggml/src/ggml.c): what ggml_tensor_overhead() counts beside the tensor
PARAMS_BYTES = 1024
"""Room for a parameter struct that goes by value.  It is a buffer of the library's own defaults, of which we set the fields
that we know: fields that a newer library has behind them keep their defaults, and are never read from beyond the struct."""

_ENUMS_AND_STRUCTS = """
typedef bool (*eval_callback)(struct ggml_tensor * t, bool ask, void * user_data);
typedef void (*log_callback)(int level, const char * text, void * user_data);

struct ggml_tensor {
    int type;
    void * buffer;
    int64_t ne[4];
    size_t nb[4];
    int op;
    int32_t op_params[16];
    int32_t flags;
    struct ggml_tensor * src[10];
    struct ggml_tensor * view_src;
    size_t view_offs;
    void * data;
    char name[64];
    void * extra;
    char padding[8];
};
struct ggml_init_params { size_t mem_size; void * mem_buffer; bool no_alloc; };
struct ggml_type_traits_cpu { void * from_float; void * vec_dot; int vec_dot_type; int64_t nrows; };

struct llama_batch {
    int32_t n_tokens;
    int32_t * token;
    float * embd;
    int32_t * pos;
    int32_t * n_seq_id;
    int32_t ** seq_id;
    int8_t * logits;
};
struct llama_model_kv_override {
    int tag;
    char key[128];
    union { int64_t val_i64; double val_f64; bool val_bool; char val_str[128]; };
};
struct llama_model_params {
    void * devices;
    void * tensor_buft_overrides;
    int32_t n_gpu_layers;
    int split_mode;
    int load_mode;
    int lazy_mode;
    int32_t main_gpu;
    const float * tensor_split;
    void * progress_callback;
    void * progress_callback_user_data;
    const struct llama_model_kv_override * kv_overrides;
    bool vocab_only;
    bool check_tensors;
    bool use_extra_bufts;
    bool no_host;
    bool no_alloc;
    bool load_mtp;
};
struct llama_chat_message { const char * role; const char * content; };
struct any_params { uint64_t words[%(words)d]; };
"""

_CONTEXT_PARAMS = """
struct %(name)s {
    uint32_t n_ctx;
    uint32_t n_batch;
    uint32_t n_ubatch;
    uint32_t n_seq_max;
    uint32_t n_rs_seq;
    uint32_t n_outputs_max;
    uint32_t n_outputs_max_per_seq;
    int32_t n_threads;
    int32_t n_threads_batch;
    int ctx_type;
    int rope_scaling_type;
    int pooling_type;
    int attention_type;
    int flash_attn_type;
    float rope_freq_base;
    float rope_freq_scale;
    float yarn_ext_factor;
    float yarn_attn_factor;
    float yarn_beta_fast;
    float yarn_beta_slow;
    uint32_t yarn_orig_ctx;
    float defrag_thold;
    eval_callback cb_eval;
    void * cb_eval_user_data;
    int type_k;
    int type_v;
    %(moe_cache)s
    void * abort_callback;
    void * abort_callback_data;
    bool embeddings;
    bool offload_kqv;
    bool no_perf;
    bool op_offload;
    bool swa_full;
    bool kv_unified;
    void * samplers;
    size_t n_samplers;
    void * ctx_other;
};
"""

_FUNCTIONS = """
const char * ggml_version(void);
const char * ggml_commit(void);
size_t ggml_tensor_overhead(void);
const char * ggml_op_name(int op);
const char * ggml_type_name(int type);
size_t ggml_type_size(int type);
int64_t ggml_blck_size(int type);
size_t ggml_nbytes(const struct ggml_tensor * tensor);
struct ggml_context * ggml_init(struct ggml_init_params params);
void ggml_free(struct ggml_context * ctx);
struct ggml_tensor * ggml_new_tensor_2d(struct ggml_context * ctx, int type, int64_t ne0, int64_t ne1);
struct ggml_tensor * ggml_view_2d(struct ggml_context * ctx, struct ggml_tensor * a, int64_t ne0, int64_t ne1, size_t nb1,
                                  size_t offset);
struct ggml_tensor * ggml_set_name(struct ggml_tensor * tensor, const char * name);
void ggml_backend_tensor_get(const struct ggml_tensor * tensor, void * data, size_t offset, size_t size);

void llama_backend_init(void);
void llama_log_set(log_callback callback, void * user_data);
struct any_params llama_model_default_params(void);
struct any_params llama_context_default_params(void);
struct llama_model * llama_model_load_from_splits(const char ** paths, size_t n_paths, struct any_params params);
void llama_model_free(struct llama_model * model);
struct llama_context * llama_init_from_model(struct llama_model * model, struct any_params params);
void llama_free(struct llama_context * ctx);
uint32_t llama_n_ctx(const struct llama_context * ctx);
uint32_t llama_n_batch(const struct llama_context * ctx);
uint32_t llama_n_ubatch(const struct llama_context * ctx);
int32_t llama_model_n_layer(const struct llama_model * model);
int32_t llama_model_n_ctx_train(const struct llama_model * model);
bool llama_model_has_encoder(const struct llama_model * model);
const char * llama_model_chat_template(const struct llama_model * model, const char * name);
const struct llama_vocab * llama_model_get_vocab(const struct llama_model * model);
int llama_vocab_type(const struct llama_vocab * vocab);
int32_t llama_vocab_n_tokens(const struct llama_vocab * vocab);
bool llama_vocab_is_eog(const struct llama_vocab * vocab, int32_t token);
int32_t llama_tokenize(const struct llama_vocab * vocab, const char * text, int32_t text_len, int32_t * tokens,
                       int32_t n_tokens_max, bool add_special, bool parse_special);
int32_t llama_detokenize(const struct llama_vocab * vocab, const int32_t * tokens, int32_t n_tokens, char * text,
                         int32_t text_len_max, bool remove_special, bool unparse_special);
int32_t llama_chat_apply_template(const char * tmpl, const struct llama_chat_message * chat, size_t n_msg, bool add_ass,
                                  char * buf, int32_t length);
struct llama_batch llama_batch_get_one(int32_t * tokens, int32_t n_tokens);
void * llama_get_memory(const struct llama_context * ctx);
void llama_memory_clear(void * mem, bool data);
int32_t llama_decode(struct llama_context * ctx, struct llama_batch batch);
float * llama_get_logits(struct llama_context * ctx);
float * llama_get_logits_ith(struct llama_context * ctx, int32_t i);
"""

PRODUCT_FUNCTIONS = """
struct ggml_tensor * ggml_new_tensor_3d(struct ggml_context * ctx, int type, int64_t ne0, int64_t ne1, int64_t ne2);
struct ggml_tensor * ggml_mul_mat_id(struct ggml_context * ctx, struct ggml_tensor * as, struct ggml_tensor * b,
                                     struct ggml_tensor * ids);
size_t ggml_graph_overhead_custom(size_t size, bool grads);
struct ggml_cgraph * ggml_new_graph_custom(struct ggml_context * ctx, size_t size, bool grads);
void ggml_build_forward_expand(struct ggml_cgraph * cgraph, struct ggml_tensor * tensor);
const struct ggml_type_traits_cpu * ggml_get_type_traits_cpu(int type);
void * ggml_backend_cpu_init(void);
void ggml_backend_cpu_set_n_threads(void * backend, int n_threads);
int ggml_backend_graph_compute(void * backend, struct ggml_cgraph * cgraph);
void ggml_backend_free(void * backend);
"""
"""What single products on the CPU need (`expert_product.py`): checked there, since a model runs without them."""

CONTEXT_LAYOUTS = ("llama_context_params", "llama_context_params_0c1e570")
"""The layouts of `llama_context_params`, newest first: commit 0c1e570 (llama-cpp-python 0.3.36) has no `moe_cache_size`."""

_MOE_CACHE = {CONTEXT_LAYOUTS[0]: "size_t moe_cache_size;", CONTEXT_LAYOUTS[1]: ""}

# enum ggml_op (ggml/include/ggml.h): the operations whose nodes are looked at
OPS = {0: "NONE", 3: "ADD_ID", 29: "MUL_MAT", 30: "MUL_MAT_ID", 36: "RESHAPE", 37: "VIEW", 40: "GET_ROWS", 69: "ARGSORT"}
OP_MUL_MAT, OP_VIEW = 29, 37
TYPE_F32, TYPE_F16, TYPE_I32 = 0, 1, 26
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


@cache
def declarations() -> Any:
    """The cffi `FFI` with all declarations above.  Raises ModuleNotFoundError where cffi is not installed."""
    from cffi import FFI

    ffi = FFI()
    text = _ENUMS_AND_STRUCTS % {"words": PARAMS_BYTES // 8}
    for name in CONTEXT_LAYOUTS:
        text += _CONTEXT_PARAMS % {"name": name, "moe_cache": _MOE_CACHE[name]}
    ffi.cdef(text + _FUNCTIONS + PRODUCT_FUNCTIONS)
    return ffi


def check_abi(ffi: Any, lib: Any, library: str) -> str:
    """Refuse a library whose structs are not ours; the name of its layout of `llama_context_params`.

    Nothing is believed: ggml makes a tensor and a view, and the library its default parameters, which are read back
    through our declarations and must have the known values.  Raises MachineError, naming the first thing that differs.
    """
    check_symbols(ffi, lib, library, _FUNCTIONS)
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
