"""The engine against the real library: it is checked before it is believed, and no misuse of it ends the process."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import archs
from bel.formats.errors import BadInputError, MachineError, UsageError
from bel.formats.gguf_model import open_model
from bel.runtime import llama_abi, llama_check, llama_library
from bel.runtime.context import ContextFull, ContextOptions
from bel.runtime.engine import Engine, Model, ModelOptions
from bel.runtime.llama_library import open_library
from bel.runtime.tensor import Tensor as Node
from synth import STRING, Gguf, Tensor, key

TEXT = "def add(a, b):\n    return a + b\n"
TOPK = "ffn_moe_topk-0"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.open()


@pytest.fixture(scope="module")
def model(engine: Engine) -> Iterator[Model]:
    with engine.load(Path(__file__).parent.parent / "examples" / "tiny-moe-q8_0.gguf") as loaded:
        yield loaded


class Watcher:
    """An observer made of two functions."""

    def __init__(self, ask: Callable[[Node], bool], seen: Callable[[Node], None] = lambda _node: None) -> None:
        self.ask, self.seen = ask, seen


# --- the binary interface -------------------------------------------------------------------------------------------


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


def test_a_missing_engine_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wheel the message is the command that installs it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    for engine in ("auto", "xllamacpp"):
        with pytest.raises(MachineError, match=r"pip install 'bel-toolkit\[llama\]'"):
            open_library.__wrapped__(engine)
    with pytest.raises(MachineError, match="pip install llama-cpp-python"):
        open_library.__wrapped__("llama-cpp-python")
    with pytest.raises(UsageError, match="is not an engine"):
        open_library.__wrapped__("ollama")


def test_an_untested_wheel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel's library does not tell its build; the package's version does."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "2026.11.12000")
    with pytest.raises(MachineError, match=f"found 2026.11.12000, expected {llama_library.TESTED_XLLAMACPP}"):
        open_library.__wrapped__("xllamacpp")


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
def test_llama_cpp_python_is_an_engine_too(example: Path) -> None:
    """Another build with another `llama_context_params` loads the same model and says the same."""
    other = Engine.open("llama-cpp-python")
    with other.load(example) as loaded, loaded.context(ContextOptions(128, n_threads=1)) as context:
        tokens, made = loaded.tokenize("def fibonacci(n):\n    if n < 2"), []
        context.decode(tokens)
        for _ in range(12):
            made.append(int(context.logits[-1].argmax()))
            context.decode(made[-1:])
    assert loaded.detokenize(made).decode().startswith(":\n        return n\n    else:\n")


# --- models ---------------------------------------------------------------------------------------------------------


def test_a_file_that_is_no_gguf_never_reaches_the_library(engine: Engine, tmp_path: Path) -> None:
    """Text, an empty file, a folder and nothing at all."""
    cases = [tmp_path / "text.gguf", tmp_path / "empty.gguf", tmp_path, tmp_path / "missing.gguf"]
    cases[0].write_text("not a model")
    cases[1].touch()
    for path in cases:
        with pytest.raises(BadInputError, match=str(path)):
            engine.load(path)


def test_a_truncated_model_is_refused(engine: Engine, example: Path, tmp_path: Path) -> None:
    """The header is whole and the data are not."""
    path = tmp_path / "cut.gguf"
    path.write_bytes(example.read_bytes()[:-4096])
    with pytest.raises(BadInputError, match=r"cut\.gguf"):
        engine.load(path)


def test_a_model_that_the_library_refuses_says_why(engine: Engine, tmp_path: Path) -> None:
    """A sound GGUF of an architecture that llama.cpp does not have: its own words are in the message."""
    path = Gguf([key("general.architecture", STRING, "no-such-arch")], [Tensor("blk.0.ffn_up_exps.weight", (32, 32, 2))])
    with pytest.raises(BadInputError, match="unknown model architecture: 'no-such-arch'"):
        engine.load(path.write(tmp_path / "strange.gguf"))


def test_the_library_says_nothing_unasked(example: Path, engine: Engine, capfd: pytest.CaptureFixture[str]) -> None:
    """Its log goes into memory, not on the user's terminal."""
    engine.log.clear()
    with engine.load(example) as loaded, loaded.context(ContextOptions(64, n_threads=1)) as context:
        context.decode([1, 2, 3])
    assert engine.log
    assert capfd.readouterr() == ("", "")


