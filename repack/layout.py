"""The plan of a conversion: from the headers of a model to the place of every tensor in the bundle.  Pure: no I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bel.formats.digest import DIGEST_BYTES
from bel.formats.errors import BadInputError, UsageError
from bel.formats.experts import ExpertLayer, find_experts
from bel.formats.experts_file import INDEX_HEADER, MAX_PARTS, PAGE_BYTES, BlobPart, LayerLayout, blob_layout
from bel.formats.gguf_compose import GgufLayout, compose, i32_entry, string_entry, u16_entry, u32_entry
from bel.formats.gguf_model import GgufModel
from bel.formats.manifest import DENSE, EXPERTS, PLE
from bel.formats.units import format_bytes

BUNDLE_VERSION_KEY = "bel.bundle_version"
CONTENT_DIGEST_KEY = "bel.content_digest"
BUNDLE_VERSION = 1
NO_DIGEST = "0" * 64
PLE_SHARE = 0.05  # --ple auto: below this share of the dense bytes a second file is not worth its open
_PLE_NAME = re.compile(r"^per_layer_token_embd(\.|_|$)")


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a tensor goes: `dest` is DENSE, PLE or EXPERTS; the offset is absolute, 0 for a stack of experts."""

    dest: str
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A whole bundle, laid out.  `destinations` runs parallel to the model's tensors; `experts_bytes` are file sizes."""

    name: str
    destinations: tuple[Destination, ...]
    dense: GgufLayout
    ple: GgufLayout | None
    layers: tuple[LayerLayout, ...]
    experts_bytes: tuple[int, ...]

    @property
    def dense_name(self) -> str:
        """File name of the dense GGUF."""
        return f"{self.name}-dense.gguf"

    @property
    def ple_name(self) -> str:
        """File name of the PLE shard."""
        return f"{self.name}-ple.gguf"

    @property
    def index_name(self) -> str:
        """File name of the digest table."""
        return f"{self.name}-experts.idx"

    @property
    def experts_names(self) -> tuple[str, ...]:
        """File names of the experts files, in order."""
        count = len(self.experts_bytes)
        if count == 1:
            return (f"{self.name}-experts.bin",)
        return tuple(f"{self.name}-experts-{i + 1:05d}-of-{count:05d}.bin" for i in range(count))

    @property
    def size_bytes(self) -> int:
        """Bytes of the GGUF files, the experts files and the digest table."""
        parts = sum(layer.n_expert * len(layer.parts) for layer in self.layers)
        ggufs = self.dense.size_bytes + (self.ple.size_bytes if self.ple else 0)
        return ggufs + sum(self.experts_bytes) + INDEX_HEADER.size + parts * DIGEST_BYTES


def plan_layout(model: GgufModel, name: str, *, ple: str, shard_bytes: int) -> Layout:
    """Lay out the bundle of `model`.  `ple` is auto, keep or split.

    Raises BadInputError where the experts are not what they must be, UsageError where a layer is larger than `shard_bytes`.
    """
    found = find_experts(model)
    stacks = {part.tensor for layer in found for part in layer.parts}
    dense = [i for i in range(len(model.tensors)) if i not in stacks]
    tables = _ple_tensors(model, dense, ple)
    dense = [i for i in dense if i not in tables]
    dense_file = _dense_gguf(model, dense, NO_DIGEST)
    ple_file = _ple_gguf(model, tables, len(dense) + len(tables)) if tables else None
    if sum(layer.n_expert * len(layer.parts) for layer in found) > MAX_PARTS:
        raise BadInputError(f"the model has more than {MAX_PARTS} expert slices", path=str(model.first.path))
    layers, experts_bytes = _experts_files(found, shard_bytes)
    places: dict[int, Destination] = {i: Destination(EXPERTS, 0) for i in stacks}
    for kind, indexes, layout in ((DENSE, dense, dense_file), (PLE, tables, ple_file)):
        if layout is not None:
            for i, info in zip(indexes, layout.tensors, strict=True):
                places[i] = Destination(kind, layout.data_start_bytes + info.offset_bytes)
    destinations = tuple(places[i] for i in range(len(model.tensors)))
    return Layout(name, destinations, dense_file, ple_file, layers, experts_bytes)


