"""Observers of a graph: what they see of each node, where they move weights, and that their exceptions surface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bel.formats.errors import MachineError
from bel.formats.gguf_model import open_model
from bel.runtime.context import ContextOptions
from bel.runtime.engine import Engine, Model
from bel.runtime.tensor import Tensor as Node
from loaded_example import TEXT, TOPK, Watcher
from loaded_example import engine as engine
from loaded_example import model as model


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
