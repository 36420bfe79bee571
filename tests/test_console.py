"""The frame of every command: standard streams that do not take the answer, what the machine refuses, texts of arguments."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

from bel.formats.console import Utf8Text, print_table, run_command
from bel.formats.trace import DECODE, TraceWriter
from bel.formats.trace_header import TraceHeader, TraceLayer

COMMANDS = ("bel-repack", "bel-profile", "bel-run")
ON_A_BUNDLE = {
    "verify": "bel-repack verify FOLDER",
    "restore": "bel-repack restore FOLDER -o out",
    "publish": "bel-repack publish FOLDER --repo-id a/b --license mit --base-model c/d --dry-run",
    "run": "bel-run FOLDER -p x",
    "check": "bel-run FOLDER --check-against FOLDER",
    "inspect": "bel-repack inspect FOLDER",
    "fit": "bel-profile fit FOLDER --vram 0",
    "record": "bel-profile record FOLDER -p x -o out.json",
}


def shell(script: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """A line of bash with the installed commands."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings["env"] = {**os.environ, "PATH": path, **settings.get("env", {})}
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=120, **settings)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_answer_that_nobody_got_is_an_error(command: str, unbuffered: str) -> None:
    for where, why in ((">&-", "Bad file descriptor"), (">/dev/full", "No space left on device")):
        done = shell(f"{command} --help {where}", env={"PYTHONUNBUFFERED": unbuffered})
        assert (done.returncode, done.stderr) == (5, f"{command}: error: standard output: {why}\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_closed_input_and_a_closed_or_full_stderr_are_no_errors(command: str) -> None:
    for where in ("<&-", "2>&-", "2>/dev/full", "<&- 2>&-"):
        done = shell(f"{command} --version {where}")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(command)


@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-", ">&- 2>&-", ">/dev/full 2>/dev/full"])
def test_the_status_of_a_wrong_command_line_does_not_depend_on_who_reads(where: str) -> None:
    done = shell(f"bel-profile no-such-command {where}")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def failed(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    def fail() -> None:
        raise error

    status = run_command(click.Command("x", callback=fail), "bel-x", [])
    return status, capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EMFILE, errno.EAGAIN, errno.EIO, errno.EPIPE, errno.ENOSPC])
def test_an_error_without_a_file_is_not_called_one_of_a_stream(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = failed(OSError(number, os.strerror(number)), capsys)
    assert status == 5
    assert said.startswith(f"bel-x: error: the machine refuses: {os.strerror(number)}")
    assert "standard" not in said


def test_a_file_that_is_called_like_a_stream(capsys: pytest.CaptureFixture[str]) -> None:
    status, said = failed(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE), "standard output"), capsys)
    assert (status, said) == (5, "bel-x: error: standard output: Broken pipe\n")


def test_a_limit_on_descriptors_is_named(example: Path, tmp_path: Path) -> None:
    done = shell(f"ulimit -n 8; bel-profile record '{example}' -p a -n 1 -o '{tmp_path}/a.json'")
    assert done.returncode == 5
    assert "standard output" not in done.stderr
    assert "ulimit -n" in done.stderr


@pytest.mark.parametrize("mib", [80, 100, 150, 300])
def test_a_limit_on_address_space_is_named_before_a_library_ends_the_process(mib: int, tmp_path: Path) -> None:
    """OpenBLAS would exit with 1 and LLVM abort, without a word of ours."""
    trace = tmp_path / "no.trace"
    trace.write_bytes(b"BELTRACE" + bytes(100))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (mib * 2**20, mib * 2**20))

    done = shell(f"exec bel-profile simulate '{trace}'", preexec_fn=limit)
    assert done.returncode == 5, done
    assert done.stderr.count("\n") == 1
    assert "ulimit -v" in done.stderr


def test_a_name_that_the_locale_cannot_show_does_not_end_a_command() -> None:
    """A locale without UTF-8 has no sign for it."""
    code = "import click; from bel.formats.console import run_command; import sys;"
    code += "sys.exit(run_command(click.Command('x', callback=lambda: click.echo('a \\u6a21 b')), 'bel-x'))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={**os.environ, "PYTHONIOENCODING": "latin-1"}, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"a \\u6a21 b\n", b"")


