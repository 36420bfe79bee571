"""What `bandwidth` measures: a folder's disk, a bundle or a model; and the shape of the experts there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from bel.formats.atomic import named_errors, read_all
from bel.formats.bundle import Bundle, check_sizes, is_bundle, open_bundle
from bel.formats.errors import BadInputError, DamagedBundleError, UsageError
from bel.formats.experts import ROLES, find_experts
from bel.formats.experts_file import PAGE_BYTES, token_cycle_bytes
from bel.formats.gguf_model import GgufModel, open_model
from bel.formats.units import GIB, KIB, align_up, format_bytes

DEFAULT_BLOCK_BYTES = 2592 * KIB  # one expert of the 4-bit models of 30B that this toolkit was made for
_GGUF_MAGIC = b"GGUF"


@dataclass(frozen=True, slots=True)
class Slices:
    """One projection of a layer: expert e's slice is `size_bytes` at `offset_bytes + e * stride_bytes` of a file."""

    role: str
    type_id: int
    columns: int
    rows: int
    path: Path
    offset_bytes: int
    stride_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Experts:
    """The first MoE layer, whose experts are multiplied, and what a token takes of all layers: None where top-k is unknown."""

    layer: int
    n_expert: int
    slices: tuple[Slices, ...]
    experts_per_token: int | None
    bytes_per_token: int | None


@dataclass(frozen=True, slots=True)
class Target:
    """`files` are read in blocks of `block_bytes`, none where a file has to be made first in `folder`."""

    path: Path
    folder: Path
    files: tuple[Path, ...]
    block_bytes: int
    experts: Experts | None


def find_target(path: Path, block_bytes: int | None) -> Target:
    """What there is to measure at a path.  `block_bytes` replaces the size of the model's experts.

    Raises UsageError for a block that direct I/O cannot read, BadInputError or DamagedBundleError for a file or bundle that
    cannot be used.
    """
    if block_bytes is not None and (block_bytes % PAGE_BYTES or not 0 < block_bytes <= GIB):
        raise UsageError(f"a block must be a multiple of {PAGE_BYTES} bytes, at most 1G", found=block_bytes)
    if is_bundle(path):
        bundle = open_bundle(path)
        check_sizes(bundle)
        files = tuple(bundle.path(row.name) for row in bundle.manifest.experts)
        return Target(path, _beside(path), files, block_bytes or _usual_stride(bundle), _of_bundle(bundle))
    if path.is_dir():
        return Target(path, path, (), block_bytes or DEFAULT_BLOCK_BYTES, None)
    if not path.is_file():
        raise BadInputError("this is neither a folder nor a file", path=str(path))
    if not _is_gguf(path):
        hint = "To measure a disk, name a folder on it"
        raise BadInputError("this file is no GGUF", path=str(path), expected="a bundle, a GGUF or a folder", hint=hint)
    model = open_model(path)
    experts = _of_model(model)
    size = align_up(sum(s.size_bytes for s in experts.slices), PAGE_BYTES)
    return Target(path, path.parent, tuple(f.path for f in model.files), block_bytes or size, experts)


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC


def _beside(folder: Path) -> Path:
    """Where to make a file on the disk of a bundle: beside it where that is the same file system, else in it."""
    parent = folder.resolve().parent
    return parent if parent.stat().st_dev == folder.stat().st_dev and os.access(parent, os.W_OK | os.X_OK) else folder


def _usual_stride(bundle: Bundle) -> int:
    """The stride that most blobs have; of two the larger."""
    blobs: dict[int, int] = {}
    for layer in bundle.manifest.layers:
        blobs[layer.stride_bytes] = blobs.get(layer.stride_bytes, 0) + layer.n_expert
    return max(blobs, key=lambda stride: (blobs[stride], stride))


def _of_bundle(bundle: Bundle) -> Experts:
    layers = [layer for layer in bundle.manifest.layers if not layer.is_mtp] or list(bundle.manifest.layers)
    first, tensors = layers[0], bundle.manifest.tensors
    path = bundle.path(bundle.manifest.experts[first.shard].name)
    for part in first.parts:
        if len(tensors[part.tensor].ne) < 2:
            raise DamagedBundleError("a stack of experts has no rows", path=str(path), tensor=tensors[part.tensor].name)
    slices = tuple(
        Slices(
            role=part.role,
            type_id=tensors[part.tensor].type_id,
            columns=tensors[part.tensor].ne[0],
            rows=tensors[part.tensor].ne[1],
            path=path,
            offset_bytes=first.offset_bytes + part.offset_bytes,
            stride_bytes=first.stride_bytes,
            size_bytes=part.size_bytes,
        )
        for part in first.parts
    )
    per_token = _sum([layer.n_used for layer in layers])
    return Experts(first.layer, first.n_expert, slices, per_token, token_cycle_bytes(bundle.manifest.layers))


def _of_model(model: GgufModel) -> Experts:
    layers = find_experts(model)
    layers = tuple(layer for layer in layers if not layer.is_mtp) or layers
    first, slices = layers[0], []
    for part in sorted(first.parts, key=lambda p: ROLES.index(p.role)):
        tensor, size = model.tensors[part.tensor], part.slice_bytes
        place = model.files[tensor.source].path
        slices.append(Slices(part.role, tensor.type_id, tensor.ne[0], tensor.ne[1], place, tensor.start_bytes, size, size))
    used = [layer.n_used for layer in layers]
    sizes = [sum(part.slice_bytes for part in layer.parts) for layer in layers]
    per_token = _sum([None if k is None else k * size for k, size in zip(used, sizes, strict=True)])
    return Experts(first.layer, first.n_expert, tuple(slices), _sum(used), per_token)


def _sum(numbers: list[int | None]) -> int | None:
    known = [n for n in numbers if n is not None]
    return sum(known) if len(known) == len(numbers) else None


def read_slice(part: Slices, expert: int) -> bytes:
    """The bytes of one expert's slice.  Raises BadInputError where the file ends before them."""
    at = part.offset_bytes + expert * part.stride_bytes
    fd = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with named_errors(part.path):
            data = read_all(fd, part.size_bytes, at)
    finally:
        os.close(fd)
    if len(data) != part.size_bytes:
        raise BadInputError(
            "the file ends inside an expert",
            path=str(part.path),
            offset_bytes=at,
            found=format_bytes(len(data)),
            expected=format_bytes(part.size_bytes),
        )
    return data
