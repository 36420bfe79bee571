"""Recording a bundle: the trace of its source, byte by byte."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import archs
import synth
from bel.formats.bundle import open_bundle
from bel.formats.console import run_command
from bel.formats.errors import DamagedBundleError, UsageError
from bel.formats.gguf_model import open_model
from bel.formats.trace_calls import read_trace
from bel.profiler.cli import main_group
from bel.profiler.record import record
from bel.profiler.record_source import model_name
from bel.runtime.bundle_model import SlotOptions, open_run
from bel.runtime.context import ContextOptions
from bel.runtime.engine import Engine
from bel.runtime.policies import parse_policy
from bel.runtime.tensor import Tensor
from exactness import repack
from recordings import CHAT, CODE, EXAMPLE, assert_beginning, record_request, tokens_of


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example model as a bundle."""
    return repack(EXAMPLE, tmp_path_factory.mktemp("record") / "tiny.bel")


@pytest.mark.parametrize("slots", [{"slots": 4}, {"slots": 9}, {}, {"ram_bytes": 150 << 20}], ids=str)
def test_a_bundle_gives_the_trace_of_its_source(slots: dict[str, int], bundle: Path, tmp_path: Path) -> None:
    """Byte by byte, at the floor of slots too: name, fingerprint, sizes, sampling, ids and weights."""
    stock = record_request(tmp_path, prompts=(CODE, CHAT), n_predict=40, weights=True, ignore_end=True, n_ubatch=24)
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
    stock = replace(record_request(tmp_path, n_predict=6, weights=True, ignore_end=True), model=model)
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
    request = replace(record_request(tmp_path), model=bundle)
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
    request = replace(record_request(tmp_path), model=copy, slots=4)
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


@pytest.mark.parametrize(("slots", "is_said"), [(33, True), (32, False)])
def test_more_slots_than_experts_are_clamped_with_a_word(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], slots: int, is_said: bool
) -> None:
    command = ["record", bundle, "-o", tmp_path / "a.json", "-p", "x", "-n", "1", "--threads", "1", "--json", "--slots", slots]
    assert run_command(main_group, "bel-profile", [str(x) for x in command]) == 0
    out, err = capsys.readouterr()
    assert set(json.loads(out)["cache"]["slots_by_layer"].values()) == {32}
    assert (f"--slots {slots} is more than there are: clamped to the 32 experts of a layer" in err) == is_said


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
    request = replace(record_request(tmp_path, n_predict=300), model=copy, slots=4, ignore_end=True)
    whole = replace(request, model=bundle, trace=tmp_path / "whole.trace")
    record(whole)
    with pytest.raises(DamagedBundleError, match=str(path)):
        record(request, worker=(sys.executable, "-c", _CUT.format(path=str(path))))
    assert_beginning(request.trace, whole.trace, at_least=len(tokens_of(CODE.text)) + 99, is_torn=True)
