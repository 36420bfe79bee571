"""What `bel-profile fit` counts against the memory that there is."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given

from bel.formats.units import GIB, MIB
from bel.profiler.fit import Fit, Question, memory_for, solve
from bel.profiler.fit_json import fit_json
from bel.profiler.footprint import read_footprint
from drawn_fits import fits
from fit_models import slot_model


def test_a_stage_is_counted_where_a_prompt_needs_one(tmp_path: Path) -> None:
    """In VRAM alone, and not where all experts have slots; more memory never gives fewer slots."""
    model = read_footprint(slot_model(tmp_path, experts=64, blocks=40))
    whole = solve(model, Question(64 * GIB, GIB, 256))
    assert (whole.resident_fraction, whole.stage_bytes) == (1, 0)
    assert solve(model, Question(0, 45 * MIB, 256)).stage_bytes == 0
    layer = 64 * model.reached[0].weights_bytes
    assert solve(model, Question(64 * GIB, GIB, 256, slots=63)).stage_bytes == layer
    assert solve(model, Question(64 * GIB, GIB, 256, slots_bytes=whole.experts_bytes - 1)).stage_bytes == layer
    before = -1
    for vram in range(20 * MIB, 2 * memory_for(whole, whole.experts_bytes), MIB):
        fit = solve(model, Question(vram, GIB, 256))
        assert fit.stage_bytes == (0 if fit.resident_fraction == 1 else layer)
        assert sum(fit.slots) >= before
        before = sum(fit.slots)


@given(fit=fits())
def test_memory_less_the_terms_of_the_json_is_what_is_left(fit: Fit) -> None:
    answer = fit_json(fit, "", [])
    terms = ("gpu_dense", "kv", "kv_padding", "state", "compute", "margin", "stage", "slots")
    memory = answer["vram_bytes"] or answer["ram_bytes"]
    assert answer["left_bytes"] == memory - sum(answer[f"{term}_bytes"] for term in terms)
    assert answer["dense_bytes"] == fit.model.dense_bytes
    moved = answer["input_bytes"]
    assert moved == (fit.model.input_bytes if fit.is_gpu else 0)
    assert answer["gpu_dense_bytes"] == answer["dense_bytes"] - (0 if fit.model.is_tied else moved)
    if fit.question.slots_bytes is None:
        assert answer["left_for_slots_bytes"] == max(0, answer["left_bytes"] + answer["slots_bytes"])


def test_more_memory_never_gives_fewer_slots(tmp_path: Path) -> None:
    model = read_footprint(slot_model(tmp_path))
    totals = [sum(solve(model, Question(0, ram)).slots) for ram in range(0, 200 * MIB, 500_000)]
    assert totals == sorted(totals)
    assert sum(0 < n < 80 for n in totals) > 0
