"""`profile.json` as bytes and back.  A profile is read as hostile input; `SPEC.md`, "Profile", has the keys and rules."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

from bel.formats.errors import BadInputError
from bel.formats.json_file import load_json_object
from bel.formats.manifest_fields import read_int, read_list, read_map, read_text
from bel.formats.profile import WEIGHTINGS, LayerStats, LayerTime, PhaseStats, Profile, Run, Workload
from bel.formats.trace_header import MAX_EXPERTS, TraceLayer

FORMAT = "bel-profile"
VERSION = 1
READABLE_VERSIONS = (1,)
MAX_WORKLOADS = 1000
MAX_NAME_CHARS = 200
MAX_EXPERT_BYTES = 1 << 48
_PHASES = ("prompt", "decode")


def encode_profile(profile: Profile) -> bytes:
    """The profile as JSON with a line for each layer of each measure: the same profile gives the same bytes."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "model": {"name": profile.model_name, "arch": profile.arch, "fingerprint": profile.fingerprint},
        "layers": {
            str(x.layer): {"n_expert": x.n_expert, "top_k": x.top_k, "expert_bytes": x.expert_bytes} for x in profile.layers
        },
        "weighting": profile.weighting,
        "workloads": {w.name: _workload_to_json(w, profile.layers) for w in profile.workloads},
    }
    return (_spread(body, 0) + "\n").encode()


def load_profile(path: Path) -> Profile:
    """The profile in a file.  Raises BadInputError, naming the key that is wrong."""
    body = load_json_object(path, "profile")
    if body.get("format") != FORMAT:
        raise BadInputError(
            "this is not a profile of bel-profile",
            path=str(path),
            hint="`bel-profile summarize` makes one of a trace, `bel-profile import --from counts-json` of bare counts",
        )
    version = body.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version not in READABLE_VERSIONS:
        raise BadInputError(
            f"profile version {version} is not supported; this toolkit reads {', '.join(map(str, READABLE_VERSIONS))}",
            path=str(path),
            hint="Upgrade bel-toolkit if the profile is newer",
        )
    try:
        return _from_json(body)
    except KeyError as error:
        raise BadInputError(f"the profile lacks the key {error}", path=str(path)) from None
    except (TypeError, ValueError, AttributeError) as error:
        raise BadInputError(f"the profile is not valid: {error}", path=str(path)) from None


def _spread(value: Any, depth: int) -> str:
    """Objects over lines, down to one line for each layer."""
    if not isinstance(value, dict) or depth >= 4 or not any(isinstance(v, dict | list) for v in value.values()):
        return json.dumps(value, allow_nan=False)
    pad = " " * (depth + 1)
    rows = [f"{pad}{json.dumps(key)}: {_spread(child, depth + 1)}" for key, child in value.items()]
    return "{\n" + ",\n".join(rows) + "\n" + " " * depth + "}"


def _workload_to_json(work: Workload, layers: tuple[TraceLayer, ...]) -> dict[str, Any]:
    def by_layer(name: str) -> dict[str, Any]:
        return {
            str(info.layer): {"prompt": getattr(x.prompt, name), "decode": getattr(x.decode, name)}
            for info, x in zip(layers, work.layers, strict=True)
        }

    times = {
        str(info.layer): {"prompt": _time_to_json(x.prompt.time), "decode": _time_to_json(x.decode.time)}
        for info, x in zip(layers, work.layers, strict=True)
    }
    return {
        "weight": work.weight,
        "runs": [
            {"engine": r.engine, "engine_build": r.engine_build, "sampling": r.sampling, "prompts": list(r.prompts)}
            for r in work.runs
        ],
        "tokens_by_layer": by_layer("tokens"),
        "calls_by_layer": by_layer("calls"),
        "counts_by_layer": by_layer("counts"),
        "accesses_by_layer": by_layer("accesses"),
        "cold_misses_by_layer": by_layer("cold_misses"),
        "lru_hits_by_layer": by_layer("lru_hits"),
        "time_ns_by_layer": times,
        "locality_by_layer": {str(info.layer): x.locality for info, x in zip(layers, work.layers, strict=True)},
    }


def _time_to_json(time: LayerTime | None) -> dict[str, int] | None:
    if time is None:
        return None
    return {"calls": time.calls, "mean": time.mean_ns, "median": time.median_ns, "p90": time.p90_ns}


def _from_json(body: dict[str, Any]) -> Profile:
    model = read_map(body, "model")
    layers = tuple(_layer(key, row) for key, row in read_map(body, "layers").items())
    if not layers or [x.layer for x in layers] != sorted({x.layer for x in layers}):
        raise ValueError("it lists no layers, or not in ascending order")
    weighting = read_text(body, "weighting")
    if weighting not in WEIGHTINGS:
        raise ValueError(f"weighting is '{weighting}', not one of {', '.join(WEIGHTINGS)}")
    rows = read_map(body, "workloads")
    if not 1 <= len(rows) <= MAX_WORKLOADS:
        raise ValueError(f"it has {len(rows)} workloads")
    workloads = tuple(_workload(name, row, layers) for name, row in rows.items())
    if not math.isclose(sum(w.weight for w in workloads), 1, abs_tol=1e-6):
        raise ValueError("the weights of its workloads do not add up to 1")
    return Profile(
        model_name=read_text(model, "name"),
        arch=read_text(model, "arch"),
        fingerprint=read_text(model, "fingerprint"),
        layers=layers,
        weighting=weighting,
        workloads=workloads,
    )


