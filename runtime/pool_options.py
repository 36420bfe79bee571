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
from bel.runtime.slot_budget import check_floor, uniform_slots

MODES = {"upload": UPLOAD, "split": SPLIT, "static": COMPUTE}
SPARE_BYTES = 1 << 20
"""Of a budget, what alignment and the device's kernels may want beside slots and stage."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """`mode`: how a decoded token's misses are met.  `upload`: each is copied into a slot, by the policy; `static`: the slots
    never change and the CPU computes what is missing; `split`: of m misses the `share` * m with the largest weights are
    uploaded, the CPU computes the others (`share` None: by costs measured at start).

    One of `slots` (in each layer, at most its experts), `slots_by_layer` and `budget_bytes` (of the home, stage included);
    without any, all experts have slots.  `wanted` {layer: experts} fill the slots at first, most wanted first.  `n_threads`
    compute on the CPU.  `is_native`: with the compiled callback.  `spin_us`: how long the CPU's thread waits awake for the next
    layer before it sleeps.  `reader`, `checks`: how the experts are read.
    """

    mode: str = "upload"
    policy: Policy = field(default_factory=lambda: parse_policy("lru"))
    slots: int | None = None
    slots_by_layer: Mapping[int, int] | None = None
    budget_bytes: int | None = None
    wanted: Mapping[int, Sequence[int]] = field(default_factory=dict)
    share: float | None = None
    n_threads: int = 1
    is_native: bool = True
    spin_us: int = 1000
    reader: str = "auto"
    checks: bool = True


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
