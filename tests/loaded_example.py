"""The example model in the engine, a text for it, and an observer made of two functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bel.runtime.engine import Engine, Model
from bel.runtime.tensor import Tensor as Node

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
