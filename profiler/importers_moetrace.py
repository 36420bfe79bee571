"""`--from thecodacus-csv`: the traces of llama-moe-trace (github.com/thecodacus/llama.cpp, tools/moe-trace/moe-trace.cpp).

`pos,layer,id0,id1,..`, one line for each token and layer.  A prompt ubatch of n tokens from b on has the positions -(b + n)
to -(b + 1) in ascending order; decode counts from 0.
"""

from __future__ import annotations

from pathlib import Path

from bel.formats.trace import DECODE, PROMPT
from bel.profiler.importers import Imported, Line, Origin, parse_integer, text_lines


def read_thecodacus_csv(path: Path) -> Imported:
    """Read a trace of llama-moe-trace.  Raises BadInputError, naming the line."""
    imported = Imported(path, Origin(engine="llama-moe-trace"))
    rows = _MoeTrace(imported)
    for line in text_lines(path):
        if not line.text.strip() or (line.number == 1 and line.text.replace(" ", "").startswith("pos,layer")):
            continue
        values = [parse_integer(cell) for cell in line.text.split(",")]
        numbers = [v for v in values if v is not None]
        is_row = len(numbers) == len(values) >= 3
        if not line.is_ended and not (is_row and rows.fits(numbers)):
            imported.notes.append(f"line {line.number} is incomplete: the file was truncated there; the line is dropped")
            break
        if not is_row:
            raise imported.bad(f"line {line.number}", "it is not a row", line.text[:80], "pos,layer,id0,id1,.. as integers")
        rows.add(line, numbers)
    rows.end_call()
    return imported


class _MoeTrace:
    """Gathers the prompt rows of one (ubatch, layer); decode rows are calls of their own."""

    def __init__(self, imported: Imported) -> None:
        self._imported = imported
        self._call: list[tuple[Line, list[int]]] = []
        self._last: tuple[int, int] | None = None  # position (None of the prompt has one: -1) and layer of the row before
        self._ubatch = -1
        self._prompt_tokens = 0

    def fits(self, row: list[int]) -> bool:
        """Whether a row has as many ids as its layer's others."""
        known = self._imported.layers.get(row[1])
        return known is None or known.top_k == len(row) - 2

    def add(self, line: Line, row: list[int]) -> None:
        """Take one row."""
        pos, layer = row[0], row[1]
        if self._call and not (pos < 0 and layer == self._call[-1][1][1] and pos == self._call[-1][1][0] + 1):
            self.end_call()
        if pos < 0:
            self._call.append((line, row))
            return
        self._begin(pos, layer)
        token = self._prompt_tokens + pos
        self._imported.add(f"line {line.number}", layer=layer, token=token, phase=DECODE, ubatch=self._ubatch, ids=row[2:])

    def end_call(self) -> None:
        """Take the gathered prompt rows as one call."""
        if not self._call:
            return
        layer, first = self._call[0][1][1], -self._call[-1][1][0] - 1
        if self._last is not None and self._last[0] >= 0:
            self._prompt_tokens = 0  # a prompt after decode rows begins a new sequence
        self._begin(-1, layer)
        for i, (line, row) in enumerate(self._call):
            self._imported.add(
                f"line {line.number}", layer=layer, token=first + i, phase=PROMPT, ubatch=self._ubatch, ids=row[2:]
            )
        self._prompt_tokens = max(self._prompt_tokens, first + len(self._call))
        self._call = []

    def _begin(self, pos: int, layer: int) -> None:
        """Layers rise within an ubatch, and decode positions differ between ubatches."""
        if self._last is None or pos != self._last[0] or layer <= self._last[1]:
            self._ubatch += 1
        self._last = (pos, layer)
