"""The report: its numbers against plain replays, what it says of profiles, and the command and page."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bel.formats.console import run_command
from bel.formats.errors import BadInputError
from bel.formats.profile_json import encode_profile
from bel.formats.trace import DECODE, PROMPT
from bel.formats.trace_calls import LayerCalls, read_trace
from bel.formats.trace_header import TraceLayer
from bel.profiler import table_cli
from bel.profiler.answers import Rates, Report, WorkloadAnswer
from bel.profiler.measure import View, measure
from bel.profiler.report import make_report, report_json
from bel.profiler.report_cli import report_command
from bel.profiler.report_tables import all_tables
from bel.profiler.summarize import summarize
from bel.profiler.verdicts import verdicts
from html_page import Page, self_contained
from routes import write_trace

PROMPTS = [(20, 60), (30, 50), (10, 80), (25, 40)]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Code and chat, with different hot experts."""
    folder = tmp_path_factory.mktemp("traces")
    code = write_trace(folder / "code.trace", "code", PROMPTS, hot=0, seed=1)
    return code, write_trace(folder / "chat.trace", "chat", PROMPTS, hot=8, seed=2)


def report(*paths: Path, phase: str = "decode", one_by_one: bool = False) -> Report:
    return make_report(measure(paths, View(phase, one_by_one)))


def lru_rate(layers: tuple[LayerCalls, ...], slots: int, phases: tuple[int, ...]) -> float:
    """A plain list, from the least to the most recent, in every layer."""
    hits = accesses = 0
    for layer in layers:
        cache: list[int] = []
        for c, phase in enumerate(layer.phase):
            used = layer.ids[layer.row_start[c] : layer.row_start[c + 1]].ravel().tolist()
            cache = cache[-slots:]
            if phase in phases:
                hits += len(set(cache) & set(used))
                accesses += len(set(used))
            for e in used:
                cache = [x for x in cache if x != e] + [e]
    return hits / accesses


def test_rates_are_those_of_a_plain_replay(traces: tuple[Path, Path]) -> None:
    work = report(*traces).workloads[0]
    layers = read_trace(traces[0]).layers
    assert [r.slots for r in work.curve] == list(range(2, 17))
    for rates in (work.curve[0], *work.sizes):
        assert rates.lru == pytest.approx(lru_rate(layers, rates.slots, (DECODE,)))
        assert rates.random == rates.slots / 16
    chosen = [x.ids[np.repeat(x.phase == DECODE, x.rows_per_call)].ravel() for x in layers]
    best = sum(int(np.sort(np.bincount(c, minlength=16))[-8:].sum()) for c in chosen)
    assert work.half.static_in_sample == pytest.approx(best / sum(len(c) for c in chosen))
    assert (work.tokens, work.prompt_tokens, work.decode_tokens, work.split) == (230, 85, 230, "prompts")


def test_the_order_of_policies(traces: tuple[Path, Path]) -> None:
    for work in report(*traces).workloads:
        for rates in work.curve:
            assert rates.lru is not None and rates.belady is not None and rates.static_in_sample is not None
            assert rates.lru <= rates.belady
            assert (rates.static_held_out or 0) <= rates.static_in_sample + 0.05
        assert (work.half.static_held_out or 0) > 0.5 + 0.05  # the draw has hot experts
        assert work.curve[-1].belady == work.curve[-1].lru  # with room for all


def test_prompts_are_counted_apart(traces: tuple[Path, Path]) -> None:
    layers = read_trace(traces[0]).layers
    for phase, phases in (("prompt", (PROMPT,)), ("all", (PROMPT, DECODE))):
        work = report(traces[0], phase=phase).workloads[0]
        assert work.half.lru == pytest.approx(lru_rate(layers, 8, phases))
        assert work.tokens == {"prompt": 85, "all": 315}[phase]


