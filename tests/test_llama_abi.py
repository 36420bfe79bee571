"""The binary interface of llama.cpp: the real library passes, and any other is refused by the name of what differs."""

from __future__ import annotations

import pytest

from bel.formats.errors import MachineError
from bel.runtime import llama_abi, llama_check
from bel.runtime.engine import Engine
from loaded_example import engine as engine


def test_the_installed_library_passes(engine: Engine) -> None:
    """The pinned wheel is what it claims to be, and says which build."""
    assert (engine.name, engine.build) == ("xllamacpp", "11549")
    assert engine.library.context_params == "llama_context_params"


# Each entry is a struct as some other version of llama.cpp could have it: a field more, a field less, two swapped.
_OTHER_STRUCTS = {
    "tensor without view_offs": ("_ENUMS_AND_STRUCTS", "    size_t view_offs;\n", "", "ggml_tensor_overhead"),
    "tensor with 8 sources and a longer name": (
        "_ENUMS_AND_STRUCTS",
        "src[10];\n    struct ggml_tensor * view_src;\n    size_t view_offs;\n    void * data;\n    char name[64];",
        "src[8];\n    struct ggml_tensor * view_src;\n    size_t view_offs;\n    void * data;\n    char name[80];",
        "ggml_tensor",
    ),
    "tensor with nb before ne": (
        "_ENUMS_AND_STRUCTS",
        "int64_t ne[4];\n    size_t nb[4];",
        "size_t nb[4];\n    int64_t ne[4];",
        "ggml_tensor.ne",
    ),
    "batch with its old fields": (
        "_ENUMS_AND_STRUCTS",
        "int32_t n_tokens;\n",
        "int32_t n_tokens;\n int64_t x;\n",
        "llama_batch",
    ),
    "model parameters without lazy_mode": ("_ENUMS_AND_STRUCTS", "    int lazy_mode;\n", "", "main_gpu"),
    "context parameters without n_rs_seq": ("_CONTEXT_PARAMS", "    uint32_t n_rs_seq;\n", "", "n_outputs_max_per_seq"),
    "context parameters with another type": (
        "_CONTEXT_PARAMS",
        "    bool embeddings;\n",
        "    int embeddings;\n",
        "embeddings",
    ),
}


@pytest.mark.parametrize("case", _OTHER_STRUCTS)
def test_other_structs_are_refused_by_name(case: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Declarations that are not the library's are found out by what it reads back through them."""
    constant, old, new, names = _OTHER_STRUCTS[case]
    text = getattr(llama_abi, constant)
    assert old in text
    monkeypatch.setattr(llama_abi, constant, text.replace(old, new))
    ffi = llama_abi.declarations.__wrapped__()
    with pytest.raises(MachineError, match="another binary interface") as caught:
        llama_check.check_abi(ffi, ffi.dlopen(str(engine.library.path)), str(engine.library.path))
    assert names in str(caught.value)
    assert "pip install 'bel-toolkit[llama]'" in str(caught.value)
    assert caught.value.found is not None
    assert caught.value.expected is not None


def test_the_layout_without_the_expert_cache_is_told_apart(engine: Engine) -> None:
    """A field of eight zero bytes in the middle shifts the flags behind it: only one of the two layouts reads right."""
    ffi, lib = engine.library.ffi, engine.library.lib
    defaults = ffi.new("struct any_params *", lib.llama_context_default_params())
    newer, older = (ffi.cast(f"struct {name} *", defaults) for name in llama_abi.CONTEXT_LAYOUTS)
    assert (newer.offload_kqv, newer.swa_full) == (True, True)
    assert not older.swa_full


def test_a_changed_operation_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations are numbers in an enum, which a new one shifts."""
    monkeypatch.setitem(llama_abi.OPS, 31, "MUL_MAT_ID")
    with pytest.raises(MachineError, match=r"ggml_op_name\(31\) differs; found OUT_PROD, expected MUL_MAT_ID"):
        llama_check.check_abi(engine.library.ffi, engine.library.lib, "x")


def test_a_library_that_is_not_llama_cpp_is_refused() -> None:
    """The C library exports nothing of llama.cpp."""
    ffi = llama_abi.declarations()
    with pytest.raises(MachineError, match="exports no ggml_version"):
        llama_check.check_abi(ffi, ffi.dlopen(None), "libc")
