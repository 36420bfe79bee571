"""Traces that importers make of a file, and the calls in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bel.formats.trace_calls import LayerCalls, Trace, read_trace
from bel.profiler.importers import Imported


def imported(
    tmp_path: Path, read: Callable[[Path], Imported], content: str | bytes, name: str = "in.txt"
) -> tuple[Trace, list[str]]:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return as_trace(tmp_path, read(path))


def as_trace(tmp_path: Path, rows: Imported) -> tuple[Trace, list[str]]:
    header = rows.header("work")
    rows.write(tmp_path / "out.trace", header)
    trace = read_trace(tmp_path / "out.trace", weights=True)
    (tmp_path / "out.trace").unlink()
    assert trace.notes == ()
    return trace, rows.notes


def calls(layer: LayerCalls) -> list[tuple[int, list[int], list[list[int]]]]:
    """(phase, tokens, ids) of each call."""
    bounds = zip(layer.row_start[:-1].tolist(), layer.row_start[1:].tolist(), strict=True)
    return [
        (int(phase), layer.token[a:b].tolist(), layer.ids[a:b].tolist())
        for phase, (a, b) in zip(layer.phase, bounds, strict=True)
    ]
