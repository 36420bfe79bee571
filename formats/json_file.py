"""JSON that came from anywhere: a byte order mark and CRLF are fine; NaN, Infinity, repeated keys and huge files are not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from bel.formats.errors import BadInputError

MAX_JSON_BYTES = 512 * 2**20  # a profile of 100 layers with 512 experts and ten workloads has 20 MiB


def load_json_object(path: Path, what: str) -> dict[str, Any]:
    """The one JSON object of a file.  `what` names the kind of file in messages.  Raises BadInputError."""
    data = _read_bounded(path, what)
    try:
        body = parse_json(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadInputError(
            f"this {what} is not UTF-8", path=str(path), offset_bytes=error.start, hint="Save it as UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"this {what} is not valid JSON: {error}", path=str(path)) from None
    if not isinstance(body, dict):
        raise BadInputError(f"this {what} is not a JSON object", path=str(path))
    return body


def parse_json(text: str) -> Any:
    """A JSON value without NaN, Infinity, numbers that overflow to them, or a key twice in one object.

    Raises ValueError, or RecursionError where it nests too deeply.
    """
    return _DECODER.decode(text)


def _read_bounded(path: Path, what: str) -> bytes:
    if path.exists() and not path.is_file():
        raise BadInputError(f"this is no {what}: it is not a file", path=str(path))
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise BadInputError(
            f"this file is too large for a {what}", path=str(path), found=size, expected=f"{MAX_JSON_BYTES} bytes"
        )
    return path.read_bytes()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for key, value in pairs:
        if key in body:
            raise ValueError(f"the key '{key}' stands twice in one object")
        body[key] = value
    return body


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is not a finite number")


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(f"{word} is not a finite number")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite)
