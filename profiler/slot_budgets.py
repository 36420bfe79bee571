"""Sizes of a cache, from what a command line gives: slots, a share of the experts, or bytes.

With a cache for each layer that is slots of each layer, with one cache for all layers a number of bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from bel.formats.errors import UsageError, printable
from bel.formats.trace_header import TraceLayer
from bel.formats.units import format_bytes, parse_bytes

SLOTS, FRACTION, BYTES = "--slots", "--fraction", "--bytes"
_SHOWN_LAYERS = 4


@dataclass(frozen=True, slots=True)
class Budget:
    """Slots of each layer, in the order of the model's layers.  `note` says what was clamped and belongs on stderr."""

    slots: tuple[int, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class SharedBudget:
    """The capacity of one cache for all layers, in the unit of `item_sizes`.  `note` belongs on stderr."""

    capacity: int
    note: str = ""


def read_budgets(option: str, text: str, layers: Sequence[TraceLayer]) -> tuple[Budget, ...]:
    """The budgets of an option for a cache in each layer.  Raises UsageError."""
    if option == BYTES:
        return tuple(byte_budget(parse_bytes(part), layers) for part in text.split(","))
    return (slot_budgets if option == SLOTS else fraction_budgets)(text, layers)


def distinct(budgets: Sequence[Budget] | Sequence[SharedBudget]) -> tuple[Budget, ...] | tuple[SharedBudget, ...]:
    """Budgets without those that hold just what an earlier one holds: their rows would be the same."""
    if isinstance(budgets[0], Budget):
        return tuple({b.slots: b for b in reversed(budgets) if isinstance(b, Budget)}.values())[::-1]
    return tuple({b.capacity: b for b in reversed(budgets) if isinstance(b, SharedBudget)}.values())[::-1]


def read_shared_budgets(option: str, text: str, layers: Sequence[TraceLayer]) -> tuple[SharedBudget, ...]:
    """The budgets of an option for one cache of all layers: slots are so many experts of each.  Raises UsageError."""
    return tuple(_shared_budget(option, part.strip(), layers) for part in text.split(","))


def has_sizes(layers: Sequence[TraceLayer]) -> bool:
    """Whether the bytes of an expert are known of every layer."""
    return all(x.expert_bytes is not None for x in layers)


def item_sizes(layers: Sequence[TraceLayer]) -> tuple[int, ...]:
    """What an expert of each layer takes in a cache of all layers: its bytes, or 1 where those are not known of every layer."""
    return tuple(x.expert_bytes or 1 for x in layers) if has_sizes(layers) else (1,) * len(layers)


def token_cycle(layers: Sequence[TraceLayer]) -> int:
    """What one token uses in all layers, in the unit of `item_sizes`."""
    return sum(min(x.top_k, x.n_expert) * size for x, size in zip(layers, item_sizes(layers), strict=True))


def _slots(part: str) -> int:
    if not re.fullmatch(r"\d{1,9}", part, re.ASCII):
        raise UsageError(f"--slots: '{printable(part)}' is not a number of slots", hint="Write whole numbers: 8,16")
    return int(part)


def _share(part: str) -> Fraction:
    if not re.fullmatch(r"\d{0,9}\.?\d{1,18}", part, re.ASCII) or Fraction(part) > 1:
        raise UsageError(f"--fraction: '{printable(part)}' is not a number from 0 to 1", hint="A quarter is 0.25")
    return Fraction(part)  # not a float: 0.29 of 100 experts are 29


def slot_budgets(text: str, layers: Sequence[TraceLayer]) -> tuple[Budget, ...]:
    """`8,16` slots in every layer, clamped to the experts that it has.  Raises UsageError."""
    asked = [_slots(part.strip()) for part in text.split(",")]
    return tuple(_clamped([slots] * len(layers), layers, f"--slots {slots}") for slots in asked)


def fraction_budgets(text: str, layers: Sequence[TraceLayer]) -> tuple[Budget, ...]:
    """`0.25,0.5` of the experts of each layer, rounded down to whole slots.  Raises UsageError."""
    shares = [_share(part.strip()) for part in text.split(",")]
    return tuple(Budget(tuple(int(share * x.n_expert) for x in layers)) for share in shares)


def byte_budget(total_bytes: int, layers: Sequence[TraceLayer]) -> Budget:
    """`total_bytes` shared equally between the layers, rounded down to whole slots.

    Raises UsageError where the size of an expert is not known.
    """
    _need_sizes(layers)
    share = total_bytes // len(layers)
    slots = [share // size for size in item_sizes(layers)]
    few = [x for x, n in zip(layers, slots, strict=True) if n < x.top_k]
    if not few:
        return _clamped(slots, layers, f"--bytes {total_bytes}")
    needed = max(x.top_k * size for x, size in zip(layers, item_sizes(layers), strict=True)) * len(layers)
    note = (
        f"--bytes {total_bytes} gives layer{'s' if len(few) > 1 else ''} {_numbers([x.layer for x in few])} fewer slots "
        f"than the {few[0].top_k} experts that a token uses; from {needed} bytes on none has"
    )
    return Budget(_clamped(slots, layers, "").slots, note)


def host_slots(slots: int, layers: Sequence[TraceLayer]) -> Budget:
    """So many slots of RAM for each layer, clamped to the experts that it has."""
    return _clamped([slots] * len(layers), layers, f"--host-slots {slots}")


def _shared_budget(option: str, part: str, layers: Sequence[TraceLayer]) -> SharedBudget:
    sizes = item_sizes(layers)
    total = sum(x.n_expert * size for x, size in zip(layers, sizes, strict=True))
    if option == SLOTS:
        asked = _slots(part)
        return SharedBudget(
            sum(min(asked, x.n_expert) * size for x, size in zip(layers, sizes, strict=True)),
            _clamped([asked] * len(layers), layers, f"--slots {asked}").note,
        )
    if option == FRACTION:
        return SharedBudget(int(_share(part) * total))
    _need_sizes(layers)
    capacity = parse_bytes(part)
    note = f"--bytes {part} is more than there is: clamped to all {format_bytes(total)} of experts" if capacity > total else ""
    return SharedBudget(min(capacity, total), note)


def _need_sizes(layers: Sequence[TraceLayer]) -> None:
    unknown = next((x.layer for x in layers if x.expert_bytes is None), None)
    if unknown is not None:
        cause = f"--bytes needs the bytes of an expert, and no input knows those of layer {unknown}"
        raise UsageError(cause, hint="Use --slots or --fraction")


def _clamped(asked: Sequence[int], layers: Sequence[TraceLayer], option: str) -> Budget:
    above: dict[int, list[int]] = {}
    for slots, x in zip(asked, layers, strict=True):
        if slots > x.n_expert:
            above.setdefault(x.n_expert, []).append(x.layer)
    words = [f"the {n} experts of layer{'s' if len(numbers) > 1 else ''} {_numbers(numbers)}" for n, numbers in above.items()]
    note = f"{option} is more than there are: clamped to {' and to '.join(words)}" if words else ""
    return Budget(tuple(min(slots, x.n_expert) for slots, x in zip(asked, layers, strict=True)), note)


def _numbers(layers: Sequence[int]) -> str:
    shown = ", ".join(map(str, layers[:_SHOWN_LAYERS]))
    return shown if len(layers) <= _SHOWN_LAYERS else f"{shown} .. {layers[-1]} ({len(layers)} layers)"
