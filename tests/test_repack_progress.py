"""What bel-repack tells of its progress."""

from __future__ import annotations

from pathlib import Path

import pytest

from bel.formats.console import Progress
from bel.formats.gguf_model import open_model
from bel.repack.convert import convert
from bel.repack.layout import plan_layout
from repack_runs import write_set


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_set(tmp_path / "in")


def test_progress_says_where_it_is(tmp_path: Path, source: Path) -> None:
    """Each phase counts up to its total and never beyond; a run that is watched is the same as one that is not."""
    model, seen = open_model(source), []
    layout = plan_layout(model, "model", ple="auto", shard_bytes=2**40)
    convert(model, layout, tmp_path / "out.bel", force=False, check=True, progress=lambda *row: seen.append(row))
    assert {phase for phase, _, _ in seen} == {"repack", "verify"}
    assert all(0 < done <= total for _, done, total in seen)
    assert [done == total for phase, done, total in seen if phase == "repack"][-1]
    assert [done == total for phase, done, total in seen if phase == "verify"][-1]
    Progress("x").close()
