"""Models in the engine: what is loaded and what is refused, their facts, and text to tokens and back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import archs
from bel.formats.errors import BadInputError
from bel.runtime.context import ContextOptions
from bel.runtime.engine import Engine, Model, ModelOptions
from loaded_example import TEXT, TOPK, Watcher
from loaded_example import engine as engine
from loaded_example import model as model
from synth import STRING, Gguf, Tensor, key

_loaded: list[Model] = []


def _example_model() -> Model:
    if not _loaded:
        _loaded.append(Engine.open().load(Path(__file__).parent.parent / "examples" / "tiny-moe-q8_0.gguf"))
    return _loaded[0]


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
