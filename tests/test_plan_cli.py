"""`bel-profile plan` as a user meets it: plans of traces, profiles and bare counts, what is refused, and the plan's file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bel.formats.bundle import open_bundle
from bel.formats.console import run_command
from bel.formats.costs import Costs, encode_costs
from bel.formats.errors import BadInputError
from bel.formats.fingerprint import fingerprint
from bel.formats.gguf_model import open_model
from bel.formats.plan_json import encode_plan, load_plan
from bel.formats.profile_json import encode_profile, load_profile
from bel.formats.trace import DECODE, TraceWriter
from bel.formats.trace_calls import read_trace
from bel.formats.trace_header import TraceHeader, TraceLayer
from bel.profiler.belady import belady_hits
from bel.profiler.cli import main_group
from bel.profiler.clock import make_clock, price
from bel.profiler.merge import merge
from bel.profiler.miss_tables import call_distances
from bel.profiler.plan_cli import plan_command
from bel.profiler.summarize import summarize
from bel.repack.convert import convert
from bel.repack.layout import plan_layout
from routes import draw_rows, write_trace

NAME = "bel-profile"
PAGE = 4096
LAYERS = tuple(TraceLayer(i, 16, 2, (2 + i % 2) * PAGE) for i in range(6))
FLOOR, MOST = 2 * 15 * PAGE, 16 * 15 * PAGE
LAYER_S, RATE = 1e-3, 2000 * PAGE
FIGURES = ["hit_rate", "misses_per_token", "bytes_per_token", "seconds_per_token", "stall_seconds_per_token"]
KEYS = [
    *("format", "version", "model", "objective", "clock", "policy", "split", "budget_bytes", "slots_bytes", "layers"),
    *("slots_by_layer", "preload", "predicted", "workloads", "worst_regret", "profile_digests", "notes"),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with traces of two workloads, and their profiles."""
    folder = tmp_path_factory.mktemp("inputs")
    for name, hot, seed in (("code", 0, 1), ("chat", 8, 2)):
        trace = write_trace(folder / f"{name}.trace", name, [(9, 60), (5, 70)], layers=LAYERS, hot=hot, seed=seed)
        (folder / f"{name}.json").write_bytes(encode_profile(summarize([trace]).profile))
    return folder


@pytest.fixture
def ran(inputs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `plan` in a folder of its own with some traces: exit status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)
    costs(LAYERS)

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = run_command(plan_command, NAME, [str(a) for a in arguments])
        return (status, *capsys.readouterr())

    return run


def costs(layers: Sequence[TraceLayer] | None, **changes: Any) -> None:
    seconds = None if layers is None else tuple((x.layer, LAYER_S) for x in layers)
    fields = {"layer_seconds": seconds, "h2d_bytes_per_s": None, "nvme_bytes_per_s": RATE, **changes}
    known = Costs(
        block_bytes=4096,
        nvme_depths=(),
        memory_bytes_per_s=1e10,
        cpu_expert_seconds=None,
        d2h_bytes_per_s=None,
        machine="a test",
        **fields,
    )
    Path("costs.json").write_bytes(encode_costs(known))


def answer(ran: tuple[int, str, str]) -> dict[str, Any]:
    status, out, err = ran
    assert (status, out.count("\n")) == (0, 1), err
    got: dict[str, Any] = json.loads(out, parse_constant=pytest.fail)
    assert list(got) == KEYS
    assert list(got["predicted"]) == ["in_sample", "held_out", "uniform", "random", "belady"]
    assert all(list(row) == FIGURES for row in got["predicted"].values())
    slots = {int(layer): n for layer, n in got["slots_by_layer"].items()}
    assert got["slots_bytes"] == sum(n * got["layers"][str(layer)]["slot_bytes"] for layer, n in slots.items())
    assert got["slots_bytes"] <= got["budget_bytes"]
    assert all(got["layers"][layer]["top_k"] <= n for layer, n in got["slots_by_layer"].items())
    assert {layer: len(ids) for layer, ids in got["preload"].items()} == got["slots_by_layer"]
    return got


