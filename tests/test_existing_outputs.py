"""Outputs that are there already, appear meanwhile or are an input: nothing is lost that is not a bundle of ours."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import faults
from bel.formats.errors import UsageError
from bel.formats.gguf_model import open_model
from bel.repack.convert import convert
from bel.repack.layout import plan_layout
from faults import run_cli, tree
from repack_runs import assert_refused, big_model, write_set
from repack_runs import reference as reference
from repack_runs import source as source


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return big_model(tmp_path_factory.mktemp("big"))


def test_two_runs_for_one_output(tmp_path: Path, big: Path) -> None:
    out = tmp_path / "out.bel"
    first = faults.start(big, "-o", out)
    try:
        assert faults.wait_until((tmp_path / ".out.bel.bel-tmp" / "big-experts.bin").exists, first)
        first.send_signal(signal.SIGSTOP)
        second = run_cli(big, "-o", out)
        third = run_cli(big, "-o", out, "--force")
    finally:
        first.send_signal(signal.SIGCONT)
    for refused in (second, third):
        assert_refused(refused, 5, "another run is writing this output", ".out.bel.bel-tmp", "Wait")
    assert faults.finish(first).status == 0
    assert run_cli("verify", out).status == 0


def test_two_restores_into_one_folder(tmp_path: Path, big: Path) -> None:
    bundle, back = tmp_path / "m.bel", tmp_path / "back"
    assert run_cli(big, "-o", bundle, "--no-verify").status == 0
    first = faults.start("restore", bundle, "-o", back)
    try:
        assert faults.wait_until((back / ".bel-restore.bel-tmp" / "big.gguf").exists, first)
        first.send_signal(signal.SIGSTOP)
        second = run_cli("restore", bundle, "-o", back)
    finally:
        first.send_signal(signal.SIGCONT)
    assert_refused(second, 5, "another run", back)
    assert faults.finish(first).status == 0
    assert tree(back) == tree(big.parent)


def test_a_stale_temporary_folder_is_replaced_and_links_in_it_are_not_followed(
    tmp_path: Path, source: Path, reference: dict[str, tuple[str, int]]
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep me")
    stale = tmp_path / ".out.bel.bel-tmp"
    (stale / "source").mkdir(parents=True)
    (stale / "source" / "old.hdr.zst").write_text("stale")
    (stale / "manifest.json").symlink_to(precious / "file")
    (stale / "folder").symlink_to(precious, target_is_directory=True)
    assert run_cli(source, "-o", tmp_path / "out.bel").status == 0
    assert tree(tmp_path / "out.bel") == reference
    assert not stale.exists()
    assert (precious / "file").read_text() == "keep me"


@pytest.mark.parametrize("make", ["file", "link"])
def test_a_temporary_name_that_is_something_else_is_refused(tmp_path: Path, source: Path, make: str) -> None:
    precious, taken = tmp_path / "precious", tmp_path / ".out.bel.bel-tmp"
    precious.mkdir()
    (precious / "file").write_text("keep me")
    if make == "link":
        taken.symlink_to(precious, target_is_directory=True)
    else:
        taken.write_text("keep me")
    before = tree(tmp_path)
    assert_refused(run_cli(source, "-o", tmp_path / "out.bel"), 5, taken)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "files",
    [
        {"thesis.txt": "years of work"},
        {"manifest.json": '{"name": "a web application"}', "thesis.txt": "years of work"},
        {"other-dense.gguf": "a model of another kind", "thesis.txt": "years of work"},
    ],
    ids=["no manifest", "a foreign manifest.json", "a file called -dense.gguf"],
)
def test_force_never_deletes_a_folder_that_is_not_a_bundle(tmp_path: Path, source: Path, files: dict[str, str]) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    before = tree(tmp_path)
    assert_refused(run_cli(source, "-o", folder, "--force"), 2, folder, "not a bundle")
    assert tree(tmp_path) == before


def test_force_spares_a_folder_that_appears_during_the_run(tmp_path: Path, source: Path) -> None:
    model = open_model(source)
    folder = tmp_path / "out.bel"

    def someone_else(_phase: str, _done: int, _total: int) -> None:
        if not folder.exists():
            folder.mkdir()
            (folder / "thesis.txt").write_text("years of work")

    layout = plan_layout(model, "model", ple="auto", shard_bytes=2**40)
    with pytest.raises(UsageError):
        convert(model, layout, folder, force=True, check=True, progress=someone_else)
    assert (folder / "thesis.txt").read_text() == "years of work"


def test_an_output_that_appears_during_the_run_is_not_replaced(tmp_path: Path, source: Path) -> None:
    model, folder = open_model(source), tmp_path / "out.bel"
    layout = plan_layout(model, "model", ple="auto", shard_bytes=2**40)
    with pytest.raises(UsageError, match="exists already"):
        convert(model, layout, folder, force=False, check=True, progress=lambda *_: folder.mkdir(exist_ok=True))
    assert {p.name for p in tmp_path.iterdir()} == {"in", "out.bel"}
    assert list(folder.iterdir()) == []


def test_force_replaces_a_damaged_bundle(tmp_path: Path, source: Path, reference: dict[str, tuple[str, int]]) -> None:
    out = tmp_path / "out.bel"
    assert run_cli(source, "-o", out).status == 0
    (out / "manifest.json").write_text("{")
    assert_refused(run_cli(source, "-o", out), 2, out, "--force")
    assert run_cli(source, "-o", out, "--force").status == 0
    assert tree(out) == reference


def outputs_that_touch_an_input(folder: Path, source: Path) -> dict[str, Path]:
    (folder / "link-to-model").symlink_to(source)
    (folder / "link-to-folder").symlink_to(source.parent, target_is_directory=True)
    (folder / "outer").symlink_to(folder, target_is_directory=True)
    return {
        "the input": source,
        "another shard": source.with_name("model-00002-of-00002.gguf"),
        "the folder of the input": source.parent,
        "a link to the input": folder / "link-to-model",
        "a link to its folder": folder / "link-to-folder",
        "the input through a link": folder / "link-to-folder" / source.name,
        "its folder through a link": folder / "outer" / source.parent.name,
        "a folder further up": folder,
    }


@pytest.mark.parametrize(
    "which",
    [
        "the input",
        "another shard",
        "the folder of the input",
        "a link to the input",
        "a link to its folder",
        "the input through a link",
        "its folder through a link",
        "a folder further up",
    ],
)
@pytest.mark.parametrize("through_link", [False, True])
def test_an_output_that_is_or_contains_an_input(tmp_path: Path, which: str, through_link: bool) -> None:
    source = write_set(tmp_path / "work" / "in")
    output = outputs_that_touch_an_input(tmp_path / "work", source)[which]
    named = tmp_path / "work" / "link-to-folder" / source.name if through_link else source
    before = tree(tmp_path, times=True)
    assert_refused(run_cli(named, "-o", output, "--force"), 2, output, "input")
    assert tree(tmp_path, times=True) == before


def test_an_output_that_is_a_hard_link_of_the_input_costs_nothing(tmp_path: Path, source: Path) -> None:
    twin = tmp_path / "twin.gguf"
    os.link(source, twin)
    before = tree(source.parent, times=True)
    assert run_cli(source, "-o", twin, "--force").status in (0, 2)
    assert tree(source.parent, times=True) == before
