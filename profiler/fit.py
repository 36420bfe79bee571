"""What fits: weights, caches and buffers against the memory there is, and how many experts of each layer find a slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bel.formats.errors import UsageError
from bel.formats.experts_file import LayerLayout
from bel.formats.trace_header import TraceLayer
from bel.formats.units import GIB, MIB, format_bytes
from bel.profiler.attention import Keys
from bel.profiler.compute_buffer import compute_bytes
from bel.profiler.footprint import Footprint, SlotLayer
from bel.profiler.kv_cache import CacheBytes, cache_bytes, ubatch_tokens
from bel.profiler.slot_budgets import SLOTS, read_budgets
from bel.runtime import slot_budget

GPU_MARGIN_BYTES, GPU_MARGIN_SHARE = 512 * MIB, 16
"""Left free in VRAM for the driver's context and fragments: this much, or one part in so many of a small GPU."""
RAM_MARGIN_BYTES, RAM_MARGIN_SHARE = 2 * GIB, 8
"""Left free in RAM for the system and the process itself: this much, or one part in so many of a small machine."""
PROCESS_BYTES = 52 * MIB
"""Without a GPU the margin is no less than the program itself (48 MiB were measured) with `slot_budget.MARGIN_BYTES`: where
that is more, it is what `bel-run --ram` counts."""
_LEAST_MARGIN_BYTES = PROCESS_BYTES + slot_budget.MARGIN_BYTES
DEFAULT_CONTEXT = 8192
"""Tokens, where nobody says and the model was trained for as many."""


