"""Recordings of the example model: what is asked for, and what a trace of it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bel.formats.trace_calls import LayerCalls, read_trace
from bel.profiler.recording import RecordRequest
from bel.runtime.engine import Engine
from bel.runtime.prompts import Prompt

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-moe-q8_0.gguf"
CODE = Prompt("code", "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n")
CHAT = Prompt("chat", "Hello! Can you tell me a story about a dog and a cat?")


def layers_of(path: Path) -> dict[int, LayerCalls]:
    """A trace by layer, all columns."""
    trace = read_trace(path, weights=True)
    return {row.info.layer: row for row in trace.layers}


def tokens_of(text: str) -> npt.NDArray[np.int32]:
    with Engine.open().load(EXAMPLE) as model:
        return model.tokenize(text)


def record_request(folder: Path, **fields: Any) -> RecordRequest:
    """One thread: the model is small, and threads that wait for each other on a busy machine take a hundred times as long."""
    return RecordRequest(EXAMPLE, folder / "x.trace", **{"prompts": (CODE,), "n_predict": 20, "n_threads": 1, **fields})


def assert_beginning(part: Path, whole: Path, *, at_least: int, is_torn: bool) -> None:
    """`part` is what `whole` begins with, in every layer the same number of rows, `at_least` so many and not all."""
    got, all_calls = read_trace(part), layers_of(whole)
    assert bool(got.notes) == is_torn
    lengths = {len(calls.ids) for calls in got.layers}
    assert len(lengths) == 1
    assert at_least <= lengths.pop() < len(all_calls[0].ids)
    for calls in got.layers:
        n = len(calls.ids)
        assert np.array_equal(calls.ids, all_calls[calls.info.layer].ids[:n])
        assert np.array_equal(calls.token, all_calls[calls.info.layer].token[:n])