def test_prompts_one_token_at_a_time(tmp_path: Path) -> None:
    """The view is that of a trace in which the prompts came token by token."""
    whole = write_trace(tmp_path / "a.trace", "code", [(24, 5), (16, 5)], seed=4, ubatch=8)
    calls = read_trace(whole).layers
    seen = report(whole, phase="prompt", one_by_one=True).workloads[0]
    assert seen.tokens == 40
    assert seen.half.static_in_sample == pytest.approx(
        sum(_top_half(x.ids[np.repeat(x.phase == PROMPT, x.rows_per_call)]) for x in calls) / (40 * 2 * 2)
    )
    assert seen.half.lru is not None
    assert seen.half.lru != report(whole, phase="prompt").workloads[0].half.lru


def _top_half(ids: Any) -> int:
    return int(np.sort(np.bincount(ids.ravel(), minlength=16))[-8:].sum())


def test_a_profile_gives_the_numbers_that_it_holds(traces: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "both.json"
    path.write_bytes(encode_profile(summarize(list(traces)).profile))
    full, short = report(*traces), report(path)
    for a, b in zip(full.workloads, short.workloads, strict=True):
        assert (a.name, a.tokens, a.top_share, a.entropy, a.repeat_share, a.cold_share) == (
            b.name,
            b.tokens,
            b.top_share,
            b.entropy,
            b.repeat_share,
            b.cold_share,
        )
        for x, y in zip(a.curve, b.curve, strict=True):
            assert (x.lru, x.static_in_sample, x.random, x.bytes) == (y.lru, y.static_in_sample, y.random, y.bytes)
            assert (y.belady, y.static_held_out) == (None, None)
        assert (b.enough, b.segments, b.split) == ((), (), None)
    assert full.pairs == short.pairs
    assert full.transfer is not None and short.transfer is not None
    assert (full.transfer.held_out, short.transfer.held_out) == (True, False)
    assert (full.missing, len(short.missing)) == ((), 1)
    assert "code, chat: from a profile; Belady" in short.missing[0]


def test_a_profile_of_prompts_does_not_tell_how_calls_share_experts(traces: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "both.json"
    path.write_bytes(encode_profile(summarize(list(traces)).profile))
    work = report(path, phase="prompt").workloads[0]
    assert work.half.static_in_sample is None
    assert work.half.lru == report(traces[0], phase="prompt").workloads[0].half.lru
    alone = report(path, phase="prompt", one_by_one=True).workloads[0]
    assert alone.half.lru is None
    assert alone.half.static_in_sample == report(traces[0], phase="prompt", one_by_one=True).workloads[0].half.static_in_sample


def test_a_workload_in_a_trace_and_a_profile_is_taken_from_the_trace(traces: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "code.json"
    path.write_bytes(encode_profile(summarize([traces[0]]).profile))
    measured = measure([path, *traces], View())
    assert [w.name for w in measured.workloads] == ["code", "chat"]
    assert all(w.is_traced for w in measured.workloads)
    assert measured.notes == (f"{path}: workload code is shown from its traces",)
    twice = measure([path, path], View())
    assert [w.name for w in twice.workloads] == ["code", "code-2"]


def test_traces_of_one_workload_are_pooled_and_split_by_run(tmp_path: Path) -> None:
    paths = [write_trace(tmp_path / f"{i}.trace", "code", [(8, 40), (8, 40)], seed=i) for i in range(3)]
    work = report(*paths).workloads[0]
    assert (work.split, work.tokens, len(work.files)) == ("runs", 240, 3)
    rates = [report(p).workloads[0].half.lru or 0 for p in paths]
    assert work.half.lru == pytest.approx(sum(rates) / 3)  # each from an empty cache, of equal length


def test_another_model_is_refused(traces: tuple[Path, Path], tmp_path: Path) -> None:
    other = write_trace(tmp_path / "other.trace", "chat", PROMPTS, model="another")
    with pytest.raises(BadInputError, match="another"):
        measure([traces[0], other], View())


@pytest.mark.parametrize("content", [b"", b"GGUF0000", b"{}", b"[1, 2]"])
def test_a_file_that_is_neither_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match="profile"):
        measure([path], View())


def test_layers_of_different_size_keep_their_proportion(tmp_path: Path) -> None:
    layers = (TraceLayer(1, 32, 4, 10), TraceLayer(3, 8, 2, 100))
    path = write_trace(tmp_path / "a.trace", "code", PROMPTS, layers=layers)
    work = report(path).workloads[0]
    assert [r.slots for r in work.curve] == list(range(4, 33))
    assert [r.bytes for r in work.curve][:5] == [240, 250, 260, 270, 280]  # the smaller layer never has less than its top-k
    assert work.half.bytes == 16 * 10 + 4 * 100
    assert [x.half.slots for x in work.layers] == [16, 4]
    assert work.flat_share == pytest.approx((3 / 32 + 1 / 8) / 2)


@pytest.mark.parametrize(("n_expert", "top_k", "half"), [(1, 1, 1), (5, 1, 2), (5, 4, 4), (7, 2, 3), (8, 8, 8)])
def test_half_of_few_or_of_an_odd_number_of_experts(tmp_path: Path, n_expert: int, top_k: int, half: int) -> None:
    path = write_trace(tmp_path / "a.trace", "code", PROMPTS, layers=(TraceLayer(0, n_expert, top_k, None),))
    work = report(path).workloads[0]
    assert (work.half.slots, work.layers[0].half.slots) == (half, half)
    assert work.half.lru == work.layers[0].half.lru


def test_how_many_tokens_are_enough(traces: tuple[Path, Path]) -> None:
    rows = report(*traces).workloads[0].enough
    assert [(e.tokens, e.is_whole) for e in rows] == [(100, False), (115, True)]
    whole = report(*traces).workloads[0].half
    assert (rows[-1].hit_rate, rows[-1].top_half_overlap) == (whole.static_held_out, 1.0)


def test_transfer_and_overlap_of_work_with_other_hot_experts(traces: tuple[Path, Path]) -> None:
    found = report(*traces)
    assert found.transfer is not None
    (own, to_chat), (to_code, chat) = found.transfer.miss_rates
    assert own is not None and to_chat is not None and to_code is not None and chat is not None
    assert to_chat > own + 0.2 and to_code > chat + 0.2
    assert (found.pairs[0].top_half_overlap or 1) < 0.4
    assert found.transfer.worst_regret == max(r for r in found.transfer.regrets if r is not None)
    same = report(traces[0], traces[0])  # one workload twice is one workload
    assert (len(same.workloads), same.transfer, same.pairs) == (1, None, ())


@pytest.mark.parametrize("prompts", [[], [(0, 1)], [(9, 0)], [(1, 1)], [(3, 2), (0, 2)]])
@pytest.mark.parametrize("phase", ["decode", "prompt", "all"])
def test_short_and_empty_work_gives_no_nan_and_no_error(tmp_path: Path, prompts: list[tuple[int, int]], phase: str) -> None:
    path = write_trace(tmp_path / "a.trace", "code", prompts)
    other = write_trace(tmp_path / "b.trace", "chat", [(20, 20)])
    for paths in ([path], [path, other]):
        found = report(*paths, phase=phase)
        json.dumps(report_json(found), allow_nan=False)
        assert "nan" not in "".join(cell for t in all_tables(found) for row in t.rows for cell in row)
        words = " ".join(a for v in verdicts(found) for a in v.answers)
        assert "nan" not in words and "None" not in words
        if not found.workloads[0].tokens:
            assert found.missing[0].startswith("code: no ")


def test_work_without_decode_tokens_names_the_other_phase(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "a.trace", "code", [(9, 0)])
    assert report(path).missing == ("code: no decode tokens; --phase prompt shows the 9 prompt tokens",)


def rates(**changes: float | None) -> dict[str, float | None]:
    return {"random": 0.5, "static_held_out": 0.7, "static_in_sample": 0.75, "lru": 0.75, "belady": 0.9} | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lru": 0.8}, "LRU is 10.0 points better than the static set."),
        ({"lru": 0.69}, "The static set is 1.0 point better than LRU."),
        ({"lru": 0.702}, "LRU and a static set are level."),
        ({"static_held_out": 0.54}, "A static set is pointless here: it hardly beats a random one."),
        ({"static_held_out": None, "belady": None}, "a static set 75.0 % in-sample; a random set 50.0 %."),
    ],
)
def test_the_words_follow_the_numbers(traces: tuple[Path, Path], changes: dict[str, float | None], words: str) -> None:
    from dataclasses import replace

    found = report(traces[0])
    half = Rates(slots=8, fraction=0.5, bytes=None, **rates(**changes))
    work: WorkloadAnswer = replace(found.workloads[0], sizes=(half,))
    answers = [a for v in verdicts(replace(found, workloads=(work,))) if "Belady" in v.question for a in v.answers]
    assert len(answers) == 1
    assert words in answers[0]


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    status = run_command(report_command, "bel-profile", [str(a) for a in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_page_is_self_contained(traces: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    status, _, err = command(capsys, *traces, "--html", page)
    assert (status, err) == (0, f"bel-profile: wrote {page}\n")
    text = page.read_text(encoding="utf-8")
    found = self_contained(text)
    assert found.tags.count("svg") == 7  # usage, and for each workload a curve and its layers; overlap; tokens
    assert sum(1 for v in verdicts(report(*traces)) if v.question in text) == 6


def test_the_same_inputs_give_the_same_page(
    traces: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.html", "b.html"):
        assert command(capsys, *traces, "--html", tmp_path / name)[0] == 0
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_names_of_workloads_are_only_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "<script>x</script> $\\frac{ \x1b[31m \u65e5\u672c " + "long " * 60
    path = write_trace(tmp_path / "a.trace", hostile, PROMPTS, model="<b>&amp;\x07")
    page = tmp_path / "report.html"
    status, out, _ = command(capsys, path, "--html", page)
    assert status == 0
    assert "\x1b" not in out and "\x07" not in out
    found = Page(page.read_text(encoding="utf-8"))
    assert not found.open
    assert "script" not in found.tags and "b" not in found.tags


@pytest.mark.parametrize("prompts", [[(0, 1)], [(9, 0)], [(4, 30)]])
def test_a_page_of_little_work(tmp_path: Path, prompts: list[tuple[int, int]], capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "a.trace", "code", prompts, layers=(TraceLayer(0, 4, 2, None),))
    page = tmp_path / "report.html"
    assert command(capsys, path, "--html", page)[0] == 0
    assert not Page(page.read_text(encoding="utf-8")).open


def test_json_is_one_object_with_every_answer(traces: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = command(capsys, *traces, "--json")
    assert (status, err, out.count("\n")) == (0, "", 1)
    answer = json.loads(out, parse_constant=pytest.fail)
    assert set(answer) == {"model_name", "arch", "phase", "one_by_one", "workloads", "pairs", "transfer", "missing"}
    work = answer["workloads"][0]
    assert set(work["layers"]) == {"0", "1"}
    assert math.isclose(work["sizes"][1]["lru"], report(*traces).workloads[0].half.lru or 0)
    assert "traces" not in out  # base names only


@pytest.mark.parametrize("columns", [60, 80, 150])
def test_the_terminal_shows_every_number_of_the_tables(
    traces: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr(table_cli, "_FILE_COLUMNS", columns)
    status, out, _ = command(capsys, *traces)
    assert status == 0
    for table in all_tables(report(*traces)):
        assert " ".join(table.title.split()) in " ".join(out.split())
        for row in table.rows:
            assert re.search(r" +".join(map(re.escape, row)), out), row
    if columns >= 80:
        assert max(map(len, out.splitlines())) <= columns


def test_without_matplotlib_only_the_page_is_refused(
    traces: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = command(capsys, *traces, "--html", tmp_path / "x.html")
    assert (status, out) == (5, "")
    assert "pip install 'bel-toolkit[plot]'" in err
    assert not (tmp_path / "x.html").exists()
    assert command(capsys, *traces)[0] == 0


def test_a_page_never_replaces_a_file_unasked(
    traces: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "x.html"
    page.write_text("mine")
    assert command(capsys, *traces, "--html", page)[0] == 2
    assert page.read_text() == "mine"
    assert command(capsys, *traces, "--html", page, "--force")[0] == 0
    before = traces[0].read_bytes()
    assert command(capsys, *traces, "--html", traces[0], "--force")[0] == 2
    assert traces[0].read_bytes() == before


def test_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = command(capsys, tmp_path / "none.trace")
    assert (status, out) == (3, "")
    assert "no such file" in err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = command(capsys, "-h")
    assert status == 0
    assert "bel-profile report code.trace chat.trace --html report.html" in out
