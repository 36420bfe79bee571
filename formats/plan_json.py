"""`plan.json` as bytes and back.  A plan is read as hostile input; `SPEC.md`, "Plan", has the keys and rules."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bel.formats.errors import BadInputError
from bel.formats.json_file import load_json_object
from bel.formats.manifest_fields import read_digest, read_int, read_ints, read_list, read_map, read_text
from bel.formats.plan import COLUMNS, OBJECTIVES, Plan, PlanLayer, PlanWork, Prediction
from bel.formats.profile_json import check_workload_name, read_layer
from bel.formats.trace_header import MAX_EXPERTS

FORMAT = "bel-plan"
VERSION = 1
READABLE_VERSIONS = (1,)
MAX_LIST = 1000
MAX_SLOT_BYTES = 1 << 40
_WORK_COLUMNS = ("in_sample", "held_out", "uniform", "own")
_FIGURES = ("hit_rate", "misses_per_token", "bytes_per_token", "seconds_per_token", "stall_seconds_per_token")


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The object that `plan.json` holds and `plan --json` prints."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": {"name": plan.model_name, "arch": plan.arch, "fingerprint": plan.fingerprint},
        "objective": plan.objective,
        "clock": plan.clock,
        "policy": plan.policy,
        "split": plan.split,
        "budget_bytes": plan.budget_bytes,
        "slots_bytes": plan.slots_bytes,
        "layers": {str(x.layer): {"n_expert": x.n_expert, "top_k": x.top_k, "slot_bytes": x.slot_bytes} for x in plan.layers},
        "slots_by_layer": {str(x.layer): x.slots for x in plan.layers},
        "preload": {str(x.layer): list(x.preload) for x in plan.layers},
        "predicted": {name: asdict(plan.predicted[name]) for name in COLUMNS},
        "workloads": {w.name: _work_to_json(w) for w in plan.workloads},
        "worst_regret": plan.worst_regret,
        "profile_digests": list(plan.profile_digests),
        "notes": list(plan.notes),
    }


def encode_plan(plan: Plan) -> bytes:
    """The plan as JSON with a line for each layer: the same plan gives the same bytes."""
    rows = [f" {json.dumps(key)}: {_spread(value)}" for key, value in plan_to_json(plan).items()]
    return ("{\n" + ",\n".join(rows) + "\n}\n").encode()


def load_plan(path: Path) -> Plan:
    """The plan in a file.  Raises BadInputError, naming the key that is wrong."""
    body = load_json_object(path, "plan")
    if body.get("format") != FORMAT:
        raise BadInputError("this is not a plan of bel-profile", path=str(path), hint="`bel-profile plan` makes one")
    version = body.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version not in READABLE_VERSIONS:
        raise BadInputError(
            f"plan version {version} is not supported; this toolkit reads {', '.join(map(str, READABLE_VERSIONS))}",
            path=str(path),
            hint="Upgrade bel-toolkit if the plan is newer",
        )
    try:
        return _from_json(body)
    except KeyError as error:
        raise BadInputError(f"the plan lacks the key {error}", path=str(path)) from None
    except (TypeError, ValueError, AttributeError) as error:
        raise BadInputError(f"the plan is not valid: {error}", path=str(path)) from None


def _spread(value: Any) -> str:
    if not isinstance(value, dict) or not value:
        return json.dumps(value, allow_nan=False)
    rows = [f"  {json.dumps(key)}: {json.dumps(child, allow_nan=False)}" for key, child in value.items()]
    return "{\n" + ",\n".join(rows) + "\n }"


def _work_to_json(work: PlanWork) -> dict[str, Any]:
    columns = {name: asdict(getattr(work, name)) for name in _WORK_COLUMNS}
    return {"weight": work.weight, **columns, "regret": work.regret}


def _from_json(body: dict[str, Any]) -> Plan:
    model = read_map(body, "model")
    objective = read_text(body, "objective")
    if objective not in OBJECTIVES:
        raise ValueError(f"objective is '{objective}', not one of {', '.join(OBJECTIVES)}")
    layers = tuple(_layer(key, row, body) for key, row in read_map(body, "layers").items())
    if not layers or [x.layer for x in layers] != sorted({x.layer for x in layers}):
        raise ValueError("it lists no layers, or not in ascending order")
    numbers = {str(x.layer) for x in layers}
    for key in ("slots_by_layer", "preload"):
        if set(read_map(body, key)) != numbers:
            raise ValueError(f"{key} has other layers than layers")
    predicted = read_map(body, "predicted")
    plan = Plan(
        model_name=read_text(model, "name"),
        arch=read_text(model, "arch"),
        fingerprint=read_text(model, "fingerprint"),
        objective=objective,
        clock=_text_or_none(body, "clock"),
        policy=read_text(body, "policy"),
        split=_text_or_none(body, "split"),
        budget_bytes=read_int(body, "budget_bytes"),
        layers=layers,
        predicted={name: _prediction(predicted, name) for name in COLUMNS},
        workloads=tuple(_work(name, row) for name, row in read_map(body, "workloads").items()),
        profile_digests=tuple(read_digest({"a digest": d}, "a digest") for d in _bounded(body, "profile_digests")),
        notes=tuple(read_text({"a note": n}, "a note") for n in _bounded(body, "notes")),
    )
    if read_int(body, "slots_bytes") != plan.slots_bytes or plan.slots_bytes > plan.budget_bytes:
        raise ValueError("slots_bytes is not what its slots take, or more than its budget")
    return plan


def _layer(key: str, row: dict[str, Any], body: dict[str, Any]) -> PlanLayer:
    number = read_layer(key)
    n_expert, top_k, size = read_int(row, "n_expert"), read_int(row, "top_k"), read_int(row, "slot_bytes")
    if not 1 <= n_expert <= MAX_EXPERTS or not 1 <= top_k <= n_expert or not 1 <= size <= MAX_SLOT_BYTES:
        raise ValueError(f"layer {number} takes {top_k} of {n_expert} experts of {size} bytes")
    slots = read_int(read_map(body, "slots_by_layer"), key)
    if not top_k <= slots <= n_expert:
        raise ValueError(f"layer {number} has {slots} slots, not {top_k} to {n_expert}")
    preload = read_ints(read_map(body, "preload"), key, slots)
    if len(set(preload)) < len(preload) or any(e >= n_expert for e in preload):
        raise ValueError(f"layer {number} preloads an expert twice, or one that it does not have")
    return PlanLayer(number, n_expert, top_k, size, slots, preload)


def _work(name: str, row: dict[str, Any]) -> PlanWork:
    check_workload_name(name)
    weight = _number_or_none(row, "weight")
    if weight is None or weight > 1:
        raise ValueError(f"workload {name}: weight is not a number from 0 to 1")
    columns = {column: _prediction(row, column) for column in _WORK_COLUMNS}
    regret = row["regret"]
    if regret is not None and (isinstance(regret, bool) or not isinstance(regret, int | float)):
        raise ValueError(f"workload {name}: regret is not a number")
    return PlanWork(name, weight, regret=None if regret is None else float(regret), **columns)


def _prediction(row: dict[str, Any], key: str) -> Prediction:
    figures = read_map(row, key)
    return Prediction(*(_number_or_none(figures, name) for name in _FIGURES))


def _number_or_none(row: dict[str, Any], key: str) -> float | None:
    value = row[key]
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ValueError(f"{key} is not a number from 0 up")
    return float(value)


def _text_or_none(row: dict[str, Any], key: str) -> str | None:
    return None if row[key] is None else read_text(row, key)


def _bounded(body: dict[str, Any], key: str) -> list[Any]:
    values = read_list(body, key)
    if len(values) > MAX_LIST:
        raise ValueError(f"{key} has more than {MAX_LIST} entries")
    return values
