"""The line of `bel-profile fit` that runs what was computed, as bel-run understands it."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from bel.formats.gguf_model import open_model
from bel.formats.units import MIB
from bel.repack.convert import convert
from bel.repack.layout import plan_layout
from bel.runtime.options_cli import run_options
from bel.runtime.run_options import RunOptions
from fit_answers import fit_answer


@click.command()
@run_options
def _parsed(options: RunOptions) -> RunOptions:
    """What bel-run makes of its command line."""
    return options


def _run_it_so(answer: dict[str, Any], engine: Path) -> RunOptions | None:
    lines = [words for words in answer["advice"] if words.startswith("Run it so: ")]
    if not lines:
        return None
    words = shlex.split(lines[0].removeprefix("Run it so: ").replace("FOLDER", shlex.quote(str(engine))))
    assert words[0] == "bel-run"
    options = _parsed.main(words[1:], standalone_mode=False)
    assert isinstance(options, RunOptions)
    return options


def test_bel_run_understands_the_line_that_runs_it(tmp_path: Path, example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "a bundle.bel"
    layout = plan_layout(open_model(example), "tiny", ple="auto", shard_bytes=45 * 10**9)
    convert(open_model(example), layout, bundle, force=False, check=True, progress=lambda *_: None)
    sizes = ("--vram", "17M", "--ram", "2M", "--context", "700")
    answer, _ = fit_answer(capsys, bundle, *sizes)
    options = _run_it_so(answer, tmp_path)
    assert options is not None
    assert options.path == bundle
    assert (options.gpu, options.n_ctx) == ("auto", 700)
    assert {options.slots} == set(answer["slots_per_layer"].values())
    assert answer["experts_on_disk_bytes"] > 0
    assert options.ram_bytes == MIB  # what is left of 2 MiB, less the margin of an eighth, in whole MiB
    of_gguf = _run_it_so(fit_answer(capsys, example, *sizes)[0], tmp_path)
    assert of_gguf == dataclasses.replace(options, path=Path("BUNDLE"))
    plenty = _run_it_so(fit_answer(capsys, bundle, "--vram", "17M", "--ram", "1G", "--context", "700")[0], tmp_path)
    assert plenty == dataclasses.replace(options, ram_bytes=None)


def test_no_line_runs_a_cache_that_bel_run_does_not_have(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kv, said in (("f16", False), ("q8_0", True), ("f32", True)):
        answer, _ = fit_answer(capsys, example, "--vram", "17M", "--ram", "1G", "--context", "512", "--kv", kv)
        assert 0 < answer["resident_fraction"] < 1
        assert any(words.startswith("Run it so") for words in answer["advice"]) is not said
        assert any("llama.cpp's own programs" in w and f"--kv {kv}" in w for w in answer["advice"]) is said
