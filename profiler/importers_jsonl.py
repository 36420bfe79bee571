"""`--from jsonl`: an optional header line, then `{"token": 0, "layer": 0, "experts": [3, 1], "phase": "decode"}` a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bel.formats.json_file import parse_json
from bel.formats.manifest_fields import read_int, read_list, read_map, read_text
from bel.formats.profile_json import read_layer
from bel.formats.trace import DECODE, PROMPT
from bel.formats.trace_header import MAX_EXPERTS
from bel.profiler.importers import Imported, Line, Origin, text_lines

_PHASES = {"prompt": PROMPT, "decode": DECODE}


class _Ubatches:
    """Numbers ubatches by their first row.  A row without an ubatch is a call of its own."""

    def __init__(self) -> None:
        self._named: dict[int, tuple[int, int]] = {}
        self._token: tuple[int, int] | None = None
        self._layers: set[int] = set()
        self._next = 0

    def number(self, named: int | None, token: int, layer: int, phase: int) -> int:
        """The number of the row's ubatch.  Raises ValueError where rows of one ubatch differ in phase."""
        if named is None:
            # Rows of one token that go through different layers were computed together.
            if self._token != (token, phase) or layer in self._layers:
                self._token, self._layers, self._next = (token, phase), set(), self._next + 1
            self._layers.add(layer)
            return self._next - 1
        self._token = None
        if named not in self._named:
            self._named[named] = (self._next, phase)
            self._next += 1
        number, its_phase = self._named[named]
        if its_phase != phase:
            raise ValueError(f"ubatch {named} has rows of the prompt and of decode")
        return number


def read_jsonl(path: Path) -> Imported:
    """Read a file of router rows.  Raises BadInputError, naming the line."""
    imported = Imported(path, Origin())
    ubatches = _Ubatches()
    is_first = True
    for line in text_lines(path):
        if not line.text.strip():
            continue
        row = _parse(line, imported)
        if row is None:
            break
        try:
            if is_first and "header" in row:
                imported.origin = _origin(read_map(row, "header"))
            else:
                _add(imported, ubatches, line, row)
        except KeyError as error:
            raise imported.bad(f"line {line.number}", f"the row lacks {error}") from None
        except (TypeError, ValueError) as error:
            raise imported.bad(f"line {line.number}", str(error)) from None
        is_first = False
    return imported


def _parse(line: Line, imported: Imported) -> dict[str, Any] | None:
    """The object of a line; None for a last line that is cut short, which is noted."""
    try:
        row = parse_json(line.text)
    except (ValueError, RecursionError) as error:
        if not line.is_ended:
            imported.notes.append(f"line {line.number} is incomplete: the file was truncated there; the line is dropped")
            return None
        raise imported.bad(f"line {line.number}", f"it is not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise imported.bad(f"line {line.number}", "it is not a JSON object")
    return row


def _add(imported: Imported, ubatches: _Ubatches, line: Line, row: dict[str, Any]) -> None:
    token, layer, name = read_int(row, "token"), _whole(row["layer"], "layer"), read_text(row, "phase")
    if name not in _PHASES:
        raise ValueError(f"phase is '{name}', not prompt or decode")
    ids = [_whole(i, "an expert") for i in read_list(row, "experts")]
    phase = _PHASES[name]
    named = read_int(row, "ubatch") if row.get("ubatch") is not None else None
    ubatch = ubatches.number(named, token, layer, phase)
    imported.add(f"line {line.number}", layer=layer, token=token, phase=phase, ubatch=ubatch, ids=ids)


def _whole(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 1 << 62:
        raise ValueError(f"{what} is not a whole number")
    return value


def _origin(header: dict[str, Any]) -> Origin:
    def positive(key: str, limit: int) -> int | None:
        if header.get(key) is None:
            return None
        value = read_int(header, key)
        if not 1 <= value <= limit:
            raise ValueError(f"{key} {value} is not in 1 to {limit}")
        return value

    n_expert = positive("n_expert", MAX_EXPERTS)
    top_k = positive("top_k", n_expert or MAX_EXPERTS)
    layers = None
    if header.get("layers") is not None:
        layers = tuple(sorted({_whole(x, "a layer") for x in read_list(header, "layers")}))
        if not layers or layers[0] < 0 or layers[-1] >= 1 << 31:
            raise ValueError("layers is empty, or names a layer that cannot be")
    sizes = read_map(header, "expert_bytes") if header.get("expert_bytes") is not None else {}
    return Origin(
        model_name=read_text(header, "model") if header.get("model") is not None else "",
        fingerprint=read_text(header, "fingerprint") if header.get("fingerprint") is not None else "",
        layers=layers,
        n_expert=n_expert,
        top_k=top_k,
        expert_bytes={read_layer(key): _size(sizes, key) for key in sizes},
    )


def _size(sizes: dict[str, Any], key: str) -> int:
    size = read_int(sizes, key)
    if not 1 <= size < 1 << 48:
        raise ValueError(f"expert_bytes of layer {key} is {size}")
    return size
