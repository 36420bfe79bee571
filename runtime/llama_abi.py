"""llama.cpp's C interface as far as this toolkit uses it.

Declarations: include/llama.h, ggml/include/ggml.h, ggml-backend.h and ggml-cpu.h of llama.cpp build 11549.  The library
is opened without a compiler (cffi in ABI mode), so nothing but `llama_check.check_abi` stands between a struct that grew
a field and a model that computes nonsense.
"""

from __future__ import annotations

from functools import cache
from typing import Any

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
typedef void (*abort_text_callback)(const char * text);

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

FUNCTIONS = """
const char * ggml_version(void);
const char * ggml_commit(void);
abort_text_callback ggml_set_abort_callback(abort_text_callback callback);
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


@cache
def declarations() -> Any:
    """The cffi `FFI` with all declarations above.  Raises ModuleNotFoundError where cffi is not installed."""
    from cffi import FFI

    ffi = FFI()
    text = _ENUMS_AND_STRUCTS % {"words": PARAMS_BYTES // 8}
    for name in CONTEXT_LAYOUTS:
        text += _CONTEXT_PARAMS % {"name": name, "moe_cache": _MOE_CACHE[name]}
    ffi.cdef(text + FUNCTIONS + PRODUCT_FUNCTIONS)
    return ffi
