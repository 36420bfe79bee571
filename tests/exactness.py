"""Running the check of exactness in tests: a source, its bundle, and slots to run it in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bel.formats.bundle import open_bundle
from bel.formats.console import run_command
from bel.formats.gguf_model import open_model
from bel.repack.cli import NAME, main_group
from bel.runtime.bundle_model import BundleRun, SlotOptions, open_run
from bel.runtime.check import CheckOptions, CheckPrompt, check
from bel.runtime.context import ContextOptions, Observer
from bel.runtime.counters import PhaseCounters
from bel.runtime.differences import Differences
from bel.runtime.engine import Engine
from bel.runtime.policies import parse_policy


@dataclass
class Checked:
    """What a check found, and what the bundle's run counted: prompt, then decode."""

    found: Differences
    phases: list[PhaseCounters] = field(default_factory=list)
    reader: str = ""

    @property
    def loads(self) -> int:
        return sum(phase.missed for phase in self.phases)

    def assert_exact(self) -> None:
        assert (self.found.first, self.found.max_logit) == (None, 0.0)


def repack(source: Path, bundle: Path, *arguments: str) -> Path:
    """Make a bundle."""
    assert run_command(main_group, NAME, [str(source), "-o", str(bundle), "--no-verify", *arguments]) == 0
    return bundle


def random_prompt(n_tokens: int, n_vocab: int, seed: int = 0) -> CheckPrompt:
    return CheckPrompt(f"{n_tokens} tokens", np.random.default_rng(seed).integers(0, n_vocab, n_tokens, np.int32))


def checked(
    source: Path,
    bundle: Path,
    prompts: Sequence[CheckPrompt],
    policy: str = "lru",
    *,
    options: dict[str, Any] | None = None,
    **slots: Any,
) -> Checked:
    """Check a bundle against its source with one thread; `slots` are fields of `SlotOptions`, `options` of `CheckOptions`."""
    opened, answer = open_bundle(bundle), Checked(Differences())
    if policy == "static" and "wanted" not in slots:
        slots["wanted"] = {layer.layer: range(layer.n_expert) for layer in opened.manifest.layers}

    @contextlib.contextmanager
    def run(sizes: ContextOptions, observer: Observer) -> Iterator[BundleRun]:
        with open_run(Engine.open(), opened, sizes, SlotOptions(parse_policy(policy), **slots), observer) as bundle_run:
            counters = bundle_run.cache.counters
            answer.phases, answer.reader = [counters.prompt, counters.decode], bundle_run.pager.name
            yield bundle_run

    given = CheckOptions(**{"n_predict": 8, "n_threads": 1, **(options or {})})
    answer.found = check(Engine.open(), opened, open_model(source), prompts, given, run)
    return answer
