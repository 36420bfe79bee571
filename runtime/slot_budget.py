"""How many slots each layer gets out of the memory that a run may use, and the sum that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bel.formats.errors import UsageError
from bel.formats.experts_file import LayerLayout
from bel.formats.units import format_bytes

MARGIN_BYTES = 24 << 20
"""What no line of the sum has: page tables, the allocator's slack, buffers of the readers."""
_NEXT_RUN_BYTES = 4 << 20
"""The program takes a little more or less memory from run to run: what a message names shall be enough the next time."""


@dataclass(frozen=True, slots=True)
class MemorySum:
    """Bytes of a run by purpose.

    `process`: the program and its libraries before the model.  `dense`: the weights that every token uses.  `kv`, `compute`:
    the buffers that llama.cpp made.  `call`: experts of one call that have no slot, and those read ahead for the next layer.
    """

    process: int
    dense: int
    kv: int
    compute: int
    call: int
    slots: int

    @property
    def total(self) -> int:
        """All of it with the margin."""
        return self.process + self.dense + self.kv + self.compute + self.call + self.slots + MARGIN_BYTES


def call_bytes(layers: Sequence[LayerLayout], slots: Sequence[int], rows: int, prefetch_bytes: int) -> int:
    """What the largest call of `rows` rows needs beside the slots, and what may be read ahead meanwhile."""
    most = 0
    for layer, count in zip(layers, slots, strict=True):
        distinct = min(layer.n_expert, rows * (layer.n_used or layer.n_expert))
        # A fixed set keeps none of the call's experts that it does not hold.
        most = max(most, min(distinct, layer.n_expert - count) * layer.stride_bytes)
    return most + prefetch_bytes


def uniform_slots(layers: Sequence[LayerLayout], count: int) -> tuple[int, ...]:
    """`count` slots in each layer, at most all of its experts."""
    return tuple(min(count, layer.n_expert) for layer in layers)


def slots_bytes(layers: Sequence[LayerLayout], slots: Sequence[int]) -> int:
    """Bytes of slots."""
    return sum(layer.stride_bytes * count for layer, count in zip(layers, slots, strict=True))


def check_floor(layers: Sequence[LayerLayout], slots: Sequence[int]) -> None:
    """Raise UsageError where a layer has fewer slots than one token needs."""
    for layer, count in zip(layers, slots, strict=True):
        floor = min(layer.n_used or 1, layer.n_expert)
        if count < floor:
            raise UsageError(
                f"{count} slots in layer {layer.layer} are fewer than its top-k: a token needs {floor} experts at once",
                hint=f"Give at least --slots {floor}",
            )


def fitting_slots(
    layers: Sequence[LayerLayout], other_bytes: int, ram_bytes: int, rows: int, prefetch_bytes: int
) -> tuple[int, ...]:
    """The most uniform slots with which everything fits into `ram_bytes`; `other_bytes` is what does not depend on them.

    Raises UsageError, naming the smallest memory that works, where not even one token's experts fit.
    """
    floor = max(min(layer.n_used or 1, layer.n_expert) for layer in layers)
    best = None
    for count in range(floor, max(layer.n_expert for layer in layers) + 1):
        slots = uniform_slots(layers, count)
        need = other_bytes + slots_bytes(layers, slots) + call_bytes(layers, slots, rows, prefetch_bytes) + MARGIN_BYTES
        if need <= ram_bytes:
            best = slots
        elif best is None:
            named = -(-(need + _NEXT_RUN_BYTES) // (1 << 20))
            raise UsageError(
                f"the model does not fit into --ram {format_bytes(ram_bytes)}: with {count} slots a layer (its top-k) it needs "
                f"{format_bytes(need)}",
                hint=f"Give --ram {named}M or more, a smaller --context, or a smaller --ubatch",
            )
    assert best is not None, "there is at least one expert in a layer"
    return best