@dataclass(frozen=True, slots=True)
class Question:
    """What to fit.  `vram_bytes` 0: no GPU, everything is in RAM.  `slots` a layer and `slots_bytes` only where asked for."""

    vram_bytes: int
    ram_bytes: int
    context: int = DEFAULT_CONTEXT
    cache_type: str = "f16"
    slots: int | None = None
    slots_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Fit:
    """The answer.  Slots are in VRAM, without a GPU in RAM.

    `fixed_bytes`: what must be there before any slot, margin and stage included; `room_bytes`: what is left for slots, negative
    where something is missing; `floor_bytes`: top-k slots in each layer.  `stage_bytes`: room in VRAM for all experts of one
    layer, which a prompt goes through where not all have a slot (`bel-run --gpu`).  `call_bytes`: without a GPU, experts of one
    call that have no slot, as `bel-run` counts them.  Without `fits` there are no slots.
    `in_ram_bytes` and `on_disk_bytes` are the experts without a slot.  `notes` belong on stderr.
    """

    model: Footprint
    question: Question
    caches: CacheBytes
    compute_bytes: int
    margin_bytes: int
    stage_bytes: int
    call_bytes: int
    fixed_bytes: int
    room_bytes: int
    floor_bytes: int
    slots: tuple[int, ...]
    in_ram_bytes: int
    on_disk_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether at least top-k slots of each layer fit."""
        return self.room_bytes >= self.floor_bytes

    @property
    def is_gpu(self) -> bool:
        """Whether slots are in VRAM."""
        return self.question.vram_bytes > 0

    @property
    def memory_bytes(self) -> int:
        """The memory that slots are in: VRAM, without a GPU RAM."""
        return self.question.vram_bytes or self.question.ram_bytes

    @property
    def dense_bytes(self) -> int:
        """The dense weights of the sum: those that a GPU holds, without a GPU all."""
        return _dense_bytes(self.model, self.question)

    @property
    def left_bytes(self) -> int:
        """What is left of the memory behind the slots; negative where something is missing."""
        return self.memory_bytes - self.fixed_bytes - self.slots_bytes

    @property
    def slots_bytes(self) -> int:
        """Bytes of all slots."""
        return slots_bytes(self.model.reached, self.slots)

    @property
    def experts_bytes(self) -> int:
        """Bytes that slots for all experts would take."""
        return sum(layer.all_bytes for layer in self.model.reached)

    @property
    def resident_fraction(self) -> float:
        """Share of the experts that have a slot, in the layers that decoding reaches."""
        return sum(self.slots) / sum(layer.n_expert for layer in self.model.reached)


def solve(model: Footprint, question: Question) -> Fit:
    """Fit a model.  Raises UsageError for slots that do not fit, and for a cache type that does not suit the model."""
    layers = model.reached
    caches = cache_bytes(model.metadata, question.context, question.cache_type)
    compute = compute_bytes(model.metadata, question.context)
    margin = (
        _gpu_margin(question.vram_bytes) if question.vram_bytes else max(_ram_margin(question.ram_bytes), _LEAST_MARGIN_BYTES)
    )
    fixed = _dense_bytes(model, question) + caches.total_bytes + compute + margin
    stage = _stage_bytes(question, layers, fixed)
    fixed += stage
    room = (question.vram_bytes or question.ram_bytes) - fixed
    notes = [*model.notes, *_cache_notes(model, question.context, caches)]
    if question.slots_bytes is not None and room < min(question.slots_bytes, sum(x.all_bytes for x in layers)):
        notes.append(f"--slots-bytes {question.slots_bytes} is more than the {max(room, 0)} bytes that are left for slots")
    limit = room if question.slots_bytes is None else min(room, question.slots_bytes)
    floor = slots_bytes(layers, [x.top_k for x in layers])
    if question.slots_bytes is not None and question.slots_bytes < floor:
        raise _budget_below_floor(question.slots_bytes, floor)
    beside = _Beside(layers, question, room - limit)
    slots = largest_slots(layers, limit, beside.over)
    if question.slots is not None:
        is_whole_free = stage > 0 and not _stage_bytes(replace(question, slots=None), layers, fixed - stage)
        slots = _asked(question.slots, layers, slots, limit, beside.over, notes, is_whole_free=is_whole_free)
    chosen = spread(layers, slots) if slots else (0,) * len(layers)
    call = beside(chosen if slots else [x.top_k for x in layers])
    rest = sum(x.all_bytes for x in layers) - slots_bytes(layers, chosen)
    in_ram = min(rest, max(0, question.ram_bytes - _ram_margin(question.ram_bytes) - model.input_bytes))
    in_ram = in_ram if question.vram_bytes else 0
    return Fit(
        model,
        question,
        caches,
        compute,
        margin,
        stage,
        call,
        fixed + call,
        min(limit, room - call),
        floor,
        chosen,
        in_ram,
        rest - in_ram,
        tuple(notes),
    )


class _Beside:
    """Bytes that `bel-run` counts beside so many slots of each layer for the experts of one call; none with a GPU."""

    def __init__(self, layers: Sequence[SlotLayer], question: Question, spare_bytes: int = 0) -> None:
        self._spare_bytes = spare_bytes
        self._rows = 0 if question.vram_bytes else ubatch_tokens(question.context)
        self._layers = [LayerLayout(x.layer, x.n_expert, x.top_k, False, 0, 0, x.stride_bytes, ()) for x in layers]

    def __call__(self, slots: Sequence[int]) -> int:
        if not self._rows:
            return 0
        # With little memory a run reads less ahead; how little is not known while it is asked what would be enough.
        return slot_budget.call_bytes(self._layers, slots, self._rows, slot_budget.PREFETCH_BYTES)

    def over(self, slots: Sequence[int]) -> int:
        """What of it `spare_bytes` do not hold: memory that a budget of slots leaves unused."""
        return max(0, self(slots) - self._spare_bytes)


def _dense_bytes(model: Footprint, question: Question) -> int:
    return model.gpu_dense_bytes if question.vram_bytes else model.dense_bytes


def _stage_bytes(question: Question, layers: Sequence[SlotLayer], fixed_bytes: int) -> int:
    """All experts of the largest layer; none without a GPU, and where all experts of all layers have slots."""
    wanted = [question.slots or x.n_expert for x in layers]
    every = sum(x.all_bytes for x in layers)
    fits = all(n >= x.n_expert for n, x in zip(wanted, layers, strict=True)) and fixed_bytes + every <= question.vram_bytes
    fits = fits and (question.slots_bytes is None or question.slots_bytes >= every)
    return 0 if fits or not question.vram_bytes else _largest_layer(layers)


def _largest_layer(layers: Sequence[SlotLayer]) -> int:
    return max(x.n_expert * x.weights_bytes for x in layers)


def default_context(model: Footprint) -> int:
    """Tokens of the context where nobody says: no more than the model was trained for."""
    trained = _trained(model)
    return min(DEFAULT_CONTEXT, trained) if trained > 0 else DEFAULT_CONTEXT


def _trained(model: Footprint) -> int:
    return Keys(model.metadata).number("context_length")


def _cache_notes(model: Footprint, context: int, caches: CacheBytes) -> list[str]:
    said, trained = [], _trained(model)
    if 0 < trained < context:
        said.append(f"--context {context} is more than the {trained} tokens that the model was trained for")
    if not caches.kv_bytes:
        said.append("the metadata declare no cache of keys and values (no attention.head_count?): 0 bytes are counted for it")
    return said


def slots_bytes(layers: Sequence[SlotLayer], slots: Sequence[int]) -> int:
    """Bytes of so many slots of each layer."""
    return sum(x.stride_bytes * n for x, n in zip(layers, slots, strict=True))


def spread(layers: Sequence[SlotLayer], slots: int) -> tuple[int, ...]:
    """As many slots in every layer, but no fewer than its top-k and no more than its experts."""
    return tuple(min(max(slots, x.top_k), x.n_expert) for x in layers)


def largest_slots(layers: Sequence[SlotLayer], room_bytes: int, beside: Callable[[Sequence[int]], int]) -> int:
    """The most slots in every layer (see `spread`) that with what is beside them take no more than `room_bytes`; 0 for none."""
    for slots in range(max(x.n_expert for x in layers), min(x.top_k for x in layers) - 1, -1):
        counts = spread(layers, slots)
        taken = slots_bytes(layers, counts)
        # In this order: the sum of a call is dearer.
        if taken <= room_bytes and taken + beside(counts) <= room_bytes:
            return slots
    return 0


def least_slots(layers: Sequence[SlotLayer], share: float) -> int:
    """The fewest slots in every layer (see `spread`) that are at least this share, 0 to 1, of all experts."""
    low, high, experts = min(x.top_k for x in layers), max(x.n_expert for x in layers), sum(x.n_expert for x in layers)
    while low < high:
        middle = (low + high) // 2
        if sum(spread(layers, middle)) / experts < share:
            low = middle + 1
        else:
            high = middle
    return low


def _asked(
    asked: int,
    layers: Sequence[SlotLayer],
    most: int,
    room: int,
    beside: Callable[[Sequence[int]], int],
    notes: list[str],
    *,
    is_whole_free: bool,
) -> int:
    """The slots asked for, at most a layer's experts.  `is_whole_free`: all experts would fit, since they need no stage."""
    top = max(x.top_k for x in layers)
    if asked < top:
        raise UsageError(
            f"--slots {asked} is below top-{top}: a token needs {top} experts of a layer at once",
            hint=f"The smallest --slots that works is {top}",
        )
    (budget,) = read_budgets(SLOTS, str(asked), [TraceLayer(x.layer, x.n_expert, x.top_k, x.stride_bytes) for x in layers])
    if budget.note:
        notes.append(budget.note)
    need = slots_bytes(layers, budget.slots)
    room -= beside(budget.slots)
    if need > room:
        hint = f"The largest number of slots that fits is {most} in each layer"
        if is_whole_free:
            every = max(x.n_expert for x in layers)
            hint = (
                f"The largest number of slots that fits is {every} in each layer: with slots for all experts no stage is needed"
            )
            hint += f" (with one at most {most} fit)" if most >= top else ""
        elif most < top:
            hint = f"Not even top-{top}, the floor, fits: without --slots this command says what to change"
        raise UsageError(
            f"--slots {asked} does not fit: {len(layers)} layers of slots take {need} bytes ({format_bytes(need)}), and "
            f"{max(room, 0)} ({format_bytes(max(room, 0))}) are left for them",
            hint=hint,
        )
    return max(budget.slots)