def replayed(path: Path, slots: Sequence[int]) -> tuple[float, float]:
    """Misses and seconds per decode token of LRU caches with these slots, straight from the trace."""
    trace = read_trace(path)
    places = [call_distances(c) for c in trace.layers]
    misses = np.stack([(p > c).sum(axis=1) for p, c in zip(places, slots, strict=True)], axis=1).astype(np.int32)
    sizes = np.array([x.expert_bytes for x in LAYERS], np.float64)
    times = price(make_clock("arrival", [LAYER_S] * len(LAYERS), sizes / RATE), misses)
    return float(misses.sum(axis=1).mean()), float(times.seconds.mean())


@pytest.mark.parametrize("budget", [40 * PAGE, 90 * PAGE, 120 * PAGE, 180 * PAGE])
def test_a_plan_of_a_trace_is_priced_exactly_and_never_slower_than_uniform_slots(ran: Any, budget: int) -> None:
    got = answer(ran("code.trace", "--slots-bytes", budget, "--costs", "costs.json", "--json"))
    assert (got["objective"], got["clock"], got["policy"], got["split"]) == ("stall", "arrival", "lru", "prompts")
    mine, uniform = got["predicted"]["in_sample"], got["predicted"]["uniform"]
    misses, seconds = replayed(Path("code.trace"), list(got["slots_by_layer"].values()))
    assert mine["misses_per_token"] == pytest.approx(misses)
    assert mine["seconds_per_token"] == pytest.approx(seconds)
    assert mine["seconds_per_token"] <= uniform["seconds_per_token"]
    assert mine["seconds_per_token"] == pytest.approx(6 * LAYER_S + mine["stall_seconds_per_token"])
    held_out = got["predicted"]["held_out"]
    assert held_out["seconds_per_token"] >= mine["seconds_per_token"] - 1e-4
    assert got["predicted"]["belady"]["hit_rate"] >= mine["hit_rate"]
    assert got["predicted"]["belady"]["seconds_per_token"] is None


def test_fetches_that_late_layers_hide_give_the_early_ones_more_slots(ran: Any) -> None:
    """Also from a profile, which does not know which misses fall on one token."""
    for source in ("code.trace", "code.json"):
        got = answer(ran(source, "--slots-bytes", 120 * PAGE, "--costs", "costs.json", "--objective", "stall", "--json"))
        slots = list(got["slots_by_layer"].values())
        assert sum(slots[:2]) > 1.2 * sum(slots[-2:])
        assert got["predicted"]["in_sample"]["seconds_per_token"] < got["predicted"]["uniform"]["seconds_per_token"]
        mine = replayed(Path("code.trace"), slots)[1]
        uniform = replayed(Path("code.trace"), [8] * 6)[1]
        assert mine < uniform


def test_a_profile_and_its_trace_have_the_same_misses(ran: Any) -> None:
    arguments = ("--slots-bytes", 120 * PAGE, "--objective", "misses", "--json")
    profile, trace = answer(ran("code.json", *arguments)), answer(ran("code.trace", *arguments))
    differ = {key for key in KEYS if profile[key] != trace[key]}
    assert differ == {"profile_digests"}
    assert profile["predicted"]["in_sample"]["seconds_per_token"] is None


def test_belady_is_that_of_the_plans_slots(ran: Any) -> None:
    got = answer(ran("code.trace", "--slots-bytes", 120 * PAGE, "--json"))
    layers = read_trace(Path("code.trace")).layers
    hits = sum(int(belady_hits(c, (DECODE,))[n]) for c, n in zip(layers, got["slots_by_layer"].values(), strict=True))
    assert got["predicted"]["belady"]["hit_rate"] == pytest.approx(hits / (6 * 2 * 130))


def test_misses_are_planned_where_times_are_missing_and_it_is_said(ran: Any) -> None:
    status, out, err = ran("code.json", "--slots-bytes", 120 * PAGE, "--json")
    assert (status, json.loads(out)["objective"]) == (0, "misses")
    assert "bel-profile bandwidth" in err.splitlines()[-1]
    assert err.count("\n") == 2, "the other line says that sizes of slots are not a bundle's"
    status, out, err = ran("code.json", "--slots-bytes", 120 * PAGE, "--objective", "stall", "--json")
    assert (status, out) == (2, "")
    assert "bel-profile bandwidth" in err
    costs(None)
    status, out, err = ran("code.json", "--slots-bytes", 120 * PAGE, "--costs", "costs.json", "--objective", "stall")
    assert (status, out) == (2, "")
    assert "layer 0" in err
    assert "--timing" in err
    costs(LAYERS[:3])
    assert "layer 3" in ran("code.json", "--slots-bytes", 120 * PAGE, "--costs", "costs.json", "--objective", "stall")[2]


