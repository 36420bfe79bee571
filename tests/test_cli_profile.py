"""`bel-profile` as a user meets it: output, exit codes, and what is left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bel.formats.console import run_command
from bel.formats.profile_json import load_profile
from bel.formats.trace_calls import read_trace
from bel.profiler.cli import NAME, main_group

ROUTE = Path(__file__).parent / "data_import" / "route.csv"
COUNTS = {"model": "tiny", "fingerprint": "f1", "n_expert": 4, "top_k": 2, "tokens": 100, "counts": {"0": [50, 50, 50, 50]}}


class Ran:
    """Exit status, stdout and stderr of a command."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: object) -> None:
        capsys.readouterr()
        self.status = run_command(main_group, NAME, [str(a) for a in arguments])
        self.out, self.err = capsys.readouterr()

    @property
    def answer(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        assert (self.status, self.out.count("\n")) == (0, 1), self.err
        answer = json.loads(self.out, parse_constant=pytest.fail)
        assert isinstance(answer, dict)
        return answer


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: Ran(capsys, *arguments)


def counts(ran: Any, name: str, **changes: Any) -> str:
    Path("counts.json").write_text(json.dumps({**COUNTS, **changes}))
    assert (
        ran("import", "counts.json", "--from", "counts-json", "--workload", name, "-o", f"{name}.json", "--force").status == 0
    )
    Path("counts.json").unlink()
    return f"{name}.json"


def test_import_and_summarize(ran: Any) -> None:
    done = ran("import", ROUTE, "--from", "bigmoe-csv", "--workload", "chat", "-o", "x.trace", "--json").answer
    assert {k: done[k] for k in ("trace", "workload", "layers", "tokens", "ids")} == {
        "trace": "x.trace",
        "workload": "chat",
        "layers": 3,
        "tokens": 36,
        "ids": 6 * (36 + 36 + 9),
    }
    assert done["trace_bytes"] == os.path.getsize("x.trace")
    done = ran("summarize", "x.trace", "-o", "x.json", "--json").answer
    assert done["workloads"] == {"chat": {"weight": 1.0, "prompt_tokens": 28, "decode_tokens": 8}}
    assert load_profile(Path("x.json")).workloads[0].tokens == 36
    shown = ran("summarize", "x.trace", "-o", "x.json")
    assert shown.status == 0
    assert "28 prompt and 8 decode tokens" in shown.out
    assert sorted(os.listdir()) == ["x.json", "x.trace"]


def test_the_workload_is_the_name_of_the_output_unless_it_is_given(ran: Any) -> None:
    assert ran("import", ROUTE, "--from", "bigmoe-csv", "-o", "talk.trace", "--json").answer["workload"] == "talk"
    refused = ran("import", ROUTE, "--from", "bigmoe-csv", "-o", "x.trace", "--workload", "a\nb")
    assert (refused.status, os.path.exists("x.trace")) == (2, False)


def test_merge_is_an_option_and_writes_merged_json(ran: Any) -> None:
    code = counts(ran, "code")
    chat = counts(ran, "chat", tokens=300, counts={"0": [300, 300, 0, 0]})
    done = ran("--merge", code, chat, "--json").answer
    assert done["profile"] == "merged.json"
    assert done["frequency_by_layer"] == {"0": [0.375, 0.375, 0.125, 0.125]}
    assert [w.name for w in load_profile(Path("merged.json")).workloads] == ["code", "chat"]
    for arguments in (
        ("--json", "--weight", "tokens", "--merge", code, chat),
        ("merge", code, chat, "--weight=tokens", "--json"),
    ):
        done = ran(*arguments).answer
        assert (done["weighting"], done["frequency_by_layer"]) == ("tokens", {"0": [0.4375, 0.4375, 0.0625, 0.0625]})
    shown = ran("--merge", code, chat, "-o", "m.json")
    assert "weighted equally" in shown.out
    assert ran("--merge", "m.json", counts(ran, "docs"), "-o", "all.json", "--json").answer["workloads"].keys() == {
        "code",
        "chat",
        "docs",
    }


def test_a_refused_merge_leaves_nothing_and_changes_nothing(ran: Any) -> None:
    code, chat = counts(ran, "code"), counts(ran, "chat", fingerprint="f2")
    before = sorted(os.listdir())
    refused = ran("--merge", code, chat, "-o", "m.json", "--json")
    assert (refused.status, refused.out) == (3, "")
    assert "f1" in refused.err
    assert "f2" in refused.err
    assert sorted(os.listdir()) == before
    Path("m.json").write_bytes(Path(code).read_bytes())
    assert ran("--merge", code, chat, "-o", "m.json").status == 3
    assert Path("m.json").read_bytes() == Path(code).read_bytes()


def test_a_profile_without_tokens_is_said_on_stderr_only(ran: Any) -> None:
    empty = counts(ran, "empty", tokens=0, counts={"0": [0, 0, 0, 0]})
    done = ran("--merge", counts(ran, "code"), empty, "--json")
    assert list(done.answer["workloads"]) == ["code"]
    assert "empty.json: workload empty has no tokens and is left out" in done.err


def test_one_profile_is_no_merge(ran: Any) -> None:
    refused = ran("--merge", counts(ran, "code"))
    assert (refused.status, os.path.exists("merged.json")) == (2, False)
    assert "two profiles" in refused.err
    assert ran("--merge").status == 2


def test_an_input_is_never_overwritten(ran: Any) -> None:
    code, chat = counts(ran, "code"), counts(ran, "chat")
    shutil.copy(code, "merged.json")
    os.link(code, "link.json")
    for arguments in (
        ("--merge", code, chat, "-o", code, "--force"),
        ("--merge", code, chat, "-o", "link.json"),
        ("--merge", "merged.json", chat),
        ("import", code, "--from", "counts-json", "-o", code, "--force"),
    ):
        before = {name: Path(name).read_bytes() for name in os.listdir()}
        refused = ran(*arguments)
        assert refused.status == 2
        assert "also an input" in refused.err
        assert {name: Path(name).read_bytes() for name in os.listdir()} == before


def test_what_is_no_profile_is_replaced_with_force_only(ran: Any) -> None:
    assert ran("import", ROUTE, "--from", "bigmoe-csv", "-o", "x.trace").status == 0
    whole = Path("x.trace").read_bytes()
    Path("notes.json").write_text("{}")
    for output in ("x.trace", "notes.json"):
        refused = ran("import", ROUTE, "--from", "bigmoe-csv", "-o", output)
        assert (refused.status, "--force" in refused.err) == (2, True)
    shutil.copy("x.trace", "y.trace")
    assert ran("summarize", "x.trace", "-o", "y.trace").status == 2
    assert Path("y.trace").read_bytes() == whole
    assert ran("import", ROUTE, "--from", "bigmoe-csv", "-o", "notes.json", "--force").status == 0
    assert read_trace(Path("notes.json")).header.workload == "notes"


def test_outputs_that_cannot_be(ran: Any) -> None:
    counts(ran, "code")
    os.mkdir("folder")
    os.mkfifo("pipe")
    for output in ("folder", "pipe", "nowhere/x.json"):
        Path("copy.json").write_bytes(Path("code.json").read_bytes())
        refused = ran("--merge", "code.json", "copy.json", "-o", output, "--force")
        assert refused.status == 2
        assert "output" in refused.err


@pytest.mark.parametrize("kind", ["bigmoe-csv", "thecodacus-csv", "jsonl", "counts-json", "vllm-npz"])
def test_a_refused_import_leaves_nothing(ran: Any, kind: str) -> None:
    for content in (b"", b"\0" * 64, b"1,2\n3\n", b"[1]\n", bytes(range(3, 255, 7))):
        Path("in.bin").write_bytes(content)
        refused = ran("import", "in.bin", "--from", kind, "-o", "out.trace", "--json")
        assert (refused.status, refused.out) == (3, "")
        assert "in.bin" in refused.err
        assert os.listdir() == ["in.bin"]


def test_a_dropped_line_is_one_line_on_stderr(ran: Any) -> None:
    head = '{"header": {"layers": [0], "n_expert": 4, "top_k": 2}}\n'
    line = '{"token": 0, "layer": 0, "experts": [2, 0], "phase": "decode"}\n'
    Path("in.jsonl").write_text(head + line + line[:-9])
    done = ran("import", "in.jsonl", "--from", "jsonl", "-o", "x.trace", "--json")
    assert done.answer["ids"] == 2
    assert done.err == "bel-profile: in.jsonl: line 3 is incomplete: the file was truncated there; the line is dropped\n"


def test_a_damaged_trace_is_refused_and_a_torn_one_is_said(ran: Any) -> None:
    assert ran("import", ROUTE, "--from", "bigmoe-csv", "-o", "x.trace").status == 0
    data = Path("x.trace").read_bytes()
    Path("torn.trace").write_bytes(data[:-90])
    torn = ran("summarize", "torn.trace", "-o", "t.json", "--json")
    assert torn.answer["layers"] == 3
    assert "torn.trace: the trace is torn: it ends inside block 0" in torn.err
    bad = bytearray(data)
    bad[700] ^= 1
    Path("bad.trace").write_bytes(bad)
    refused = ran("summarize", "bad.trace", "-o", "b.json")
    assert (refused.status, os.path.exists("b.json")) == (3, False)
    assert "bad.trace" in refused.err
    assert ran("summarize", "missing.trace", "-o", "b.json").status == 3


def test_record_writes_a_trace_and_its_profile(ran: Any, example: Path) -> None:
    pytest.importorskip("xllamacpp")
    command = ("record", example, "-p", "One two three", "-n", 5, "--timing", "--workload", "chat")
    done = ran(*command, "-o", "a.json", "--json").answer
    assert (done["trace"], done["profile"], done["layers"]) == ("a.trace", "a.json", 6)
    (prompt,) = done["prompts"]
    assert done["workloads"]["chat"] == {
        "weight": 1.0,
        "prompt_tokens": prompt["prompt_tokens"],
        "decode_tokens": prompt["decode_tokens"],
    }
    profile = load_profile(Path("a.json"))
    assert all(x.decode.time is not None and x.decode.time.calls == 5 for x in profile.workloads[0].layers)
    again = ran(*command, "-o", "a.json")
    assert (again.status, "a.trace: the output exists already" in again.err) == (2, True)
    assert ran("record", example, "-o", "b.json").status == 2
    assert ran("record", example, "-p", "x", "-o", "b.trace").status == 2
    shown = ran(*command[:-2], "--weights", "-o", "b.json", "--trace", "c.trace")
    assert (shown.status, sorted(os.listdir())) == (0, ["a.json", "a.trace", "b.json", "c.trace"])
    one, two = read_trace(Path("a.trace")), read_trace(Path("c.trace"), weights=True)
    assert [x.ids.tolist() for x in one.layers] == [x.ids.tolist() for x in two.layers]
    assert two.header.workload == "b"


def test_every_command_has_help_with_examples(ran: Any) -> None:
    for command in [[], *([name] for name in main_group.commands)]:
        for flag in ("-h", "--help"):
            shown = ran(*command, flag)
            assert shown.status == 0
            assert "Examples:" in shown.out
            assert "bel-profile" in shown.out


def test_the_words_of_the_command_line(ran: Any) -> None:
    assert ran().status == 2
    assert ran("nonsense").status == 2
    assert ran("import", ROUTE, "--from", "nonsense", "-o", "x").status == 2
    assert ran("--merge", "a", "b", "--weight", "mine").status == 2
    assert re.match(r"bel-profile, version \d", ran("--version").out)


def test_the_module_runs_as_a_program(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "bel.profiler.cli",
        "import",
        str(ROUTE),
        "--from",
        "bigmoe-csv",
        "-o",
        "x.trace",
        "--json",
    ]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["ids"] == 486
