"""`bel-repack` as a user meets it: help, names, JSON, exit codes, messages, terminals and pipes."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import select
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import synth
from bel.formats.console import Progress
from faults import COMMAND, Outcome, real, run_cli, tree

MODEL_KEYS = {
    "model",
    "moe_layers",
    "mtp_layers",
    "n_experts_by_layer",
    "n_expert_used_by_layer",
    "routed_expert_tensors",
    "expert_stride_bytes",
    "dense_bytes",
    "experts_bytes",
    "ple_bytes",
    "padding_bytes",
    "token_cycle_bytes",
    "content_digest",
}
RUN_KEYS = {"bundle", "seconds", "bytes_read", "bytes_written", "peak_rss_bytes"}


def ple_model(table_elements: int = 64, **settings: Any) -> synth.Gguf:
    """A model with a per-layer-embedding table of 34/32 bytes an element and 8 rows."""
    table = synth.Tensor("per_layer_token_embd.weight", (table_elements, 8), synth.Q8_0)
    return synth.moe(tensors=[table, *synth.moe_tensors()], **settings)


def write_set(folder: Path, model: synth.Gguf, counts: list[int], base: str = "model") -> list[Path]:
    """A split set in a folder."""
    return [shard.write(folder / name) for name, shard in synth.split(model, counts, base).items()]


def answer(outcome: Outcome) -> dict[str, Any]:
    """The one JSON object that a successful `--json` prints, and nothing else."""
    assert outcome.status == 0, outcome

    def refuse(text: str) -> float:
        raise AssertionError(f"{text} is not JSON")

    value = json.loads(outcome.stdout, parse_constant=refuse)
    assert outcome.stdout.count("\n") == 1
    assert isinstance(value, dict)
    return value


def assert_error(outcome: Outcome, status: int, *words: object) -> None:
    assert outcome.status == status, outcome
    assert outcome.stdout == ""
    assert "Traceback" not in outcome.stderr, outcome.stderr
    for word in words:
        assert str(word) in outcome.stderr, (word, outcome.stderr)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return synth.moe().write(tmp_path / "m.gguf")


# Help and usage


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("command", [[], ["convert"], ["inspect"], ["verify"], ["restore"]])
def test_every_command_has_help_with_an_example(command: list[str], option: str) -> None:
    outcome = run_cli(*command, option)
    assert outcome.status == 0
    assert outcome.stderr == ""
    assert re.search(rf"Examples?:\n +bel-repack (?:{(command or [''])[0]} )?\S", outcome.stdout) or command == ["convert"], (
        outcome.stdout
    )
    assert "bel-repack " in outcome.stdout.split("Example")[1]


def test_the_help_lists_every_command_and_option_of_the_design() -> None:
    listed = run_cli("--help").stdout
    assert all(re.search(rf"^ +{c} ", listed, re.M) for c in ("convert", "inspect", "verify", "restore"))
    options = {
        "convert": ["-o", "--ple", "--shard-size", "--no-verify", "--force", "--dry-run", "--json"],
        "inspect": ["--json", "--digest"],
        "verify": ["--source", "--quick", "--json"],
        "restore": ["-o", "--force", "--json"],
    }
    for command, names in options.items():
        text = run_cli(command, "--help").stdout
        assert all(re.search(rf"^ +{name}\b", text, re.M) for name in names), (command, text)


@pytest.mark.parametrize(
    "args",
    [
        ["--no-such-option"],
        ["m.gguf", "--ple", "maybe"],
        ["m.gguf", "--shard-size", "big"],
        ["m.gguf", "--shard-size", "-1"],
        ["m.gguf", "--shard-size", ""],
        ["m.gguf", "--shard-size", "nan"],
        ["m.gguf", "n.gguf"],
        ["m.gguf", "-o"],
        ["convert"],
        ["inspect"],
        ["verify"],
        ["verify", "--source"],
        ["restore"],
        ["restore", "x", "y"],
    ],
)
def test_a_wrong_command_line_exits_with_2(args: list[str]) -> None:
    outcome = run_cli(*args)
    assert_error(outcome, 2)
    assert outcome.stderr.strip(), "it says what is wrong"


@pytest.mark.parametrize(
    "size",
    [
        "9" * 5000,
        "9" * 400 + ".5",
        "1.5.5G",
        "12 G B",
        "0x10",
        "1e9",
    ],
    ids=["5000 digits", "400 digits and a point", "two points", "two units", "hex", "exponent"],
)
def test_a_size_that_is_none_is_an_error_and_no_traceback(model: Path, size: str) -> None:
    assert_error(run_cli(model, "--shard-size", size), 2, "not a size")


@pytest.mark.parametrize(
    ("args", "status"),
    [
        (["nonexistent.gguf"], 3),
        (["inspect", "nonexistent.gguf"], 3),
        (["verify", "nonexistent.bel"], 3),
        (["restore", "nonexistent.bel"], 3),
        (["verify", "nonexistent.bel", "--json"], 3),
        (["nonexistent.gguf", "--json"], 3),
    ],
)
def test_what_does_not_exist_is_named(args: list[str], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_error(run_cli(*args), status, "nonexistent", "no such")
    assert list(tmp_path.iterdir()) == []


def test_the_commands_take_no_gguf_for_a_bundle_and_no_bundle_for_a_gguf(model: Path) -> None:
    assert run_cli(model).status == 0
    bundle = model.with_name("m.bel")
    assert_error(run_cli("verify", model), 3, model, "not a bundle")
    assert_error(run_cli("restore", model), 3, model, "not a bundle")
    assert_error(run_cli(bundle, "-o", model.with_name("x.bel")), 3, bundle)
    assert_error(run_cli(bundle / "m-dense.gguf", "-o", model.with_name("x.bel")), 3, "already repacked")
    assert_error(run_cli("verify", model.parent), 4, model.parent, "manifest")


def test_the_output_folder_must_have_a_parent(model: Path, tmp_path: Path) -> None:
    assert_error(run_cli(model, "-o", tmp_path / "no" / "such" / "x.bel"), 2, tmp_path / "no" / "such", "does not exist")
    assert run_cli(model, "-o", f"{tmp_path}/x.bel/").status == 0
    assert_error(run_cli(model, "-o", tmp_path / "x.bel"), 2, "--force")
    (tmp_path / "file").write_text("")
    assert_error(run_cli(model, "-o", tmp_path / "file" / "x.bel"), 2)


# Names and paths


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("m.gguf", "m"),
        ("no-extension", "no-extension"),
        ("m.v2.Q4_K_M.gguf", "m.v2.Q4_K_M"),
        ("m.GGUF", "m.GGUF"),
        (".gguf", ".gguf"),
        ("-leading-dash.gguf", "-leading-dash"),
        ("--json", "--json"),
        ("convert", "convert"),
        ("with space.gguf", "with space"),
        ("line\nend.gguf", "line\nend"),
        ("esc\x1b[31m.gguf", "esc\x1b[31m"),
        ("ünïcödé 模型.gguf", "ünïcödé 模型"),
        (os.fsdecode(b"not-utf8-\xff\xfe.gguf"), os.fsdecode(b"not-utf8-\xff\xfe")),
        ("manifest.json", "manifest.json"),
        ("m-00001-of-00001.gguf", "m"),
        ("x" * 200 + ".gguf", "x" * 200),
    ],
)
def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, base: str) -> None:
    """The default output stands beside the model, relative path or not, and every command takes its odd name."""
    monkeypatch.chdir(tmp_path)
    synth.moe().write(tmp_path / name)
    original = (tmp_path / name).read_bytes()
    done = answer(run_cli("--json", "--", name))
    bundle = tmp_path / f"{base}.bel"
    assert Path(done["bundle"]) == bundle
    assert done["model"]["sources"][0]["name"] == name
    assert {p.name for p in bundle.iterdir()} == {
        "manifest.json",
        "source",
        f"{base}-dense.gguf",
        f"{base}-experts.bin",
        f"{base}-experts.idx",
    }
    for args in (["inspect", "--", name], ["inspect", bundle], ["verify", bundle, "--source", tmp_path / name]):
        outcome = run_cli(*args)
        assert outcome.status == 0, outcome
        outcome.stdout.encode()
        assert "\x1b" not in outcome.stdout + outcome.stderr
    assert run_cli("restore", bundle, "-o", "back").status == 0
    assert (tmp_path / "back" / name).read_bytes() == original
    shutil.rmtree(bundle)
    table = run_cli("--", name)
    assert table.status == 0
    table.stdout.encode()


@pytest.mark.parametrize("name", ["esc\x1b[2J", "line\nend", "bell\x07", os.fsdecode(b"\xff")])
def test_texts_from_a_file_never_reach_the_terminal_raw(tmp_path: Path, name: str) -> None:
    """A model from a stranger must not move the cursor, forge a line of the answer, or stop it with an encoding error."""
    raw = os.fsencode(name)
    entries = [
        synth.key("general.architecture", synth.STRING, raw),
        synth.key("general.name", synth.STRING, raw * 200),
        synth.key(raw + b".expert_count", synth.U32, 99),
        synth.key(raw + b".expert_used_count", synth.U32, 2),
    ]
    path = synth.moe(entries=entries).write(tmp_path / "m.gguf")
    dense = synth.moe(entries=entries, tensors=[synth.Tensor(name, (32,), synth.F32)]).write(tmp_path / "d.gguf")
    for outcome in (real("inspect", path), real(path), real("inspect", path.with_name("m.bel")), real("inspect", dense)):
        assert outcome.status in (0, 3), outcome
        assert "Traceback" not in outcome.stderr
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", outcome.stdout + outcome.stderr)
        assert not re.search(r"^end", outcome.stdout + outcome.stderr, re.M)


def test_any_shard_names_the_set(tmp_path: Path) -> None:
    shards = write_set(tmp_path, synth.moe(), [4, 0, 8], "big.Q8_0")
    for shard in shards:
        done = answer(run_cli(shard, "--json", "--force"))
        assert Path(done["bundle"]) == tmp_path / "big.Q8_0.bel"
        assert [s["name"] for s in done["model"]["sources"]] == [s.name for s in shards]
        assert answer(run_cli("inspect", shard, "--json"))["model"]["sources"][1]["bytes"] == shards[1].stat().st_size


def test_a_model_behind_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a Hugging Face cache: the links have the names, and the output stands beside the link."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number, shard in enumerate(write_set(tmp_path / "blobs", synth.moe(), [6, 6])):
        shard.rename(tmp_path / "blobs" / f"blob{number}")
        (tmp_path / "snapshot" / shard.name).symlink_to(f"../blobs/blob{number}")
    (tmp_path / "short").symlink_to(tmp_path / "snapshot", target_is_directory=True)
    monkeypatch.chdir(tmp_path / "snapshot")
    named = tmp_path / "short" / "model-00002-of-00002.gguf"
    assert run_cli(named).status == 0
    assert (tmp_path / "snapshot" / "model.bel" / "manifest.json").is_file()
    assert run_cli("model-00001-of-00002.gguf", "-o", "again.bel").status == 0
    assert tree(tmp_path / "snapshot" / "again.bel") == tree(tmp_path / "snapshot" / "model.bel")


def test_dots_behind_a_link_lead_where_the_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk" / "models").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "models").symlink_to(tmp_path / "disk" / "models", target_is_directory=True)
    synth.moe().write(tmp_path / "disk" / "m.gguf")
    monkeypatch.chdir(tmp_path / "home")
    assert run_cli("models/../m.gguf").status == 0
    assert (tmp_path / "disk" / "m.bel").is_dir(), "beside the model"


def test_no_file_of_a_bundle_holds_a_path_of_this_machine(tmp_path: Path) -> None:
    folder = tmp_path / "a-telling-folder-name"
    folder.mkdir()
    path = ple_model().write(folder / "m.gguf")
    assert run_cli(path).status == 0
    for file in (folder / "m.bel").rglob("*"):
        assert b"telling" not in os.fsencode(file.name)
        assert file.is_dir() or b"telling" not in file.read_bytes(), file


# JSON


def numbers(value: Any) -> list[float]:
    """All numbers in a JSON value."""
    if isinstance(value, dict | list):
        return [n for v in (value.values() if isinstance(value, dict) else value) for n in numbers(v)]
    return [value] if isinstance(value, int | float) else []


def test_json_of_the_conversion(tmp_path: Path) -> None:
    shards = write_set(tmp_path, ple_model(), [6, 7])
    done = answer(run_cli(shards[0], "--json"))
    assert set(done) >= MODEL_KEYS | RUN_KEYS
    assert set(done["model"]) == {"name", "arch", "sources"}
    assert [set(s) for s in done["model"]["sources"]] == [{"name", "bytes", "sha256"}] * 2
    bundle = Path(done["bundle"])
    sizes = {p.name: p.stat().st_size for p in bundle.iterdir()}
    assert done["dense_bytes"] == sizes["model-dense.gguf"]
    assert done["ple_bytes"] == sizes["model-ple.gguf"]
    assert done["experts_bytes"] == sizes["model-experts.bin"]
    assert (done["moe_layers"], done["mtp_layers"]) == ([0, 1], [])
    assert done["n_experts_by_layer"] == {"0": 4, "1": 4}
    assert done["n_expert_used_by_layer"] == {"0": 2, "1": 2}
    assert done["expert_stride_bytes"] == {"0": 8192, "1": 8192}
    assert done["token_cycle_bytes"] == 2 * 2 * 8192
    assert done["padding_bytes"] == 4096 + 8 * (8192 - 3 * 2176)
    assert done["routed_expert_tensors"] == [f"blk.{b}.ffn_{r}_exps.weight" for b in (0, 1) for r in ("gate", "up", "down")]
    assert done["bytes_read"] == sum(s.stat().st_size for s in shards)
    assert done["bytes_written"] >= done["bytes_read"]
    assert all(math.isfinite(n) and n >= 0 for n in numbers(done))
    summed = subprocess.run(["sha256sum", *shards], capture_output=True, text=True, check=True).stdout
    assert [s["sha256"] for s in done["model"]["sources"]] == [line.split()[0] for line in summed.splitlines()]
    shown = answer(run_cli("inspect", bundle, "--json"))
    assert {k: shown[k] for k in MODEL_KEYS} == {k: done[k] for k in MODEL_KEYS}


def test_json_of_inspect(tmp_path: Path) -> None:
    model = synth.moe().write(tmp_path / "m.gguf")
    (tmp_path / "set").mkdir()
    shards = write_set(tmp_path / "set", synth.moe(), [5, 7])
    one, many = answer(run_cli("inspect", model, "--json")), answer(run_cli("inspect", shards[1], "--json"))
    assert set(one) >= MODEL_KEYS
    assert one["content_digest"] is None
    digests = {answer(run_cli("inspect", p, "--json", "--digest"))["content_digest"] for p in (model, *shards)}
    for source in (model, shards[0]):
        assert run_cli(source).status == 0
    for bundle in (tmp_path / "m.bel", tmp_path / "set" / "model.bel"):
        digests.add(answer(run_cli("inspect", bundle, "--json"))["content_digest"])
    assert len(digests) == 1, "file, split set and their bundles are one model"
    assert re.fullmatch("[0-9a-f]{64}", digests.pop())
    for key in MODEL_KEYS - {"model", "dense_bytes"}:
        assert one[key] == many[key], key
    other = answer(run_cli("inspect", synth.moe(seed=1).write(tmp_path / "o.gguf"), "--json", "--digest"))
    assert other["content_digest"] != answer(run_cli("inspect", tmp_path / "m.bel", "--json"))["content_digest"]


def test_inspect_says_of_a_gguf_what_its_bundle_holds(tmp_path: Path) -> None:
    path = ple_model().write(tmp_path / "m.gguf")
    before, dry = answer(run_cli("inspect", path, "--json")), answer(run_cli(path, "--dry-run", "--json"))
    done = answer(run_cli(path, "--json"))
    for key in MODEL_KEYS - {"model", "content_digest"}:
        assert before[key] == dry[key] == done[key], key


def test_json_of_verify_and_restore(model: Path, tmp_path: Path) -> None:
    assert run_cli(model).status == 0
    bundle = tmp_path / "m.bel"
    checked = answer(run_cli("verify", bundle, "--json"))
    assert set(checked) == {"ok", "blobs_checked", "bytes_checked", "problems"}
    assert (checked["ok"], checked["blobs_checked"], checked["problems"]) == (True, 8, [])
    sizes = sum(p.stat().st_size for p in bundle.rglob("*") if p.is_file() and p.name != "manifest.json")
    assert checked["bytes_checked"] == sizes
    restored = answer(run_cli("restore", bundle, "-o", tmp_path / "back", "--json"))
    assert restored == {"files": [{"name": "m.gguf", "bytes": model.stat().st_size, "sha256": restored["files"][0]["sha256"]}]}
    summed = subprocess.run(["sha256sum", model], capture_output=True, text=True, check=True).stdout
    assert restored["files"][0]["sha256"] == summed.split()[0]


def test_json_of_a_failed_verify_is_printed_too(model: Path, tmp_path: Path) -> None:
    assert run_cli(model).status == 0
    os.truncate(tmp_path / "m.bel" / "m-experts.bin", 4096)
    outcome = run_cli("verify", tmp_path / "m.bel", "--json")
    assert outcome.status == 4
    told = json.loads(outcome.stdout)
    assert told["ok"] is False
    assert "truncated" in told["problems"][0]
    (tmp_path / "m.bel" / "manifest.json").write_text("{")
    outcome = run_cli("verify", tmp_path / "m.bel", "--json")
    assert outcome.status == 4
    assert json.loads(outcome.stdout)["ok"] is False


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_errors_leave_stdout_empty(model: Path, tmp_path: Path, flags: list[str]) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    assert_error(run_cli(tmp_path / "bad.gguf", *flags), 3, "bad.gguf")
    assert_error(run_cli("inspect", tmp_path / "bad.gguf", *flags), 3, "bad.gguf")
    assert run_cli(model).status == 0
    assert_error(run_cli(model, *flags), 2, "m.bel")
    os.truncate(tmp_path / "m.bel" / "m-experts.bin", 4096)
    assert_error(run_cli("restore", tmp_path / "m.bel", "-o", tmp_path / "back", *flags), 4, "m-experts.bin")
    assert_error(run_cli("inspect", tmp_path / "m.bel", *flags), 4, "m-experts.bin")


def test_a_model_without_top_k_has_null_in_its_place(tmp_path: Path) -> None:
    entries = [synth.key("general.architecture", synth.STRING, "qwen3moe")]
    path = synth.moe(entries=entries).write(tmp_path / "m.gguf")
    done = run_cli(path, "--json")
    told = answer(done)
    assert told["token_cycle_bytes"] is None
    assert told["n_expert_used_by_layer"] == {"0": None, "1": None}
    assert told["model"]["name"] is None
    assert "expert_used_count" in done.stderr
    assert run_cli("inspect", path).status == 0
    assert run_cli("inspect", path.with_name("m.bel")).status == 0


# Options


def test_dry_run_writes_nothing(model: Path, tmp_path: Path) -> None:
    before = tree(tmp_path, times=True)
    for flags in ([], ["--json"], ["--force"], ["-o", tmp_path / "x.bel"]):
        assert run_cli(model, "--dry-run", *flags).status == 0
        assert tree(tmp_path, times=True) == before


@pytest.mark.parametrize(
    ("size", "files"),
    [("45GB", 1), ("70k", 1), ("69632", 1), ("69631", 2), ("36864", 2), ("36.9kB", 2), ("36KiB", 2), ("40K", 2)],
)
def test_shard_size(model: Path, tmp_path: Path, size: str, files: int) -> None:
    assert run_cli(model, "--shard-size", size).status == 0
    made = sorted(p.name for p in (tmp_path / "m.bel").glob("*.bin"))
    assert made == (["m-experts.bin"] if files == 1 else ["m-experts-00001-of-00002.bin", "m-experts-00002-of-00002.bin"])
    assert run_cli("verify", tmp_path / "m.bel", "--source", model).status == 0
    assert run_cli("verify", tmp_path / "m.bel", "--quick").status == 0
    assert run_cli("restore", tmp_path / "m.bel", "-o", tmp_path / "back").status == 0
    assert (tmp_path / "back" / "m.gguf").read_bytes() == model.read_bytes()


@pytest.mark.parametrize("size", ["36863", "1", "0"])
def test_a_layer_larger_than_the_shard_size_is_refused(model: Path, tmp_path: Path, size: str) -> None:
    for flags in ([], ["--dry-run"]):
        assert_error(run_cli(model, "--shard-size", size, *flags), 2, "blk.0", "36864", f"--shard-size {size}")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    assert run_cli(model, "--shard-size", "36864").status == 0, "the size that the message gives is enough"


@pytest.mark.parametrize(
    ("mode", "elements", "is_split"),
    [("auto", 64, True), ("auto", 32 * 2, True), ("keep", 2048, False), ("split", 32, True), ("auto", 32, True)],
)
def test_ple(tmp_path: Path, mode: str, elements: int, is_split: bool) -> None:
    path = ple_model(elements).write(tmp_path / "m.gguf")
    done = answer(run_cli(path, "--ple", mode, "--json"))
    assert (tmp_path / "m.bel" / "m-ple.gguf").exists() == is_split == (done["ple_bytes"] > 0)
    assert run_cli("verify", tmp_path / "m.bel", "--source", path).status == 0
    assert run_cli("restore", tmp_path / "m.bel", "-o", tmp_path / "back").status == 0
    assert (tmp_path / "back" / "m.gguf").read_bytes() == path.read_bytes()


def test_ple_auto_keeps_a_small_table_where_it_is(tmp_path: Path) -> None:
    large = synth.Tensor("token_embd.weight", (4096, 8), synth.F32)
    table = synth.Tensor("per_layer_token_embd.weight", (64, 8), synth.Q8_0)
    path = synth.moe(tensors=[large, table, *synth.moe_tensors()[1:]]).write(tmp_path / "m.gguf")
    for mode, is_split in (("auto", False), ("split", True)):
        assert run_cli(path, "--ple", mode, "--force").status == 0
        assert (tmp_path / "m.bel" / "m-ple.gguf").exists() == is_split
    assert run_cli(synth.moe().write(tmp_path / "n.gguf"), "--ple", "split").status == 0
    assert not (tmp_path / "n.bel" / "n-ple.gguf").exists(), "nothing to split off"


def test_no_verify(model: Path, tmp_path: Path) -> None:
    table = run_cli(model, "--no-verify")
    assert table.status == 0
    assert "not (--no-verify)" in table.stdout
    made = tree(tmp_path / "m.bel")
    assert "every byte" in run_cli(model, "--force").stdout
    assert tree(tmp_path / "m.bel") == made


def test_the_table_says_what_to_run_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last lines can be pasted into a shell, whatever the name."""
    monkeypatch.chdir(tmp_path)
    synth.moe().write(tmp_path / "it's a; model.gguf")
    lines = run_cli("it's a; model.gguf").stdout.splitlines()
    commands = [line[line.index("bel-repack ") :] for line in lines if "bel-repack " in line]
    assert [c.split()[1] for c in commands] == ["inspect", "restore"]
    for command in commands:
        script = command.replace("bel-repack", f"'{COMMAND}'", 1).replace("-o DIR", "-o back")
        assert subprocess.run(["sh", "-c", script], capture_output=True, check=False).returncode == 0, command
    assert (tmp_path / "back" / "it's a; model.gguf").read_bytes() == (tmp_path / "it's a; model.gguf").read_bytes()


