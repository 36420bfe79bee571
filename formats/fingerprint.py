"""The fingerprint of a model: a cheap identity that a profile, a trace and a plan carry, so that none is used on another model.

The content digest (`digest.py`) reads every byte; this reads one page of each tensor, a few milliseconds for any size.
The fingerprint is BLAKE3 over the tag `bel-fingerprint-1\\0`, the number of tensors (u64, little-endian) and their digests in
ascending order.  The digest of a tensor is the leaf digest of `digest.py` (name, type, dimensions) over the first
`min(4096, slice)` bytes of its data, a slice being what `digest.slice_count` cuts it into: for a stack of experts that is
the beginning of expert 0, which a bundle keeps together as well.  So the order of the tensors, the split into files, the
alignment and the metadata do not matter, and a GGUF and its bundle have the same fingerprint.

Two models of equal shape differ in it because training changes every tensor from its first row on.  It is *not* proof of
equal bytes: a model that was edited only behind the first page of every tensor it touches keeps its fingerprint.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from bel.formats.atomic import named_errors, read_all
from bel.formats.bundle import Bundle
from bel.formats.digest import leaf_digest, slice_count
from bel.formats.errors import BadInputError
from bel.formats.gguf_model import GgufModel
from bel.formats.manifest import DENSE, EXPERTS

HEAD_BYTES = 4096
_TAG = b"bel-fingerprint-1\0"


@dataclass(frozen=True, slots=True)
class _Head:
    """Where the first bytes of a tensor are."""

    name: str
    type_id: int
    ne: tuple[int, ...]
    size_bytes: int
    path: Path
    offset_bytes: int


def fingerprint(model: GgufModel | Bundle) -> str:
    """The fingerprint of a model, as 64 hex digits.

    Raises BadInputError where a file ends before a tensor that its header declares, and OSError where it cannot be read.
    """
    heads = _gguf_heads(model) if isinstance(model, GgufModel) else _bundle_heads(model)
    digests = sorted(_leaves(heads))
    return blake3(_TAG + struct.pack("<Q", len(digests)) + b"".join(digests)).hexdigest()


def _gguf_heads(model: GgufModel) -> Iterator[_Head]:
    for t in model.tensors:
        yield _Head(t.name, t.type_id, t.ne, t.size_bytes, model.files[t.source].path, t.start_bytes)


def _bundle_heads(bundle: Bundle) -> Iterator[_Head]:
    manifest = bundle.manifest
    places = {
        part.tensor: (manifest.experts[layer.shard].name, layer.part_offset(0, part))
        for layer in manifest.layers
        for part in layer.parts
    }
    for index, row in enumerate(manifest.tensors):
        if row.dest == EXPERTS:
            name, offset = places[index]
        else:
            assert manifest.ple is not None or row.dest == DENSE, "a tensor of a PLE file that the manifest does not have"
            file = manifest.dense if row.dest == DENSE else manifest.ple
            name, offset = (file or manifest.dense).name, row.dest_offset_bytes
        yield _Head(row.name, row.type_id, row.ne, row.size_bytes, bundle.path(name), offset)


def _leaves(heads: Iterable[_Head]) -> Iterator[bytes]:
    files: dict[Path, int] = {}
    try:
        for head in heads:
            if head.path not in files:
                files[head.path] = os.open(head.path, os.O_RDONLY | os.O_CLOEXEC)
            yield leaf_digest(head.name, head.type_id, head.ne, _read(head, files[head.path]))
    finally:
        for fd in files.values():
            os.close(fd)


def _read(head: _Head, fd: int) -> bytes:
    size = min(HEAD_BYTES, head.size_bytes // slice_count(head.ne, head.size_bytes))
    with named_errors(head.path):
        data = read_all(fd, size, head.offset_bytes)
    if len(data) < size:
        raise BadInputError(
            "truncated: the file ends inside the tensor",
            path=str(head.path),
            tensor=head.name,
            offset_bytes=head.offset_bytes,
            found=f"{len(data)} bytes",
            expected=f"{size}",
        )
    return data
