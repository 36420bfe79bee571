"""Recording on the real library: what the trace holds is what the router chose, and nothing that happens loses it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import archs
import synth
from bel.formats.bundle import open_bundle
from bel.formats.console import run_command
from bel.formats.errors import BadInputError, DamagedBundleError, InterruptedRun, MachineError, UsageError
from bel.formats.gguf_model import GgufModel, open_model
from bel.formats.trace import DECODE, PROMPT, TraceWriter
from bel.formats.trace_calls import LayerCalls, read_trace
from bel.formats.trace_header import TraceHeader
from bel.profiler.cli import main_group
from bel.profiler.record import record
from bel.profiler.record_source import model_name
from bel.profiler.record_worker import FLUSH_TOKENS, Recorder, trace_layers
from bel.profiler.recording import RecordRequest
from bel.profiler.router import RouterObserver
from bel.runtime.bundle_model import SlotOptions, open_run
from bel.runtime.context import ContextOptions
from bel.runtime.engine import Engine
from bel.runtime.policies import parse_policy
from bel.runtime.prompts import Prompt, read_prompts
from bel.runtime.sampling import Chooser
from bel.runtime.tensor import Tensor
from exactness import repack

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-moe-q8_0.gguf"
CODE = Prompt("code", "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n")
CHAT = Prompt("chat", "Hello! Can you tell me a story about a dog and a cat?")


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


def layers_of(path: Path) -> dict[int, LayerCalls]:
    """A trace by layer, all columns."""
    trace = read_trace(path, weights=True)
    return {row.info.layer: row for row in trace.layers}


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


def tokens_of(text: str) -> npt.NDArray[np.int32]:
    with Engine.open().load(EXAMPLE) as model:
        return model.tokenize(text)


def assert_best(scores: npt.NDArray[np.float32], ids: npt.NDArray[np.integer[Any]]) -> None:
    """`ids` (n, k) are the k best of `scores` (n, E), best first; among equals any will do."""
    k = ids.shape[1]
    assert all(len(set(row)) == k for row in ids.tolist())
    assert np.array_equal(np.take_along_axis(scores, ids.astype(np.int64), 1), -np.sort(-scores, 1)[:, :k])


# --- the ids are right ----------------------------------------------------------------------------------------------


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


# --- ubatches, prompts, context -------------------------------------------------------------------------------------


def test_a_ubatch_smaller_than_the_prompt(tmp_path: Path) -> None:
    """Forty tokens in sevens: six calls a layer, numbered, the last with five rows; then one call a token."""
    trace = tmp_path / "x.trace"
    record_here(EXAMPLE, trace, [tokens_of(CODE.text * 3)[:40]], 3, 7)
    for calls in layers_of(trace).values():
        assert calls.rows_per_call.tolist() == [7, 7, 7, 7, 7, 5, 1, 1, 1]
        assert calls.phase.tolist() == [PROMPT] * 6 + [DECODE] * 3
        assert calls.ubatch.tolist() == list(range(9))
        assert calls.token.tolist() == list(range(43))


def test_a_prompt_of_one_token(tmp_path: Path) -> None:
    """The whole way through the worker, on a model that puts no token before a text."""
    model = archs.make_model("olmoe", tmp_path / "model.gguf")
    request = replace(_request(tmp_path, prompts=(Prompt("p", "a"),), n_predict=3), model=model, ignore_end=True)
    result = record(request)
    assert (result.prompt_tokens, result.decode_tokens) == (1, 3)
    for calls in layers_of(request.trace).values():
        assert calls.phase.tolist() == [PROMPT, DECODE, DECODE, DECODE]
        assert calls.token.tolist() == [0, 1, 2, 3]


def test_the_trace_says_what_was_run(tmp_path: Path) -> None:
    """The header names the model, the engine, the prompts by digest and the sampling; not the time, not the place."""
    request = _request(tmp_path, prompts=(CODE, CHAT), n_predict=6, workload="mixed", ignore_end=True)
    progress: list[tuple[int, int]] = []
    result = record(request, lambda done, total: progress.append((done, total)))
    got = read_trace(request.trace)
    header = got.header
    assert (header.model_name, header.arch, header.workload) == ("tiny-moe", "qwen3moe", "mixed")
    assert (header.engine, header.engine_build) == ("xllamacpp", "11549") == (result.engine, result.engine_build)
    assert header.prompts == (CODE.digest, CHAT.digest)
    assert not header.has_weights
    assert not header.has_times
    assert [(row.layer, row.n_expert, row.top_k, row.expert_bytes) for row in header.layers] == [
        (layer, 32, 4, 3 * 128 * 64 // 32 * 34) for layer in range(6)
    ]
    assert header.sampling is not None
    assert header.sampling["temperature"] == 0
    assert str(tmp_path) not in repr(header)
    sizes = [len(tokens_of(prompt.text)) for prompt in (CODE, CHAT)]
    ran = [(p.name, p.prompt_tokens, p.decode_tokens, p.ended) for p in result.prompts]
    assert ran == [("code", sizes[0], 6, False), ("chat", sizes[1], 6, False)]
    assert got.notes == ()
    assert all(len(calls.ids) == sum(sizes) + 12 for calls in got.layers)
    assert progress
    assert all(0 <= done <= total for done, total in progress)


def test_twice_the_same(tmp_path: Path) -> None:
    """The same request gives the same bytes."""
    first, second = (replace(_request(tmp_path), trace=tmp_path / name, n_predict=150) for name in ("1.trace", "2.trace"))
    record(first)
    record(second)
    assert first.trace.read_bytes() == second.trace.read_bytes()


def test_sampling_is_seeded(tmp_path: Path) -> None:
    """A temperature draws other tokens than the greedy ones, the same for the same seed."""
    hot = replace(_request(tmp_path, n_predict=30), temperature=1.5, seed=7)
    runs = [replace(hot, trace=tmp_path / f"{i}.trace", seed=seed) for i, seed in enumerate((7, 7, 8))]
    for run in runs:
        record(run)
    one, same, other = (run.trace.read_bytes() for run in runs)
    assert one == same
    assert layers_of(runs[0].trace)[5].ids.tolist() != layers_of(runs[2].trace)[5].ids.tolist()
    assert one != other


def test_the_end_of_the_text_ends_a_prompt(tmp_path: Path) -> None:
    """Generation stops where the model ends its text, unless it may not; then every token asked for is recorded."""
    with Engine.open().load(EXAMPLE) as model, model.context(ContextOptions(256, n_threads=1)) as context:
        ending = Prompt("ends", model.chat_prompt([("user", "What is two plus two?")]))
        context.decode(model.tokenize(ending.text))
        made = [int(context.logits[-1].argmax())]
        while not model.is_end(made[-1]) and len(made) < 200:
            context.decode(made[-1:])
            made.append(int(context.logits[-1].argmax()))
        assert 5 < len(made) < 50, "the example answers this one with a short sentence"
    result = record(_request(tmp_path, prompts=(ending,), n_predict=200))
    assert (result.decode_tokens, result.prompts[0].ended) == (len(made) - 1, True)
    on = record(replace(_request(tmp_path, prompts=(ending,), n_predict=200), ignore_end=True, replace=True))
    assert (on.decode_tokens, on.prompts[0].ended) == (200, False)


def test_a_context_that_would_fill_up_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """The numbers, whose they are, and the number that would fit; no file."""
    request = _request(tmp_path, n_predict=500)
    n = len(tokens_of(CODE.text))
    with pytest.raises(UsageError, match="the context would fill up") as caught:
        record(request)
    for fact in (
        f"has {n} tokens",
        f"found {n + 500} tokens",
        "at most 512, the context that the model was trained",
        f"-n {512 - n}",
    ):
        assert fact in str(caught.value)
    with pytest.raises(UsageError, match=f"at most {n}, the context given. Shorten the prompt"):
        record(replace(request, n_predict=1, n_ctx=n))
    assert not request.trace.exists()
    assert record(replace(request, n_predict=512 - n, ignore_end=True)).decode_tokens == 512 - n


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    """Errors of the worker arrive as what they were there, with their facts."""
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    with pytest.raises(BadInputError, match="GGUF") as caught:
        record(replace(_request(tmp_path), model=text))
    assert caught.value.path == str(text)
    with pytest.raises(UsageError, match="is not an engine"):
        record(replace(_request(tmp_path), engine="ollama"))
    with pytest.raises(UsageError, match="temperature"):
        record(replace(_request(tmp_path), temperature=-1.0))
    with pytest.raises(FileNotFoundError) as missing:
        record(replace(_request(tmp_path), trace=tmp_path / "no" / "x.trace"))
    assert missing.value.filename is not None
    existing = tmp_path / "x.trace"
    existing.write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        record(replace(_request(tmp_path), trace=existing))
    assert existing.read_text() == "mine"


# --- bundles ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example model as a bundle."""
    return repack(EXAMPLE, tmp_path_factory.mktemp("record") / "tiny.bel")


