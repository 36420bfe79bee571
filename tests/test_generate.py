"""The generation loop and the stream of text, on real models: a character is never cut, and whatever ends a text is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import archs
from arch_parts import N_VOCAB
from bel.formats.errors import BadInputError, UsageError
from bel.runtime.context import Context, ContextOptions
from bel.runtime.engine import Engine, Model
from bel.runtime.generate import CONTEXT_FULL, END_OF_TEXT, INTERRUPTED, LENGTH, Generation, TextStream
from bel.runtime.sampling import Chooser
from synth import I32

N_CTX = 48
END = N_VOCAB - 1
PROMPT = np.array([10, 20, 30, 40, 50])


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A random model with a token for every byte, so that most characters take several."""
    path = archs.make_model("qwen3moe", tmp_path_factory.mktemp("bytewise") / "m.gguf")
    with Engine.open().load(path) as model:
        yield model


@pytest.fixture
def context(bytewise: Model) -> Iterator[Context]:
    with bytewise.context(ContextOptions(N_CTX, 16, 16, 1)) as context:
        yield context


def greedy() -> Chooser:
    return Chooser(0, 0)


def streamed(model: Model, tokens: list[int]) -> tuple[list[str], str]:
    """The pieces as they came, and the rest."""
    stream = TextStream(model, END)
    return [stream.push(token) for token in tokens], stream.finish()


@given(st.text(max_size=30))
def test_a_text_comes_out_as_it_went_in(bytewise: Model, text: str) -> None:
    tokens = [int(t) for t in bytewise.tokenize(text, parse_special=False)]
    pieces, rest = streamed(bytewise, tokens)
    assert "".join(pieces) == text
    assert rest == ""
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(st.lists(st.integers(0, N_VOCAB - 2), max_size=30))
def test_any_tokens_give_what_all_their_bytes_give(bytewise: Model, tokens: list[int]) -> None:
    """Also where the bytes are no text: nothing is lost, repeated or held back longer than a character."""
    pieces, rest = streamed(bytewise, tokens)
    data = bytewise.detokenize(tokens) if tokens else b""
    assert "".join(pieces) + rest == data.decode("utf-8", "replace")
    for count in range(len(tokens)):
        shown = "".join(pieces[: count + 1]).encode()
        so_far = bytewise.detokenize(tokens[: count + 1])
        assert len(so_far.decode("utf-8", "replace").encode()) - len(shown) <= 3


def test_a_cut_character_at_the_end_is_shown_as_one_replacement(bytewise: Model) -> None:
    tokens = [int(t) for t in bytewise.tokenize("a€")][:-1]
    pieces, rest = streamed(bytewise, tokens)
    assert ("".join(pieces), rest) == ("a", "\ufffd")


def _sentence_pieces() -> archs.Keys:
    """A vocabulary of the SentencePiece kind, where the space of a word is part of its token."""
    words = ["<unk>", "<s>", "</s>", "▁one", "▁two", "three", "▁"]
    words += [f"word{number}" for number in range(N_VOCAB - 256 - len(words))]
    tokens = words + [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [2, 3, 3] + [1] * (len(words) - 3) + [6] * 256
    scores = [0.0] * N_VOCAB
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": (I32, kinds),
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": True,
    }


def test_words_keep_their_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, a token of SentencePiece at the beginning of a text loses it."""
    monkeypatch.setattr(archs, "_tokenizer_keys", _sentence_pieces)
    with Engine.open().load(archs.make_model("qwen3moe", tmp_path / "m.gguf")) as model:
        stream = TextStream(model, 3)
        assert [stream.push(token) for token in (4, 3, 5, 4)] == [" two", " one", "three", " two"]


def test_the_tokens_are_those_of_a_plain_loop(context: Context) -> None:
    """A prompt longer than a batch, then each token by itself."""
    prompt = np.arange(1, 21)
    generation = Generation(context, greedy())
    generation.prompt(prompt)
    made = list(generation.tokens(6))
    context.clear()
    context.decode(prompt[:16])
    context.decode(prompt[16:])
    expected = []
    for _ in range(6):
        expected.append(int(context.logits[-1].argmax()))
        context.decode(expected[-1:])
    assert made == expected
    assert generation.ended == LENGTH
    assert (generation.speed.prompt_tokens, generation.speed.decode_tokens) == (20, 5)
    assert generation.speed.decode_seconds > 0


def test_no_token_asked_for_computes_the_prompt_alone(context: Context) -> None:
    generation = Generation(context, greedy())
    generation.prompt(PROMPT)
    assert list(generation.tokens(0)) == []
    assert (generation.ended, generation.speed.decode_tokens) == (LENGTH, 0)


@pytest.mark.parametrize("n_positions", [None, 20])
def test_a_full_context_ends_the_text_behind_its_last_token(context: Context, n_positions: int | None) -> None:
    """The last position's logits still give a token, which has no place any more."""
    generation = Generation(context, greedy(), n_positions=n_positions, ignore_end=True)
    generation.prompt(PROMPT)
    made = list(generation.tokens(1000))
    assert generation.ended == CONTEXT_FULL
    assert len(made) == (n_positions or N_CTX) - len(PROMPT) + 1


def test_a_prompt_that_does_not_fit_is_refused_before_it_is_computed(context: Context) -> None:
    generation = Generation(context, greedy())
    with pytest.raises(UsageError, match=f"it has {N_CTX + 1} tokens, the context {N_CTX}"):
        generation.prompt(np.ones(N_CTX + 1, np.int64))
    assert generation.speed.prompt_tokens == 0


def test_a_stop_ends_behind_the_token_at_hand(context: Context) -> None:
    made: list[int] = []
    generation = Generation(context, greedy(), is_stopped=lambda: len(made) == 3)
    generation.prompt(PROMPT)
    for token in generation.tokens(20):
        made.append(token)
    assert (len(made), generation.ended) == (3, INTERRUPTED)


def test_a_stop_in_the_prompt_computes_no_more_of_it(context: Context) -> None:
    generation = Generation(context, greedy(), is_stopped=lambda: context.n_past >= 16)
    generation.prompt(np.ones(40, np.int64))
    assert list(generation.tokens(5)) == []
    assert (generation.ended, generation.speed.prompt_tokens) == (INTERRUPTED, 16)


class _WantsToEnd:
    """A chooser that always takes the end first, and the best of the rest where that is not to be had."""

    def pick(self, logits: np.ndarray) -> int:
        return END if np.isfinite(logits[END]) else int(np.argmax(logits))


def test_the_end_of_a_text_is_not_a_token_of_it(context: Context) -> None:
    generation = Generation(context, _WantsToEnd())  # type: ignore[arg-type]
    generation.prompt(PROMPT)
    assert list(generation.tokens(5)) == []
    assert generation.ended == END_OF_TEXT


def test_an_ignored_end_gives_the_best_of_the_other_tokens(context: Context) -> None:
    generation = Generation(context, _WantsToEnd(), ignore_end=True)  # type: ignore[arg-type]
    generation.prompt(PROMPT)
    best = int(np.argmax(np.delete(context.logits[-1], END)))
    made = list(generation.tokens(3))
    assert made[0] == best
    assert END not in made


def test_logits_that_are_no_numbers_end_with_an_error() -> None:
    with pytest.raises(BadInputError, match="not finite"):
        greedy().pick(np.array([np.nan, 1.0], np.float32))
