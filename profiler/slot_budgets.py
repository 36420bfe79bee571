"""Slots of each layer, from what a command line gives: a number, a share of the experts, or bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from bel.formats.errors import UsageError, printable
from bel.formats.trace_header import TraceLayer

_SHOWN_LAYERS = 4


@dataclass(frozen=True, slots=True)
class Budget:
    """Slots of each layer, in the order of the model's layers.  `note` says what was clamped and belongs on stderr."""

    slots: tuple[int, ...]
    note: str = ""


def slot_budgets(text: str, layers: Sequence[TraceLayer]) -> tuple[Budget, ...]:
    """`8,16` slots in every layer, clamped to the experts that it has.  Raises UsageError."""
    budgets = []
    for part in text.split(","):
        if not re.fullmatch(r"\d{1,9}", part.strip(), re.ASCII):
            raise UsageError(f"--slots: '{printable(part)}' is not a number of slots", hint="Write whole numbers: 8,16")
        budgets.append(_clamped([int(part)] * len(layers), layers, f"--slots {int(part)}"))
    return tuple(budgets)


def fraction_budgets(text: str, layers: Sequence[TraceLayer]) -> tuple[Budget, ...]:
    """`0.25,0.5` of the experts of each layer, rounded down to whole slots.  Raises UsageError."""
    budgets = []
    for part in text.split(","):
        if not re.fullmatch(r"\d{0,9}\.?\d{1,18}", part.strip(), re.ASCII) or Fraction(part.strip()) > 1:
            raise UsageError(f"--fraction: '{printable(part)}' is not a number from 0 to 1", hint="A quarter is 0.25")
        share = Fraction(part.strip())  # not a float: 0.29 of 100 experts are 29
        budgets.append(Budget(tuple(int(share * x.n_expert) for x in layers)))
    return tuple(budgets)


def byte_budget(total_bytes: int, layers: Sequence[TraceLayer]) -> Budget:
    """`total_bytes` shared equally between the layers, rounded down to whole slots.

    Raises UsageError where a layer would get less than its top-k, or the size of an expert is not known.
    """
    sizes = []
    for x in layers:
        if x.expert_bytes is None:
            cause = f"--bytes needs the bytes of an expert, and no input knows those of layer {x.layer}"
            raise UsageError(cause, hint="Use --slots or --fraction")
        sizes.append(x.expert_bytes)
    share = total_bytes // len(layers)
    floors = [x.top_k * size for x, size in zip(layers, sizes, strict=True)]
    worst = floors.index(max(floors))
    if share < floors[worst]:
        cause = (
            f"--bytes {total_bytes} gives each of {len(layers)} layers {share} bytes, and layer {layers[worst].layer} needs "
            f"{floors[worst]} for its top-k, {layers[worst].top_k} experts"
        )
        raise UsageError(cause, hint=f"The smallest --bytes that works is {floors[worst] * len(layers)}")
    return _clamped([share // size for size in sizes], layers, f"--bytes {total_bytes}")


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
