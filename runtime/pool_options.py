"""What a pool is asked to be, and how many slots that makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bel.formats.errors import UsageError
from bel.formats.experts_file import LayerLayout
from bel.formats.units import format_bytes
from bel.runtime.policies import REPICK, STATIC, Policy, parse_policy
from bel.runtime.pool_step import SPLIT, UPLOAD
from bel.runtime.pool_step import STATIC as COMPUTE
from bel.runtime.pool_tiers_hosts import tier_bytes
from bel.runtime.slot_budget import check_floor, uniform_slots
from bel.runtime.tier_layers import HOST_TIERS

MODES = {"upload": UPLOAD, "split": SPLIT, "static": COMPUTE}
N_AHEAD = 2
"""Experts of the next layer that are brought ahead: more wait for each other (docs/gpu.md has what 0 to 4 gave)."""
SPARE_BYTES = 1 << 20
"""Of a budget, what alignment and the device's kernels may want beside slots and stage."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """`mode`: how a decoded token's misses are met.  `upload`: each is copied into a slot, by the policy; `static`: the slots
    never change and the CPU computes what is missing; `split`: of m misses the `share` * m with the largest weights are
    uploaded, the CPU computes the others (`share` None: by costs measured at start).

    One of `slots` (in each layer, at most its experts), `slots_by_layer` and `budget_bytes` (of the home, stage included);
    without any, all experts have slots.  While a token's layer is computed at most `n_ahead` experts of the next one are
    brought to the stage, those that its router likely chooses.  `wanted` {layer: experts} fill the slots at
    first, most wanted first.  `n_threads` compute on the CPU.  `is_native`: with the compiled callback.  `spin_us`: how long
    the threads beside it wait awake for the next layer before they sleep.  `reader`, `checks`: how the experts are read.

    Host memory holds all experts, or with one of `host_slots` (in each layer) and `host_bytes` (with the room for reads) only
    some, in the mode `upload` alone: the others are read from the disk, and the callback is not compiled.  `host_tier`:
    `exclusive`, host memory holds what was not used as lately as what has slots; `inclusive`, it holds that too.  `wanted`
    fills it behind the slots.
    """

    mode: str = "upload"
    policy: Policy = field(default_factory=lambda: parse_policy("lru"))
    slots: int | None = None
    slots_by_layer: Mapping[int, int] | None = None
    budget_bytes: int | None = None
    wanted: Mapping[int, Sequence[int]] = field(default_factory=dict)
    share: float | None = None
    n_threads: int = 1
    n_ahead: int = N_AHEAD
    is_native: bool = True
    spin_us: int = 1000
    reader: str = "auto"
    checks: bool = True
    host_slots: int | None = None
    host_bytes: int | None = None
    host_tier: str = "exclusive"

    @property
    def has_tiers(self) -> bool:
        """Whether host memory is not to hold all experts."""
        return self.host_slots is not None or self.host_bytes is not None


def check_options(options: PoolOptions) -> None:
    """Raise UsageError for options that do not go together."""
    if options.mode not in MODES:
        raise UsageError(f"there is no pool mode '{options.mode}'", expected=", ".join(MODES))
    is_fixed = options.policy.kind == STATIC
    if options.policy.kind == REPICK or is_fixed != (options.mode == "static"):
        raise UsageError(f"the policy {options.policy.name} does not go with the pool mode {options.mode}")
    if options.share is not None and not 0 <= options.share <= 1:
        raise UsageError("the share of misses to upload is not between 0 and 1", found=options.share)
    if options.n_threads < 1 or options.spin_us < 0:
        raise UsageError("the CPU's experts need a thread, and no less than no time")
    _check_tiers(options)


def _check_tiers(options: PoolOptions) -> None:
    if options.host_tier not in HOST_TIERS:
        raise UsageError(f"there is no host tier '{options.host_tier}'", expected=" or ".join(HOST_TIERS))
    if not options.has_tiers:
        return
    if options.host_slots is not None and options.host_bytes is not None:
        raise UsageError("slots of host memory and its bytes exclude each other", hint="Give one of them")
    if min(options.host_slots or 0, options.host_bytes or 0) < 0:
        raise UsageError("host memory has no less than no slots", found=options.host_slots or options.host_bytes)
    if options.mode != "upload":
        raise UsageError(
            f"the pool mode {options.mode} needs all experts in host memory: the CPU computes from there",
            hint="Use the mode upload, or give host memory all experts",
        )


def host_counts(options: PoolOptions, layers: Sequence[LayerLayout], counts: Sequence[int]) -> tuple[int, ...]:
    """Slots of host memory in each of the layers, of which `counts` have slots in the home.

    Raises UsageError where not even reads fit into the bytes, or an inclusive host memory cannot hold what the home holds.
    """
    if options.host_slots is not None:
        held = uniform_slots(layers, options.host_slots)
    else:
        held = _fitting_host(options.host_bytes or 0, layers)
    is_small = any(host < home for host, home in zip(held, counts, strict=True))
    if options.host_tier == "inclusive" and any(held) and is_small:
        raise UsageError(
            "an inclusive host memory holds all that has slots, and is smaller here: "
            f"it has {min(held)} slots in a layer, and the home {max(counts)}",
            hint="Give host memory as much as the home or more, or use the host tier exclusive",
        )
    return held


def _fitting_host(host_bytes: int, layers: Sequence[LayerLayout]) -> tuple[int, ...]:
    for count in range(max(layer.n_expert for layer in layers), -1, -1):
        held = uniform_slots(layers, count)
        if tier_bytes(layers, held) <= host_bytes:
            return held
    raise UsageError(
        f"the room for reads does not fit into {format_bytes(host_bytes)} of host memory: it needs "
        f"{format_bytes(tier_bytes(layers, uniform_slots(layers, 0)))}"
    )


def slot_counts(options: PoolOptions, layers: Sequence[LayerLayout], stage_bytes: int) -> tuple[int, ...]:
    """Slots of each of the layers, which are those that are reached.  `stage_bytes` of a budget are the stage's.

    Raises UsageError where they are fewer than a token's experts, or do not fit; it says what would.
    """
    given = [x for x in (options.slots, options.slots_by_layer, options.budget_bytes) if x is not None]
    if len(given) > 1:
        raise UsageError("slots, a plan and a memory budget exclude each other", hint="Give one of them")
    if options.budget_bytes is not None:
        return _fitting(options.budget_bytes, layers, stage_bytes)
    if options.slots_by_layer is not None:
        missing = [x.layer for x in layers if x.layer not in options.slots_by_layer]
        if missing:
            raise UsageError(f"the plan has no slots for layer {missing[0]}")
        counts = tuple(min(options.slots_by_layer[x.layer], x.n_expert) for x in layers)
    else:
        counts = uniform_slots(layers, options.slots if options.slots is not None else max(x.n_expert for x in layers))
    check_floor(layers, counts)
    return counts


def expert_bytes(layer: LayerLayout) -> int:
    """Bytes of one expert's weights in the home."""
    return sum(part.size_bytes for part in layer.parts)


def _fitting(budget_bytes: int, layers: Sequence[LayerLayout], stage_bytes: int) -> tuple[int, ...]:
    def needed(counts: Sequence[int]) -> int:
        return stage_bytes + SPARE_BYTES + sum(n * expert_bytes(x) for x, n in zip(layers, counts, strict=True))

    floor = max(min(layer.n_used or 1, layer.n_expert) for layer in layers)
    for count in range(max(layer.n_expert for layer in layers), floor - 1, -1):
        counts = uniform_slots(layers, count)
        if needed(counts) <= budget_bytes:
            return counts
    raise UsageError(
        f"the slot pool does not fit into {format_bytes(budget_bytes)}: {floor} slots a layer (its top-k) and a layer's stage "
        f"need {format_bytes(needed(uniform_slots(layers, floor)))}",
    )
