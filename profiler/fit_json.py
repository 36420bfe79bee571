"""The answer of a fit as the object that `--json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bel.profiler.fit import Fit


def fit_json(fit: Fit, verdict: str, advice: Sequence[str]) -> dict[str, Any]:
    """The object that `--json` prints: the keys of every fit, then what explains them.

    `left_bytes` = VRAM (without a GPU RAM) - `gpu_dense_bytes` - `kv_bytes` - `kv_padding_bytes` - `state_bytes` -
    `compute_bytes` - `margin_bytes` - `stage_bytes` - `slots_bytes`.  `dense_bytes` are all dense weights; `input_bytes` the
    embeddings that are in RAM beside a GPU, 0 without one, where they are part of `gpu_dense_bytes` as all of them.
    """
    layers = fit.model.reached
    return {
        "vram_bytes": fit.question.vram_bytes,
        "ram_bytes": fit.question.ram_bytes,
        "dense_bytes": fit.model.dense_bytes,
        "gpu_dense_bytes": fit.dense_bytes,
        "input_bytes": fit.model.input_bytes if fit.is_gpu else 0,
        "kv_bytes": fit.caches.kv_bytes,
        "compute_bytes": fit.compute_bytes,
        "slots_total": sum(fit.slots),
        "slots_per_layer": {str(x.layer): n for x, n in zip(layers, fit.slots, strict=True)},
        "resident_fraction": fit.resident_fraction,
        "verdict": verdict,
        "advice": list(advice),
        "fits": fit.fits,
        "context": fit.question.context,
        "kv_type": fit.question.cache_type,
        "kv_padding_bytes": fit.caches.padding_bytes,
        "state_bytes": fit.caches.state_bytes,
        "margin_bytes": fit.margin_bytes,
        "stage_bytes": fit.stage_bytes,
        "call_bytes": fit.call_bytes,
        "ple_bytes": fit.model.ple_bytes,
        "slots_bytes": fit.slots_bytes,
        "floor_bytes": fit.floor_bytes,
        "left_for_slots_bytes": max(fit.room_bytes, 0),
        "left_bytes": fit.left_bytes,
        "experts_in_ram_bytes": fit.in_ram_bytes,
        "experts_on_disk_bytes": fit.on_disk_bytes,
        "expert_bytes": {str(x.layer): x.weights_bytes for x in fit.model.layers},
        "expert_stride_bytes": {str(x.layer): x.stride_bytes for x in fit.model.layers},
    }
