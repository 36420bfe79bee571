"""Outputs behind links, and models that have no folder of their own: where a bundle lands."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

import faults
from faults import COMMAND, answer, run_cli, tree
from repack_runs import assert_refused, big_model, ple_model, undisturbed
from repack_runs import source as source


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def test_force_replaces_the_folder_that_a_link_leads_to(tmp_path: Path, source: Path, disk: Path) -> None:
    reference = undisturbed(tmp_path, source)
    assert run_cli(source, "-o", disk / "real.bel").status == 0
    (disk / "real.bel" / "model-dense.gguf").write_bytes(b"old")
    link, inode = tmp_path / "out.bel", (disk / "real.bel").stat().st_ino
    link.symlink_to("disk/real.bel")
    assert_refused(run_cli(source, "-o", link), 2, link, "exists already")
    done = answer(run_cli(source, "-o", link, "--force", "--json"))
    assert os.readlink(link) == "disk/real.bel"
    assert (disk / "real.bel").stat().st_ino != inode
    assert tree(disk / "real.bel") == reference
    assert done["bundle"] == str(disk / "real.bel")
    assert {p.name for p in disk.iterdir()} == {"real.bel"}
    assert {p.name for p in tmp_path.iterdir()} == {"in", "disk", "out.bel"}


def test_a_kill_leaves_a_whole_bundle_behind_the_link(tmp_path: Path, source: Path, disk: Path) -> None:
    reference, link = undisturbed(tmp_path, source), tmp_path / "out.bel"
    link.symlink_to(disk / "real.bel")
    assert run_cli(source, "-o", link).status == 0
    kills = 0
    for outcome in faults.every_call(source, "-o", link, "--force", act=faults.sends(signal.SIGKILL), step=9):
        assert outcome.status == -signal.SIGKILL
        assert os.readlink(link) == str(disk / "real.bel")
        assert tree(link.resolve()) == reference
        kills += 1
    assert kills > 5
    assert run_cli(source, "-o", link, "--force").status == 0
    assert {p.name for p in disk.iterdir()} == {"real.bel"}


def test_the_default_output_follows_a_link_too(source: Path, disk: Path) -> None:
    (source.parent / "model.bel").symlink_to(disk / "model.bel")
    assert run_cli(source).status == 0
    assert (disk / "model.bel" / "manifest.json").is_file()
    assert (source.parent / "model.bel").is_symlink()
    assert run_cli(source, "--force").status == 0
    assert (source.parent / "model.bel").is_symlink()


def test_a_link_to_nothing_is_made_where_it_leads(tmp_path: Path, source: Path, disk: Path) -> None:
    (tmp_path / "out.bel").symlink_to(disk / "new.bel")
    assert run_cli(source, "-o", tmp_path / "out.bel").status == 0
    assert tree(disk / "new.bel") == undisturbed(tmp_path, source)
    assert (tmp_path / "out.bel").is_symlink()


@pytest.mark.parametrize("flags", [[], ["--force"]])
@pytest.mark.parametrize(
    ("leads_to", "words"),
    [("not/there.bel", "does not exist"), ("out.bel", "a link|exists already"), ("in", "the input")],
    ids=["no parent", "itself", "the folder of the input"],
)
def test_a_link_that_leads_nowhere_good(tmp_path: Path, source: Path, leads_to: str, words: str, flags: list[str]) -> None:
    (tmp_path / "out.bel").symlink_to(leads_to)
    before = tree(tmp_path)
    outcome = run_cli(source, "-o", tmp_path / "out.bel", *flags)
    assert_refused(outcome, 2)
    assert any(word in outcome.stderr for word in words.split("|")), outcome
    assert tree(tmp_path) == before


def test_what_a_link_leads_to_is_held_to_the_same(tmp_path: Path, source: Path, disk: Path) -> None:
    (disk / "thesis.txt").write_text("years of work")
    (tmp_path / "out.bel").symlink_to(disk)
    assert_refused(run_cli(source, "-o", tmp_path / "out.bel", "--force"), 2, "not a bundle", "thesis.txt")
    assert (disk / "thesis.txt").read_text() == "years of work"


def test_one_output_under_two_names_is_locked_once(tmp_path: Path, disk: Path) -> None:
    big = big_model(tmp_path / "big")
    (tmp_path / "out.bel").symlink_to(disk / "real.bel")
    first = faults.start(big, "-o", disk / "real.bel")
    try:
        assert faults.wait_until((disk / ".real.bel.bel-tmp" / "big-experts.bin").exists, first)
        first.send_signal(signal.SIGSTOP)
        second = run_cli(big, "-o", tmp_path / "out.bel")
    finally:
        first.send_signal(signal.SIGCONT)
    assert_refused(second, 5, "another run is writing this output")
    assert faults.finish(first).status == 0


@pytest.mark.parametrize("name", ["/dev/stdin", "/dev/fd/0", "/proc/self/fd/0", "/proc/thread-self/fd/0"])
def test_a_model_on_a_descriptor_needs_an_output(tmp_path: Path, name: str) -> None:
    model = ple_model().write(tmp_path / "model.gguf")
    with model.open("rb") as file:
        bare = subprocess.run([COMMAND, name], stdin=file, capture_output=True, text=True, check=False)
    assert (bare.returncode, bare.stdout) == (2, "")
    assert f"bel-repack: error: {name}: a bundle is not written beside a device" in bare.stderr
    assert "-o" in bare.stderr
    assert not os.path.lexists("/dev/stdin.bel")
    assert {p.name for p in tmp_path.iterdir()} == {"model.gguf"}


def test_a_model_on_a_descriptor_with_an_output_is_converted_and_restored(tmp_path: Path) -> None:
    model = ple_model().write(tmp_path / "model.gguf")
    with model.open("rb") as file:
        command = [COMMAND, "/dev/stdin", "-o", tmp_path / "out.bel"]
        subprocess.run(command, stdin=file, capture_output=True, check=True)
    assert run_cli("restore", tmp_path / "out.bel", "-o", tmp_path / "back").status == 0
    assert [p.read_bytes() for p in (tmp_path / "back").iterdir()] == [model.read_bytes()]


def test_a_link_of_the_users_to_a_descriptor_has_a_folder_of_its_own(tmp_path: Path) -> None:
    model = ple_model().write(tmp_path / "model.gguf")
    (tmp_path / "linked.gguf").symlink_to("/dev/stdin")
    with model.open("rb") as file:
        subprocess.run([COMMAND, tmp_path / "linked.gguf"], stdin=file, capture_output=True, check=True)
    assert (tmp_path / "linked.bel" / "linked-dense.gguf").is_file()


@pytest.mark.parametrize("command", [[], ["inspect"], ["verify"], ["restore"], ["publish", "--repo-id", "o/n"]])
def test_a_pipe_or_device_is_refused_and_never_waited_for(tmp_path: Path, command: list[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", "/dev/null", "/dev/zero"):
        outcome = faults.real(*command, name)
        assert_refused(outcome, 3, name)
