"""What a trace says about its run before the first choice of the router: model, layers, workload, engine.

`SPEC.md`, "Trace", has the keys.  The header is read as hostile input: every number is bounded before it is used.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from bel.formats.manifest_fields import read_int, read_list, read_map, read_text

FORMAT = "bel-trace"
MAX_EXPERTS = 1 << 16  # ids are u16
MAX_LAYERS = 1 << 16  # a block numbers the layers in u16
MAX_SAMPLING_BYTES = 1 << 16
MAX_TEXT_CHARS = 4096


@dataclass(frozen=True, slots=True)
class TraceLayer:
    """One MoE layer: its number in the model, its experts, how many a token takes, and the bytes of one expert."""

    layer: int
    n_expert: int
    top_k: int
    expert_bytes: int | None


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """Identity of a run.  `prompts` are digests of the prompt texts, never the texts.

    `fingerprint` is that of the model (`fingerprint.py`), or "" where an imported file names none.  `sampling` is a flat
    JSON object.  `has_weights` and `has_times` say which optional columns the blocks have.
    """

    model_name: str
    arch: str
    fingerprint: str
    layers: tuple[TraceLayer, ...]
    workload: str
    prompts: tuple[str, ...] = ()
    engine: str = ""
    engine_build: str = ""
    sampling: dict[str, Any] | None = None
    has_weights: bool = False
    has_times: bool = False


def encode_header(header: TraceHeader) -> bytes:
    """The header as UTF-8 JSON: the same header gives the same bytes.  Raises ValueError for one that cannot be written."""
    _check(header)
    body = {
        "format": FORMAT,
        "model": {"name": header.model_name, "arch": header.arch, "fingerprint": header.fingerprint},
        "layers": [
            {"layer": x.layer, "n_expert": x.n_expert, "top_k": x.top_k, "expert_bytes": x.expert_bytes} for x in header.layers
        ],
        "workload": header.workload,
        "prompts": list(header.prompts),
        "engine": {"name": header.engine, "build": header.engine_build},
        "sampling": dict(sorted((header.sampling or {}).items())),
        "columns": {"weights": header.has_weights, "times": header.has_times},
    }
    return json.dumps(body, allow_nan=False).encode()


def decode_header(data: bytes) -> TraceHeader:
    """The header in `data`.  Raises ValueError, KeyError or TypeError for one that breaks a rule of the format."""
    body = json.loads(data, parse_constant=_no_constant)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    model, engine, columns = read_map(body, "model"), read_map(body, "engine"), read_map(body, "columns")
    header = TraceHeader(
        model_name=read_text(model, "name"),
        arch=read_text(model, "arch"),
        fingerprint=read_text(model, "fingerprint"),
        layers=tuple(_layer(row) for row in read_list(body, "layers")),
        workload=read_text(body, "workload"),
        prompts=tuple(read_list(body, "prompts")),
        engine=read_text(engine, "name"),
        engine_build=read_text(engine, "build"),
        sampling=read_map(body, "sampling"),
        has_weights=columns["weights"] is True,
        has_times=columns["times"] is True,
    )
    _check(header)
    return header


def _layer(row: Any) -> TraceLayer:
    if not isinstance(row, dict):
        raise ValueError("a layer is not an object")
    size = None if row["expert_bytes"] is None else read_int(row, "expert_bytes")
    return TraceLayer(read_int(row, "layer"), read_int(row, "n_expert"), read_int(row, "top_k"), size)


def _check(header: TraceHeader) -> None:
    numbers = [x.layer for x in header.layers]
    if not 1 <= len(numbers) <= MAX_LAYERS or numbers != sorted(set(numbers)) or not 0 <= numbers[0] <= numbers[-1] < 1 << 31:
        raise ValueError("it lists no layers, or not in ascending order")
    for row in header.layers:
        if not 1 <= row.n_expert <= MAX_EXPERTS or not 1 <= row.top_k <= row.n_expert:
            raise ValueError(f"layer {row.layer} takes {row.top_k} of {row.n_expert} experts")
        if row.expert_bytes is not None and not 1 <= row.expert_bytes < 1 << 48:
            raise ValueError(f"layer {row.layer} has experts of {row.expert_bytes} bytes")
    texts = (header.model_name, header.arch, header.fingerprint, header.workload, header.engine, header.engine_build)
    for text in (*texts, *header.prompts):
        if not isinstance(text, str) or len(text) > MAX_TEXT_CHARS:
            raise ValueError("a text is too long, or not a text")
    if len(json.dumps(header.sampling or {}, allow_nan=False)) > MAX_SAMPLING_BYTES:
        raise ValueError("the sampling settings are too long")


def _no_constant(word: str) -> None:
    raise ValueError(f"it holds {word}")