@pytest.mark.parametrize("slots", [{"slots": 4}, {"slots": 9}, {}, {"ram_bytes": 150 << 20}], ids=str)
def test_a_bundle_gives_the_trace_of_its_source(slots: dict[str, int], bundle: Path, tmp_path: Path) -> None:
    """Byte by byte, at the floor of slots too: name, fingerprint, sizes, sampling, ids and weights."""
    stock = _request(tmp_path, prompts=(CODE, CHAT), n_predict=40, weights=True, ignore_end=True, n_ubatch=24)
    ours = replace(stock, model=bundle, trace=tmp_path / "ours.trace", **slots)
    told: list[tuple[int, int]] = []
    results = [record(stock), record(ours, lambda done, total: told.append((done, total)))]
    assert results[0].prompts == results[1].prompts
    assert told
    assert stock.trace.read_bytes() == ours.trace.read_bytes()
    assert all(len(calls.ids) == results[0].prompt_tokens + 80 for calls in read_trace(ours.trace).layers)


@pytest.mark.parametrize("arch", ["glm4moe", "gemma4", "grovemoe"])
def test_bundles_of_other_architectures(arch: str, tmp_path: Path) -> None:
    """With dense and MTP blocks, gate and up merged, two calls a layer: the header's layers are the source's."""
    model = archs.make_model(arch, tmp_path / "model.gguf")
    stock = replace(_request(tmp_path, n_predict=6, weights=True, ignore_end=True), model=model)
    ours = replace(stock, model=repack(model, tmp_path / "m.bel"), trace=tmp_path / "ours.trace", slots=2)
    record(stock)
    record(ours)
    assert stock.trace.read_bytes() == ours.trace.read_bytes()


