"""Faults that a sceptical user found in bel-profile with the README alone: each as a test of its kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bel.formats.console import run_command
from bel.formats.costs import Costs, encode_costs
from bel.formats.errors import MachineError
from bel.formats.gguf_model import open_model
from bel.formats.trace import DECODE, TraceWriter
from bel.formats.trace_header import TraceHeader, TraceLayer
from bel.profiler.cli import NAME, main_group
from bel.repack.convert import convert
from bel.repack.layout import plan_layout

HEADER = TraceHeader("m", "qwen3moe", "f", (TraceLayer(0, 4, 2, 100),), "code")


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """Status, stdout and stderr of a command."""
    capsys.readouterr()
    status = run_command(main_group, NAME, [str(a) for a in args])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return status, said.out, said.err


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "code.trace"
    with TraceWriter(path, HEADER) as writer:
        for n in range(8):
            ids = np.array([[n % 4, (n + 1) % 4]], np.uint16)
            writer.append(phase=DECODE, ubatch=n, layer=0, tokens=np.array([n]), ids=ids)
    return path


def test_a_trace_that_is_being_written_is_not_replaced(tmp_path: Path) -> None:
    """The first of two recordings to one name must not report the second one's work as its own."""
    path = tmp_path / "x.trace"
    with TraceWriter(path, HEADER) as writer:
        with pytest.raises(MachineError, match="another recording"):
            TraceWriter(path, HEADER, replace=True)
        writer.append(phase=DECODE, ubatch=0, layer=0, tokens=np.array([0]), ids=np.array([[0, 1]], np.uint16))
    TraceWriter(path, HEADER, replace=True).close()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("jsonl", '{"token":0,"layer":99999999999,"experts":[3,1],"phase":"decode"}\n'),
        ("jsonl", '{"token":0,"layer":65536,"experts":[3,1],"phase":"decode"}\n'),
        ("thecodacus-csv", "pos,layer,id0,id1\n0,4294967296,1,2\n"),
    ],
)
def test_a_layer_that_cannot_be_is_refused_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, text: str
) -> None:
    path = tmp_path / "x.txt"
    path.write_text(text)
    status, _, err = run(capsys, "import", path, "--from", kind, "-o", tmp_path / "x.trace")
    assert status == 3
    assert str(path) in err
    assert "line " in err
    assert not (tmp_path / "x.trace").exists()


@pytest.mark.parametrize(
    "args",
    [
        ("summarize", "gone.trace", "-o", "z.json"),
        ("simulate", "gone.trace"),
        ("report", "gone.trace"),
        ("import", "gone", "--from", "jsonl", "-o", "z.trace"),
        ("--merge", "gone.json", "gone2.json"),
    ],
)
def test_a_missing_input_is_bad_input_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *args)
    assert (status, out) == (3, "")
    assert "gone" in err
    assert "no such file" in err


@pytest.mark.parametrize("command", ["summarize", "simulate", "report"])
def test_a_trace_named_twice_does_not_count_twice(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "link.trace").symlink_to(trace)
    output = ["-o", tmp_path / "z.json"] if command == "summarize" else []
    for second in (trace, tmp_path / "link.trace"):
        status, _, err = run(capsys, command, trace, second, *output)
        assert status == 2
        assert "twice" in err


