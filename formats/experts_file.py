"""`NAME-experts.bin` and its digest table: one 4096-byte-aligned blob per (layer, expert).

`SPEC.md`, "Experts file" and "Digest table", has the same layout for readers in other languages; a test compares.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from bel.formats.digest import DIGEST_BYTES
from bel.formats.errors import DamagedBundleError
from bel.formats.units import align_up

PAGE_BYTES = 4096
"""Direct I/O needs offsets and lengths that are multiples of the disk's block, which is at most a page."""
PART_ALIGNMENT = 64  # a cache line and the widest vector load; ggml needs 32
CHEAP_PADDING_RATIO = 0.02  # parts are page-aligned, so that one can be read alone, where this much of a blob pays for it

MAX_PARTS = 2**20
"""Fifteen times the largest model of 2026; a table of more digests than this is a damaged count, and is not read."""

EXPERTS_MAGIC = b"BELEXPTS"
INDEX_MAGIC = b"BELDIGST"
VERSION = 1
EXPERTS_HEADER = struct.Struct("<8sIIIIQ32s")
EXPERTS_FIELDS = ("magic", "version", "shard", "shard_count", "page_bytes", "file_bytes", "index_digest")
INDEX_HEADER = struct.Struct("<8sIIQ")
INDEX_FIELDS = ("magic", "version", "digest_bytes", "digest_count")


@dataclass(frozen=True, slots=True)
class BlobPart:
    """One projection inside every blob of a layer: `offset_bytes` counts from the blob's start; `tensor` is a table index."""

    role: str
    tensor: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """The blobs of one layer: expert e starts at `offset_bytes + e * stride_bytes` of experts file number `shard`."""

    layer: int
    n_expert: int
    n_used: int | None
    is_mtp: bool
    shard: int
    offset_bytes: int
    stride_bytes: int
    parts: tuple[BlobPart, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all blobs of the layer."""
        return self.stride_bytes * self.n_expert

    def part_offset(self, expert: int, part: BlobPart) -> int:
        """Where a part of an expert's blob starts in the experts file."""
        return self.offset_bytes + expert * self.stride_bytes + part.offset_bytes


def blob_layout(sizes_bytes: list[int]) -> tuple[list[int], int]:
    """Offsets of the parts inside a blob, and the blob's stride, for parts of these sizes."""
    tight, tight_stride = _place(sizes_bytes, PART_ALIGNMENT)
    paged, paged_stride = _place(sizes_bytes, PAGE_BYTES)
    cheap = paged_stride - tight_stride <= CHEAP_PADDING_RATIO * tight_stride
    return (paged, paged_stride) if cheap else (tight, tight_stride)


def _place(sizes_bytes: list[int], alignment: int) -> tuple[list[int], int]:
    offsets, at = [], 0
    for size in sizes_bytes:
        at = align_up(at, alignment)
        offsets.append(at)
        at += size
    return offsets, align_up(at, PAGE_BYTES)


def experts_header(shard: int, shard_count: int, file_bytes: int, index_digest: bytes) -> bytes:
    """The first page of an experts file.  `index_digest` (BLAKE3 of the digest table) binds the file to its bundle."""
    head = EXPERTS_HEADER.pack(EXPERTS_MAGIC, VERSION, shard, shard_count, PAGE_BYTES, file_bytes, index_digest)
    return head.ljust(PAGE_BYTES, b"\0")


def parts_in_order(layers: tuple[LayerLayout, ...]) -> Iterator[tuple[LayerLayout, int, BlobPart]]:
    """(layer, expert, part) in the order of the blobs in the experts files, which is the order of the digest table."""
    for layer in layers:
        for expert in range(layer.n_expert):
            for part in layer.parts:
                yield layer, expert, part


class PartPlaces:
    """Where the parts of each expert stack stand: stacks go by their index in the tensor table."""

    def __init__(self, layers: tuple[LayerLayout, ...]) -> None:
        self._rows: dict[int, tuple[LayerLayout, BlobPart, int]] = {}
        at = 0
        for layer in layers:
            for number, part in enumerate(layer.parts):
                self._rows[part.tensor] = (layer, part, at + number)
            at += layer.n_expert * len(layer.parts)

    def of(self, tensor: int) -> tuple[LayerLayout, BlobPart]:
        """The layer of a stack, and its part of every blob there."""
        layer, part, _ = self._rows[tensor]
        return layer, part

    def digest(self, table: memoryview, tensor: int, expert: int) -> memoryview:
        """What an expert's part must hash to; `table` is that of `unpack_index`."""
        layer, _, first = self._rows[tensor]
        at = (first + expert * len(layer.parts)) * DIGEST_BYTES
        return table[at : at + DIGEST_BYTES]


def weights_bytes(layers: tuple[LayerLayout, ...]) -> int:
    """Bytes of expert weights in all blobs, padding left out."""
    return sum(part.size_bytes * layer.n_expert for layer in layers for part in layer.parts)


def token_cycle_bytes(layers: tuple[LayerLayout, ...]) -> int | None:
    """Bytes of blobs that one token touches: k * stride over the trunk's layers; None where a layer's k is unknown."""
    trunk = [layer for layer in layers if not layer.is_mtp]
    if any(layer.n_used is None for layer in trunk):
        return None
    return sum((layer.n_used or 0) * layer.stride_bytes for layer in trunk)


def pack_index(digests: bytes | bytearray) -> bytes:
    """The digest table for the concatenated 32-byte digests, in `parts_in_order`."""
    return INDEX_HEADER.pack(INDEX_MAGIC, VERSION, DIGEST_BYTES, len(digests) // DIGEST_BYTES) + digests


def unpack_index(data: bytes, count: int, path: str) -> memoryview:
    """The concatenated digests of a table that must hold `count` of them.  Raises DamagedBundleError."""
    if len(data) != INDEX_HEADER.size + count * DIGEST_BYTES:
        raise DamagedBundleError(
            "the digest table has the wrong size", path=path, found=len(data), expected=INDEX_HEADER.size + count * DIGEST_BYTES
        )
    magic, version, width, have = INDEX_HEADER.unpack_from(data)
    if magic != INDEX_MAGIC or version != VERSION or width != DIGEST_BYTES or have != count:
        raise DamagedBundleError(
            "the digest table's header is not what this version writes",
            path=path,
            found=f"{magic!r} version {version}, {have} digests of {width} bytes",
            expected=f"{INDEX_MAGIC!r} version {VERSION}, {count} of {DIGEST_BYTES}",
        )
    return memoryview(data)[INDEX_HEADER.size :]
