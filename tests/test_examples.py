"""The scripts of `examples/` do what they say, run as a user runs them; `demo.sh` is run by `make demo`."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bel.formats.bundle import open_bundle
from faults import run_cli, tree
from runnable import ROOT, one_cpu, user_environment

EXAMPLES = ROOT / "examples"
NAMES = (
    "convert-and-inspect",
    "profile-and-merge",
    "simulate-and-plan",
    "run-under-a-cap",
    "publish-to-a-loopback-hub",
)
CAP_BYTES, RAM_BYTES = 128 << 20, 96 << 20
Run = Callable[[str], tuple[Path, str]]


def start(name: str, folder: Path, *arguments: str | Path, inside: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run an example in a folder of its own; standard error is in `stdout`, where a user sees it."""
    environment = user_environment(os.environ, folder.parent / "home")
    del environment["HF_HUB_OFFLINE"]  # an example talks to its own hub only
    with one_cpu():
        return subprocess.run(
            [*inside, str(EXAMPLES / f"{name}.sh"), *map(str, arguments)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs an example once, in a folder that is not the checkout's, with its usual output: that folder, and what it printed."""
    done: dict[str, tuple[Path, str]] = {}

    def run(name: str) -> tuple[Path, str]:
        if name not in done:
            folder = tmp_path_factory.mktemp("a folder")  # with a blank: a word that is not quoted breaks
            before = tree(EXAMPLES, times=True)
            ended = start(name, folder)
            assert ended.returncode == 0, ended.stdout
            assert tree(EXAMPLES, times=True) == before, "an example changes nothing in the checkout"
            assert [path.name for path in folder.iterdir()] == ["demo-out"]
            done[name] = (folder / "demo-out" / name, ended.stdout)
        return done[name]

    return run


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_every_example_is_known_here_and_in_the_index() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.sh")}
    assert scripts == {*NAMES, "demo", "common"}
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}.sh`" in index or f"[{name}.sh]({name}.sh)" in index for name in (*NAMES, "demo"))


@pytest.mark.parametrize("name", (*NAMES, "common"))
def test_an_example_names_no_absolute_path(name: str) -> None:
    text = (EXAMPLES / f"{name}.sh").read_text(encoding="utf-8")
    body = text.removeprefix("#!/usr/bin/env bash\n").replace("/dev/null", "")
    assert re.findall(r"(?<![\w.\"}$)*])/\w[\w/]*", body) == []
    assert name == "common" or os.access(EXAMPLES / f"{name}.sh", os.X_OK)


def test_convert_and_inspect_gives_the_model_back_and_finds_the_damage(ran: Run, example: Path) -> None:
    out, said = ran("convert-and-inspect")
    assert digest(out / "restored" / example.name) == digest(example)
    assert run_cli("verify", out / "tiny-moe.bel", "--source", example).status == 0
    manifest = open_bundle(out / "tiny-moe.bel").manifest
    assert json.loads((out / "inspect.json").read_text(encoding="utf-8"))["content_digest"] == manifest.content_digest
    assert len(re.findall(rf"content digest +{manifest.content_digest}\n", said)) == 3, "converted, inspected, restored"
    assert run_cli("verify", out / "damaged.bel").status == 4
    layer, expert = re.findall(r"checksum mismatch in layer (\d+) expert (\d+) part", said)[0]
    at, row = 1150976, manifest.layers[int(layer)]
    assert (at - row.offset_bytes) // row.stride_bytes == int(expert)


def test_profile_and_merge_keeps_both_workloads(ran: Run) -> None:
    out, said = ran("profile-and-merge")
    single = {
        work: json.loads((out / f"{work}.json").read_text(encoding="utf-8"))["workloads"][work] for work in ("code", "chat")
    }
    merged = json.loads((out / "merged.json").read_text(encoding="utf-8"))["workloads"]
    assert set(merged) == {"code", "chat"}
    for work, row in single.items():
        assert {k: v for k, v in merged[work].items() if k != "weight"} == {k: v for k, v in row.items() if k != "weight"}
        assert merged[work]["weight"] == 0.5
    assert "code and chat share" in said and (out / "report.html").stat().st_size > 10_000


def test_simulate_and_plan_runs_by_a_plan_that_adds_up(ran: Run) -> None:
    out, said = ran("simulate-and-plan")
    plan = json.loads((out / "plan.json").read_text(encoding="utf-8"))
    taken = sum(count * plan["layers"][layer]["slot_bytes"] for layer, count in plan["slots_by_layer"].items())
    assert taken == plan["slots_bytes"] <= plan["budget_bytes"] == 2688 << 10
    assert len(set(plan["slots_by_layer"].values())) > 1, "the layers differ, or nothing was planned"
    assert f"{sum(plan['slots_by_layer'].values())} of 192 experts (50 %)" in said
    rates = {
        policy: float(rate) for policy, rate in re.findall(r"^(lru|belady|static:\S+) +16 .*?([\d.]+) %", said, re.MULTILINE)
    }
    static = next(rate for policy, rate in rates.items() if policy.startswith("static"))
    assert static < rates["lru"] < rates["belady"]
    same_text(out / "planned.txt", out / "stock.txt")


def same_text(one: Path, other: Path) -> None:
    assert one.read_bytes() == other.read_bytes() and len(one.read_text(encoding="utf-8").split()) > 10


def can_make_a_group() -> bool:
    """Whether a control group with a limit can be made here."""
    command = [sys.executable, str(ROOT / "tests/bench/capped.py"), "1G", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def peak_bytes(said: str) -> float:
    return float(re.findall(r"peak memory +([\d.]+) MiB", said)[0]) * (1 << 20)


def test_run_under_a_cap_is_capped_where_that_can_be(ran: Run) -> None:
    out, said = ran("run-under-a-cap")
    assert ("Capped at 128 MiB" in said) != ("NOT CAPPED" in said)
    if can_make_a_group():
        assert "NOT CAPPED" not in said
    for charged, ended in re.findall(r"capped: at most (\d+) bytes charged, (\d+) processes ended", said):
        assert 0 < int(charged) <= CAP_BYTES and ended == "0"
    assert peak_bytes(said) <= RAM_BYTES
    same_text(out / "bundle.txt", out / "stock.txt")


IGNORES_LIMITS = """#!/usr/bin/env bash
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""
NO_GROUPS = ("unshare", "--mount", "bash", "-c", 'mount -t tmpfs -o ro none /sys/fs/cgroup && exec "$0" "$@"')


@pytest.mark.parametrize("systemd", [None, IGNORES_LIMITS], ids=["none", "ignores-limits"])
def test_run_under_a_cap_does_not_pretend(systemd: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no group can be made, and `systemd-run` is of no use: it is not there, or it takes the limit and keeps none."""
    inside = NO_GROUPS if can_make_a_group() else ()
    if inside and subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("groups can be made here, and cannot be hidden")
    tool = tmp_path / "bin" / "systemd-run"
    tool.parent.mkdir()
    tool.write_text(systemd or "#!/usr/bin/env bash\nexit 1\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    ended = start("run-under-a-cap", tmp_path, tmp_path / "out", inside=inside)
    assert ended.returncode == 0, ended.stdout
    assert "NOT CAPPED" in ended.stdout and "Capped" not in ended.stdout and "capped:" not in ended.stdout
    assert re.search(r"^\$ bel-run .* --ram 96M ", ended.stdout, re.MULTILINE) and peak_bytes(ended.stdout) <= RAM_BYTES
    same_text(tmp_path / "out/bundle.txt", tmp_path / "out/stock.txt")


def test_publish_to_a_loopback_hub_brings_the_model_back(ran: Run, example: Path) -> None:
    out, said = ran("publish-to-a-loopback-hub")
    assert digest(out / "restored" / example.name) == digest(example)
    assert run_cli("verify", out / "fetched.bel", "--source", example).status == 0
    assert (out / "fetched.bel/README.md").is_file() and (out / "fetched.bel/SHA256SUMS").is_file()
    assert "fetched, without the experts" in said and "fetched, every byte verified" in said
    address = re.findall(r"a hub listens at http://127\.0\.0\.1:(\d+)\n", said)[0]
    ended = subprocess.run(
        [sys.executable, "-c", f"import socket; socket.create_connection(('127.0.0.1', {address}), 5)"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ConnectionRefusedError" in ended.stderr, "the hub ends with the script"


@pytest.mark.parametrize("name", [*NAMES, "demo"])
def test_a_folder_that_holds_something_is_left_alone(name: str, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "precious").write_text("x", encoding="utf-8")
    before = tree(tmp_path, times=True)
    ended = start(name, tmp_path, out)
    assert ended.returncode == 2 and "is not empty" in ended.stdout
    assert tree(tmp_path, times=True) == before


def test_without_the_commands_an_example_says_what_to_do(tmp_path: Path) -> None:
    """In a copy, beside which no environment is."""
    (tmp_path / "copy").mkdir()
    for name in ("common.sh", "convert-and-inspect.sh"):
        (tmp_path / "copy" / name).write_bytes((EXAMPLES / name).read_bytes())
    command = ["bash", str(tmp_path / "copy/convert-and-inspect.sh"), str(tmp_path / "out")]
    found = [part for part in os.environ["PATH"].split(os.pathsep) if not (Path(part) / "bel-run").exists()]
    environment = {**os.environ, "PATH": os.pathsep.join(found)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 5 and "make demo" in ended.stderr and not (tmp_path / "out").exists()