def test_layer_times_of_a_trace_are_used_where_the_costs_have_none(ran: Any) -> None:
    random = np.random.default_rng(3)
    with TraceWriter(
        Path("timed.trace"), TraceHeader("random", "qwen3moe", "f1", LAYERS, "timed", has_times=True), sync=False
    ) as writer:
        for t in range(40):
            for i, info in enumerate(LAYERS):
                ids = draw_rows(random, 1, 16, 2)
                time_ns = 1_000_000 * (i + 1)
                writer.append(phase=DECODE, ubatch=t, layer=info.layer, tokens=np.array([t]), ids=ids, time_ns=time_ns)
    costs(None)
    got = answer(ran("timed.trace", "--slots-bytes", 120 * PAGE, "--costs", "costs.json", "--objective", "stall", "--json"))
    row = got["predicted"]["in_sample"]
    assert row["seconds_per_token"] - row["stall_seconds_per_token"] == pytest.approx(21e-3)


def test_misses_are_priced_too_where_times_are_known(ran: Any) -> None:
    got = answer(ran("code.trace", "--slots-bytes", 120 * PAGE, "--costs", "costs.json", "--objective", "misses", "--json"))
    assert got["objective"] == "misses"
    seconds = replayed(Path("code.trace"), list(got["slots_by_layer"].values()))[1]
    assert got["predicted"]["in_sample"]["seconds_per_token"] == pytest.approx(seconds)


def test_workloads_of_a_merge_are_weighed_and_their_regret_is_shown(ran: Any) -> None:
    merged = merge([Path("code.json"), Path("chat.json")], "equal")
    Path("merged.json").write_bytes(encode_profile(merged.profile))
    got = answer(ran("merged.json", "--slots-bytes", 90 * PAGE, "--objective", "misses", "--json"))
    rows = got["workloads"]
    assert {name: row["weight"] for name, row in rows.items()} == {"code": 0.5, "chat": 0.5}
    for column in ("in_sample", "held_out", "uniform"):
        mean = sum(0.5 * row[column]["misses_per_token"] for row in rows.values())
        assert got["predicted"][column]["misses_per_token"] == pytest.approx(mean)
    for name, row in rows.items():
        alone = answer(ran(f"{name}.json", "--slots-bytes", 90 * PAGE, "--objective", "misses", "--json"))
        own = alone["predicted"]["in_sample"]["misses_per_token"]
        assert row["own"]["misses_per_token"] == pytest.approx(own)
        assert row["regret"] == pytest.approx(row["in_sample"]["misses_per_token"] / own - 1)
        assert row["regret"] >= 0
    assert got["worst_regret"] == max(row["regret"] for row in rows.values())
    # Each workload prefers other experts: both kinds are loaded, those of either alone come later.
    hot = {int(e) for e in got["preload"]["0"][:4]}
    assert hot & set(range(4))
    assert hot & set(range(8, 12))


def test_bare_counts_are_planned_as_a_fixed_set(ran: Any) -> None:
    counts = {"0": [70, 60, 40, 30], "1": [50, 50, 50, 50]}
    body = {"model": "m", "fingerprint": "f", "n_expert": 4, "top_k": 2, "tokens": 100, "counts": counts}
    Path("counts-in.json").write_text(json.dumps(body))
    assert run_command(main_group, NAME, ["import", "counts-in.json", "--from", "counts-json", "-o", "bare.json"]) == 0
    profile = json.loads(Path("bare.json").read_text())
    for row in profile["layers"].values():
        row["expert_bytes"] = PAGE
    Path("bare.json").write_text(json.dumps(profile))
    got = answer(ran("bare.json", "--slots-bytes", 5 * PAGE, "--json"))
    assert (got["policy"], got["objective"], got["split"]) == ("static", "misses", None)
    assert got["slots_by_layer"] == {"0": 2, "1": 3}  # the third expert of layer 1 has 50 uses, that of layer 0 has 40
    assert got["predicted"]["in_sample"]["hit_rate"] == pytest.approx(280 / 400)
    assert got["predicted"]["held_out"]["hit_rate"] is None
    assert got["predicted"]["belady"]["hit_rate"] is None
    assert "fixed set" in got["notes"][0]
    status, out, err = ran("bare.json", "--slots-bytes", 5 * PAGE, "--objective", "stall")
    assert (status, out) == (2, "")
    assert "only counts are known of bare" in err


