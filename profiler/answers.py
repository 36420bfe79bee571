"""The answers of a report as values.  A quantity without data is None.

Rates and shares are fractions.  A rate of several layers is the sum of their hits over the sum of their accesses; a share,
an entropy or an overlap is the mean over the layers.
"""

from __future__ import annotations

from dataclasses import dataclass

FRACTIONS = (0.25, 0.5, 0.75)
HALF = 0.5
GAP_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
POLICIES = ("random", "static_held_out", "static_in_sample", "lru", "belady")


@dataclass(frozen=True, slots=True)
class Rates:
    """Hit rates of each policy with a number of slots.

    `slots` are those of the largest layer; a smaller layer has its proportion, and none has fewer than its top_k.  `bytes`
    of all slots where the bytes of an expert are known.
    """

    slots: int
    fraction: float
    bytes: int | None
    random: float | None
    static_held_out: float | None
    static_in_sample: float | None
    lru: float | None
    belady: float | None


@dataclass(frozen=True, slots=True)
class LayerAnswer:
    """One layer; `half` are its rates with half of its experts resident.

    `usage`: for each expert its share of the selections over the share where usage is flat.
    """

    layer: int
    n_expert: int
    top_k: int
    tokens: int
    top_share: float | None
    entropy: float | None
    repeat_share: float | None
    median_gap_tokens: int | None
    half: Rates
    usage: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class SegmentAnswer:
    """SRP, and SCH with half of the experts, for segments of `tokens`."""

    tokens: int
    srp: float | None
    sch: float | None


@dataclass(frozen=True, slots=True)
class EnoughAnswer:
    """A profile of the first `tokens` of one part of the work, judged on the other part; `is_whole`: of all of that part.

    `hit_rate` of a static half made from it, `top_half_overlap` with the top half of the whole part.
    """

    tokens: int
    is_whole: bool
    hit_rate: float | None
    top_half_overlap: float | None


@dataclass(frozen=True, slots=True)
class WorkloadAnswer:
    """One workload.

    `tokens` are the rows that count under the phase.  `flat_share` and `flat_repeat_share` are what `top_share` and
    `repeat_share` are for flat usage.  `cold_share`: accesses to experts that were never used before, which a cache that
    starts empty misses.  `gap_tokens`: for a quantile of the repeated uses the tokens since the use before.
    """

    name: str
    files: tuple[str, ...]
    is_traced: bool
    prompt_tokens: int
    decode_tokens: int
    tokens: int
    split: str | None
    top_share: float | None
    flat_share: float
    entropy: float | None
    repeat_share: float | None
    flat_repeat_share: float
    cold_share: float | None
    gap_tokens: dict[str, int | None]
    segments: tuple[SegmentAnswer, ...]
    curve: tuple[Rates, ...]
    sizes: tuple[Rates, ...]
    enough: tuple[EnoughAnswer, ...]
    layers: tuple[LayerAnswer, ...]

    @property
    def half(self) -> Rates:
        """The rates at half of the experts, rounded down, or at the least that a token needs where that is more."""
        return next((r for r in reversed(self.sizes) if r.fraction <= HALF), self.sizes[0])


@dataclass(frozen=True, slots=True)
class PairAnswer:
    """How far two workloads share the more used half of their experts; 0.5 by chance."""

    one: str
    other: str
    top_half_overlap: float | None
    by_layer: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class TransferAnswer:
    """Static halves made from one workload and served to another; costs are miss rates.

    `miss_rates[i][j]` is G[i, j]: the cost on workload j of the set made from i.  `merged[j]` that of the set made from
    all with equal weights, `regrets[j]` what j loses by it against its own set.  `held_out`: sets were made of the other
    part of the work than they serve.
    """

    fraction: float
    held_out: bool
    workloads: tuple[str, ...]
    miss_rates: tuple[tuple[float | None, ...], ...]
    merged: tuple[float | None, ...]
    regrets: tuple[float | None, ...]
    worst_regret: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """The answers, and in words what the inputs cannot tell (`missing`)."""

    model_name: str
    arch: str
    phase: str
    one_by_one: bool
    workloads: tuple[WorkloadAnswer, ...]
    pairs: tuple[PairAnswer, ...]
    transfer: TransferAnswer | None
    missing: tuple[str, ...]
