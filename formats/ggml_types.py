"""The tensor types of ggml: block length in elements and block size in bytes, by type id.

Source: `type_traits` of ggml/src/ggml.c and `enum ggml_type` of ggml/include/ggml.h (llama.cpp build 11549).  The
table is ours because the gguf package lacks type 42 and has a wrong size for type 9; a test compares the rest.
Ids 4, 5, 31 to 33 and 36 to 38 were removed from ggml; forks use 100 and up.  Their sizes are not known here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A block-quantised type: a row of `n` elements takes `n // block_elements * block_bytes` bytes."""

    type_id: int
    name: str
    block_elements: int
    block_bytes: int


_ROWS = [
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 36),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
    (42, "Q2_0", 64, 18),
]
GGML_TYPES: dict[int, GgmlType] = {row[0]: GgmlType(*row) for row in _ROWS}


def type_name(type_id: int) -> str:
    """The name of a type id, or 'type 153' for one that the table does not hold."""
    known = GGML_TYPES.get(type_id)
    return known.name if known else f"type {type_id}"


def tensor_bytes(type_id: int, ne: tuple[int, ...]) -> int | None:
    """Bytes of a contiguous tensor with dimensions `ne` (ggml order, fastest first).

    None for a type that the table does not hold.  Raises ValueError where a row is not a whole number of blocks.
    """
    known = GGML_TYPES.get(type_id)
    if known is None:
        return None
    row = ne[0] if ne else 1
    if row % known.block_elements:
        raise ValueError(f"rows of {row} elements are not whole {known.name} blocks of {known.block_elements}")
    rows = 1
    for n in ne[1:]:
        rows *= n
    return row // known.block_elements * known.block_bytes * rows
