"""`--from bigmoe-csv`: the route traces of BigMoeOnEdge (github.com/Helldez/BigMoeOnEdge), `# route_trace v1`.

Comment lines with the model and the bytes of an expert in each layer, a line of column names, then one line for each (turn,
phase, step, layer, slot).  Phase 0 is the prompt, whose rows stand layer by layer.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from bel.formats.trace import DECODE, PROMPT
from bel.profiler.importers import Imported, Line, Origin, parse_integer, text_lines

ROUTE_TRACE_VERSIONS = (1,)
_VERSION = re.compile(r"route_trace v(\d{1,9})", re.ASCII)
_PAIR = re.compile(r"(\w+)=(.*?)(?=\s+\w+=|\s*$)")
_NEEDED = ("turn", "phase", "step", "layer", "slot", "expert")


def read_bigmoe_csv(path: Path) -> Imported:
    """Read a route trace of BigMoeOnEdge.  Raises BadInputError, naming the line."""
    imported = Imported(path, Origin(engine="BigMoeOnEdge"))
    reader = _RouteTrace(imported)
    for line in text_lines(path):
        reader.line(line)
    reader.finish()
    return imported


class _RouteTrace:
    """Gathers the slots of one (turn, phase, step, layer) into a row."""

    def __init__(self, imported: Imported) -> None:
        self._imported = imported
        self._comments: list[Line] = []
        self._columns: dict[str, int] | None = None
        self._key: tuple[int, ...] = ()
        self._first = 0
        self._ids: list[int] = []
        self._weights: list[float] = []
        self._batch: tuple[int, ...] = ()
        self._ubatch = -1

    def line(self, line: Line) -> None:
        """Take one line of the file."""
        if not line.text.strip():
            return
        if self._columns is None:
            if line.text.startswith("#"):
                self._comments.append(line)
            else:
                self._read_columns(line)
            return
        cells = line.text.split(",")
        values = self._values(line, cells)
        if values is None:
            self._imported.notes.append(f"line {line.number} is incomplete: the file was truncated there; the line is dropped")
            return
        key, slot, expert = tuple(values[:4]), values[4], values[5]
        if key != self._key:
            self._end_row(f"line {self._first}")
            self._key, self._first = key, line.number
        if slot != len(self._ids):
            raise self._imported.bad(f"line {line.number}", "the slots of a row are out of order", slot, len(self._ids))
        self._ids.append(expert)
        if self._imported.has_weights:
            self._weights.append(self._weight(line, cells))

    def finish(self) -> None:
        """Take the last row; one with slots missing is dropped, and noted."""
        top_k = self._imported.origin.top_k
        if top_k is not None and 0 < len(self._ids) < top_k:
            self._imported.notes.append(f"the row from line {self._first} is incomplete: the file was truncated; it is dropped")
            return
        self._end_row(f"line {self._first}")

    def _read_columns(self, line: Line) -> None:
        names = [name.strip() for name in line.text.split(",")]
        missing = [name for name in _NEEDED if name not in names]
        if missing:
            raise self._imported.bad(f"line {line.number}", f"the column names lack {', '.join(missing)}", line.text[:80])
        self._columns = {name: i for i, name in enumerate(names)}
        self._imported.has_weights = "weight" in names
        self._imported.origin = self._read_comments()

    def _read_comments(self) -> Origin:
        model: dict[str, str] = {}
        sizes: dict[int, int] = {}
        for line in self._comments:
            version = _VERSION.search(line.text)
            if version and int(version[1]) not in ROUTE_TRACE_VERSIONS:
                raise self._imported.bad(
                    f"line {line.number}", f"route_trace version {version[1]} is not supported; version 1 is read"
                )
            pairs = dict(_PAIR.findall(line.text.lstrip("# ")))
            if "layer" in pairs:
                layer, size = parse_integer(pairs["layer"]), parse_integer(pairs.get("expert_bytes", ""))
                if layer is None or size is None or not 0 <= layer < 1 << 31 or not 1 <= size < 1 << 48:
                    raise self._imported.bad(
                        f"line {line.number}", "a layer has no valid number or expert_bytes", line.text[:80]
                    )
                sizes[layer] = size
            else:
                model.update(pairs)
        return Origin(
            model_name=re.split(r"[/\\]", model.get("model", ""))[-1],  # the path is of the machine that made it
            arch=model.get("arch", ""),
            engine="BigMoeOnEdge",
            layers=tuple(sorted(sizes)) or None,
            n_expert=self._count(model, "n_expert"),
            top_k=self._count(model, "n_expert_used"),
            expert_bytes=sizes,
        )

    def _count(self, model: dict[str, str], key: str) -> int | None:
        if key not in model:
            return None
        value = parse_integer(model[key])
        if value is None or not 1 <= value <= 1 << 16:
            raise self._imported.bad("the comments", f"{key} is not a count of experts", model[key])
        return value

    def _values(self, line: Line, cells: list[str]) -> list[int] | None:
        """turn, phase, step, layer, slot and expert; None for a last line that is cut short."""
        columns = self._columns or {}
        values = [parse_integer(cells[columns[name]]) if columns[name] < len(cells) else None for name in _NEEDED]
        numbers = [v for v in values if v is not None]
        if len(cells) == len(columns) and len(numbers) == len(_NEEDED) and numbers[1] in (0, 1):
            return numbers
        if not line.is_ended and len(cells) <= len(columns):
            return None
        raise self._imported.bad(
            f"line {line.number}", "it is not a row of the columns", line.text[:80], ",".join(columns) + ", phase 0 or 1"
        )

    def _weight(self, line: Line, cells: list[str]) -> float:
        try:
            weight = float(cells[(self._columns or {})["weight"]])
        except ValueError:
            weight = math.nan
        if not math.isfinite(weight) or abs(weight) > 65504:  # the largest number of a half float
            raise self._imported.bad(f"line {line.number}", "the weight is not a finite number", line.text[:80])
        return weight

    def _end_row(self, where: str) -> None:
        if not self._ids:
            return
        turn, phase, step, layer = self._key
        # A prompt is one batch for each layer, a decode step another; a layer that comes again begins the next ubatch.
        batch = (turn, phase) if phase == 0 else (turn, phase, step)
        if batch != self._batch[: len(batch)] or len(batch) + 1 != len(self._batch) or layer < self._batch[-1]:
            self._ubatch += 1
        self._batch = (*batch, layer)
        self._imported.add(
            where,
            layer=layer,
            token=step,
            phase=DECODE if phase else PROMPT,
            ubatch=self._ubatch,
            ids=self._ids,
            weights=self._weights if self._imported.has_weights else None,
        )
        self._ids, self._weights = [], []
