"""`bel-repack` as a user meets it: help, usage, and errors that name what is wrong."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import synth
from faults import COMMAND, run_cli
from repack_answers import assert_error


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return synth.moe().write(tmp_path / "m.gguf")


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("command", [[], ["convert"], ["inspect"], ["verify"], ["restore"]])
def test_every_command_has_help_with_an_example(command: list[str], option: str) -> None:
    outcome = run_cli(*command, option)
    assert outcome.status == 0
    assert outcome.stderr == ""
    assert re.search(rf"Examples?:\n +bel-repack (?:{(command or [''])[0]} )?\S", outcome.stdout) or command == ["convert"], (
        outcome.stdout
    )
    assert "bel-repack " in outcome.stdout.split("Example")[1]


def test_the_help_lists_every_command_and_option_of_the_design() -> None:
    listed = run_cli("--help").stdout
    assert all(re.search(rf"^ +{c} ", listed, re.M) for c in ("convert", "inspect", "verify", "restore"))
    options = {
        "convert": ["-o", "--ple", "--shard-size", "--no-verify", "--force", "--dry-run", "--json"],
        "inspect": ["--json", "--digest"],
        "verify": ["--source", "--quick", "--json"],
        "restore": ["-o", "--force", "--json"],
    }
    for command, names in options.items():
        text = run_cli(command, "--help").stdout
        assert all(re.search(rf"^ +{name}\b", text, re.M) for name in names), (command, text)


@pytest.mark.parametrize(
    "args",
    [
        ["--no-such-option"],
        ["m.gguf", "--ple", "maybe"],
        ["m.gguf", "--shard-size", "big"],
        ["m.gguf", "--shard-size", "-1"],
        ["m.gguf", "--shard-size", ""],
        ["m.gguf", "--shard-size", "nan"],
        ["m.gguf", "n.gguf"],
        ["m.gguf", "-o"],
        ["convert"],
        ["inspect"],
        ["verify"],
        ["verify", "--source"],
        ["restore"],
        ["restore", "x", "y"],
    ],
)
def test_a_wrong_command_line_exits_with_2(args: list[str]) -> None:
    outcome = run_cli(*args)
    assert_error(outcome, 2)
    assert outcome.stderr.strip(), "it says what is wrong"


@pytest.mark.parametrize(
    "size",
    [
        "9" * 5000,
        "9" * 400 + ".5",
        "1.5.5G",
        "12 G B",
        "0x10",
        "1e9",
    ],
    ids=["5000 digits", "400 digits and a point", "two points", "two units", "hex", "exponent"],
)
def test_a_size_that_is_none_is_an_error_and_no_traceback(model: Path, size: str) -> None:
    assert_error(run_cli(model, "--shard-size", size), 2, "not a size")


@pytest.mark.parametrize(
    ("args", "status"),
    [
        (["nonexistent.gguf"], 3),
        (["inspect", "nonexistent.gguf"], 3),
        (["verify", "nonexistent.bel"], 3),
        (["restore", "nonexistent.bel"], 3),
        (["verify", "nonexistent.bel", "--json"], 3),
        (["nonexistent.gguf", "--json"], 3),
    ],
)
def test_what_does_not_exist_is_named(args: list[str], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_error(run_cli(*args), status, "nonexistent", "no such")
    assert list(tmp_path.iterdir()) == []


def test_the_commands_take_no_gguf_for_a_bundle_and_no_bundle_for_a_gguf(model: Path) -> None:
    assert run_cli(model).status == 0
    bundle = model.with_name("m.bel")
    assert_error(run_cli("verify", model), 3, model, "not a bundle")
    assert_error(run_cli("restore", model), 3, model, "not a bundle")
    assert_error(run_cli(bundle, "-o", model.with_name("x.bel")), 3, bundle)
    assert_error(run_cli(bundle / "m-dense.gguf", "-o", model.with_name("x.bel")), 3, "already repacked")
    assert_error(run_cli("verify", model.parent), 3, model.parent, "not a bundle", "manifest")


def test_the_output_folder_must_have_a_parent(model: Path, tmp_path: Path) -> None:
    assert_error(run_cli(model, "-o", tmp_path / "no" / "such" / "x.bel"), 2, tmp_path / "no" / "such", "does not exist")
    assert run_cli(model, "-o", f"{tmp_path}/x.bel/").status == 0
    assert_error(run_cli(model, "-o", tmp_path / "x.bel"), 2, "--force")
    (tmp_path / "file").write_text("")
    assert_error(run_cli(model, "-o", tmp_path / "file" / "x.bel"), 2)


def test_the_table_says_what_to_run_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last lines can be pasted into a shell, whatever the name."""
    monkeypatch.chdir(tmp_path)
    synth.moe().write(tmp_path / "it's a; model.gguf")
    lines = run_cli("it's a; model.gguf").stdout.splitlines()
    commands = [line[line.index("bel-repack ") :] for line in lines if "bel-repack " in line]
    assert [c.split()[1] for c in commands] == ["inspect", "restore"]
    for command in commands:
        script = command.replace("bel-repack", f"'{COMMAND}'", 1).replace("-o DIR", "-o back")
        assert subprocess.run(["sh", "-c", script], capture_output=True, check=False).returncode == 0, command
    assert (tmp_path / "back" / "it's a; model.gguf").read_bytes() == (tmp_path / "it's a; model.gguf").read_bytes()


def test_version() -> None:
    outcome = run_cli("--version")
    assert (outcome.status, outcome.stderr) == (0, "")
    assert re.fullmatch(r"bel-repack, version \d+\.\d+\.\d+\n", outcome.stdout)


def test_no_arguments_show_the_help() -> None:
    outcome = run_cli()
    assert outcome.status in (0, 2)
    assert "Examples:" in outcome.stdout + outcome.stderr


@pytest.mark.parametrize(
    "make", [lambda p: p.mkdir(), os.mkfifo, lambda p: p.symlink_to("gone")], ids=["folder", "fifo", "dangling"]
)
def test_what_is_no_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "m.gguf"
    make(path)
    for args in ([path], ["inspect", path]):
        assert_error(run_cli(*args), 3, path)
