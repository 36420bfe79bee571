"""The pages of `simulate` and `plan`: whole, with the figures that the inputs allow, and never over another file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bel.formats.console import run_command
from bel.formats.costs import Costs, encode_costs
from bel.formats.trace_header import TraceLayer
from bel.profiler.cli import NAME, main_group
from html_page import Page, self_contained
from routes import write_trace

LAYERS = tuple(TraceLayer(i, 16, 2, 100_000 + 50_000 * (i % 2)) for i in range(4))
PRICED = ("--costs", "costs.json")
SIMULATE = ("simulate", "x.trace")
PLAN = ("plan", "x.trace", "--slots-bytes", "4M")
EVERY = "lru,random,lfu-forget,lfu-ghost,lfu-decay:0.98,lfuda,slru,arc,s3fifo,repick:4,repick:9,static-oracle,belady"


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command in a folder of its own with a trace and costs: exit status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    write_trace(Path("x.trace"), "chat", [(9, 30), (5, 30)], layers=LAYERS)
    costs = Costs(
        block_bytes=4096,
        nvme_bytes_per_s=2e8,
        nvme_depths=(),
        memory_bytes_per_s=1e10,
        cpu_expert_seconds=None,
        h2d_bytes_per_s=2e9,
        d2h_bytes_per_s=None,
        layer_seconds=tuple((x.layer, 1e-3) for x in LAYERS),
        machine="a test",
    )
    Path("costs.json").write_bytes(encode_costs(costs))

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        return (run_command(main_group, NAME, [str(a) for a in arguments]), *capsys.readouterr())

    return run


def page_of(answer: tuple[int, str, str]) -> tuple[Page, str]:
    status, _, err = answer
    assert status == 0, err
    assert "bel-profile: wrote page.html" in err
    text = Path("page.html").read_text(encoding="utf-8")
    return self_contained(text), text


def test_a_simulation_shows_its_knees_times_and_reads(ran: Any) -> None:
    page, text = page_of(ran(*SIMULATE, *PRICED, "--html", "page.html", "--json"))
    assert page.tags.count("svg") == 3
    rows = json.loads(ran(*SIMULATE, "--fraction", "0.125,0.25,0.375,0.5,0.625,0.75,0.875,1", "--json")[1])
    knee = rows["knees"]["lru"]
    assert f"lru has its knee at {knee['bytes'] / 2**20:.2f} MiB: {100 * knee['hit_rate']:.1f}&nbsp;% hits" in text
    assert "the policy&#x27;s smallest cache here" in text
    assert all(f"{100 * row['hit_rate']:.1f}&nbsp;%" in text for row in rows["rows"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("--slots", "4"),
        ("--slots", "0,4", "--policy", EVERY),
        ("--slots", "4,8", "--host-slots", "4", *PRICED, "--policy", "lru"),
        ("--scope", "global"),
        ("--phase", "prompt", "--policy", "belady"),
    ],
)
def test_any_simulation_has_a_page(ran: Any, arguments: tuple[str, ...]) -> None:
    page, text = page_of(ran(*SIMULATE, *arguments, "--html", "page.html"))
    assert page.tags.count("svg") == (3 if PRICED[0] in arguments else 2)
    assert ("The figures show the first 12 policies" in text) == (EVERY in arguments)


def test_a_simulation_of_nothing_has_a_page_without_figures(ran: Any) -> None:
    write_trace(Path("y.trace"), "chat", [(9, 0)], layers=(TraceLayer(0, 4, 2, None),))
    page, _ = page_of(ran("simulate", "y.trace", "--html", "page.html"))
    assert "svg" not in page.tags


def test_sizes_without_bytes_are_slots(ran: Any) -> None:
    write_trace(Path("y.trace"), "chat", [(0, 9)], layers=(TraceLayer(0, 4, 2, None),))
    for scope, axis, unit in (("layer", "slots of all layers", "slots"), ("global", "experts in the cache", "experts")):
        command = ("simulate", "y.trace", "--html", "page.html", "--policy", "lru", "--slots", "1,2,3", "--scope", scope)
        answer = ran(*command, "--json", "--force")
        rates = [row["hit_rate"] for row in json.loads(answer[1])["rows"]]
        knee = next(n for n, rate in zip((1, 2, 3), rates, strict=True) if rate >= 0.9 * rates[-1])
        _, text = page_of(answer)
        assert axis in text and f"at {knee} {unit}" in text, "the knee is the smallest that is nearly best"


def test_a_plan_shows_slots_and_where_the_time_goes(ran: Any) -> None:
    page, text = page_of(ran(*PLAN, *PRICED, "--html", "page.html", "-o", "plan.json"))
    assert page.tags.count("svg") == 2
    plan = json.loads(Path("plan.json").read_text())
    for name in ("in_sample", "held_out", "uniform", "random"):
        row = plan["predicted"][name]
        assert f"{1e3 * row['seconds_per_token']:.2f} ms, {1e3 * row['stall_seconds_per_token']:.2f} of them stall" in text
        assert f"{1e3 * row['bytes_per_token'] / 2e8:.2f} ms of transfers" in text
    assert "The numbers of each layer" in text


def test_a_plan_without_times_says_so(ran: Any) -> None:
    page, text = page_of(ran(*PLAN, "--objective", "misses", "--html", "page.html"))
    assert page.tags.count("svg") == 1
    assert "Missing: the time of a token" in text


def test_the_same_inputs_give_the_same_page(ran: Any) -> None:
    for command in (SIMULATE, PLAN):
        texts = [page_of(ran(*command, *PRICED, "--html", "page.html", "--force"))[1] for _ in range(2)]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("command", [SIMULATE, PLAN])
def test_a_page_never_replaces_a_file_unasked(ran: Any, command: tuple[str, ...]) -> None:
    Path("page.html").write_text("mine")
    assert ran(*command, *PRICED, "--html", "page.html")[0] == 2
    assert Path("page.html").read_text() == "mine"
    for own in ("x.trace", "costs.json"):
        before = Path(own).read_bytes()
        assert ran(*command, *PRICED, "--html", own, "--force")[0] == 2
        assert Path(own).read_bytes() == before
    assert ran(*command, *PRICED, "--html", "page.html", "--force")[0] == 0


def test_a_plan_and_its_page_are_two_files(ran: Any) -> None:
    status, out, err = ran(*PLAN, "-o", "one", "--html", "one")
    assert (status, out, Path("one").exists()) == (2, "", False)
    assert "the plan and the page have one name" in err


@pytest.mark.parametrize("command", [SIMULATE, PLAN])
def test_without_matplotlib_only_the_page_is_refused(
    ran: Any, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = ran(*command, "--html", "page.html")
    assert (status, out, Path("page.html").exists()) == (5, "", False)
    assert "pip install 'bel-toolkit[plot]'" in err
    assert ran(*command)[0] == 0
