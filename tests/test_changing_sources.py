"""Sources that change while they are read: found, and no bundle of two states."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import synth
from bel.formats.errors import BadInputError
from bel.formats.gguf_model import open_model
from bel.repack.convert import convert
from bel.repack.layout import plan_layout
from repack_runs import big_model
from repack_runs import source as source


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return big_model(tmp_path_factory.mktemp("big"))


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 100)
        file.write(b"x")


@pytest.mark.parametrize("change", [_append, _truncate, _overwrite, os.utime], ids=["append", "truncate", "overwrite", "touch"])
def test_a_source_that_changes_while_it_is_read(tmp_path: Path, big: Path, change: Callable[[Path], None]) -> None:
    source = tmp_path / "in" / "big.gguf"
    source.parent.mkdir()
    shutil.copyfile(big, source)
    os.utime(source, (1, 1))
    model, changed = open_model(source), threading.Event()

    def meanwhile(phase: str, done: int, _total: int) -> None:
        if phase == "repack" and done > 16 * 2**20 and not changed.is_set():
            change(source)
            changed.set()

    layout = plan_layout(model, "big", ple="auto", shard_bytes=2**40)
    with pytest.raises(BadInputError, match=r"big\.gguf: the file (changed|became shorter) while it was read") as caught:
        convert(model, layout, tmp_path / "out.bel", force=False, check=True, progress=meanwhile)
    assert caught.value.exit_code == 3
    assert changed.is_set()
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("change", [_append, _truncate])
def test_a_source_that_changed_since_its_header_was_read(tmp_path: Path, source: Path, change: Callable[[Path], None]) -> None:
    model = open_model(source)
    change(source)
    layout = plan_layout(model, "model", ple="auto", shard_bytes=2**40)
    with pytest.raises(BadInputError, match="while it was read"):
        convert(model, layout, tmp_path / "out.bel", force=False, check=True, progress=lambda *_: None)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_another_model_under_the_same_name_since_its_header_was_read(tmp_path: Path) -> None:
    path = synth.moe(seed=1).write(tmp_path / "m.gguf")
    model = open_model(path)
    entries = [
        *synth.moe_entries()[:-1],
        synth.key("tokenizer.ggml.tokens", synth.ARRAY, (synth.STRING, [f"u{i}" for i in range(8)])),
    ]
    synth.moe(entries=entries, seed=2).write(path)
    assert path.stat().st_size == model.first.file_bytes
    layout = plan_layout(model, "m", ple="auto", shard_bytes=2**40)
    with pytest.raises(BadInputError, match="changed while it was read"):
        convert(model, layout, tmp_path / "out.bel", force=False, check=True, progress=lambda *_: None)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
