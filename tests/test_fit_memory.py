"""What `bel-profile fit` counts against the memory that there is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hypothesis import given

from bel.formats.experts_file import LayerLayout
from bel.formats.units import GIB, MIB
from bel.profiler.fit import PROCESS_BYTES, Fit, Question, memory_for, solve
from bel.profiler.fit_json import fit_json
from bel.profiler.footprint import read_footprint
from bel.runtime.slot_budget import PREFETCH_BYTES, ahead_bytes, fitting_slots
from drawn_fits import fits
from fit_models import slot_model


def test_a_stage_is_counted_where_a_prompt_needs_one(tmp_path: Path) -> None:
    """In VRAM alone, and not where all experts have slots; more memory never gives fewer slots."""
    model = read_footprint(slot_model(tmp_path, experts=64, blocks=40))
    whole = solve(model, Question(64 * GIB, GIB, 256))
    assert (whole.resident_fraction, whole.stage_bytes) == (1, 0)
    assert solve(model, Question(0, 140 * MIB, 256)).stage_bytes == 0
    layer = 64 * model.reached[0].weights_bytes
    assert solve(model, Question(64 * GIB, GIB, 256, slots=63)).stage_bytes == layer
    assert solve(model, Question(64 * GIB, GIB, 256, slots_bytes=whole.experts_bytes - 1)).stage_bytes == layer
    before = -1
    for vram in range(20 * MIB, 2 * memory_for(whole, whole.slots), MIB):
        fit = solve(model, Question(vram, GIB, 256))
        assert fit.stage_bytes == (0 if fit.resident_fraction == 1 else layer)
        assert sum(fit.slots) >= before
        before = sum(fit.slots)


@given(fit=fits())
def test_memory_less_the_terms_of_the_json_is_what_is_left(fit: Fit) -> None:
    answer = fit_json(fit, "", [])
    terms = ("gpu_dense", "kv", "kv_padding", "state", "compute", "margin", "stage", "call", "slots")
    memory = answer["vram_bytes"] or answer["ram_bytes"]
    assert answer["left_bytes"] == memory - sum(answer[f"{term}_bytes"] for term in terms)
    assert answer["dense_bytes"] == fit.model.dense_bytes
    moved = answer["input_bytes"]
    assert moved == (fit.model.input_bytes if fit.is_gpu else 0)
    assert answer["gpu_dense_bytes"] == answer["dense_bytes"] - (0 if fit.model.is_tied else moved)
    if fit.question.slots_bytes is None:
        assert answer["left_for_slots_bytes"] == max(0, answer["left_bytes"] + answer["slots_bytes"])


def test_more_memory_never_gives_fewer_slots(tmp_path: Path) -> None:
    model = read_footprint(slot_model(tmp_path, blocks=8))
    totals = [sum(solve(model, Question(0, ram)).slots) for ram in range(100 * MIB, 400 * MIB, 500_000)]
    assert totals == sorted(totals)
    assert sum(0 < n < 320 for n in totals) > 0


def test_without_a_gpu_the_sum_is_that_of_a_run(tmp_path: Path) -> None:
    """At no size more slots than `bel-run --ram` finds room for with the same dense weights and caches."""
    model = read_footprint(slot_model(tmp_path, experts=64, blocks=12))
    layers = [LayerLayout(x.layer, x.n_expert, x.top_k, False, 0, 0, x.stride_bytes, ()) for x in model.reached]
    some = 0
    for ram in range(20 * MIB, 300 * MIB, MIB):
        fit = solve(model, Question(0, ram, 512))
        if not fit.fits:
            continue
        other = PROCESS_BYTES + fit.dense_bytes + fit.caches.total_bytes + fit.compute_bytes
        ahead = ahead_bytes(PREFETCH_BYTES, ram)
        found = fitting_slots(layers, other, ram, 512, ahead)  # raises where nothing fits
        assert all(a <= b for a, b in zip(fit.slots, found, strict=True))
        some += 0 < fit.resident_fraction < 1
    assert some


def test_the_experts_of_one_call_are_counted(tmp_path: Path) -> None:
    """Of large experts they are more than the margin: a run was refused that fit had said yes to."""
    small = read_footprint(slot_model(tmp_path, experts=64, blocks=12))
    large = tuple(dataclasses.replace(x, stride_bytes=64 * MIB) for x in small.layers)
    model = dataclasses.replace(small, layers=large)
    fit = solve(model, Question(0, 16 * GIB, 512))
    (count,) = set(fit.slots)
    assert fit.call_bytes == (64 - count + 1) * 64 * MIB, "all others of one layer, and one read ahead"
    assert fit.left_bytes >= 0
