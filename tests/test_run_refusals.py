"""What `bel-run` is asked for and cannot do: refused with the next step; and the help that names what it can."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

import click
import pytest

import archs
from bel.runtime import cli
from bel.runtime.cli import NAME
from recordings import EXAMPLE
from run_answers import Run, ended, process
from run_answers import model as model
from run_answers import run as run

REFUSED: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "a GGUF without --stock": (("GGUF", "-p", "x"), 2, ("bel-repack", "--stock")),
    "a bundle with --stock": (("BUNDLE", "-p", "x", "--stock"), 2, ("--stock", "bundle")),
    "slots for stock": (("GGUF", "-p", "x", "--stock", "--slots", "8"), 2, ("--slots is for a bundle",)),
    "memory for stock": (("GGUF", "-p", "x", "--stock", "--ram", "8G"), 2, ("--ram is for a bundle",)),
    "two budgets": (("BUNDLE", "-p", "x", "--slots", "8", "--ram", "8G"), 2, ("--slots and --ram", "exclude")),
    "two prompts": (("BUNDLE", "-p", "x", "-f", "y"), 2, ("-p and -f",)),
    "an empty prompt": (("BUNDLE", "-p", ""), 3, ("prompt is empty",)),
    "a missing prompt file": (("BUNDLE", "-f", "nowhere.txt"), 3, ("nowhere.txt", "no such file")),
    "a folder as prompt": (("BUNDLE", "-f", "/"), 3, ("not a file",)),
    "no such bundle": (("nowhere.bel", "-p", "x"), 3, ("nowhere.bel", "no such bundle")),
    "no such plan": (("BUNDLE", "-p", "x", "--plan", "nowhere.json"), 3, ("nowhere.json", "no such plan")),
    "a folder as plan": (("BUNDLE", "-p", "x", "--plan", "/"), 3, ("not a plan", "which is a file")),
    "an unknown policy": (("BUNDLE", "-p", "x", "--policy", "best"), 2, ("'best'", "lfu-decay:R")),
    "fewer slots than top-k": (("BUNDLE", "-p", "x", "--slots", "3"), 2, ("top-k", "--slots 4")),
    "a GPU": (("BUNDLE", "-p", "x", "--gpu", "1"), 5, ("there is no GPU", "docs/gpu.md")),
    "a GPU without a way": (("BUNDLE", "--gpu", "-p", "x"), 5, ("there is no GPU",)),
    "a size that is none": (("BUNDLE", "-p", "x", "--ram", "much"), 2, ("'much' is not a size",)),
    "a temperature that is none": (("BUNDLE", "-p", "x", "--temp", "nan"), 2, ("--temp",)),
    "a prompt above the context": (("BUNDLE", "-p", "x " * 2000), 2, ("does not fit", "--context")),
    "no prompt": (("BUNDLE",), 3, ("standard input", "empty")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_with_the_next_step(run: Run, model: Path, case: str) -> None:
    arguments, status, words = REFUSED[case]
    done = run(*({"GGUF": str(EXAMPLE), "BUNDLE": str(model)}.get(a, a) for a in arguments))
    assert (done.status, done.stdout) == (status, ""), done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


def test_chat_without_a_template_is_refused(run: Run, tmp_path: Path) -> None:
    path = archs.make_model("qwen3moe", tmp_path / "m.gguf")
    done = run(path, "--stock", "--chat", "-p", "Hello")
    assert done.status == 3
    assert "no chat template" in done.stderr


def test_a_terminal_is_no_prompt_unless_asked_for(model: Path) -> None:
    """Without this the command would wait for a person who does not know it."""
    ours, theirs = os.openpty()
    try:
        done = ended(process(model, stdin=theirs))
    finally:
        os.close(theirs)
        os.close(ours)
    assert (done.status, done.stdout) == (2, "")
    assert "Give a text with -p" in done.stderr


def test_help_names_every_option_of_the_design(run: Run) -> None:
    text = run("--help").stdout
    for option in ("-p", "-f", "-n", "--plan", "--slots", "--ram", "--policy", "--context", "--threads", "--temp", "--seed"):
        assert re.search(rf"^\s+{option}\b", text, re.MULTILINE), option
    for option in ("--chat", "--stats", "--json", "--stock", "--bench", "--check-against", "--gpu", "--vram"):
        assert option in text, option


@pytest.mark.parametrize("mode", cli._MODES)
def test_a_mode_is_a_command_of_its_own_that_knows_its_option(mode: str, run: Run) -> None:
    module, _, name = cli._MODES[mode].partition(":")
    command = getattr(importlib.import_module(module), name)
    assert isinstance(command, click.Command)
    assert any(mode in p.opts for p in command.params)
    done = run(mode, "--help")
    assert done.status == 0
    assert done.stdout.startswith(f"Usage: {NAME} ")
    assert run("--help").stdout != done.stdout
