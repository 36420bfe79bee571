"""`costs.json`, the measured constants of one machine, as bytes and back.  Read as hostile input; `SPEC.md`, "Costs"."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bel.formats.errors import BadInputError
from bel.formats.json_file import load_json_object
from bel.formats.manifest_fields import read_int, read_map, read_text
from bel.formats.profile_json import read_layer

FORMAT = "bel-costs"
VERSION = 1
READABLE_VERSIONS = (1,)
MAX_BLOCK_BYTES = 2**40
MIN_BYTES_PER_S = 1.0  # smaller ones make times that overflow
MAX_BYTES_PER_S = 1e15  # a thousand times the memory of today's largest accelerator
MIN_SECONDS = 1e-12
MAX_SECONDS = 1e6
MAX_READS_IN_FLIGHT = 65536
MAX_MACHINE_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Costs:
    """What moving and computing an expert costs on one machine.

    `block_bytes` is the size of the reads that were measured, `nvme_bytes_per_s` the rate of the best depth, `nvme_depths`
    (reads in flight, bytes/s) ascending; empty where the rate was not measured here.  `memory_bytes_per_s` counts the bytes
    of a large copy once.  `cpu_expert_seconds` is one expert for one token, all its products, with weights that are not in
    the CPU's cache; None where it was not measured.  The rates between host and device are None without a GPU.
    `layer_seconds` (layer, seconds of compute for one token) ascending, where measured; else a trace says it.  `machine` is
    words for people: CPU, kernel, file system.
    """

    block_bytes: int
    nvme_bytes_per_s: float
    nvme_depths: tuple[tuple[int, float], ...]
    memory_bytes_per_s: float
    cpu_expert_seconds: float | None
    h2d_bytes_per_s: float | None
    d2h_bytes_per_s: float | None
    layer_seconds: tuple[tuple[int, float], ...] | None
    machine: str


def costs_json(costs: Costs) -> dict[str, Any]:
    """The object that `costs.json` holds."""
    layers = costs.layer_seconds
    return {
        "format": FORMAT,
        "version": VERSION,
        "machine": costs.machine,
        "block_bytes": costs.block_bytes,
        "nvme_bytes_per_s": costs.nvme_bytes_per_s,
        "nvme_depths": {str(depth): rate for depth, rate in costs.nvme_depths},
        "memory_bytes_per_s": costs.memory_bytes_per_s,
        "cpu_expert_seconds": costs.cpu_expert_seconds,
        "h2d_bytes_per_s": costs.h2d_bytes_per_s,
        "d2h_bytes_per_s": costs.d2h_bytes_per_s,
        "layer_seconds": None if layers is None else {str(layer): seconds for layer, seconds in layers},
    }


def encode_costs(costs: Costs) -> bytes:
    """The costs as JSON with a line for each key: the same costs give the same bytes."""
    return (json.dumps(costs_json(costs), indent=1, allow_nan=False) + "\n").encode()


def load_costs(path: Path) -> Costs:
    """The costs in a file.  Raises BadInputError, naming the key that is wrong."""
    body = load_json_object(path, "costs file")
    if body.get("format") != FORMAT:
        raise BadInputError(
            "this is not a costs file of bel-profile", path=str(path), hint="`bel-profile bandwidth DIR` makes one"
        )
    version = body.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version not in READABLE_VERSIONS:
        raise BadInputError(
            f"costs version {version} is not supported; this toolkit reads {', '.join(map(str, READABLE_VERSIONS))}",
            path=str(path),
            hint="Upgrade bel-toolkit if the costs are newer",
        )
    try:
        return _from_json(body)
    except KeyError as error:
        raise BadInputError(f"the costs lack the key {error}", path=str(path)) from None
    except ValueError as error:
        raise BadInputError(f"the costs are not valid: {error}", path=str(path)) from None


def _from_json(body: dict[str, Any]) -> Costs:
    block = read_int(body, "block_bytes")
    if not 1 <= block <= MAX_BLOCK_BYTES:
        raise ValueError(f"block_bytes is {block}, not 1 to 2^40")
    machine = read_text(body, "machine")
    if len(machine) > MAX_MACHINE_CHARS or not machine.isprintable():
        raise ValueError("machine is too long, or has unprintable characters")
    best, depths = _rate(body, "nvme_bytes_per_s"), _table(body, "nvme_depths", _depth, _rate)
    if depths and best != max(rate for _, rate in depths):
        raise ValueError("nvme_bytes_per_s is not the best of nvme_depths")
    return Costs(
        block_bytes=block,
        nvme_bytes_per_s=best,
        nvme_depths=depths,
        memory_bytes_per_s=_rate(body, "memory_bytes_per_s"),
        cpu_expert_seconds=_or_none(body, "cpu_expert_seconds", _seconds),
        h2d_bytes_per_s=_or_none(body, "h2d_bytes_per_s", _rate),
        d2h_bytes_per_s=_or_none(body, "d2h_bytes_per_s", _rate),
        layer_seconds=None if body["layer_seconds"] is None else _table(body, "layer_seconds", read_layer, _seconds),
        machine=machine,
    )


def _table(
    body: dict[str, Any], name: str, read_key: Callable[[str], int], read_value: Callable[[dict[str, Any], str], float]
) -> tuple[tuple[int, float], ...]:
    rows = read_map(body, name)
    try:
        table = tuple((read_key(key), read_value(rows, key)) for key in rows)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    keys = [key for key, _ in table]
    if keys != sorted(set(keys)):
        raise ValueError(f"{name} is not in ascending order")
    return table


def _depth(key: str) -> int:
    if (
        not (key.isascii() and key.isdigit())
        or len(key) > 5
        or str(int(key)) != key
        or not 1 <= int(key) <= MAX_READS_IN_FLIGHT
    ):
        raise ValueError(f"'{key}' is not a number of reads in flight")
    return int(key)


def _or_none(body: dict[str, Any], key: str, read: Callable[[dict[str, Any], str], float]) -> float | None:
    return None if body[key] is None else read(body, key)


def _rate(row: dict[str, Any], key: str) -> float:
    return _positive(row, key, MIN_BYTES_PER_S, MAX_BYTES_PER_S)


def _seconds(row: dict[str, Any], key: str) -> float:
    return _positive(row, key, MIN_SECONDS, MAX_SECONDS)


def _positive(row: dict[str, Any], key: str, least: float, limit: float) -> float:
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= limit:
        raise ValueError(f"{key} is not a number from {least:g} to {limit:g}")
    return float(value)
