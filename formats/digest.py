"""Digests: BLAKE3 of slices, tensors and whole models, and what a run of zeros hashes to.

A tensor is hashed slice by slice along its third dimension (an expert of a stack is one slice), so that the digest
of a part of a blob, which finds a damaged expert, is also a leaf of the digest of the tensor and of the model.
`SPEC.md`, "Digests", has the exact encodings.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable

from blake3 import blake3

DIGEST_BYTES = 32
_ZEROS = memoryview(bytes(1 << 20))
_CONTENT_TAG = b"bel-content-1\0"


class SliceHasher:
    """BLAKE3 of one slice that arrives in pieces, some of which may be holes."""

    __slots__ = ("_done_bytes", "_hash", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._done_bytes = 0
        self._hash: blake3 | None = None

    def update(self, data: memoryview) -> None:
        """Add bytes."""
        if self._hash is None:
            self._hash = blake3()
        self._hash.update(data)
        self._done_bytes += len(data)

    def update_zeros(self, count: int) -> None:
        """Add `count` zero bytes.  A slice that is one hole costs nothing: its digest is remembered by length."""
        if self._done_bytes == 0 and count == self.size_bytes:
            self._done_bytes = count
            return
        self._done_bytes += count
        if self._hash is None:
            self._hash = blake3()
        for part in zero_runs(count):
            self._hash.update(part)

    def digest(self) -> bytes:
        """The digest; `size_bytes` bytes must have been added."""
        assert self._done_bytes == self.size_bytes, "a slice was hashed before all of it was read"
        return zeros_digest(self.size_bytes) if self._hash is None else self._hash.digest()


@functools.lru_cache(maxsize=256)
def zeros_digest(count: int) -> bytes:
    """BLAKE3 of `count` zero bytes."""
    hasher = blake3()
    for part in zero_runs(count):
        hasher.update(part)
    return hasher.digest()


def zero_runs(count: int) -> Iterable[memoryview]:
    """`count` zero bytes as views of a shared buffer of at most 1 MiB."""
    full, rest = divmod(count, len(_ZEROS))
    for _ in range(full):
        yield _ZEROS
    if rest:
        yield _ZEROS[:rest]


def is_zero(data: memoryview | bytes) -> bool:
    """Whether every byte is zero."""
    return not any(data) if len(data) < 64 else bytes(data).count(0) == len(data)


def slice_count(ne: tuple[int, ...], size_bytes: int) -> int:
    """Into how many equal slices a tensor is hashed: ne[2] where it has three dimensions and divides, else 1."""
    return ne[2] if len(ne) >= 3 and size_bytes and ne[2] and size_bytes % ne[2] == 0 else 1


def data_digest(slice_digests: bytes | bytearray) -> bytes:
    """Digest of a tensor's data: BLAKE3 over the 32-byte digests of its slices, in order."""
    return blake3(slice_digests).digest()


def leaf_digest(name: str, type_id: int, ne: tuple[int, ...], data: bytes) -> bytes:
    """Digest of a tensor with its identity; `data` is what `data_digest` gave."""
    raw = name.encode("utf-8", "surrogateescape")
    head = struct.pack("<Q", len(raw)) + raw + struct.pack(f"<II{len(ne)}Q", type_id, len(ne), *ne)
    return blake3(head + data).digest()


def content_digest(leaves: Iterable[bytes]) -> str:
    """Digest of a model, as 64 hex digits: independent of the order and the place of its tensors."""
    ordered = sorted(leaves)
    return blake3(_CONTENT_TAG + struct.pack("<Q", len(ordered)) + b"".join(ordered)).hexdigest()


def bytes_digest(data: bytes | bytearray) -> str:
    """BLAKE3 of `data`, as 64 hex digits."""
    return blake3(data).hexdigest()