@pytest.mark.parametrize("utf8", ["0", "1"])
def test_a_prompt_is_utf_8_whatever_the_locale_says(utf8: str) -> None:
    code = """
import sys, click
from bel.formats.console import Utf8Text, run_command
@click.command()
@click.option("-p", type=Utf8Text())
def main(p): click.echo(ascii(p))
sys.exit(run_command(main, "bel-x"))
"""
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": utf8, "PYTHONCOERCECLOCALE": "0"}
    for argument, wanted in (("é模".encode(), "é模"), (b"a\xff", "a\udcff")):
        done = subprocess.run(
            [sys.executable, "-c", code, "-p", argument], capture_output=True, text=True, env=env, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{wanted!a}\n", "")


def test_a_text_within_the_process_is_what_it_is() -> None:
    command = click.Command("x", params=[click.Option(["-p"], type=Utf8Text())], callback=lambda p: click.echo(ascii(p)))
    assert CliRunner().invoke(command, ["-p", "é"]).output == f"{'é'!a}\n"


def test_lines_of_tables_end_with_their_last_sign(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(click.Command("x", callback=lambda: print_table("T", [("a", "b"), ("c", "")])), "bel-x", []) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [line.rstrip() for line in lines]
    assert lines[1:] == ["  a  b", "  c"]


@pytest.mark.parametrize(
    "command", ["import . --from jsonl -o x.json", "import . --from vllm-npz -o x.json", "plan . --slots-bytes 2M"]
)
def test_a_folder_is_a_wrong_input_and_no_error_of_the_machine(command: str, tmp_path: Path) -> None:
    done = shell(f"bel-profile {command}", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (3, "bel-profile: error: .: this is a folder, not a file\n")


def test_prompts_of_a_recording_may_be_pipes(example: Path, tmp_path: Path) -> None:
    """In the order given, beside files and texts."""
    (tmp_path / "b.txt").write_text("b")
    script = f"bel-profile record '{example}' -p a -f b.txt -f <(printf cc) -n 0 --threads 1 -o x.json --json"
    done = shell(script, cwd=tmp_path)
    assert done.returncode == 0, done
    names = [row["name"] for row in json.loads(done.stdout)["prompts"]]
    assert names[:2] == ["-p number 1", "b.txt"]
    assert names[2].startswith("/dev/fd/")


def test_tables_keep_to_the_columns_of_the_environment(tmp_path: Path) -> None:
    trace = tmp_path / "code.trace"
    header = TraceHeader("m", "qwen3moe", "f", (TraceLayer(0, 4, 2, 100),), "code")
    with TraceWriter(trace, header) as writer:
        for n in range(64):
            ids = np.array([[n % 4, (n + 1) % 4]], np.uint16)
            writer.append(phase=DECODE, ubatch=n, layer=0, tokens=np.array([n]), ids=ids)
    widths = {}
    for columns in ("", "80", "120", "none"):
        lines = shell(f"bel-profile report '{trace}'", env={"COLUMNS": columns}).stdout.splitlines()
        assert lines == [line.rstrip() for line in lines]
        widths[columns] = max(len(line) for line in lines if line.startswith("  "))
    assert widths["80"] <= 80 < widths["120"] <= 120
    assert widths["none"] == widths[""]


@pytest.mark.parametrize("command", ON_A_BUNDLE)
def test_a_folder_that_never_was_a_bundle_is_no_damaged_one(tmp_path: Path, command: str) -> None:
    """Another folder is a mistake of the command line; one that lost its manifest is damaged."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    done = shell(ON_A_BUNDLE[command].replace("FOLDER", "folder"), cwd=tmp_path)
    assert done.returncode == 3, done
    assert "folder: " in done.stderr
    assert "damaged" not in done.stderr
    assert sorted(x.name for x in tmp_path.iterdir()) == ["folder"]
    (tmp_path / "folder" / "m-experts.bin").write_bytes(b"")
    done = shell(ON_A_BUNDLE[command].replace("FOLDER", "folder"), cwd=tmp_path)
    assert done.returncode in (3, 4), done
    if command in ("verify", "restore", "publish"):
        assert done.returncode == 4
        assert "no manifest.json" in done.stderr
