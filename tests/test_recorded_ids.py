"""What a trace holds is what the router chose: every token, every layer, with the weights in use."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import archs
from bel.formats.gguf_model import GgufModel, open_model
from bel.formats.trace import DECODE, PROMPT, TraceWriter
from bel.formats.trace_header import TraceHeader
from bel.profiler.record_worker import Recorder, trace_layers
from bel.profiler.router import RouterObserver
from bel.runtime.context import ContextOptions
from bel.runtime.engine import Engine
from bel.runtime.sampling import Chooser
from bel.runtime.tensor import Tensor
from recordings import CHAT, CODE, EXAMPLE, layers_of, tokens_of


@dataclass
class Witness:
    """Forwards to the recorder's observer, and reads by other ways what it must find.

    `scores`: what the choice was sorted by, reached through the choice's sources.  `chosen`: the choice, read at its own
    node.  `used`: the weights, read at the product that uses them.  `named`: the nodes that a caller wants by name.
    """

    inner: RouterObserver
    wanted: tuple[str, ...] = ()
    scores: dict[int, list[npt.NDArray[np.float32]]] = field(default_factory=dict)
    chosen: dict[int, list[npt.NDArray[np.int32]]] = field(default_factory=dict)
    used: dict[int, list[npt.NDArray[np.float32]]] = field(default_factory=dict)
    named: dict[str, list[npt.NDArray[np.float32]]] = field(default_factory=dict)
    _is_inner: bool = False

    def ask(self, tensor: Tensor) -> bool:
        self._is_inner = self.inner.ask(tensor)
        kind, _, layer = tensor.name.partition("-")
        return self._is_inner or (layer.isdecimal() and kind in ("ffn_moe_topk", "ffn_moe_weighted", *self.wanted))

    def seen(self, tensor: Tensor) -> None:
        if self._is_inner:
            self.inner.seen(tensor)
        kind, _, number = tensor.name.partition("-")
        layer = int(number)
        if kind == "ffn_moe_topk":
            self.chosen.setdefault(layer, []).append(tensor.array())
            sort = tensor.src(0)
            if sort is not None and sort.op == "ARGSORT":
                scores = sort.src(0)
                assert scores is not None
                self.scores.setdefault(layer, []).append(scores.array())
        elif kind == "ffn_moe_weighted":
            weights = tensor.src(1)
            assert weights is not None
            self.used.setdefault(layer, []).append(weights.array(3)[..., 0])
        if kind in self.wanted:
            self.named.setdefault(tensor.name, []).append(tensor.array())

    def take(self, n_tokens: int) -> Any:
        return self.inner.take(n_tokens)


def record_here(
    path: Path, trace: Path, prompts: list[npt.NDArray[np.int32]], n_decode: int, n_ubatch: int, wanted: tuple[str, ...] = ()
) -> tuple[Witness, GgufModel]:
    """Record in this process, with a witness and all columns."""
    source = open_model(path)
    layers = trace_layers(source)
    witness = Witness(RouterObserver(source.arch or "", layers, weights=True, times=True), wanted)
    header = TraceHeader("test", source.arch or "", "", layers, "test", has_weights=True, has_times=True)
    chooser = Chooser(0.0, 0)
    n_ctx = max(map(len, prompts)) + n_decode
    with (
        Engine.open().load(path) as model,
        model.context(ContextOptions(n_ctx, n_ubatch, n_ubatch, 1), witness) as context,
        TraceWriter(trace, header) as writer,
    ):
        recorder = Recorder(context, witness, writer)  # type: ignore[arg-type]
        for tokens in prompts:
            assert sum(recorder.prompt(tokens)) == len(tokens)
            for _ in range(n_decode):
                recorder.decode(chooser.pick(context.logits[-1]))
            recorder.flush()
    return witness, source


def assert_best(scores: npt.NDArray[np.float32], ids: npt.NDArray[np.integer[Any]]) -> None:
    """`ids` (n, k) are the k best of `scores` (n, E), best first; among equals any will do."""
    k = ids.shape[1]
    assert all(len(set(row)) == k for row in ids.tolist())
    assert np.array_equal(np.take_along_axis(scores, ids.astype(np.int64), 1), -np.sort(-scores, 1)[:, :k])


def test_ids_are_the_best_of_the_routers_logits(tmp_path: Path) -> None:
    """Every token, every layer, prompt and decode, in order; and a router in numpy finds the same."""
    trace = tmp_path / "x.trace"
    prompt = tokens_of(CODE.text)
    wanted = ("ffn_moe_logits", "ffn_moe_probs", "ffn_norm")
    witness, source = record_here(EXAMPLE, trace, [prompt], 40, 16, wanted)
    got = layers_of(trace)
    n = len(prompt) + 40
    n_close = 0
    for layer, calls in got.items():
        ids, k = calls.ids, calls.info.top_k
        assert ids.shape == (n, k)
        logits, probs, normed = (np.concatenate(witness.named[f"{name}-{layer}"]) for name in wanted)
        assert_best(logits, ids)
        assert_best(probs, ids)
        gate = _f32(source, f"blk.{layer}.ffn_gate_inp.weight")
        ours = normed.astype(np.float64) @ gate.T.astype(np.float64)
        assert np.allclose(ours, logits, atol=1e-2)
        # Rounding may swap neighbours: a row counts where its k + 1 best scores are further apart than the two differ.
        best = -np.sort(-ours, 1)[:, : k + 1]
        clear = (best[:, :-1] - best[:, 1:]).min(1) > 4 * np.abs(ours - logits).max()
        n_close += int((~clear).sum())
        assert np.array_equal(np.argsort(-ours, 1)[clear, :k], ids[clear])
    assert n_close < 0.1 * n * len(got), "most rows are clear, or nothing was compared"


def test_weights_are_those_that_multiply_the_experts(tmp_path: Path) -> None:
    """Normed to one in this architecture, and in the order of the ids."""
    trace = tmp_path / "x.trace"
    witness, _ = record_here(EXAMPLE, trace, [tokens_of(CHAT.text)], 5, 512, ("ffn_moe_probs",))
    for layer, calls in layers_of(trace).items():
        weights = calls.weights
        assert weights is not None
        assert np.array_equal(weights, np.concatenate(witness.used[layer]).astype(np.float16))
        assert np.allclose(weights.astype(np.float32).sum(1), 1, atol=2e-3)
        probs = np.concatenate(witness.named[f"ffn_moe_probs-{layer}"])
        shares = np.take_along_axis(probs, calls.ids.astype(np.int64), 1)
        assert np.allclose(weights, shares / shares.sum(1, keepdims=True), atol=2e-3)


@pytest.mark.parametrize("arch", archs.ARCHS)
def test_every_architecture_is_recorded_whole(arch: str, tmp_path: Path) -> None:
    """Every MoE layer has every row of prompt and decode; the ids are the best scores, the weights those in use."""
    kind = archs.ARCHS[arch]
    path, trace = archs.make_model(arch, tmp_path / "model.gguf"), tmp_path / "x.trace"
    prompts = [np.array([72, 101, 32, 256, 10, 200, 120, 66, 257, 41, 104], np.int32), np.array([9, 8], np.int32)]
    witness, _ = record_here(path, trace, prompts, 4, 5)
    got = layers_of(trace)
    n = sum(map(len, prompts)) + 8
    assert list(got) == kind.moe_layers(kind.shape)
    for layer, calls in got.items():
        assert (calls.info.n_expert, calls.info.top_k) == (kind.shape.n_expert, kind.shape.n_used)
        assert calls.ids.shape == (n, kind.shape.n_used)
        assert calls.rows_per_call.tolist() == [5, 5, 1] + [1] * 4 + [2] + [1] * 4
        assert calls.phase.tolist() == [PROMPT] * 3 + [DECODE] * 4 + [PROMPT] + [DECODE] * 4
        assert calls.ubatch.tolist() == list(range(12))
        assert calls.order.tolist() == [list(got).index(layer) + len(got) * u for u in range(12)]
        assert calls.token.tolist() == [*range(15), *range(6)]
        assert np.array_equal(calls.ids, np.concatenate(witness.chosen[layer][:: kind.calls]))
        used = np.concatenate([w.reshape(-1, kind.shape.n_used) for w in witness.used[layer][:: kind.calls]])
        assert calls.weights is not None
        assert np.array_equal(calls.weights, used.astype(np.float16))
        assert calls.time_ns is not None
        assert (calls.time_ns > 0).all()
        if layer < kind.hash_layers:
            assert layer not in witness.scores, "a hash layer takes its ids from a table"
        else:
            assert_best(np.concatenate(witness.scores[layer][:: kind.calls]), calls.ids)


def test_a_ubatch_smaller_than_the_prompt(tmp_path: Path) -> None:
    """Forty tokens in sevens: six calls a layer, numbered, the last with five rows; then one call a token."""
    trace = tmp_path / "x.trace"
    record_here(EXAMPLE, trace, [tokens_of(CODE.text * 3)[:40]], 3, 7)
    for calls in layers_of(trace).values():
        assert calls.rows_per_call.tolist() == [7, 7, 7, 7, 7, 5, 1, 1, 1]
        assert calls.phase.tolist() == [PROMPT] * 6 + [DECODE] * 3
        assert calls.ubatch.tolist() == list(range(9))
        assert calls.token.tolist() == list(range(43))


def _f32(source: GgufModel, name: str) -> npt.NDArray[np.float32]:
    """An F32 tensor of a model, in numpy's order."""
    tensor = next(t for t in source.tensors if t.name == name)
    data = source.files[tensor.source].path.read_bytes()[tensor.start_bytes : tensor.start_bytes + tensor.size_bytes]
    return np.frombuffer(data, np.float32).reshape(tensor.ne[::-1])
