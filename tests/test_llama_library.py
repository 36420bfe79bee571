"""Which library of llama.cpp is opened: one that is not there or not tested is refused, and one library is one engine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from bel.formats.errors import MachineError, UsageError
from bel.runtime import llama_library
from bel.runtime.context import ContextOptions
from bel.runtime.engine import Engine
from bel.runtime.llama_library import open_library


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


def test_names_of_one_library_are_one_engine() -> None:
    """A second engine on the same library would take the log from the first, and with it the causes of failures."""
    assert Engine.open("xllamacpp") is Engine.open("auto") is Engine.open()
