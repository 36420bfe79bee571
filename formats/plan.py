"""A plan: how many slots each layer of a model gets, which experts fill them first, and what that is expected to bring.

`SPEC.md`, "Plan", has the keys, `plan_json.py` reads and writes them.
"""

from __future__ import annotations

from dataclasses import dataclass

STALL, MISSES = "stall", "misses"
OBJECTIVES = (STALL, MISSES)
IN_SAMPLE, HELD_OUT, UNIFORM, RANDOM, BELADY = "in_sample", "held_out", "uniform", "random", "belady"
COLUMNS = (IN_SAMPLE, HELD_OUT, UNIFORM, RANDOM, BELADY)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Means over decode tokens; None where a quantity cannot be known.

    `hit_rate` of the accesses, `bytes_per_token` those of missed experts, `seconds_per_token` compute and stall together.
    """

    hit_rate: float | None = None
    misses_per_token: float | None = None
    bytes_per_token: float | None = None
    seconds_per_token: float | None = None
    stall_seconds_per_token: float | None = None


@dataclass(frozen=True, slots=True)
class PlanLayer:
    """One MoE layer: its slots, the bytes of one, and the experts to load beforehand, the most wanted first."""

    layer: int
    n_expert: int
    top_k: int
    slot_bytes: int
    slots: int
    preload: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanWork:
    """What the plan does for one workload.

    `own` is a plan made for this workload alone; `regret` what the workload loses against it by sharing, as a share of the
    seconds per token (objective `stall`) or of the misses per token; None where `own` has none.
    """

    name: str
    weight: float
    in_sample: Prediction
    held_out: Prediction
    uniform: Prediction
    own: Prediction
    regret: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Slots for one model, bound to it by name and fingerprint.

    `clock` (None without times) says how `seconds_per_token` were counted, `split` how held-out halves were made,
    `policy` whose misses were counted.  `profile_digests` are BLAKE3 of the inputs.  `notes` are the assumptions, in words.
    """

    model_name: str
    arch: str
    fingerprint: str
    objective: str
    clock: str | None
    policy: str
    split: str | None
    budget_bytes: int
    layers: tuple[PlanLayer, ...]
    predicted: dict[str, Prediction]
    workloads: tuple[PlanWork, ...]
    profile_digests: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def slots_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(x.slots * x.slot_bytes for x in self.layers)

    @property
    def worst_regret(self) -> float | None:
        """The largest regret of a workload."""
        known = [w.regret for w in self.workloads if w.regret is not None]
        return max(known) if known else None