# verify --source


@pytest.fixture
def bundle(model: Path) -> Path:
    assert run_cli(model).status == 0
    return model.with_name("m.bel")


def test_verify_against_the_right_source(bundle: Path, model: Path, tmp_path: Path) -> None:
    assert run_cli("verify", bundle, "--source", model).status == 0
    shutil.copyfile(model, tmp_path / "renamed.gguf")
    assert run_cli("verify", bundle, "--source", tmp_path / "renamed.gguf", "--quick").status == 0


@pytest.mark.parametrize("quick", [[], ["--quick"]])
def test_verify_against_a_model_of_the_same_shape(bundle: Path, tmp_path: Path, quick: list[str]) -> None:
    other = synth.moe(seed=1).write(tmp_path / "other.gguf")
    outcome = run_cli("verify", bundle, "--source", other, "--json", *quick)
    assert outcome.status == 4
    problems = json.loads(outcome.stdout)["problems"]
    assert all(str(other) in p for p in problems)
    assert any("blk.1.ffn_down_exps.weight" in p for p in problems)
    assert any("sha256" in p for p in problems)


def test_verify_finds_one_changed_bit_of_a_source_anywhere(bundle: Path, model: Path) -> None:
    """Header, tensors of every kind, the last byte: `--source` is an answer about every byte."""
    data = model.read_bytes()
    for at in (30, 700, 1100, 1300, 5000, len(data) // 2, len(data) - 1):
        changed = bytearray(data)
        changed[at] ^= 1
        model.write_bytes(changed)
        outcome = run_cli("verify", bundle, "--source", model)
        assert outcome.status in (3, 4), (at, outcome)
        assert str(model) in outcome.stderr


def test_verify_names_a_source_of_another_size(bundle: Path, tmp_path: Path) -> None:
    other = synth.moe(tail=b"more").write(tmp_path / "other.gguf")
    outcome = run_cli("verify", bundle, "--source", other)
    assert outcome.status == 4
    assert str(other) in outcome.stderr.splitlines()[0]


def test_verify_does_not_call_a_sound_bundle_damaged(bundle: Path, tmp_path: Path) -> None:
    outcome = run_cli("verify", bundle, "--source", synth.moe(seed=1).write(tmp_path / "other.gguf"))
    assert outcome.status == 4
    assert "is damaged" not in outcome.stderr


def test_verify_without_the_source_that_was_named(bundle: Path, tmp_path: Path) -> None:
    assert_error(run_cli("verify", bundle, "--source", tmp_path / "gone.gguf"), 3, tmp_path / "gone.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(60))
    assert_error(run_cli("verify", bundle, "--source", tmp_path / "bad.gguf", "--json"), 3, tmp_path / "bad.gguf")


# Pipes and terminals


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_reader_that_has_gone_is_no_traceback(model: Path, bundle: Path, flags: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for args in (["inspect", str(model)], ["verify", str(bundle)], ["--help"]):
        done = subprocess.run(
            [COMMAND, *args, *(flags if "--help" not in args else [])],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert done.returncode == 141
        assert done.stderr == ""
    os.close(writer)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_full_disk_behind_stdout(model: Path, flags: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([COMMAND, "inspect", model, *flags], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 5
    assert "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr


def test_a_full_disk_behind_stdout_is_told_from_one_behind_the_output(model: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([COMMAND, "inspect", model], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert "standard output" in done.stderr or "stdout" in done.stderr


def test_a_full_disk_behind_stderr(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([COMMAND, tmp_path / "gone.gguf"], stdout=subprocess.PIPE, stderr=full, text=True, check=False)
    assert done.returncode == 3
    assert done.stdout == ""


CLOSED = {"stdout": ">&-", "stderr": "2>&-", "stdin": "<&-", "both": ">&- 2>&-", "all": "<&- >&- 2>&-"}


@pytest.mark.parametrize("which", CLOSED)
def test_closed_standard_streams(model: Path, tmp_path: Path, which: str) -> None:
    """As a daemon may start a command: the work is done, and no file of the bundle takes a stream's place and its text."""
    script = f"'{COMMAND}' '{model}' {CLOSED[which]}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0, done
    assert run_cli("verify", tmp_path / "m.bel", "--source", model).status == 0


class Clock:
    """A clock that goes on by a step at each look."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_plain_progress_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("bel-repack", Clock(2.0))
    for done in range(10, 101, 10):
        progress("repack", done * 2**20, 100 * 2**20)
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" % ")[0] for line in lines] == [
        "bel-repack: repack 40",
        "bel-repack: repack 70",
        "bel-repack: repack 100",
    ]
    assert all(re.search(r"of 100 MiB, \d+ MB/s, \d+ s left$", line) for line in lines)


def test_a_quick_run_says_nothing_on_stderr(model: Path) -> None:
    assert run_cli(model).stderr == ""


def test_progress_of_nothing_does_not_divide_by_zero(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("x", Clock(10.0))
    for _ in range(3):
        progress("repack", 0, 0)
    assert "nan" not in capsys.readouterr().err


def on_a_terminal(script: str, *args: str | Path, columns: int = 100, rows: int = 24) -> str:
    """What a Python script writes to a terminal."""
    import fcntl
    import struct
    import sys
    import termios

    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", script, *map(str, args)], stdin=side, stdout=side, stderr=side)
    os.close(side)
    shown = b""
    while select.select([main], [], [], 30)[0]:
        try:
            part = os.read(main, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        shown += part
    os.close(main)
    assert process.wait(timeout=30) == 0, shown
    return shown.decode()


SLOW = """
import sys, time
import bel.formats.console as console
class Clock:
    now = 0.0
    def __call__(self):
        Clock.now += 1.0
        return Clock.now
console.Progress.__init__.__defaults__ = (Clock(),)
from bel.repack.cli import main
main()
"""


@pytest.mark.parametrize(("columns", "rows"), [(100, 24), (0, 0)], ids=["a size", "a terminal that does not know its size"])
def test_a_bar_on_a_terminal(tmp_path: Path, columns: int, rows: int) -> None:
    experts = 96
    tensors = synth.expert_stacks(0, experts, width=512, ff=512)
    path = synth.Gguf(synth.moe_entries(layers=1, experts=experts), tensors).write(tmp_path / "m.gguf")
    assert path.stat().st_size > 3 * 4 * 2**20, "several chunks, so that there is something to show"
    shown = on_a_terminal(SLOW, path, columns=columns, rows=rows)
    bars = [part for part in re.split(r"[\r\n]", shown) if re.search(r"\d+%\|", part)]
    assert bars, shown
    for phase in ("repack", "verify"):
        mine = [b for b in bars if b.startswith(phase)]
        assert mine, (phase, bars)
        assert re.search(r"\d+(\.\d+)?[kMG]?/\d+(\.\d+)?[kMG] \[.*<.*, .*B/s\]", mine[-1]), mine
    last = shown.rstrip().splitlines()[-1]
    assert "bel-repack restore" in last, "the table stands below, and the bar is gone"


def test_no_bar_for_a_quick_run_on_a_terminal(model: Path) -> None:
    shown = on_a_terminal("from bel.repack.cli import main; main()", model)
    assert "%|" not in shown


def test_a_long_path_is_not_cut_on_a_narrow_terminal(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    path = synth.moe().write(folder / "m.gguf")
    shown = on_a_terminal("from bel.repack.cli import main; main()", path, columns=40)
    assert str(folder / "m.bel") in shown.replace("\r\n", "\n")


def test_version() -> None:
    outcome = run_cli("--version")
    assert (outcome.status, outcome.stderr) == (0, "")
    assert re.fullmatch(r"bel-repack, version \d+\.\d+\.\d+\n", outcome.stdout)


def test_no_arguments_show_the_help() -> None:
    outcome = run_cli()
    assert outcome.status in (0, 2)
    assert "Examples:" in outcome.stdout + outcome.stderr


@pytest.mark.parametrize(
    "make", [lambda p: p.mkdir(), os.mkfifo, lambda p: p.symlink_to("gone")], ids=["folder", "fifo", "dangling"]
)
def test_what_is_no_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "m.gguf"
    make(path)
    for args in ([path], ["inspect", path]):
        assert_error(run_cli(*args), 3, path)