def test_facts_of_the_model(model: Model) -> None:
    """What the header says."""
    assert (model.n_layer, model.n_vocab, model.n_ctx_train, model.has_tokenizer) == (6, 4096, 512, True)
    assert model.is_end(2)
    assert not model.is_end(300)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_text_comes_back_from_its_tokens(text: str) -> None:
    """Any text, NUL and emoji included; the tokens are of the vocabulary."""
    model = _example_model()
    tokens = model.tokenize(text, add_special=False, parse_special=False)
    assert model.detokenize(tokens) == text.encode()
    assert all(0 <= token < model.n_vocab for token in tokens)


def test_special_tokens_are_added_and_parsed(model: Model) -> None:
    """The beginning token stands before the text; the name of the end token becomes it only when asked."""
    plain = model.tokenize(TEXT, add_special=False)
    assert model.tokenize(TEXT).tolist() == [1, *plain.tolist()]
    end = model.detokenize([2], special=True).decode()
    assert model.tokenize(end, add_special=False).tolist() == [2]
    assert 2 not in model.tokenize(end, add_special=False, parse_special=False)


def test_a_chat_is_put_into_the_models_template(model: Model, engine: Engine, tmp_path: Path) -> None:
    """The example has a template; a model without one is refused."""
    text = model.chat_prompt([("user", "What is two plus two?")])
    assert "What is two plus two?" in text
    assert len(text) > len("What is two plus two?")
    with (
        engine.load(archs.make_model("qwen3moe", tmp_path / "bare.gguf")) as bare,
        pytest.raises(BadInputError, match="no chat template"),
    ):
        bare.chat_prompt([("user", "hi")])


def test_metadata_can_be_overridden(engine: Engine, example: Path) -> None:
    """A model loaded with top-2 instead of top-4 routes to two experts."""
    widths: list[int] = []
    watcher = Watcher(lambda node: node.name == TOPK, lambda node: widths.append(node.ne[0]))
    top_2 = ModelOptions(overrides={"qwen3moe.expert_used_count": 2})
    with engine.load(example, top_2) as loaded, loaded.context(ContextOptions(64, n_threads=1), watcher) as context:
        context.decode([1, 2, 3])
    assert widths == [2]


# --- running --------------------------------------------------------------------------------------------------------


def test_logits_are_a_function_of_the_tokens(model: Model) -> None:
    """Two contexts, and one that was cleared, give the same bits; and the model says what it was trained to say."""
    tokens = model.tokenize("def fibonacci(n):\n    if n < 2")
    with model.context(ContextOptions(128, n_threads=1)) as one, model.context(ContextOptions(128, n_threads=1)) as other:
        one.decode(tokens, all_logits=True)
        other.decode([5, 6, 7])
        other.clear()
        other.decode(tokens, all_logits=True)
        assert one.logits.shape == (len(tokens), model.n_vocab)
        assert np.array_equal(one.logits, other.logits)
        made = []
        for _ in range(12):
            made.append(int(one.logits[-1].argmax()))
            one.decode(made[-1:])
            assert one.logits.shape == (1, model.n_vocab)
        assert one.n_past == len(tokens) + 12
    assert model.detokenize(made).decode().startswith(":\n        return n\n    else:\n")


def test_logits_of_the_last_token_alone(model: Model) -> None:
    """The default gives one row, the last of all rows."""
    tokens = model.tokenize(TEXT)
    with model.context(ContextOptions(64, n_threads=1)) as every, model.context(ContextOptions(64, n_threads=1)) as last:
        every.decode(tokens, all_logits=True)
        last.decode(tokens)
        assert last.logits.shape == (1, model.n_vocab)
        assert np.allclose(last.logits[0], every.logits[-1], atol=1e-3)


