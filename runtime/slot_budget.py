"""How many slots each layer gets out of the memory that a run may use, and the sum that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bel.formats.errors import UsageError
from bel.formats.experts_file import LayerLayout
from bel.formats.units import format_bytes

MARGIN_BYTES = 24 << 20
"""What no line of the sum has: page tables, the allocator's slack, buffers of the readers."""
PREFETCH_BYTES = 96 << 20
"""What is read ahead at most."""
_AHEAD_PART = 16
"""Of the memory given, one part in so many at most is for experts that are read ahead."""
_NEXT_RUN_BYTES = 4 << 20
"""The program takes a little more or less memory from run to run: what a message names shall be enough the next time."""


class TooLittleMemory(UsageError):  # noqa: N818 - what it is, not that it is an error
    """Not even one token's experts fit into the memory that there is."""


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


def ahead_bytes(prefetch_bytes: int, ram_bytes: int | None) -> int:
    """What may be read ahead of `prefetch_bytes`: where memory is limited a small part of it, for slots bring more."""
    return prefetch_bytes if ram_bytes is None else min(prefetch_bytes, ram_bytes // _AHEAD_PART)


def call_bytes(layers: Sequence[LayerLayout], slots: Sequence[int], rows: int, prefetch_bytes: int) -> int:
    """What the largest call of `rows` rows needs beside the slots, and what may be read ahead meanwhile.

    Of a layer's experts at most those without a slot stand beside its slots, whatever they were loaded for.
    """
    most, ahead = 0, 0
    for layer, count in zip(layers, slots, strict=True):
        if layer.is_mtp:  # never called
            continue
        rest = layer.n_expert - count
        # A fixed set keeps none of the call's experts that it does not hold.
        most = max(most, min(rows * (layer.n_used or layer.n_expert), rest) * layer.stride_bytes)
        ahead = max(ahead, min(prefetch_bytes // layer.stride_bytes, rest) * layer.stride_bytes)
    return most + ahead


def uniform_slots(layers: Sequence[LayerLayout], count: int) -> tuple[int, ...]:
    """`count` slots in each layer, at most all of its experts."""
    return tuple(min(count, layer.n_expert) for layer in layers)


def clamp_notes(asked: int | None, most: int) -> list[str]:
    """What to say where `asked` slots of each layer are more than the `most` experts that one has; nothing else."""
    if asked is None or asked <= most:
        return []
    return [f"--slots {asked} is more than there are: clamped to the {most} experts of a layer"]


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

    Raises TooLittleMemory, naming the smallest memory that works, where not even one token's experts fit.
    """
    floor = max(min(layer.n_used or 1, layer.n_expert) for layer in layers)
    sums = []
    for count in range(floor, max(layer.n_expert for layer in layers) + 1):
        slots = uniform_slots(layers, count)
        need = other_bytes + slots_bytes(layers, slots) + call_bytes(layers, slots, rows, prefetch_bytes) + MARGIN_BYTES
        sums.append((need, slots))
    fitting = [slots for need, slots in sums if need <= ram_bytes]
    if fitting:
        return fitting[-1]
    need, slots = min(sums)  # of few layers more slots may need less: what is beside them shrinks
    named = -(-(need + _NEXT_RUN_BYTES) // (1 << 20))
    raise TooLittleMemory(
        f"the model does not fit into --ram {format_bytes(ram_bytes)}: with {max(slots)} slots a layer"
        f"{' (its top-k)' if max(slots) == floor else ''} it needs {format_bytes(need)}",
        hint=f"Give --ram {named}M or more, a smaller --context, or a smaller --ubatch",
    )