def _budget_below_floor(asked: int, floor: int) -> UsageError:
    return UsageError(
        f"--slots-bytes {asked} is below the floor: top-k slots in each layer take {floor} bytes ({format_bytes(floor)})",
        hint=f"The smallest --slots-bytes that works is {floor}",
    )


def _gpu_margin(vram_bytes: int) -> int:
    return min(GPU_MARGIN_BYTES, vram_bytes // GPU_MARGIN_SHARE)


def _ram_margin(ram_bytes: int) -> int:
    return min(RAM_MARGIN_BYTES, ram_bytes // RAM_MARGIN_SHARE)


def _run_margin(ram_bytes: int) -> int:
    """Where the slots are in RAM."""
    return max(_ram_margin(ram_bytes), _LEAST_MARGIN_BYTES)


def memory_for(fit: Fit, slots: Sequence[int]) -> int:
    """The least VRAM (without a GPU: RAM) with room for so many slots of each layer, margin and stage included."""
    layers, others = fit.model.reached, fit.dense_bytes + fit.caches.total_bytes + fit.compute_bytes
    used = slots_bytes(layers, slots)
    if not fit.is_gpu:
        need = others + used + _Beside(layers, fit.question)(slots)
        return max(_with_margin(need, RAM_MARGIN_BYTES, RAM_MARGIN_SHARE), need + _LEAST_MARGIN_BYTES)
    # Where all experts have slots there is no stage, so a small model may need less for more slots.
    used = min(used + _largest_layer(layers), fit.experts_bytes)
    return _with_margin(others + used, GPU_MARGIN_BYTES, GPU_MARGIN_SHARE)


def ram_in_use(fit: Fit) -> int:
    """The RAM less its margin."""
    return fit.question.ram_bytes - _ram_margin(fit.question.ram_bytes)


def ram_for_the_rest(fit: Fit) -> int:
    """The least RAM that holds all experts without a slot in VRAM."""
    used = fit.model.input_bytes + fit.in_ram_bytes + fit.on_disk_bytes
    return _with_margin(used, RAM_MARGIN_BYTES, RAM_MARGIN_SHARE)


def _with_margin(used: int, most: int, share: int) -> int:
    """The smallest size that less its margin, min(most, size // share), is `used`."""
    return min(used + most, (used - 1) * share // (share - 1) + 1)
