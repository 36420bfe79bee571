"""A profile: how often each expert was chosen, and how well a cache would have served, for each workload and layer.

`SPEC.md`, "Profile", has the keys, `profile_json.py` reads and writes them.  The workloads of a merged profile stay apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bel.formats.trace_header import TraceLayer

EQUAL, TOKENS = "equal", "tokens"
WEIGHTINGS = (EQUAL, TOKENS)


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Time of a layer in nanoseconds over the calls in which it was taken."""

    calls: int
    mean_ns: int
    median_ns: int
    p90_ns: int


@dataclass(frozen=True, slots=True)
class PhaseStats:
    """One layer in one phase.  `tokens` are rows of the router, `counts` (n_expert,) selections of each expert.

    The rest is None where only counts are known: `calls`, `accesses` (distinct experts of each call, summed), `cold_misses`
    (those never used before), and `lru_hits` (n_expert + 1,), the hits of an LRU cache of 0, 1, .. n_expert slots.
    """

    tokens: int
    counts: tuple[int, ...]
    calls: int | None = None
    accesses: int | None = None
    cold_misses: int | None = None
    lru_hits: tuple[int, ...] | None = None
    time: LayerTime | None = None


@dataclass(frozen=True, slots=True)
class LayerStats:
    """One layer of one workload.  `locality` holds further measures by name: finite numbers, lists of them, or objects."""

    prompt: PhaseStats
    decode: PhaseStats
    locality: dict[str, Any]

    @property
    def tokens(self) -> int:
        """Rows of both phases."""
        return self.prompt.tokens + self.decode.tokens

    @property
    def counts(self) -> tuple[int, ...]:
        """Selections of each expert in both phases."""
        return tuple(a + b for a, b in zip(self.prompt.counts, self.decode.counts, strict=True))

    def counts_of(self, phase: str) -> tuple[int, ...]:
        """Selections of each expert in "decode", "prompt" or "all"."""
        return {"prompt": self.prompt.counts, "decode": self.decode.counts, "all": self.counts}[phase]


@dataclass(frozen=True, slots=True)
class Run:
    """Where numbers of a workload come from: one trace, or one imported file."""

    engine: str
    engine_build: str
    sampling: dict[str, Any]
    prompts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of work (code, chat).  `weight` is its share in everything that is averaged over workloads."""

    name: str
    weight: float
    layers: tuple[LayerStats, ...]  # in the order of the profile's layers
    runs: tuple[Run, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the work: those of the layer that saw most (a pruned last layer sees fewer)."""
        return max(x.tokens for x in self.layers)


@dataclass(frozen=True, slots=True)
class Profile:
    """Model, layers, and the workloads with their weights, which add up to 1."""

    model_name: str
    arch: str
    fingerprint: str
    layers: tuple[TraceLayer, ...]
    weighting: str
    workloads: tuple[Workload, ...]


def weighted(workloads: tuple[Workload, ...], weighting: str) -> tuple[Workload, ...]:
    """The workloads with weights that add up to 1: the same for each, or by their tokens.  There must be at least one."""
    if weighting == EQUAL:
        return tuple(replace(w, weight=1 / len(workloads)) for w in workloads)
    total = sum(w.tokens for w in workloads)
    return tuple(replace(w, weight=w.tokens / total) for w in workloads)


def expert_shares(profile: Profile, place: int, phase: str = "all") -> list[float] | None:
    """The share of each expert in the selections of one layer, by its place: the weighted mean over the workloads.

    `phase` is "decode", "prompt" or "all".  A workload without selections in it has no say; None where no workload has any.
    """
    mean, weight = [0.0] * profile.layers[place].n_expert, 0.0
    for work in profile.workloads:
        counts = work.layers[place].counts_of(phase)
        total = sum(counts)
        if not total or not work.weight:
            continue
        weight += work.weight
        mean = [m + work.weight * c / total for m, c in zip(mean, counts, strict=True)]
    return [m / weight for m in mean] if weight else None


def frequency_by_layer(profile: Profile) -> dict[int, list[float] | None]:
    """`expert_shares` of each layer by its number."""
    return {info.layer: expert_shares(profile, place) for place, info in enumerate(profile.layers)}
