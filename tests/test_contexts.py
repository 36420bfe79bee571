"""Contexts: logits are a function of the tokens, and no misuse of them ends the process."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

import archs
from bel.formats.errors import BadInputError, UsageError
from bel.runtime.context import ContextFull, ContextOptions
from bel.runtime.engine import Engine, Model, ModelOptions
from loaded_example import TEXT
from loaded_example import engine as engine
from loaded_example import model as model


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
