"""What a model weighs, by where it can be: dense weights, per-layer embeddings, and the experts of each layer.

It needs headers only, so it works before a download is complete.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from bel.formats.bundle import is_bundle, open_bundle
from bel.formats.errors import BadInputError
from bel.formats.experts import find_experts, warnings
from bel.formats.experts_file import blob_layout
from bel.formats.gguf_model import GgufModel, open_model

_PLE_NAME = re.compile(r"^per_layer_token_embd(\.|_|$)")


@dataclass(frozen=True, slots=True)
class SlotLayer:
    """The experts of one layer.  A slot takes `stride_bytes`, of which `weights_bytes` are weights; `elements` of one expert.

    `top_k` is 1 where the metadata do not tell it.  `is_reached`: not an MTP block, which decoding never reaches.
    """

    layer: int
    n_expert: int
    top_k: int
    stride_bytes: int
    weights_bytes: int
    elements: int
    is_reached: bool

    @property
    def all_bytes(self) -> int:
        """Bytes of slots for all of its experts."""
        return self.n_expert * self.stride_bytes

    @property
    def bits(self) -> float:
        """Bits a weight."""
        return 8 * self.weights_bytes / self.elements


@dataclass(frozen=True, slots=True)
class Footprint:
    """A model's weights.  `dense_bytes` are all but routed experts and per-layer embeddings (`ple_bytes`).

    `input_bytes` of them are the table of token embeddings, which llama.cpp leaves in RAM; `is_tied`: the output uses the same
    table, and a GPU has a copy.  `metadata` holds the model's keys.
    """

    name: str
    metadata: GgufModel
    dense_bytes: int
    input_bytes: int
    is_tied: bool
    ple_bytes: int
    layers: tuple[SlotLayer, ...]
    notes: tuple[str, ...]

    @property
    def reached(self) -> tuple[SlotLayer, ...]:
        """The layers that decoding reaches."""
        return tuple(layer for layer in self.layers if layer.is_reached)

    @property
    def gpu_dense_bytes(self) -> int:
        """Bytes of the dense weights that a GPU holds when it has all layers."""
        return self.dense_bytes if self.is_tied else self.dense_bytes - self.input_bytes


def read_footprint(path: Path) -> Footprint:
    """The weights of a GGUF (any shard, its data may be missing) or of a bundle.

    Raises BadInputError for what is no model with experts, DamagedBundleError for a damaged manifest.
    """
    return _of_bundle(path) if is_bundle(path) else _of_gguf(path)


def _of_gguf(path: Path) -> Footprint:
    model = open_model(path, need_data=False)
    found = find_experts(model)
    stacks = {part.tensor for layer in found for part in layer.parts}
    dense = [(t.name, t.size_bytes) for i, t in enumerate(model.tensors) if i not in stacks]
    layers = tuple(
        SlotLayer(
            layer.layer,
            layer.n_expert,
            layer.n_used or 1,
            blob_layout([part.slice_bytes for part in layer.parts])[1],
            sum(part.slice_bytes for part in layer.parts),
            sum(_elements(model.tensors[part.tensor].ne) for part in layer.parts) // layer.n_expert,
            not layer.is_mtp,
        )
        for layer in found
    )
    notes = tuple(warnings(model, found))
    return _footprint(model.first.text("general.name") or path.name, model, dense, layers, notes)


def _of_bundle(path: Path) -> Footprint:
    bundle = open_bundle(path)
    manifest = bundle.manifest
    stacks = {part.tensor for layer in manifest.layers for part in layer.parts}
    dense = [(t.name, t.size_bytes) for i, t in enumerate(manifest.tensors) if i not in stacks]
    layers = tuple(
        SlotLayer(
            layer.layer,
            layer.n_expert,
            layer.n_used or 1,
            layer.stride_bytes,
            sum(part.size_bytes for part in layer.parts),
            sum(_elements(manifest.tensors[part.tensor].ne) for part in layer.parts) // layer.n_expert,
            not layer.is_mtp,
        )
        for layer in manifest.layers
    )
    notes = tuple(f"top-k of layer {x.layer} is not known: 1 is taken" for x in manifest.layers if x.n_used is None)
    model = open_model(bundle.path(manifest.dense.name), need_data=False)
    return _footprint(manifest.model_name or manifest.name, model, dense, layers, notes)


def _footprint(
    name: str, model: GgufModel, dense: list[tuple[str, int]], layers: tuple[SlotLayer, ...], notes: tuple[str, ...]
) -> Footprint:
    if not any(layer.is_reached for layer in layers):
        raise BadInputError("all experts are in MTP blocks: the file holds no model's trunk", path=str(model.first.path))
    sizes = dict(dense)
    ple = sum(size for tensor, size in dense if _PLE_NAME.match(tensor))
    return Footprint(
        name,
        model,
        sum(sizes.values()) - ple,
        sizes.get("token_embd.weight", 0),
        "output.weight" not in sizes,
        ple,
        layers,
        notes,
    )


def _elements(ne: tuple[int, ...]) -> int:
    count = 1
    for n in ne:
        count *= n
    return count
