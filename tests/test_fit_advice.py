"""The verdict of `bel-profile fit` and its advice, which keeps what it promises."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bel.formats.units import GIB, MIB, parse_bytes
from bel.profiler.fit import Fit, Question, memory_for, solve, spread
from bel.profiler.fit_words import advice, size_option, verdict
from bel.profiler.footprint import Footprint, read_footprint
from drawn_fits import fits
from fit_models import slot_model


def _at(model: Footprint, share: float, **question: Any) -> Fit:
    """The fit of a model in memory for a share of its experts."""
    first = solve(model, Question(0, GIB, **question))
    slots = [int(share * x.n_expert + 1e-9) for x in model.reached]
    return solve(model, dataclasses.replace(first.question, ram_bytes=memory_for(first, slots)))


def test_the_verdict_follows_the_resident_share(tmp_path: Path) -> None:
    model = read_footprint(slot_model(tmp_path, experts=100, blocks=4))
    assert "no longer the right policy" in verdict(_at(model, 0.149))
    assert "doubtful" in verdict(_at(model, 0.15))
    assert "doubtful" in verdict(_at(model, 0.199))
    assert "sound choice" in verdict(_at(model, 0.2))
    assert "one token cycle" in verdict(_at(model, 0.04))
    assert "one token cycle" not in verdict(_at(model, 0.05))
    whole = _at(model, 1.0)
    assert "Everything fits in RAM" in verdict(whole)
    assert advice(whole) == []


def test_the_verdict_with_a_gpu_says_what_was_measured(tmp_path: Path) -> None:
    model = read_footprint(slot_model(tmp_path, experts=100, blocks=40))
    first = solve(model, Question(GIB, 64 * GIB, 512))
    said = {}
    for slots in (14, 15, 19, 20, 50):
        vram = memory_for(first, (slots,) * 40)
        fit = solve(model, Question(vram, 64 * GIB, 512))
        assert fit.slots == (slots,) * 40
        said[slots] = verdict(fit)
    for slots in (20, 50):
        assert "bel-run --gpu tries the ways" in said[slots]
        assert "slowest of the pool's ways" in said[slots]
        assert "sound choice" not in said[slots]
    for slots in (15, 19):
        assert "doubtful" in said[slots]
    assert "no longer the right policy" in said[14]
    assert "lfu-decay:0.98 (bel-run's default) or LRU" in said[14]
    assert not any("repick" in words for words in said.values())


def test_what_does_not_fit_says_how_much_is_missing_and_what_would_help(tmp_path: Path) -> None:
    model = read_footprint(slot_model(tmp_path, blocks=4))
    fit = _at(model, 0.09)  # the floor is 0.1
    assert not fit.fits
    assert sum(fit.slots) == 0
    assert "Does not fit" in verdict(fit)
    assert "LRU hits nothing" in verdict(fit)
    words = " ".join(advice(fit))
    assert "--kv q8_0" in words
    assert "--context 4096" in words
    assert "for the floor" in words


def test_advised_memory_is_the_least_that_works(tmp_path: Path) -> None:
    model = read_footprint(slot_model(tmp_path))
    for vram in (0, GIB, 64 * GIB):
        first = solve(model, Question(vram, 64 * GIB))
        need = memory_for(first, spread(model.reached, 0))
        change = {"vram_bytes": need} if vram else {"ram_bytes": need}
        less = {name: size - 1 for name, size in change.items()}
        assert solve(model, dataclasses.replace(first.question, **change)).fits
        assert not solve(model, dataclasses.replace(first.question, **less)).fits


def test_an_advised_size_can_be_copied_into_the_command(tmp_path: Path) -> None:
    model = read_footprint(slot_model(tmp_path, experts=64, blocks=40))
    for vram in (0, 40 * MIB):
        ram = memory_for(solve(model, Question(0, GIB, 256)), (32,) * 40)
        fit = solve(model, Question(vram, ram, 256))
        assert 0 < fit.resident_fraction < 1
        (words,) = [w for w in advice(fit) if w.startswith("More memory")]
        (size,) = re.findall(r"(\S+) for all experts", words)
        change = {"vram_bytes" if vram else "ram_bytes": parse_bytes(size)}
        assert solve(model, dataclasses.replace(fit.question, **change)).resident_fraction == 1


SHARES = {"the floor": 0.0, "20 % of the experts": 0.2, "50 % of the experts": 0.5, "all experts": 1.0}


def _advised(fit: Fit, start: str) -> dict[str, int]:
    """The sizes of a line of advice, each with what it is for."""
    lines = [words for words in advice(fit) if words.startswith(start)]
    return {aim: parse_bytes(size) for words in lines for size, aim in re.findall(rf"(\S+) for ({'|'.join(SHARES)})", words)}


@given(fit=fits())
def test_every_advised_size_reaches_what_it_promised(fit: Fit) -> None:
    free = dataclasses.replace(fit.question, slots_bytes=None)
    name = "vram_bytes" if fit.is_gpu else "ram_bytes"
    for aim, size in _advised(fit, "More memory").items():
        again = solve(fit.model, dataclasses.replace(free, **{name: size}))
        assert size > fit.memory_bytes
        assert again.fits
        assert again.resident_fraction >= SHARES[aim]
        if SHARES[aim] == 1:
            assert "Everything fits" in verdict(again)
        elif SHARES[aim]:
            assert "doubtful" not in verdict(again)
            assert "no longer the right policy" not in verdict(again)
    for words in advice(fit):
        for size in re.findall(r"--ram (\S+) holds all experts", words):
            again = solve(fit.model, dataclasses.replace(fit.question, ram_bytes=parse_bytes(size)))
            assert again.on_disk_bytes == 0


def test_advice_tells_every_share_that_is_not_reached(tmp_path: Path) -> None:
    model = read_footprint(slot_model(tmp_path, experts=100, blocks=4))
    assert list(_advised(_at(model, 0.19), "More memory")) == ["20 % of the experts", "50 % of the experts", "all experts"]
    assert list(_advised(_at(model, 0.2), "More memory")) == ["50 % of the experts", "all experts"]
    assert "the floor" in _advised(_at(model, 0.01), "More memory")


def test_advice_on_a_question_with_slots_says_to_leave_them_out(tmp_path: Path) -> None:
    model = read_footprint(slot_model(tmp_path, experts=100, blocks=4))
    fit = _at(model, 0.1)
    (words,) = [w for w in advice(solve(model, dataclasses.replace(fit.question, slots=8))) if w.startswith("More memory")]
    assert words.endswith("(without --slots).")
    assert not any("without --slots" in w for w in advice(fit))


@given(count=st.integers(1, 2**45))
def test_a_size_as_an_option_is_never_less(count: int) -> None:
    shown = parse_bytes(size_option(count))
    assert count <= shown <= count + max(MIB, GIB // 10 + 1)


def test_more_ram_takes_what_is_on_the_disk(tmp_path: Path) -> None:
    model = read_footprint(slot_model(tmp_path, experts=64, blocks=40))
    fit = solve(model, Question(40 * MIB, 2 * MIB, 256))
    assert fit.on_disk_bytes > 0
    (words,) = [w for w in advice(fit) if w.startswith("More RAM")]
    (size,) = re.findall(r"--ram (\S+)", words)
    assert solve(model, dataclasses.replace(fit.question, ram_bytes=parse_bytes(size))).on_disk_bytes == 0


def test_fewer_slots_than_fit_are_taken_and_said(tmp_path: Path) -> None:
    model = read_footprint(slot_model(tmp_path))
    fit = solve(model, Question(0, GIB, slots=8))
    assert fit.slots == (8, 8)
    assert advice(fit)[0].startswith("More fits than was asked for: 40 slots")


def test_advice_is_what_the_changed_question_gives(tmp_path: Path) -> None:
    model = read_footprint(slot_model(tmp_path, experts=200, blocks=8))
    fit = _at(model, 0.1)
    now = fit.slots[0]
    for change, start in (({"cache_type": "q8_0"}, "--kv q8_0"), ({"context": 4096}, "--context 4096")):
        better = solve(model, dataclasses.replace(fit.question, **change))
        (words,) = [w for w in advice(fit) if w.startswith(start)]
        assert f"{better.slots[0]} slots in each layer instead of {now}" in words
        assert better.slots[0] > now


def test_without_the_gpu_is_advised_only_where_it_helps(tmp_path: Path) -> None:
    model = read_footprint(slot_model(tmp_path))
    small = solve(model, Question(1 * MIB, GIB))
    assert any("--vram 0" in words for words in advice(small))
    assert not any("--vram 0" in words for words in advice(solve(model, Question(1 * MIB, 1 * MIB))))
