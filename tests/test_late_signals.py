"""A signal that comes with the last step of a command, or behind it: the output is there, and the command says so."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recordings import EXAMPLE

_STRUCK = """
import os, signal, sys
from bel.formats.signals import INTERRUPTS
from bel.{package}.cli import main
done = INTERRUPTS.done
def struck():
    if {is_before}:
        os.kill(os.getpid(), signal.{number})
        sum(range(1000))
    done()
    if not {is_before}:
        os.kill(os.getpid(), signal.{number})
        sum(range(1000))
    os.write(2, b"struck\\n")
INTERRUPTS.done = struck
main()
"""
PACKAGES = {"bel-repack": "repack", "bel-profile": "profiler"}
COMMANDS = {
    "convert": ("bel-repack m.gguf -o new.bel", "new.bel/manifest.json"),
    "convert --force": ("bel-repack m.gguf -o old.bel --force", "old.bel/manifest.json"),
    "restore": ("bel-repack restore m.bel -o out", "out/tiny-moe-q8_0.gguf"),
    "restore --force": ("bel-repack restore m.bel -o there --force", "there/tiny-moe-q8_0.gguf"),
    "record": ("bel-profile record m.gguf -p x -n 2 --threads 1 -o r.json", "r.json"),
    "summarize": ("bel-profile summarize t.trace -o s.json", "s.json"),
    "merge": ("bel-profile --merge a.json b.json -o c.json", "c.json"),
    "plan": ("bel-profile plan a.json --model m.bel --slots-bytes 2M -o p.json", "p.json"),
    "plan --html": ("bel-profile plan a.json --model m.bel --slots-bytes 2M -o p2.json --html p.html", "p.html"),
}


def run(folder: Path, *arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command, *rest = arguments
    code = code or f"from bel.{PACKAGES[command]}.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *rest], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("late")
    shutil.copy(EXAMPLE, folder / "tiny-moe-q8_0.gguf")
    (folder / "m.gguf").symlink_to("tiny-moe-q8_0.gguf")
    (folder / "there").mkdir()
    (folder / "there" / "tiny-moe-q8_0.gguf").write_bytes(b"older")
    made = [run(folder, "bel-repack", "tiny-moe-q8_0.gguf", "-o", name) for name in ("m.bel", "old.bel")]
    for text, name in (("def f(", "a"), ("hello", "b"), ("x", "t")):
        words = ("record", "m.gguf", "-p", text, "-n", "3", "--threads", "1", "--workload", name, "-o", f"{name}.json")
        made.append(run(folder, "bel-profile", *words))
    for done in made:
        assert done.returncode == 0, done.stderr
    (folder / "t.json").unlink()
    return folder


@pytest.mark.parametrize("is_before", [True, False], ids=["with", "behind"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_whose_output_is_there_has_not_been_interrupted(folder: Path, command: str, is_before: bool) -> None:
    line, output = COMMANDS[command]
    name, *arguments = line.split()
    before = (folder / output).stat().st_ino if (folder / output).exists() else None
    if not is_before and "--force" not in arguments:
        arguments = _elsewhere(arguments)
        output = f"again-{output}"
    code = _STRUCK.format(package=PACKAGES[name], number="SIGINT" if is_before else "SIGTERM", is_before=is_before)
    done = run(folder, name, *arguments, "--json", code=code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("struck") == 1
    assert "interrupted" not in done.stderr
    assert json.loads(done.stdout)
    assert (folder / output).stat().st_ino != before
    assert not [path.name for path in folder.glob("**/.*")], "nothing is left beside it"


def _elsewhere(arguments: list[str]) -> list[str]:
    """The same command with other outputs."""
    outputs = [n + 1 for n, word in enumerate(arguments) if word in ("-o", "--html")]
    return [f"again-{word}" if n in outputs else word for n, word in enumerate(arguments)]
