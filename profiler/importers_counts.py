"""`--from counts-json`: a profile from bare counts, `{"model", "fingerprint", "n_expert", "top_k", "tokens", "counts"}`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bel.formats.errors import BadInputError
from bel.formats.json_file import load_json_object
from bel.formats.manifest_fields import read_int, read_map, read_text
from bel.formats.profile import EQUAL, LayerStats, PhaseStats, Profile, Run, Workload
from bel.formats.profile_json import read_counts, read_layer
from bel.formats.trace_header import MAX_EXPERTS, TraceLayer


def read_counts_json(path: Path, workload: str) -> Profile:
    """A profile of one workload.  Bare counts do not tell phases: they stand under decode.  Raises BadInputError."""
    body = load_json_object(path, "file of counts")
    try:
        return _profile(body, workload)
    except KeyError as error:
        raise BadInputError(f"the counts lack the key {error}", path=str(path)) from None
    except (TypeError, ValueError, AttributeError) as error:
        raise BadInputError(f"the counts are not valid: {error}", path=str(path)) from None


def _profile(body: dict[str, Any], workload: str) -> Profile:
    n_expert, top_k, tokens = read_int(body, "n_expert"), read_int(body, "top_k"), read_int(body, "tokens")
    if not 1 <= n_expert <= MAX_EXPERTS or not 1 <= top_k <= n_expert:
        raise ValueError(f"top_k {top_k} of n_expert {n_expert} cannot be")
    rows = read_map(body, "counts")
    layers, stats = [], []
    for layer in sorted(map(read_layer, rows)):
        layers.append(TraceLayer(layer, n_expert, top_k, None))
        try:
            stats.append(_layer(read_counts(rows, str(layer), n_expert), tokens, top_k))
        except ValueError as error:
            raise ValueError(f"layer {layer}: {error}") from None
    if not layers:
        raise ValueError("they have no layers")
    run = Run(engine="", engine_build="", sampling={}, prompts=())
    return Profile(
        model_name=read_text(body, "model"),
        arch="",
        fingerprint=read_text(body, "fingerprint"),
        layers=tuple(layers),
        weighting=EQUAL,
        workloads=(Workload(workload, 1.0, tuple(stats), (run,)),),
    )


def _layer(counts: tuple[int, ...], tokens: int, top_k: int) -> LayerStats:
    if sum(counts) != tokens * top_k:
        raise ValueError(f"the counts add up to {sum(counts)}, not to tokens * top_k = {tokens * top_k}")
    if max(counts) > tokens:
        raise ValueError(f"expert {counts.index(max(counts))} is counted {max(counts)} times in {tokens} tokens")
    return LayerStats(PhaseStats(0, (0,) * len(counts)), PhaseStats(tokens, counts), {})
