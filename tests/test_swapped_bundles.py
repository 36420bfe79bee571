"""A bundle that another one replaces while `bel-run` opens it: one of them runs, and neither is called damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bel.formats.bundle import Bundle, open_bundle
from bel.formats.errors import DamagedBundleError
from bel.formats.staging import exchange
from bel.runtime import running
from bel.runtime.run_options import RunOptions
from recordings import EXAMPLE
from repack_runs import run_cli

SEED_BYTE = 0x5A


@pytest.fixture
def bundles(tmp_path: Path) -> tuple[Path, Path]:
    """Two of the same names and sizes, whose weights differ."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        data = bytearray(EXAMPLE.read_bytes())
        if name == "other":
            data[-1] ^= SEED_BYTE
        (tmp_path / name / "m.gguf").write_bytes(data)
        assert run_cli(tmp_path / name / "m.gguf").status == 0
    return tmp_path / "one" / "m.bel", tmp_path / "other" / "m.bel"


def swapping(monkeypatch: pytest.MonkeyPatch, bundles: tuple[Path, Path], times: int) -> list[Path]:
    """In front of the first so many checks of a dense file the two change their names.  Returns what was opened."""
    opened: list[Path] = []
    check: Callable[[Bundle], None] = running.check_dense

    def swapped(bundle: Bundle) -> None:
        opened.append(bundle.folder)
        if len(opened) <= times:
            exchange(*bundles)
        check(bundle)

    monkeypatch.setattr(running, "check_dense", swapped)
    return opened


def tokens(folder: Path) -> str:
    """What runs: its content digest."""
    with running.open_running(RunOptions(folder, slots=8, n_ctx=64, n_threads=1)) as run:
        assert run.bundle is not None
        run.context.decode([1, 2, 3])
        return run.bundle.pager._bundle.manifest.content_digest


@pytest.mark.parametrize("times", [0, 1, 2])
def test_the_one_that_has_the_name_then_runs(bundles: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    opened = swapping(monkeypatch, bundles, times)
    digest = tokens(bundles[0])
    assert len(opened) == times + 1
    assert digest == open_bundle(bundles[0]).manifest.content_digest


def test_it_is_not_tried_for_ever(bundles: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    opened = swapping(monkeypatch, bundles, 10)
    with pytest.raises(DamagedBundleError):
        tokens(bundles[0])
    assert len(opened) == 3


def test_a_damaged_one_is_looked_at_once(bundles: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    opened = swapping(monkeypatch, bundles, 0)
    shutil.copy(bundles[1] / "m-experts.idx", bundles[0])
    shutil.copy(bundles[1] / "m-dense.gguf", bundles[0])
    dense = bytearray((bundles[0] / "m-dense.gguf").read_bytes())
    dense[-1] ^= 1
    (bundles[0] / "m-dense.gguf").write_bytes(dense)
    with pytest.raises(DamagedBundleError):
        tokens(bundles[0])
    assert len(opened) == 1