def test_budgets_that_are_too_large_are_clamped_and_those_that_are_too_small_refused(ran: Any) -> None:
    status, out, err = ran("code.json", "--slots-bytes", "1G", "--objective", "misses", "--json")
    assert (status, set(json.loads(out)["slots_by_layer"].values())) == (0, {16})
    assert f"clamped to {MOST}" in err
    assert ran("code.json", "--slots-bytes", FLOOR, "--objective", "misses")[0] == 0
    status, out, err = ran("code.json", "--slots-bytes", FLOOR - 1, "--objective", "misses", "-o", "p.json")
    assert (status, out, os.path.exists("p.json")) == (2, "", False)
    assert f"smallest --slots-bytes that works is {FLOOR}" in err
    assert ran("code.json", "--json")[0] == 2
    assert ran("code.json", "--vram", "1G")[0] == 2
    assert ran("code.json", "chat.json", "--slots-bytes", "1G")[0] == 2


def test_the_plan_is_written_read_back_and_replaced(ran: Any) -> None:
    arguments = ("code.json", "--slots-bytes", 120 * PAGE, "--objective", "misses", "-o", "plan.json")
    got = answer(ran(*arguments, "--json"))
    assert json.loads(Path("plan.json").read_text()) == got
    plan = load_plan(Path("plan.json"))
    assert encode_plan(plan) == Path("plan.json").read_bytes()
    assert ran(*arguments)[0] == 0  # a plan can be made again
    Path("plan.json").write_text("notes of mine")
    status, _, err = ran(*arguments)
    assert (status, Path("plan.json").read_text()) == (2, "notes of mine")
    assert "--force" in err
    assert ran(*arguments, "--force")[0] == 0
    assert ran(*arguments[:-1], "code.json", "--force")[0] == 2
    assert load_profile(Path("code.json")).model_name == "random"


def test_the_table_names_what_it_compares_with(ran: Any) -> None:
    status, out, _ = ran("code.trace", "--slots-bytes", 120 * PAGE, "--costs", "costs.json")
    assert status == 0
    for words in (
        "layer 0",
        "of the experts",
        "this plan",
        "held out",
        "uniform",
        "random",
        "Belady",
        "MiB read",
        "The plan saves",
    ):
        assert words in out
    status, out, _ = ran("code.trace", "--slots-bytes", MOST, "--costs", "costs.json")
    assert "the plan has uniform slots" in out
    assert "loses" not in out