def test_a_model_without_a_name_is_called_after_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the bundle as by the source, which may be split."""

    class Nameless(synth.Gguf):
        def write(self, path: Path) -> Path:
            self.entries = [entry for entry in self.entries if b"general.name" not in entry]
            half = len(self.tensors) // 2
            files = synth.split(self, [half, len(self.tensors) - half])
            return next(iter([part.write(path.with_name(name)) for name, part in files.items()]))

    monkeypatch.setattr(archs, "Gguf", Nameless)
    source = archs.make_model("qwen3moe", tmp_path / "model.gguf")
    base = source.name.removesuffix("-00001-of-00002.gguf")
    assert base != source.name
    assert model_name(open_model(source)) == model_name(open_bundle(repack(source, tmp_path / "other.bel"))) == base


def test_what_is_no_way_to_record_a_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    """Reads are no layer times; slots are for a bundle; a token needs its experts.  No file is left."""
    request = replace(_request(tmp_path), model=bundle)
    for wrong, why in (
        (replace(request, times=True), "would have the reads of its experts"),
        (replace(request, slots=4, ram_bytes=1 << 30), "exclude each other"),
        (replace(request, slots=0), "slots is below 1"),
        (replace(request, slots=3), "Give at least --slots 4"),
        (replace(request, ram_bytes=20 << 20), "does not fit into --ram 20.00 MiB"),
        (replace(request, model=EXAMPLE, slots=4), "--slots is for a bundle"),
        (replace(request, model=EXAMPLE, ram_bytes=1 << 30), "--ram is for a bundle"),
        (replace(request, n_predict=500), "at most 512, the context that the model was trained for"),
    ):
        with pytest.raises(UsageError, match=why):
            record(wrong)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_bundle_is_not_recorded(bundle: Path, tmp_path: Path) -> None:
    """A wrong byte of an expert is found before a token is computed from it."""
    copy = Path(shutil.copytree(bundle, tmp_path / "copy.bel"))
    manifest = open_bundle(copy).manifest
    layer = manifest.layers[2]
    with (copy / manifest.experts[0].name).open("r+b") as file:
        file.seek(layer.part_offset(7, layer.parts[1]))
        value = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([value ^ 1]))
    request = replace(_request(tmp_path), model=copy, slots=4)
    with pytest.raises(DamagedBundleError, match=r"expert 7 of layer 2 \(up\)"):
        record(request)
    assert not request.trace.exists()


def test_the_command_records_a_bundle(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--slots` and `--ram` arrive, and the profile is the one that the source gives."""
    common = ["-p", CODE.text, "-n", "12", "--threads", "1", "--workload", "code", "--json"]
    answers = []
    for name, model, *slots in (("a", EXAMPLE), ("b", bundle, "--slots", "5"), ("c", bundle, "--ram", "150M")):
        command = ["record", str(model), "-o", str(tmp_path / f"{name}.json"), *common, *slots]
        assert run_command(main_group, "bel-profile", command) == 0
        answers.append((tmp_path / f"{name}.json").read_bytes())
    assert answers[0] == answers[1] == answers[2]
    capsys.readouterr()
    for wrong in (["--slots", "2"], ["--ram", "20M"], ["--slots", "5", "--ram", "1G"], ["--timing"]):
        assert (
            run_command(main_group, "bel-profile", ["record", str(bundle), "-o", str(tmp_path / "d.json"), *common, *wrong])
            == 2
        )
        assert capsys.readouterr().out == ""
    assert not list(tmp_path.glob("d.*"))


