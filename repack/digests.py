"""Collecting the digests of all slices of a model while its bytes pass by in whatever order."""

from __future__ import annotations

from bel.formats.digest import (
    DIGEST_BYTES,
    SliceHasher,
    content_digest,
    data_digest,
    leaf_digest,
    slice_count,
)
from bel.formats.experts_file import LayerLayout, parts_in_order
from bel.formats.gguf_model import GgufModel
from bel.formats.units import MIB
from bel.repack.spans import Piece


class SliceDigests:
    """One slice is hashed at a time (a file is walked in order); the digests of finished slices are kept."""

    def __init__(self) -> None:
        self._hasher: SliceHasher | None = None
        self._digests: dict[int, bytearray] = {}

    def add(self, piece: Piece, data: memoryview | None) -> bytes | None:
        """Hash a piece of a slice (`data` None: it is hole); its digest where the piece completes the slice, else None."""
        if piece.at_bytes == 0:
            self._hasher = SliceHasher(piece.span.size_bytes)
        assert self._hasher is not None, "a slice begins with its first piece"
        if data is None:
            self._hasher.update_zeros(piece.size_bytes)
        else:
            self._hasher.update(data)
        if not piece.completes:
            return None
        digest = self._hasher.digest()
        row = self._digests.setdefault(piece.span.tensor, bytearray())
        at = piece.span.part * DIGEST_BYTES
        if len(row) < at + DIGEST_BYTES:
            row.extend(bytes(at + DIGEST_BYTES - len(row)))
        row[at : at + DIGEST_BYTES] = digest
        return digest

    def tensor(self, index: int) -> bytes:
        """The data digest of a tensor, all of whose slices were hashed."""
        return data_digest(self._digests[index])

    def of_part(self, tensor: int, part: int) -> bytes:
        """The digest of one slice."""
        return bytes(self._digests[tensor][part * DIGEST_BYTES : (part + 1) * DIGEST_BYTES])

    def index(self, layers: tuple[LayerLayout, ...]) -> bytes:
        """The digests of all parts, in the order of the digest table."""
        return b"".join(self.of_part(part.tensor, expert) for _, expert, part in parts_in_order(layers))

    def complete(self, index: int, ne: tuple[int, ...], size_bytes: int) -> bool:
        """Whether every slice of a tensor was hashed."""
        return len(self._digests.get(index, b"")) == slice_count(ne, size_bytes) * DIGEST_BYTES

    def content(self, model: GgufModel) -> str:
        """The content digest of a model, all of whose tensors were hashed."""
        return content_digest(leaf_digest(t.name, t.type_id, t.ne, self.tensor(i)) for i, t in enumerate(model.tensors))


class GapCollector:
    """Finds the gap bytes that must be kept: those that are not zero, by steps of at most 1 MiB."""

    def __init__(self) -> None:
        self._step = bytearray()

    def add(self, piece: Piece, data: memoryview | None) -> bytes | None:
        """The whole gap span where this piece completes it and it is not all zero, else None."""
        assert piece.span.size_bytes <= MIB, "gaps are cut"
        if data is None and piece.size_bytes == piece.span.size_bytes:
            return None  # a whole step of hole: terabytes of it must pass in a moment
        if data is None:
            self._step += bytes(piece.size_bytes)
        else:
            self._step += data
        if not piece.completes:
            return None
        step, self._step = bytes(self._step), bytearray()
        return step if step.count(0) != len(step) else None