def _layer(key: str, row: dict[str, Any]) -> TraceLayer:
    n_expert, top_k, number = read_int(row, "n_expert"), read_int(row, "top_k"), read_layer(key)
    if not 1 <= n_expert <= MAX_EXPERTS or not 1 <= top_k <= n_expert:
        raise ValueError(f"layer {number} takes {top_k} of {n_expert} experts")
    size = None if row["expert_bytes"] is None else read_int(row, "expert_bytes")
    if size is not None and not 1 <= size < MAX_EXPERT_BYTES:
        raise ValueError(f"layer {number} has experts of {size} bytes")
    return TraceLayer(number, n_expert, top_k, size)


def read_layer(key: str) -> int:
    """The layer of a JSON key, a plain decimal number.  Raises ValueError."""
    if not (key.isascii() and key.isdigit()) or len(key) > 9 or str(int(key)) != key:
        raise ValueError(f"'{key}' is not the number of a layer")
    return int(key)


def _workload(name: str, row: dict[str, Any], layers: tuple[TraceLayer, ...]) -> Workload:
    check_workload_name(name)
    weight = row["weight"]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1:
        raise ValueError(f"workload {name}: weight is {weight}, not a number from 0 to 1")
    try:
        stats = tuple(_layer_stats(row, info) for info in layers)
        runs = tuple(_run(r) for r in read_list(row, "runs"))
    except ValueError as error:
        raise ValueError(f"workload {name}: {error}") from None
    return Workload(name, float(weight), stats, runs)


def check_workload_name(name: str) -> None:
    """Raises ValueError for a label that is empty, too long, or would disturb a terminal."""
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise ValueError("the name of a workload is empty, too long, or has unprintable characters")


def _run(row: dict[str, Any]) -> Run:
    prompts = read_list(row, "prompts")
    if not all(isinstance(p, str) for p in prompts):
        raise ValueError("a prompt digest is not a text")
    return Run(read_text(row, "engine"), read_text(row, "engine_build"), read_map(row, "sampling"), tuple(prompts))


def _layer_stats(row: dict[str, Any], info: TraceLayer) -> LayerStats:
    key = str(info.layer)
    phases = []
    for phase in _PHASES:
        try:
            phases.append(_phase(row, key, phase, info))
        except ValueError as error:
            raise ValueError(f"layer {key}, {phase}: {error}") from None
    locality = read_map(read_map(row, "locality_by_layer"), key)
    return LayerStats(phases[0], phases[1], locality)


def _phase(row: dict[str, Any], key: str, phase: str, info: TraceLayer) -> PhaseStats:
    def cell(name: str) -> dict[str, Any]:
        return read_map(read_map(row, name), key)

    counts = read_counts(cell("counts_by_layer"), phase, info.n_expert)
    hits = cell("lru_hits_by_layer")
    stats = PhaseStats(
        tokens=read_int(cell("tokens_by_layer"), phase),
        counts=counts,
        calls=_int_or_none(cell("calls_by_layer"), phase),
        accesses=_int_or_none(cell("accesses_by_layer"), phase),
        cold_misses=_int_or_none(cell("cold_misses_by_layer"), phase),
        lru_hits=None if hits[phase] is None else read_counts(hits, phase, info.n_expert + 1),
        time=_time(cell("time_ns_by_layer")[phase]),
    )
    _check_phase(stats, info)
    return stats


def read_counts(row: dict[str, Any], key: str, length: int) -> tuple[int, ...]:
    """A list of `length` non-negative integers.  Raises ValueError."""
    values = read_list(row, key)
    if len(values) != length:
        raise ValueError(f"a list has {len(values)} numbers where {length} are expected")
    return tuple(read_int({"a count": v}, "a count") for v in values)


def _int_or_none(row: dict[str, Any], key: str) -> int | None:
    return None if row[key] is None else read_int(row, key)


def _time(row: Any) -> LayerTime | None:
    if row is None:
        return None
    return LayerTime(read_int(row, "calls"), read_int(row, "mean"), read_int(row, "median"), read_int(row, "p90"))


def _check_phase(stats: PhaseStats, info: TraceLayer) -> None:
    if sum(stats.counts) != stats.tokens * info.top_k:
        raise ValueError(f"the counts add up to {sum(stats.counts)}, not to tokens * top_k = {stats.tokens * info.top_k}")
    known = (stats.calls, stats.accesses, stats.cold_misses, stats.lru_hits)
    if any(x is None for x in known):
        if any(x is not None for x in known):
            raise ValueError("calls, accesses, cold misses and LRU hits are known together or not at all")
        return
    calls, accesses, cold, hits = stats.calls or 0, stats.accesses or 0, stats.cold_misses or 0, stats.lru_hits or ()
    if not calls <= accesses <= sum(stats.counts) or calls > stats.tokens or cold > accesses:
        raise ValueError(f"{calls} calls, {accesses} accesses and {cold} cold misses do not fit its counts")
    if hits[0] != 0 or hits[-1] != accesses - cold or any(a > b for a, b in itertools.pairwise(hits)):
        raise ValueError("the LRU hits fall, or do not end at the accesses less the cold misses")
