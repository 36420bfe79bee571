"""The stages of a pool: which layers can use the same one, and what that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_ROW_PADDING = 512  # elements: MATRIX_ROW_PADDING, ggml/src/ggml-cuda/common.cuh


@dataclass(frozen=True, slots=True)
class StackShape:
    """A stack of `n_expert` experts of one projection: rows of `columns` elements; an expert has `size_bytes`."""

    type_id: int
    columns: int
    size_bytes: int
    n_expert: int


def stage_groups(layers: Sequence[Sequence[StackShape]], reads_ahead: bool) -> list[int]:
    """The stage of each layer, by number from 0.

    One does for all, but where kernels read behind a row: what they find there they multiply by zero, so it must be a number.
    Bytes that another layer left there for weights of another type may spell a NaN; of the same shapes they are weights.
    """
    is_read = reads_ahead and any(stack.columns % _ROW_PADDING for layer in layers for stack in layer)
    groups: dict[tuple[StackShape, ...], int] = {}
    return [groups.setdefault(tuple(layer) if is_read else (), len(groups)) for layer in layers]


def stage_bytes(layers: Sequence[Sequence[StackShape]], reads_ahead: bool) -> int:
    """Bytes of experts on all stages."""
    sizes: dict[int, int] = {}
    for group, layer in zip(stage_groups(layers, reads_ahead), layers, strict=True):
        size = sum(stack.size_bytes * stack.n_expert for stack in layer)
        sizes[group] = max(sizes.get(group, 0), size)
    return sum(sizes.values())