def test_what_the_cache_counted_is_what_simulate_counts(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over two prompts, in both phases; of a GGUF there is nothing to count."""
    common = ["-n", "12", "--threads", "1", "--workload", "code", "--json", "--ignore-eos"]
    answers = []
    for name, model, *slots in (("a", EXAMPLE), ("b", bundle, "--slots", "5")):
        command = ["record", model, "-o", tmp_path / f"{name}.json", "-p", CODE.text, "-p", "once more", *common, *slots]
        assert run_command(main_group, "bel-profile", [str(x) for x in command]) == 0
        answers.append(json.loads(capsys.readouterr().out)["cache"])
    assert answers[0] is None
    cache = answers[1]
    assert set(cache["slots_by_layer"].values()) == {5}
    for phase in ("prompt", "decode"):
        command = [
            "simulate",
            str(tmp_path / "b.trace"),
            "--policy",
            cache["policy"],
            "--slots",
            "5",
            "--phase",
            phase,
            "--json",
        ]
        assert run_command(main_group, "bel-profile", command) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        assert {key: row[key] for key in ("accesses", "hits", "misses")} == cache[phase]
        assert 0 < cache[phase]["hits"] < cache[phase]["accesses"]


def test_an_observer_that_fails_leaves_the_run_as_good_as_new(bundle: Path) -> None:
    """In any layer, of the first graph or a later one: the next decode computes what a fresh one does."""

    class Failing:
        at = 0
        seen_nodes = 0

        def ask(self, tensor: Tensor) -> bool:
            return tensor.name.startswith("ffn_moe_topk")

        def seen(self, _tensor: Tensor) -> None:
            self.seen_nodes += 1
            if self.seen_nodes == self.at:
                raise ValueError("a bug in the observer")

    prompt, opened = tokens_of(CODE.text), open_bundle(bundle)
    logits = []
    for fails in ((), (1, 3, 6)):
        observer = Failing()
        slots = SlotOptions(parse_policy("lru"), slots=4)
        with open_run(Engine.open(), opened, ContextOptions(64, 64, 64, 1), slots, observer) as run:
            for at in fails:
                for tokens in (prompt, [65]):
                    observer.at, observer.seen_nodes = at, 0
                    with pytest.raises(ValueError, match="a bug in the observer"):
                        run.context.decode(tokens)
                    observer.at = 0
            run.context.decode(prompt)
            logits.append(run.context.logits.copy())
            for token in (65, 66, 67):
                run.context.decode([token])
                logits.append(run.context.logits.copy())
    assert all(np.array_equal(a, b) for a, b in zip(logits[:4], logits[4:], strict=True))


_CUT = """
import os, sys
from bel.profiler import record_worker
from bel.profiler.router import RouterObserver
class Cutting(RouterObserver):
    decodes = 0
    def take(self, n_tokens):
        Cutting.decodes += 1
        if Cutting.decodes == 100:
            os.truncate({path!r}, 8192)
        return super().take(n_tokens)
record_worker.RouterObserver = Cutting
record_worker.main()
"""


def test_a_read_that_fails_while_recording_keeps_what_there_is(bundle: Path, tmp_path: Path) -> None:
    """The experts file is cut behind the 100th decode: the trace has what came before, and the error names the file."""
    copy = Path(shutil.copytree(bundle, tmp_path / "copy.bel"))
    path = copy / open_bundle(copy).manifest.experts[0].name
    request = replace(_request(tmp_path, n_predict=300), model=copy, slots=4, ignore_end=True)
    whole = replace(request, model=bundle, trace=tmp_path / "whole.trace")
    record(whole)
    with pytest.raises(DamagedBundleError, match=str(path)):
        record(request, worker=(sys.executable, "-c", _CUT.format(path=str(path))))
    _assert_beginning(request.trace, whole.trace, at_least=len(tokens_of(CODE.text)) + 99, is_torn=False)


# --- nothing is lost ------------------------------------------------------------------------------------------------

# Real deaths inside the callback, from the 200th token on: the library's own assertion, and a bad address.
_DEATHS = {
    "abort": ("import ctypes; ctypes.CDLL(LIBRARY).ggml_abort(b'ggml.c', 42, b'GGML_ASSERT(i01 < ne01) failed')", "SIGABRT"),
    "segfault": ("import ctypes; ctypes.string_at(8)", "SIGSEGV"),
    "kill": ("os.kill(os.getpid(), 9)", "SIGKILL"),
}
_DYING_WORKER = """
import os, sys
from bel.profiler import record_worker
from bel.profiler.router import RouterObserver
from bel.runtime.engine import Engine
from bel.runtime.sampling import Chooser
LIBRARY = str(Engine.open().library.path)
class Dying(RouterObserver):
    decodes = 0
    def take(self, n_tokens):
        Dying.decodes += 1
        return super().take(n_tokens)
    def seen(self, tensor):
        super().seen(tensor)
        if Dying.decodes == {at}:
            {death}
record_worker.RouterObserver = Dying
record_worker.main()
"""


@pytest.mark.parametrize("death", _DEATHS)
def test_the_death_of_the_library_leaves_the_trace(death: str, tmp_path: Path) -> None:
    """The error names the signal, the library's last words and the trace, which has all but the last block."""
    action, signal_name = _DEATHS[death]
    request = replace(_request(tmp_path, n_predict=300), ignore_end=True)
    whole = replace(request, trace=tmp_path / "whole.trace", n_predict=220)
    record(whole)
    with pytest.raises(MachineError, match=signal_name) as caught:
        record(request, worker=(sys.executable, "-c", _DYING_WORKER.format(at=200, death=action)))
    assert str(request.trace) in str(caught.value)
    assert caught.value.exit_code == 5
    if death == "abort":
        assert "ggml.c:42: GGML_ASSERT(i01 < ne01) failed" in str(caught.value)
    _assert_beginning(request.trace, whole.trace, at_least=len(tokens_of(CODE.text)) + 199 - FLUSH_TOKENS, is_torn=True)


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    """It ends before it has read its request, which is larger than a pipe holds."""
    request = _request(tmp_path, prompts=(Prompt("long", "x" * 2**20),))
    with pytest.raises(MachineError, match=r"status 1.*nothing was recorded.*no numpy here"):
        record(request, worker=(sys.executable, "-c", "raise SystemExit('no numpy here')"))


def test_kill_9_of_the_whole_run(tmp_path: Path) -> None:
    """Both processes die at once, at no chosen place; at most the last block is lost."""
    request = replace(_request(tmp_path, n_predict=400), ignore_end=True)
    whole = replace(request, trace=tmp_path / "whole.trace")
    record(whole)
    with _running(request) as process:
        done = _follow(process, at_least=len(tokens_of(CODE.text)) + FLUSH_TOKENS + 20)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    _assert_beginning(request.trace, whole.trace, at_least=done - FLUSH_TOKENS, is_torn=True)


def test_the_worker_ends_in_order_when_the_command_is_gone(tmp_path: Path) -> None:
    """Kill -9 of the command alone: the worker notices, closes the trace, and does not live on."""
    request = replace(_request(tmp_path, n_predict=440), ignore_end=True)
    whole = replace(request, trace=tmp_path / "whole.trace")
    record(whole)
    with _running(request) as process:
        done = _follow(process, at_least=len(tokens_of(CODE.text)) + 10)
        process.kill()
        process.wait()
        for _ in range(600):
            if not read_trace(request.trace).notes:
                break
            time.sleep(0.05)
    _assert_beginning(request.trace, whole.trace, at_least=done, is_torn=False)


def test_an_interrupt_closes_the_trace(tmp_path: Path) -> None:
    """Ctrl-C, which in a terminal reaches both processes: all rows that were recorded are there, and the end mark."""
    request = replace(_request(tmp_path, n_predict=400), ignore_end=True)
    whole = replace(request, trace=tmp_path / "whole.trace")
    record(whole)
    told: list[int] = []

    def interrupt(done: int, _total: int) -> None:
        told.append(done)
        if done > len(tokens_of(CODE.text)) and len(told) == len(set(told)):
            raise KeyboardInterrupt

    with pytest.raises(InterruptedRun, match=str(request.trace)) as caught:
        record(request, interrupt)
    assert caught.value.exit_code == 130
    _assert_beginning(request.trace, whole.trace, at_least=told[0], is_torn=False)


def test_a_bug_of_the_observer_is_no_silent_half_trace(tmp_path: Path) -> None:
    """An exception inside the callback ends the recording with its own text; the trace ends before that token."""
    worker = _DYING_WORKER.format(at=200, death="raise ValueError('a bug in the observer')")
    request = replace(_request(tmp_path, n_predict=300), ignore_end=True)
    whole = replace(request, trace=tmp_path / "whole.trace", n_predict=220)
    record(whole)
    with pytest.raises(RuntimeError, match="a bug in the observer"):
        record(request, worker=(sys.executable, "-c", worker))
    _assert_beginning(request.trace, whole.trace, at_least=len(tokens_of(CODE.text)) + 199, is_torn=False)


def test_an_error_before_the_first_call_leaves_no_trace(tmp_path: Path) -> None:
    """A file without a single call would be taken for a recording."""
    worker = _DYING_WORKER.format(at=0, death="raise ValueError('at once')")
    request = _request(tmp_path)
    with pytest.raises(RuntimeError, match="at once"):
        record(request, worker=(sys.executable, "-c", worker))
    assert list(tmp_path.iterdir()) == []


def test_logits_that_are_no_numbers_end_the_recording(tmp_path: Path) -> None:
    """A damaged model would be recorded as if it had chosen: token 0 for ever."""
    source = open_model(EXAMPLE)
    output = next(t for t in source.tensors if t.name in ("output.weight", "token_embd.weight"))
    data = bytearray(EXAMPLE.read_bytes())
    row = output.start_bytes + 900 * (output.size_bytes // output.ne[1])
    data[row : row + 2] = np.float16(np.nan).tobytes()  # the scale of the first block of token 900
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(data)
    with pytest.raises(BadInputError, match="logits are not finite"):
        record(replace(_request(tmp_path), model=broken))


# --- prompts --------------------------------------------------------------------------------------------------------


def test_prompts_of_a_folder_come_sorted(tmp_path: Path) -> None:
    """Every file below it, by path; texts of the command line first; the text is kept as it is."""
    for name in ("b.txt", "a/z.txt", "a/y.md", "c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(f"{name}\r\nä".encode())
    prompts = read_prompts([tmp_path / "c", tmp_path], ["first"])
    names = ["c", "a/y.md", "a/z.txt", "b.txt", "c"]
    assert [p.name for p in prompts] == ["-p number 1", *(str(tmp_path / name) for name in names)]
    assert [p.text for p in prompts] == ["first", *(f"{name}\r\nä" for name in names)]
    assert len({p.digest for p in prompts}) == 5


def test_bad_prompts_are_refused_by_name(tmp_path: Path) -> None:
    """Nothing, nothing in it, not text."""
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"abc\xe4\n")
    (tmp_path / "none").mkdir()
    for name, what in (
        ("empty.txt", "is empty"),
        ("latin.txt", r"not UTF-8 text \(at byte 3\)"),
        ("none", "no files"),
        ("x", "no such"),
    ):
        with pytest.raises(BadInputError, match=f"{name}.*{what}"):
            read_prompts([tmp_path / name])
    with pytest.raises(BadInputError, match=r"number 1.*not UTF-8"):
        read_prompts([], [b"\xff".decode("utf-8", "surrogateescape")])
    with pytest.raises(UsageError, match="no prompt"):
        read_prompts([])


# --- helpers --------------------------------------------------------------------------------------------------------

_RUN = """
import sys
from bel.profiler.record import record
from bel.profiler.recording import RecordRequest
record(RecordRequest.from_json(sys.argv[1]), lambda done, total: print(done, flush=True))
"""


def _request(folder: Path, **fields: Any) -> RecordRequest:
    """One thread: the model is small, and threads that wait for each other on a busy machine take a hundred times as long."""
    return RecordRequest(EXAMPLE, folder / "x.trace", **{"prompts": (CODE,), "n_predict": 20, "n_threads": 1, **fields})


@contextlib.contextmanager
def _running(request: RecordRequest) -> Iterator[subprocess.Popen[str]]:
    """A recording in a process group of its own, which says its progress on stdout."""
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN, request.to_json()], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _follow(process: subprocess.Popen[str], at_least: int) -> int:
    """Wait until so many tokens are reported; how many were."""
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= at_least:
            return int(line)
    raise AssertionError("the recording ended before it was stopped")


def _assert_beginning(part: Path, whole: Path, *, at_least: int, is_torn: bool) -> None:
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


def _f32(source: GgufModel, name: str) -> npt.NDArray[np.float32]:
    """An F32 tensor of a model, in numpy's order."""
    tensor = next(t for t in source.tensors if t.name == name)
    data = source.files[tensor.source].path.read_bytes()[tensor.start_bytes : tensor.start_bytes + tensor.size_bytes]
    return np.frombuffer(data, np.float32).reshape(tensor.ne[::-1])
