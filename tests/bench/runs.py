"""Runs of `bel-run --bench`, each in a process of its own, cold, under a cap on memory or without one."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capped import capped
from measure import make_cold

from bel.formats.bundle import is_bundle, open_bundle
from bel.formats.gguf_model import open_model

BEL_RUN = [sys.executable, "-c", "from bel.runtime.cli import main; main()"]
OPENMP: dict[str, dict[str, str]] = {
    "": {},
    ", OMP_WAIT_POLICY=active": {"OMP_WAIT_POLICY": "active"},
    ", OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
}
SEED = 1


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure.  `limit_bytes` is the cap: None for no cap, 0 for a group that only counts."""

    name: str
    model: Path
    arguments: tuple[str, ...] = ()
    limit_bytes: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    decode_tokens: int = 64
    is_warm: bool = False


@dataclass(frozen=True, slots=True)
class Took:
    """What one run printed (None where it ended badly, `failed` says how), and the most that was charged to its group."""

    answer: dict[str, Any] | None
    failed: str
    charged_bytes: int | None


@dataclass(frozen=True, slots=True)
class Runner:
    """How all cases are run: tokens of the prompt, the text that they come from (None: drawn at random), and how cold."""

    prompt_tokens: int
    text: Path | None
    drop: bool

    def run(self, case: Case) -> Took:
        """One run."""
        make_cold(_files(case.model), drop=self.drop)
        numbers = ["-n", str(case.decode_tokens), "--prompt-tokens", str(self.prompt_tokens), "--seed", str(SEED)]
        text = [] if self.text is None else ["-f", str(self.text)]
        command = [*BEL_RUN, str(case.model), "--bench", "--json", *case.arguments, *numbers, *text]
        command += [] if case.is_warm else ["--cold-only"]
        environment = {**os.environ, **case.environment}
        if case.limit_bytes is None:
            return _took(subprocess.run(command, capture_output=True, text=True, check=False, env=environment), None)
        with capped(case.limit_bytes or None) as group:
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, preexec_fn=group.join)
            return _took(done, group.peak_bytes)

    def run_all(self, cases: Sequence[Case], rounds: int, say: Any) -> dict[str, list[Took]]:
        """`rounds` runs of each case, in an order that is drawn for each round: a drift of the machine meets all alike."""
        rng = random.Random(SEED)
        found: dict[str, list[Took]] = {case.name: [] for case in cases}
        for number in range(rounds):
            for case in rng.sample(list(cases), len(cases)):
                took = self.run(case)
                found[case.name].append(took)
                speed = took.failed or f"{figure([took], 'decode_tokens_per_s'):.2f} tokens/s"
                say(f"  round {number + 1}: {case.name}: {speed}")
        return found


def _files(model: Path) -> list[Path]:
    if is_bundle(model):
        bundle = open_bundle(model)
        return [bundle.path(name) for name, _ in bundle.manifest.files]
    return [header.path for header in open_model(model).files]


def _took(done: subprocess.CompletedProcess[str], charged_bytes: int | None) -> Took:
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [""]
        killed = "killed (out of memory)" if done.returncode == -9 else f"exit {done.returncode}: {last[0]}"
        return Took(None, killed, charged_bytes)
    return Took(json.loads(done.stdout), "", charged_bytes)


def figure(runs: Sequence[Took], key: str, which: int = 0) -> float | None:
    """The median of a figure of one pass over all runs (the first pass is the cold one); None where a run has none."""
    values = [run.answer["passes"][which].get(key) for run in runs if run.answer is not None]
    return statistics.median(values) if len(values) == len(runs) and values and None not in values else None


def best_speed(runs: Sequence[Took]) -> float | None:
    """The best median decode speed of the cold and the warm pass: what a baseline is to be measured by."""
    passes = len(runs[0].answer["passes"]) if runs[0].answer is not None else 0
    speeds = [figure(runs, "decode_tokens_per_s", which) for which in range(passes)]
    return max((speed for speed in speeds if speed is not None), default=None)


def loaded(found: dict[str, list[Took]]) -> float:
    """The largest number of cores that others kept busy during any run."""
    answers = [run.answer for runs in found.values() for run in runs if run.answer is not None]
    return max((answer["other_cores"] for answer in answers), default=0.0)