def test_misuse_is_an_error_and_not_an_abort(model: Model) -> None:
    """What the library answers with an assertion, or with memory of others, is refused before it."""
    with model.context(ContextOptions(256, n_batch=16, n_ubatch=16, n_threads=1)) as context:
        for tokens in ([], list(range(17))):
            with pytest.raises(ValueError, match="in a batch of at most 16"):
                context.decode(tokens)
        for token in (-1, model.n_vocab, 2**40):
            with pytest.raises(UsageError, match=f"no such token; found {token}"):
                context.decode([1, token])
        with pytest.raises(BadInputError, match="no logits"):
            _ = context.logits
        context.decode([1])
        assert context.n_past == 1
    context.close()


def test_a_full_context_names_the_numbers(model: Model) -> None:
    """The context has the size that was asked for, not the multiple that the library rounds it to; it stays usable."""
    with model.context(ContextOptions(40, n_batch=32, n_ubatch=32, n_threads=1)) as context:
        context.decode(range(1, 33))
        with pytest.raises(ContextFull, match="32 positions used, 9 more wanted, expected at most 40 in all"):
            context.decode(range(9))
        context.decode(range(8))
        with pytest.raises(ContextFull, match="40 positions used, 1 more"):
            context.decode([1])


def test_a_model_without_a_tokenizer_cannot_read_text(engine: Engine, tmp_path: Path) -> None:
    """The library would abort; ids still work."""
    source = archs.make_model("olmoe", tmp_path / "with.gguf")
    with engine.load(
        source, ModelOptions(overrides={"tokenizer.ggml.model": "none", "olmoe.vocab_size": archs.N_VOCAB})
    ) as bare:
        assert not bare.has_tokenizer
        with pytest.raises(BadInputError, match="no tokenizer"):
            bare.tokenize("text")
        with pytest.raises(BadInputError, match="no tokenizer"):
            bare.detokenize([1])
        with bare.context(ContextOptions(64, n_threads=1)) as context:
            context.decode([1, 2])
            assert context.logits.shape == (1, archs.N_VOCAB)


# --- the observer ---------------------------------------------------------------------------------------------------