def dense_header(model: GgufModel, layout: Layout, content_digest: str) -> bytes:
    """The header of the dense file with the model's content digest filled in; as long as the planned one."""
    dense = [i for i, d in enumerate(layout.destinations) if d.dest == DENSE]
    return _dense_gguf(model, dense, content_digest).header()


def _ple_tensors(model: GgufModel, dense: list[int], mode: str) -> list[int]:
    tables = [i for i in dense if _PLE_NAME.match(model.tensors[i].name)]
    if not tables or mode == "keep":
        return []
    table_bytes = sum(model.tensors[i].size_bytes for i in tables)
    dense_bytes = sum(model.tensors[i].size_bytes for i in dense)
    worth = table_bytes >= PLE_SHARE * dense_bytes and any(
        model.tensors[i].name == "per_layer_token_embd.weight" for i in tables
    )
    return tables if mode == "split" or worth else []


def _tensor_list(model: GgufModel, indexes: list[int]) -> list[tuple[str, tuple[int, ...], int, int]]:
    return [(t.name, t.ne, t.type_id, t.size_bytes) for t in (model.tensors[i] for i in indexes)]


def _dense_gguf(model: GgufModel, indexes: list[int], content_digest: str) -> GgufLayout:
    first = model.first
    own = (BUNDLE_VERSION_KEY, CONTENT_DIGEST_KEY)  # a source may hold them if it was merged from a bundle by another tool
    entries = [first.entry(key) for key in first.keys if not key.startswith("split.") and key not in own]
    entries += [u32_entry(BUNDLE_VERSION_KEY, BUNDLE_VERSION), string_entry(CONTENT_DIGEST_KEY, content_digest)]
    return compose(first.version, first.alignment, entries, _tensor_list(model, indexes))


def _ple_gguf(model: GgufModel, indexes: list[int], gguf_tensors: int) -> GgufLayout:
    """A second split: llama.cpp wants `split.no` of every file but the first (llama-model-loader.cpp)."""
    first = model.first
    entries = [first.entry(key) for key in ("general.architecture", "general.alignment") if key in first.keys]
    entries += [
        u16_entry("split.no", 1),
        u16_entry("split.count", 2),
        i32_entry("split.tensors.count", gguf_tensors),
        u32_entry(BUNDLE_VERSION_KEY, BUNDLE_VERSION),
    ]
    return compose(first.version, first.alignment, entries, _tensor_list(model, indexes))


def _experts_files(found: tuple[ExpertLayer, ...], shard_bytes: int) -> tuple[tuple[LayerLayout, ...], tuple[int, ...]]:
    """Blobs layer after layer; a new file is begun where the next layer would not fit below `shard_bytes`."""
    layers: list[LayerLayout] = []
    ends = [PAGE_BYTES]
    for layer in found:
        offsets, stride = blob_layout([p.slice_bytes for p in layer.parts])
        size = stride * layer.n_expert
        if PAGE_BYTES + size > shard_bytes:
            raise UsageError(
                f"layer blk.{layer.layer} alone takes {PAGE_BYTES + size} bytes ({format_bytes(PAGE_BYTES + size)}), "
                f"more than --shard-size {shard_bytes}",
                hint=f"Use --shard-size {PAGE_BYTES + size} or more",
            )
        if ends[-1] + size > shard_bytes:
            ends.append(PAGE_BYTES)
        parts = tuple(BlobPart(p.role, p.tensor, o, p.slice_bytes) for p, o in zip(layer.parts, offsets, strict=True))
        layers.append(
            LayerLayout(layer.layer, layer.n_expert, layer.n_used, layer.is_mtp, len(ends) - 1, ends[-1], stride, parts)
        )
        ends[-1] += size
    return tuple(layers), tuple(ends)
