"""`bel-run` on a damaged bundle, a failing disk, an interrupt and a reader that has gone: how it ends, and what it says."""

from __future__ import annotations

import errno
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from bel.formats.bundle import open_bundle
from bel.runtime import first_check, running
from bel.runtime.run_options import RunOptions
from faults import HANG_SECONDS
from run_answers import FLOOR, PROMPT, Run, ended, process
from run_answers import copy as copy
from run_answers import model as model
from run_answers import run as run
from run_answers import stock as stock


def _flip(bundle: Path, layer: int, expert: int) -> None:
    """Change one byte of an expert's last part."""
    manifest = open_bundle(bundle).manifest
    row = manifest.layers[layer]
    place = row.part_offset(expert, row.parts[-1]) + 5
    with bundle.joinpath(manifest.experts[row.shard].name).open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))


def test_a_damaged_blob_is_found_before_anything_is_computed(run: Run, copy: Path) -> None:
    _flip(copy, 5, 31)
    done = run(copy, "-p", PROMPT)
    assert (done.status, done.stdout) == (4, "")
    assert "expert 31 of layer 5" in done.stderr
    assert "experts.bin" in done.stderr


def test_a_damaged_blob_of_the_prompt_ends_the_run(run: Run, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first graph of all, when the weights of the later layers have no memory yet."""
    monkeypatch.setattr(first_check.check_tails, "__defaults__", (0,))
    for expert in range(32):
        _flip(copy, 1, expert)
    done = run(copy, "-p", PROMPT, "--slots", FLOOR)
    assert (done.status, done.stdout) == (4, "")
    assert re.search(r"expert \d+ of layer 1 ", done.stderr)


def test_a_damaged_blob_leaves_the_text_so_far(run: Run, copy: Path, stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert that only a later token chooses: found in the counters of undamaged runs."""
    monkeypatch.setattr(first_check.check_tails, "__defaults__", (0,))
    late = _late_expert(copy, stock["tokens"])
    _flip(copy, 0, late)
    done = run(copy, "-p", PROMPT, "-n", 24, "--slots", FLOOR)
    assert done.status == 4
    assert f"expert {late} of layer 0" in done.stderr
    assert done.stdout
    assert stock["text"].startswith(done.stdout)


def _late_expert(bundle: Path, tokens: list[int]) -> int:
    """An expert of layer 0 that the prompt does not use and a token behind it does."""
    with running.open_running(RunOptions(bundle, n_ctx=512, n_threads=1)) as run:
        assert run.bundle is not None
        run.context.decode(run.model.tokenize(PROMPT))
        before = set(run.bundle.cache.resident(0))
        for token in tokens[:-1]:
            run.context.decode([token])
        return min(set(run.bundle.cache.resident(0)) - before)


def test_a_damaged_dense_weight_is_found(run: Run, copy: Path) -> None:
    manifest = open_bundle(copy).manifest
    tensor = next(t for t in manifest.tensors if t.dest == "dense" and t.name.endswith("attn_q.weight"))
    with copy.joinpath(manifest.dense.name).open("r+b") as file:
        file.seek(tensor.dest_offset_bytes + tensor.size_bytes // 2)
        file.write(b"\x55\xaa")
    done = run(copy, "-p", PROMPT)
    assert done.status == 4
    assert tensor.name in done.stderr
    assert manifest.dense.name in done.stderr


@pytest.mark.parametrize("name", ["dense.gguf", "experts.bin", "experts.idx", "manifest.json"])
def test_a_missing_file_is_damage(run: Run, copy: Path, name: str) -> None:
    path = next(p for p in copy.iterdir() if p.name.endswith(name))
    path.unlink()
    done = run(copy, "-p", PROMPT)
    assert done.status == 4
    assert path.name in done.stderr


@pytest.mark.parametrize(("fault", "status", "words"), [("EIO", 5, ("Input/output error",)), ("short", 4, ("the file ends",))])
def test_a_failing_read_ends_the_run(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, fault: str, status: int, words: tuple[str, ...]
) -> None:
    """The fiftieth read of the experts: in the middle of the prompt."""
    real, count = os.preadv, 0

    def failing(*arguments: Any) -> int:
        nonlocal count
        count += 1
        if count >= 50 and fault == "EIO":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return 0 if count >= 50 else real(*arguments)

    monkeypatch.setattr(os, "preadv", failing)
    done = run(model, "-p", PROMPT, "--reader", "threads", "--slots", FLOOR)
    assert (done.status, done.stdout) == (status, "")
    for word in (*words, "experts.bin", "at byte"):
        assert word in done.stderr
    monkeypatch.undo()
    assert run(model, "-p", PROMPT, "-n", 1).status == 0  # nothing of it is left in this process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_text_in_order(model: Path, number: signal.Signals) -> None:
    """A real signal to a real process, once it has begun to write."""
    started = process(model, "-p", PROMPT, "-n", 100000, "--ignore-eos", "--context", 100000, "--stats")
    assert started.stdout is not None
    begun = started.stdout.read(30)
    started.send_signal(number)
    done = ended(started)
    assert len(begun) == 30
    assert done.status == 130
    assert re.search(r"interrupted behind \d+ tokens", done.stderr)
    assert "decode experts" in done.stderr


def test_a_reader_that_has_gone_ends_the_run_without_a_word(model: Path) -> None:
    """`bel-run ... | head -c 1`."""
    started = process(model, "-p", PROMPT, "-n", 100000, "--ignore-eos", "--context", 100000)
    assert started.stdout is not None
    assert started.stderr is not None
    started.stdout.read(1)
    started.stdout.close()
    said = started.stderr.read().decode()
    started.stderr.close()
    assert started.wait(HANG_SECONDS) == 141
    assert "error" not in said