class Boom(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize("kind", [Boom, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("phase", ["ask", "seen"])
def test_an_exception_in_the_observer_surfaces(kind: type[BaseException], phase: str, model: Model) -> None:
    """llama.cpp would report success; the decode raises it instead, and the context starts again from nothing."""
    is_armed = True

    def ask(node: Node) -> bool:
        if is_armed and phase == "ask" and node.name == "ffn_moe_topk-2":
            raise kind("in ask")
        return node.name == "ffn_moe_topk-2"

    def seen(_node: Node) -> None:
        if is_armed and phase == "seen":
            raise kind("in seen")

    tokens = model.tokenize(TEXT)
    with (
        model.context(ContextOptions(64, n_threads=1)) as plain,
        model.context(ContextOptions(64, n_threads=1), Watcher(ask, seen)) as context,
    ):
        with pytest.raises(kind, match=f"in {phase}"):
            context.decode(tokens)
        is_armed = False
        assert context.n_past == 0
        context.decode(tokens)
        plain.decode(tokens)
        assert np.array_equal(context.logits, plain.logits)


def test_the_observer_sees_nodes_in_order_with_their_sources(model: Model, example: Path) -> None:
    """The weights behind a matrix product are the file's: name, shape, type, strides and bytes."""
    order: list[str] = []
    stacks: dict[str, tuple[Any, ...]] = {}

    def ask(node: Node) -> bool:
        order.append(node.name)
        if node.op == "MUL_MAT_ID":
            weight = node.src(0)
            assert weight is not None
            stacks[weight.name] = (weight.op, weight.ne, weight.type_id, bytes(weight.read()), node.src(9))
        return False

    with model.context(ContextOptions(64, n_threads=1), Watcher(ask)) as context:
        context.decode([1, 2, 3])
    assert order.index("ffn_moe_logits-0") < order.index(TOPK) < order.index("ffn_moe_up-0") < order.index("ffn_moe_topk-1")
    source = open_model(example)
    data = example.read_bytes()
    experts = [t for t in source.tensors if "_exps.weight" in t.name]
    assert sorted(stacks) == sorted(t.name for t in experts)
    for t in experts:
        stored = data[t.start_bytes : t.start_bytes + t.size_bytes]
        assert stacks[t.name] == ("NONE", (*t.ne, 1), t.type_id, stored, None)


def test_a_strided_view_is_read_by_its_strides(model: Model) -> None:
    """The choice is a view of the sort of all experts: as many bytes as that has, and its first k columns."""
    seen: list[tuple[Any, ...]] = []

    def look(node: Node) -> None:
        whole = node.src(0)
        assert whole is not None
        seen.append((node.is_view, node.ne, node.nb, node.size_bytes, node.array(), whole.array()))
        with pytest.raises(MachineError, match="another kind"):
            node.array(1)

    with model.context(ContextOptions(64, n_threads=1), Watcher(lambda node: node.name == TOPK, look)) as context:
        context.decode([1, 2, 3])
    ((is_view, ne, nb, size, chosen, sort),) = seen
    assert (is_view, ne, nb[:2], size) == (True, (4, 3, 1, 1), (4, 128), 2 * 128 + 16)
    assert sort.shape == (3, 32)
    assert np.array_equal(chosen, sort[:, :4])
    assert all(sorted(row) == list(range(32)) for row in sort)


def test_quantised_data_have_no_array(model: Model) -> None:
    """Blocks are not numbers."""
    caught: list[str] = []

    def ask(node: Node) -> bool:
        weight = node.src(0)
        if node.op == "MUL_MAT_ID" and weight is not None:
            with pytest.raises(MachineError, match="found type 8"):
                weight.array(3)
            caught.append(weight.name)
        return False

    with model.context(ContextOptions(64, n_threads=1), Watcher(ask)) as context:
        context.decode([1])
    assert caught


def test_weights_run_from_another_place_with_other_strides(engine: Engine, example: Path) -> None:
    """What the runtime stands on: experts in memory of our own, further apart, give the same logits to the bit."""
    kept: list[Any] = []

    def move(node: Node) -> bool:
        weight = node.src(0)
        if node.op == "MUL_MAT_ID" and weight is not None and weight.identity not in [w for w, _ in kept]:
            n_expert, size = weight.ne[2], weight.nb[2]
            stride = size + 4096
            arena = np.full(n_expert * stride, 0xAA, np.uint8)
            arena.reshape(n_expert, stride)[:, :size] = np.frombuffer(weight.read(), np.uint8).reshape(n_expert, size)
            kept.append((weight.identity, arena))
            weight.place(arena.ctypes.data, (*weight.nb[:2], stride, stride * n_expert))
            assert weight.address == arena.ctypes.data
        return False

    with engine.load(example) as stock, engine.load(example) as moved:
        tokens = stock.tokenize(TEXT)
        with (
            stock.context(ContextOptions(64, n_threads=1)) as one,
            moved.context(ContextOptions(64, n_threads=1), Watcher(move)) as other,
        ):
            one.decode(tokens, all_logits=True)
            other.decode(tokens, all_logits=True)
            assert len(kept) == 18
            assert np.array_equal(one.logits, other.logits)
            for _, arena in kept:
                arena[:] = 0
            other.clear()
            other.decode(tokens, all_logits=True)
            assert not np.array_equal(one.logits, other.logits)


_loaded: list[Model] = []


def _example_model() -> Model:
    if not _loaded:
        _loaded.append(Engine.open().load(Path(__file__).parent.parent / "examples" / "tiny-moe-q8_0.gguf"))
    return _loaded[0]


def test_names_of_one_library_are_one_engine() -> None:
    """A second engine on the same library would take the log from the first, and with it the causes of failures."""
    assert Engine.open("xllamacpp") is Engine.open("auto") is Engine.open()


def test_single_tokens_may_have_threads_of_their_own(engine: Engine, model: Model) -> None:
    """llama.cpp says itself with how many it computes."""
    ask = ctypes.CDLL(str(engine.library.path))
    for options, expected in (
        (ContextOptions(64, 64, 64, 3), (3, 3)),
        (ContextOptions(64, 64, 64, 3, n_threads_single=1), (1, 3)),
    ):
        with model.context(options) as context:
            pointer = ctypes.c_void_p(int(engine.library.ffi.cast("uintptr_t", context._pointer)))
            assert (ask.llama_n_threads(pointer), ask.llama_n_threads_batch(pointer)) == expected