def test_a_profile_is_not_reported_as_served_one_by_one(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "code.json"
    assert run(capsys, "summarize", trace, "-o", profile)[0] == 0
    status, _, err = run(capsys, "report", profile, "--one-by-one")
    assert status == 2
    assert "profile" in err


def test_a_report_into_a_closed_pipe(trace: Path) -> None:
    script = f"'{Path(sys.executable).with_name(NAME)}' report '{trace}' | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 141)


def test_a_closed_pipe_ends_a_command_as_its_signal_would(trace: Path) -> None:
    """Also with stderr in it: the status is 128 + SIGPIPE, and nothing is said."""
    command = f"'{Path(sys.executable).with_name(NAME)}' simulate '{trace}'"
    for merged in ("", " 2>&1"):
        read_end, write_end = os.pipe()
        os.close(read_end)
        done = subprocess.run(
            ["bash", "-c", command + merged], stdout=write_end, stderr=subprocess.PIPE, text=True, check=False
        )
        os.close(write_end)
        assert (done.returncode, done.stderr) == (141, "")


@pytest.fixture
def bundle(tmp_path: Path, example: Path) -> Path:
    source, folder = open_model(example), tmp_path / "m.bel"
    plan = plan_layout(source, "m", ple="keep", shard_bytes=2**40)
    convert(source, plan, folder, force=False, check=True, progress=lambda *_: None)
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


WRITERS: dict[str, Callable[[Path, Path, Path], list[object]]] = {
    "plan": lambda out, trace, bundle: ["plan", trace, "--model", bundle, "--slots-bytes", "8G", "-o", out],
    "plan --html": lambda out, trace, bundle: ["plan", trace, "--model", bundle, "--slots-bytes", "8G", "--html", out],
    "plan alone": lambda out, trace, _: ["plan", trace, "--slots-bytes", "8G", "-o", out],
    "bandwidth": lambda out, _, bundle: ["bandwidth", bundle, "-o", out],
    "record": lambda out, _, bundle: ["record", bundle, "-p", "a", "-o", out],
    "record --trace": lambda out, trace, bundle: ["record", bundle, "-p", "a", "-o", trace.with_name("o.json"), "--trace", out],
    "summarize": lambda out, trace, _: ["summarize", trace, "-o", out],
    "merge": lambda out, trace, _: ["--merge", trace, trace.with_name("code.json"), "-o", out],
    "import": lambda out, trace, _: ["import", trace, "--from", "jsonl", "-o", out],
    "report": lambda out, trace, _: ["report", trace, "--html", out],
    "simulate": lambda out, trace, _: ["simulate", trace, "--html", out],
}


@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_written_into_a_bundle(
    writer: str, trace: Path, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--force with a bundle's file as the output destroyed the bundle, though the bundle was the input."""
    assert run(capsys, "summarize", trace, "-o", tmp_path / "code.json")[0] == 0
    (tmp_path / "link.bel").symlink_to(bundle)
    (tmp_path / "link.bin").symlink_to(bundle / "m-experts.bin")
    before = contents(bundle)
    places = [bundle / "m-experts.bin", bundle / "manifest.json", bundle / "new.json", bundle / "source" / "new.json"]
    for out in [*places, tmp_path / "link.bel" / "m-experts.idx", tmp_path / "link.bin"]:
        arguments = [str(a) for a in WRITERS[writer](out, trace, bundle)]
        for force in ([], ["--force"]) if writer != "merge" else ([],):
            status, said, err = run(capsys, *arguments, *force)
            assert (status, said) == (2, ""), err
            assert "inside the bundle" in err
    assert contents(bundle) == before
    assert (tmp_path / "link.bin").is_symlink()


def test_neither_a_gguf_nor_a_prompt_is_replaced(
    trace: Path, example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other shards of a model, and the files of a folder of prompts, are inputs too."""
    shard = tmp_path / "model-00002-of-00002.gguf"
    shard.write_bytes(example.read_bytes()[:4096])
    status, _, err = run(capsys, "plan", trace, "--slots-bytes", "8G", "-o", shard, "--force")
    assert (status, "is a GGUF" in err, len(shard.read_bytes())) == (2, True, 4096)
    (tmp_path / "prompts").mkdir()
    prompt = tmp_path / "prompts" / "a.txt"
    prompt.write_text("a prompt")
    status, _, err = run(capsys, "record", example, "-f", prompt.parent, "-o", prompt, "--force")
    assert (status, "also an input" in err, prompt.read_text()) == (2, True, "a prompt")


def test_two_names_of_one_output_are_one(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sub").mkdir()
    same = tmp_path / "sub" / ".." / "p.json"
    status, _, err = run(capsys, "plan", trace, "--slots-bytes", "8G", "-o", tmp_path / "p.json", "--html", same)
    assert (status, "one name" in err) == (2, True)


def test_cache_types_of_plan_are_those_of_fit(trace: Path, example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("bogus", "q4_K", ""):
        status, _, err = run(capsys, "plan", trace, "--model", example, "--ram", "8G", "--kv", wrong)
        assert (status, "'--kv'" in err) == (2, True)
    status, _, err = run(capsys, "plan", trace, "--slots-bytes", "1M", "--kv", "Q8_0", "--context", "99")
    assert (status, "--context and --kv have no effect" in err) == (0, True)
    assert "no effect" not in run(capsys, "plan", trace, "--slots-bytes", "1M")[2]


def test_a_clock_without_costs_is_refused(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--objective", "misses"]):
        status, out, err = run(capsys, "plan", trace, "--slots-bytes", "1M", "--clock", "blocking", *more)
        assert (status, out, "Give --costs too" in err) == (2, "", True)


def test_without_a_model_slots_are_whole_pages(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Experts of 100 bytes: three slots in bytes of weights are not what a bundle's slots take."""
    status, out, err = run(capsys, "plan", trace, "--slots-bytes", 3 * 4096, "--json")
    plan = json.loads(out)
    assert (status, plan["slots_by_layer"], plan["slots_bytes"]) == (0, {"0": 3}, 3 * 4096)
    assert "known only with" in err
    assert run(capsys, "plan", trace, "--slots-bytes", "8191")[0] == 2


def costs_file(path: Path, block_bytes: int) -> Path:
    known = Costs(block_bytes, 1e9, (), 1e10, None, None, None, ((0, 1e-3),), "a test")
    path.write_bytes(encode_costs(known))
    return path


@pytest.mark.parametrize("command", [["plan", "--slots-bytes", "1M"], ["simulate"]])
def test_costs_of_another_size_are_told(
    command: list[str], trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far, near = costs_file(tmp_path / "far.json", 2**20), costs_file(tmp_path / "near.json", 4096)
    sized = [*command, trace] if command[0] == "plan" else [*command, trace, "--bytes", "1M"]
    status, _, err = run(capsys, *sized, "--costs", far)
    assert (status, "the costs are of reads of 1.00 MiB, and an expert has 4.00 KiB" in err) == (0, True)
    assert "reads of" not in run(capsys, *sized, "--costs", near)[2]


def test_a_file_of_another_kind_is_called_what_it_is(
    trace: Path, example: Path, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "summarize", trace, "-o", tmp_path / "code.json")[0] == 0
    for path, kind in ((trace, "a trace"), (example, "a GGUF"), (bundle, "a bundle")):
        wrong = [["--merge", tmp_path / "code.json", path, "-o", tmp_path / "m.json"]]
        wrong += [
            [command, trace, "--costs", path, *more] for command, more in (("simulate", []), ("plan", ["--slots-bytes", "1M"]))
        ]
        wrong += [["simulate", trace, "--policy", f"static:{path}"]]
        for arguments in wrong:
            status, _, err = run(capsys, *arguments)
            assert (status, f"this is {kind}, not a" in err) == (3, True), err


@pytest.mark.parametrize("command", [["plan", "--slots-bytes", "1M"], ["report"], ["merge"], ["simulate"]])
def test_an_expert_without_bytes_is_refused(
    command: list[str], trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    assert run(capsys, "summarize", trace, "-o", good)[0] == 0
    bad.write_text(good.read_text().replace('"expert_bytes": 100', '"expert_bytes": 0'))
    assert bad.read_text() != good.read_text()
    inputs = {"merge": [good, bad, "-o", tmp_path / "m.json"], "simulate": [trace, "--policy", f"static:{bad}"]}
    status, _, err = run(capsys, *command, *inputs.get(command[0], [bad]))
    assert (status, "layer 0 has experts of 0 bytes" in err) == (3, True), err
