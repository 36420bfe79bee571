"""A trained model made big, a plan for it from other text, and its routing on the measured text."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from inflate import inflate

from bel.formats.bundle import open_bundle
from bel.formats.plan import Plan
from bel.formats.plan_json import encode_plan, load_plan
from bel.runtime.bundle_model import SlotOptions
from bel.runtime.engine import Engine
from bel.runtime.policies import parse_policy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import counted

CONVERT = "from bel.repack.cli import main; main()"
PLAN = "from bel.profiler.cli import main; main()"


@dataclass(frozen=True, slots=True)
class Real:
    """The inflated model and its bundle, `half` of its experts, and the folder for what is made on the way."""

    model: Path
    bundle: Path
    half: int
    folder: Path

    @property
    def planned(self) -> Path:
        """The plan at the bytes of `half` slots in each layer."""
        return self.folder / "plan.json"

    @property
    def costs(self) -> Path:
        """What moving and computing an expert takes here."""
        return self.folder / "costs.json"

    @property
    def uniform(self) -> Path:
        """A plan of `half` slots in each layer, with the same order of preloading."""
        return self.folder / "uniform.json"


def make_real(folder: Path, trained: Path, size_bytes: int) -> Real:
    """Inflate and convert, unless that was done before from a model of this name."""
    model = folder / f"inflated-{trained.stem}-{size_bytes >> 20}M.gguf"
    bundle = model.with_suffix(".bel")
    if not model.exists():
        part = model.with_suffix(".part")
        inflate(trained, part, size_bytes)
        part.replace(model)
    if not bundle.exists():
        _command(CONVERT, "convert", model, "-o", bundle, "--no-verify")
    work = folder / f"real-{trained.stem}"
    work.mkdir(exist_ok=True)
    layers = [layer for layer in open_bundle(bundle).manifest.layers if not layer.is_mtp]
    return Real(model, bundle, max(layer.n_expert for layer in layers) // 2, work)


def tokens_of(real: Real, text: Path, start: int, count: int) -> np.ndarray:
    """(count,) tokens of all files of a folder, or of one file, from `start` on."""
    files = sorted(path for path in text.rglob("*") if path.is_file()) if text.is_dir() else [text]
    whole = "\n".join(path.read_text(encoding="utf-8") for path in files)
    with Engine.open().load(real.model) as model:
        ids = model.tokenize(whole)
    if len(ids) < start + count:
        sys.exit(f"{text} has {len(ids)} tokens, {start + count} are needed: give a longer text, or fewer tokens")
    return ids[start : start + count]


def make_plans(real: Real, seed_tokens: np.ndarray) -> None:
    """Record other text than the measured one, and plan from it; and a uniform plan that preloads by the same counts."""
    trace = real.folder / "seed.trace"
    first = len(seed_tokens) // 4
    options = SlotOptions(parse_policy("lru"), slots=real.half)
    counted.run_counted(real.bundle, trace, (seed_tokens[:first], seed_tokens[first:]), options, n_ubatch=256, threads=2)
    layers = counted.trace_layers(open_bundle(real.bundle))
    budget = sum(layer.expert_bytes * min(real.half, layer.n_expert) for layer in layers)  # type: ignore[operator]
    real.planned.unlink(missing_ok=True)
    how = ["--objective", "misses", "--slots-bytes", str(budget)]
    _command(PLAN, "plan", trace, "--model", real.bundle, *how, "-o", real.planned)
    real.uniform.write_bytes(encode_plan(_uniform(load_plan(real.planned), real.half, counted.wanted_of(trace))))


def measure_costs(real: Real) -> None:
    """The costs of this machine, by `bel-profile bandwidth`."""
    _command(PLAN, "bandwidth", real.bundle, "-o", real.costs)


def predicted(real: Real, trace: Path, policies: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of `bel-profile simulate` for half of the slots, with the time of a token by the costs."""
    how = ["--policy", ",".join(policies), "--slots", str(real.half), "--phase", "decode"]
    costs = real.costs.with_name("costs-run.json")
    rows = json.loads(_command(PLAN, "simulate", trace, *how, "--costs", costs, "--clock", "blocking", "--json"))["rows"]
    return list(rows)


def _uniform(plan: Plan, slots: int, wanted: dict[int, list[int]]) -> Plan:
    layers = tuple(
        dataclasses.replace(layer, slots=min(slots, layer.n_expert), preload=tuple(wanted[layer.layer][:slots]))
        for layer in plan.layers
    )
    return dataclasses.replace(plan, layers=layers)


def _command(code: str, *arguments: str | Path) -> str:
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{arguments[0]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout
