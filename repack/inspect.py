"""What a GGUF or a bundle holds, as one answer: the keys of `--json`, which the tables are made of too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bel.formats.experts_file import LayerLayout, token_cycle_bytes, weights_bytes
from bel.formats.gguf_model import GgufModel
from bel.formats.manifest import Manifest
from bel.repack.digests import SliceDigests
from bel.repack.layout import Layout
from bel.repack.spans import Kind, Placed, gguf_spans
from bel.repack.stream import MAX_HASHED_HOLE_BYTES, sparse_bytes
from bel.repack.walk import FileWalk, counter, source_shrank


def describe_layout(model: GgufModel, layout: Layout) -> dict[str, Any]:
    """What the bundle of a GGUF would hold.  Digests are None: nothing was read but headers."""
    return {
        "model": {
            "name": model.first.text("general.name"),
            "arch": model.arch,
            "sources": [{"name": h.path.name, "bytes": h.file_bytes, "sha256": None} for h in model.files],
        },
        **_describe_layers(layout.layers, [t.name for t in model.tensors]),
        "dense_bytes": layout.dense.size_bytes,
        "ple_bytes": layout.ple.size_bytes if layout.ple else 0,
        **_describe_experts(layout.layers, sum(layout.experts_bytes)),
        "content_digest": None,
    }


def describe_manifest(manifest: Manifest) -> dict[str, Any]:
    """What a bundle holds, from its manifest."""
    return {
        "model": {
            "name": manifest.model_name,
            "arch": manifest.arch,
            "sources": [{"name": s.name, "bytes": s.size_bytes, "sha256": s.sha256} for s in manifest.sources],
        },
        **_describe_layers(manifest.layers, [t.name for t in manifest.tensors]),
        "dense_bytes": manifest.dense.size_bytes,
        "ple_bytes": manifest.ple.size_bytes if manifest.ple else 0,
        **_describe_experts(manifest.layers, sum(row.size_bytes for row in manifest.experts)),
        "content_digest": manifest.content_digest,
    }


def _describe_layers(layers: tuple[LayerLayout, ...], tensor_names: list[str]) -> dict[str, Any]:
    return {
        "moe_layers": [layer.layer for layer in layers],
        "mtp_layers": [layer.layer for layer in layers if layer.is_mtp],
        "n_experts_by_layer": {str(layer.layer): layer.n_expert for layer in layers},
        "n_expert_used_by_layer": {str(layer.layer): layer.n_used for layer in layers},
        "routed_expert_tensors": [tensor_names[part.tensor] for layer in layers for part in layer.parts],
        "expert_stride_bytes": {str(layer.layer): layer.stride_bytes for layer in layers},
    }


def _describe_experts(layers: tuple[LayerLayout, ...], experts_bytes: int) -> dict[str, Any]:
    return {
        "experts_bytes": experts_bytes,
        "padding_bytes": experts_bytes - weights_bytes(layers),
        "token_cycle_bytes": token_cycle_bytes(layers),
    }


def digest_model(model: GgufModel, progress: Callable[[str, int, int], None]) -> tuple[str, list[str | None]]:
    """Read every byte of a GGUF model: its content digest, and the SHA-256 of each file (None for one that is mostly holes)."""
    digests = SliceDigests()
    advance = counter(progress, "digest", sum(h.file_bytes for h in model.files))
    sums: list[str | None] = []
    for number, header in enumerate(model.files):
        placed = [Placed(i, t.ne, t.start_bytes, t.size_bytes) for i, t in enumerate(model.tensors) if t.source == number]
        spans = gguf_spans(header.data_start_bytes, placed, header.file_bytes)
        hashed = sparse_bytes(header.path, header.file_bytes) <= MAX_HASHED_HOLE_BYTES
        with FileWalk(header.path, header.file_bytes, spans, advance, sha256=hashed, short_read=source_shrank) as walk:
            for piece, data in walk:
                if piece.span.kind is Kind.SLICE:
                    digests.add(piece, data)
        sums.append(walk.sha256)
    return digests.content(model), sums
