"""How many slots `bel-profile fit` gives, and what it says of a number that was asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bel.formats.units import GIB
from bel.profiler.fit import Question, largest_slots, least_slots, memory_for, slots_bytes, solve, spread
from bel.profiler.footprint import SlotLayer, read_footprint
from drawn_fits import layer_lists
from fit_answers import fit_answer, run_fit
from fit_models import slot_model


@given(layers=layer_lists, room=st.integers(-1, 6 * 64 * 5 * 4096))
def test_the_largest_number_of_slots_is_the_largest(layers: list[SlotLayer], room: int) -> None:
    fitting = [n for n in range(1, 65) if slots_bytes(layers, spread(layers, n)) <= room]
    found = largest_slots(layers, room, lambda _: 0)
    if not fitting:
        assert found == 0
    else:
        assert slots_bytes(layers, spread(layers, found)) <= room
        assert spread(layers, found) == spread(layers, max(fitting))


@given(layers=layer_lists, share=st.sampled_from([0.15, 0.2, 0.5, 1.0]))
def test_the_least_slots_of_a_share_are_the_least(layers: list[SlotLayer], share: float) -> None:
    experts = sum(x.n_expert for x in layers)
    enough = [n for n in range(1, 65) if sum(spread(layers, n)) / experts >= share]
    assert spread(layers, least_slots(layers, share)) == spread(layers, min(enough))


def test_more_slots_than_fit_is_an_error_that_names_how_many_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = slot_model(tmp_path)
    budget = 2 * 7 * 8192 + 8191
    status, out, err = run_fit(capsys, path, "--vram", "1G", "--ram", "1G", "--slots", 8, "--slots-bytes", budget, "--json")
    assert (status, out) == (2, "")
    assert re.search(r"slots that fits is 7\b", err)
    answer, err = fit_answer(capsys, path, "--vram", "1G", "--ram", "1G", "--slots-bytes", budget)
    assert answer["slots_per_layer"] == {"0": 7, "1": 7}
    assert err == ""
    answer, _ = fit_answer(capsys, path, "--vram", "1G", "--ram", "1G", "--slots", 7, "--slots-bytes", budget)
    assert answer["slots_total"] == 14


def test_slots_that_do_not_fit_in_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = slot_model(tmp_path, blocks=4)
    model = read_footprint(path)
    free = solve(model, Question(0, GIB))
    ram = memory_for(free, (10,) * 4)
    answer, _ = fit_answer(capsys, path, "--ram", ram)
    assert answer["slots_per_layer"] == dict.fromkeys("0123", 10)
    status, _, err = run_fit(capsys, path, "--ram", ram, "--slots", 11)
    assert status == 2
    assert re.search(r"slots that fits is 10\b", err)


def test_the_largest_number_that_fits_may_be_all_since_then_there_is_no_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = slot_model(tmp_path)
    first = solve(read_footprint(path), Question(GIB, GIB))
    sizes = ("--vram", memory_for(first, first.slots), "--ram", "1G")
    most = {n: run_fit(capsys, path, *sizes, "--slots", n) for n in range(4, 41)}
    refused = [n for n, (status, _, _) in most.items() if status]
    assert refused == list(range(refused[0], 40))
    for n in refused:
        assert most[n][0] == 2
        assert re.search(r"slots that fits is 40\b", most[n][2])
        if refused[0] > 4:
            assert f"at most {refused[0] - 1} fit" in most[n][2]
    less = ("--vram", memory_for(first, first.slots) - 1, "--ram", "1G")
    assert not re.search(r"slots that fits is 40\b", run_fit(capsys, path, *less, "--slots", refused[0])[2])


def test_asked_for_slots_where_not_even_top_k_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run_fit(capsys, slot_model(tmp_path), "--ram", "1M", "--slots", 4)
    assert status == 2
    assert "Not even top-4" in err


def test_slots_below_top_k_and_above_the_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = slot_model(tmp_path)
    status, _, err = run_fit(capsys, path, "--ram", "1G", "--slots", 3)
    assert status == 2
    assert "top-4" in err
    answer, err = fit_answer(capsys, path, "--ram", "1G", "--slots", 99)
    assert answer["slots_per_layer"] == {"0": 40, "1": 40}
    assert re.search(r"\b40 experts\b", err)
    assert answer["resident_fraction"] == 1


def test_a_budget_below_the_floor_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = slot_model(tmp_path)
    floor = 2 * 4 * 8192
    status, _, err = run_fit(capsys, path, "--ram", "1G", "--slots-bytes", floor - 1)
    assert status == 2
    assert str(floor) in err
    answer, _ = fit_answer(capsys, path, "--ram", "1G", "--slots-bytes", floor)
    assert answer["slots_total"] == 8


def test_a_budget_above_what_is_left_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = slot_model(tmp_path, blocks=4)
    ram = memory_for(solve(read_footprint(path), Question(0, GIB)), (10,) * 4)
    answer, err = fit_answer(capsys, path, "--ram", ram, "--slots-bytes", "1G")
    assert answer["slots_per_layer"] == dict.fromkeys("0123", 10)
    assert "--slots-bytes" in err