def test_a_plan_is_bound_to_its_model(ran: Any, example: Path) -> None:
    """Slot sizes, floors and identity come from the GGUF or its bundle."""
    source = open_model(example)
    convert(
        source,
        plan_layout(source, "m", ple="keep", shard_bytes=2**40),
        Path("m.bel"),
        force=False,
        check=True,
        progress=lambda *_: None,
    )
    strides = {x.layer: x.stride_bytes for x in open_bundle(Path("m.bel")).manifest.layers}
    layers = [TraceLayer(x.layer, x.n_expert, x.n_used or 1, None) for x in open_bundle(Path("m.bel")).manifest.layers]

    def trace(mark: str) -> Path:
        path = Path(f"{mark[:4]}.trace")
        random = np.random.default_rng(1)
        with TraceWriter(
            path, TraceHeader("m", source.arch or "", mark, tuple(layers), "code"), sync=False, replace=True
        ) as writer:
            for t in range(30):
                for info in layers:
                    ids = draw_rows(random, 1, info.n_expert, info.top_k)
                    writer.append(phase=DECODE, ubatch=t, layer=info.layer, tokens=np.array([t]), ids=ids)
        return path

    mine = trace(fingerprint(source))
    budget = sum(x.n_expert * strides[x.layer] for x in layers) // 2
    for model in (example, Path("m.bel")):
        got = answer(ran(mine, "--model", model, "--slots-bytes", budget, "--json"))
        assert {int(k): row["slot_bytes"] for k, row in got["layers"].items()} == strides
    status, out, err = ran(mine, "--model", example, "--ram", "2G", "--context", 256, "--json")
    assert set(json.loads(out)["slots_by_layer"].values()) == {x.n_expert for x in layers}, err
    costs(layers, h2d_bytes_per_s=2 * RATE)  # with a GPU and all experts in RAM misses come over its link
    fast = answer(ran(mine, "--model", example, "--vram", "2G", "--ram", "2G", "--costs", "costs.json", "--json"))
    assert "host to GPU" in fast["notes"][1]
    slow = answer(ran(mine, "--model", example, "--slots-bytes", budget, "--costs", "costs.json", "--json"))
    assert "disk" in slow["notes"][1]
    assert ran(mine, "--slots-bytes", budget)[0] == 2  # the trace does not know its sizes
    status, out, err = ran(trace("0" * 64), "--model", example, "--slots-bytes", budget)
    assert (status, out) == (3, "")
    assert "fingerprint" in err
    layers.pop()
    status, out, err = ran(trace(fingerprint(source)), "--model", example, "--slots-bytes", budget)
    assert (status, out) == (3, "")
    assert "layers" in err


def broken(path: list[Any], value: Any) -> Any:
    def change(body: dict[str, Any]) -> None:
        at: Any = body
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (broken(["format"], "bel-profile"), "not a plan"),
        (broken(["version"], 2), "version 2"),
        (broken(["version"], True), "version True"),
        (broken(["objective"], "speed"), "objective"),
        (broken(["layers"], {}), "layers"),
        (broken(["layers", "0", "n_expert"], 0), "layer 0"),
        (broken(["layers", "0", "slot_bytes"], 0), "layer 0"),
        (broken(["slots_by_layer", "0"], 17), "17 slots"),
        (broken(["slots_by_layer", "0"], 1), "1 slots"),
        (broken(["slots_by_layer", "9"], 2), "slots_by_layer"),
        (broken(["preload", "0"], [3, 3]), "twice"),
        (broken(["preload", "0"], [16]), "does not have"),
        (broken(["preload", "0"], list(range(16))), "entries"),
        (broken(["slots_bytes"], 1), "slots_bytes"),
        (broken(["budget_bytes"], 1), "budget"),
        (broken(["predicted", "uniform", "hit_rate"], -1), "hit_rate"),
        (broken(["predicted", "belady"], None), "belady"),
        (broken(["workloads", "code", "regret"], "much"), "regret"),
        (broken(["workloads", "code", "weight"], 2), "weight"),
        (broken(["profile_digests"], ["x"]), "digest"),
        (broken(["notes"], [1]), "note"),
        (broken(["model", "fingerprint"], 5), "fingerprint"),
        (lambda body: body.pop("clock"), "clock"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_the_name_of_its_key(ran: Any, change: Any, words: str) -> None:
    assert ran("code.json", "--slots-bytes", 120 * PAGE, "--objective", "misses", "-o", "plan.json")[0] == 0
    body = json.loads(Path("plan.json").read_text())
    change(body)
    Path("plan.json").write_text(json.dumps(body))
    with pytest.raises(BadInputError, match=words):
        load_plan(Path("plan.json"))


def test_a_measure_that_does_not_fit_its_profile_is_refused(ran: Any) -> None:
    body = json.loads(Path("code.json").read_text())
    tables = body["workloads"]["code"]["locality_by_layer"]["2"]["decode_misses"]["parts"][0]["calls"]
    tables[16] = tables[15]
    tables[15] = tables[14]
    Path("code.json").write_text(json.dumps(body))
    status, out, err = ran("code.json", "--slots-bytes", 120 * PAGE, "--objective", "misses")
    assert (status, out) == (3, "")
    assert "decode_misses of layer 2" in err
