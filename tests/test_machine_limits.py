"""Runs on machines that are full, read-only or limited: done, or refused with the reason."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

import faults
import synth
from faults import real, run_cli, tree
from repack_runs import assert_refused, big_model, write_set
from repack_runs import source as source


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return big_model(tmp_path_factory.mktemp("big"))


def test_a_disk_too_small_is_refused_before_the_first_byte(tmp_path: Path, big: Path) -> None:
    with faults.mounted(tmp_path / "disk", "-o", "size=32m") as disk:
        outcome = run_cli(big, "-o", disk / "out.bel")
        assert_refused(outcome, 5, "no space", disk, "bytes)")
        assert list(disk.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with faults.mounted(tmp_path / "disk", "-o", "size=32m") as disk:
        monkeypatch.setattr("bel.repack.convert.check_space", lambda *_: None)  # as if another process took the space after it
        outcome = run_cli(big, "-o", disk / "out.bel")
        assert_refused(outcome, 5, "No space left on device", "big-experts.bin", "use -o on another disk")
        assert list(disk.iterdir()) == []


def test_a_restore_onto_a_disk_too_small(tmp_path: Path, big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_cli(big, "-o", tmp_path / "m.bel", "--no-verify").status == 0
    with faults.mounted(tmp_path / "disk", "-o", "size=32m") as disk:
        assert_refused(run_cli("restore", tmp_path / "m.bel", "-o", disk), 5, "no space", disk)
        assert list(disk.iterdir()) == []
        monkeypatch.setattr("bel.repack.restore.check_space", lambda *_: None)
        outcome = run_cli("restore", tmp_path / "m.bel", "-o", disk / "back")
        assert_refused(outcome, 5, "No space left on device", "big.gguf")
        assert list(disk.iterdir()) == []


def test_a_bundle_that_just_fits_is_made(tmp_path: Path, source: Path) -> None:
    """The check before the first byte must not refuse what would fit: it knows sizes to a page or so a file."""
    assert run_cli(source, "-o", tmp_path / "m.bel").status == 0
    need = sum(-(-p.stat().st_size // 4096) * 4096 for p in (tmp_path / "m.bel").rglob("*") if p.is_file())
    with faults.mounted(tmp_path / "disk", "-o", f"size={need + 2 * 2**20}") as disk:
        assert run_cli(source, "-o", disk / "m.bel").status == 0


def test_a_file_size_limit(tmp_path: Path, big: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))

    assert_refused(real(big, "-o", tmp_path / "out.bel", preexec_fn=limit), 5, "big-experts.bin", "ulimit -f")
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_target(tmp_path: Path, source: Path) -> None:
    assert run_cli(source, "-o", tmp_path / "m.bel").status == 0
    with faults.mounted(tmp_path / "disk", "-o", "ro") as disk:
        for args in ((source, "-o", disk / "out.bel"), ("restore", tmp_path / "m.bel", "-o", disk)):
            assert_refused(run_cli(*args), 5, "Read-only file system", disk, "use -o")


def test_a_read_only_source_is_enough(tmp_path: Path) -> None:
    """Nothing is written beside a source, and none of its times change: a model may lie on a read-only share."""
    with faults.mounted(tmp_path / "share", "-o", "size=4m") as share:
        source = write_set(share)
        assert run_cli(source, "-o", tmp_path / "kept.bel").status == 0
        os.system(f"mount -o remount,ro {share}")
        assert_refused(run_cli(source), 5, "Read-only file system", share)
        assert run_cli(source, "-o", tmp_path / "m.bel").status == 0
        assert run_cli("verify", tmp_path / "m.bel", "--source", source).status == 0
        assert tree(tmp_path / "m.bel") == tree(tmp_path / "kept.bel")


def round_trip_under_a_descriptor_limit(folder: Path, descriptors: int, shard_size: str) -> int:
    """Convert, verify and restore a set of 40 files; how many experts files that made."""
    tensors = [t for layer in range(40) for t in synth.expert_stacks(layer, 2)]
    model = synth.Gguf(synth.moe_entries(layers=40, experts=2), tensors)
    (folder / "in").mkdir()
    for name, shard in synth.split(model, [3] * 40).items():
        shard.write(folder / "in" / name)
    first, bundle = folder / "in" / "model-00001-of-00040.gguf", folder / "m.bel"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    for args in (
        (first, "-o", bundle, "--shard-size", shard_size),
        ("verify", bundle, "--source", first),
        ("restore", bundle, "-o", folder / "back"),
    ):
        done = real(*args, preexec_fn=limit)
        assert done.status == 0, done
    assert tree(folder / "back") == tree(folder / "in")
    return len(list(bundle.glob("*-experts*.bin")))


@pytest.mark.parametrize("descriptors", [16, 24])
def test_many_source_files_under_a_small_descriptor_limit(tmp_path: Path, descriptors: int) -> None:
    assert round_trip_under_a_descriptor_limit(tmp_path, descriptors, "45GB") == 1


def test_many_experts_files_under_a_small_descriptor_limit(tmp_path: Path) -> None:
    assert round_trip_under_a_descriptor_limit(tmp_path, 24, "21000") == 40


@pytest.mark.parametrize("descriptors", [6, 7, 8, 9])
def test_too_few_descriptors_are_said(tmp_path: Path, source: Path, descriptors: int) -> None:
    before = tree(tmp_path)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    outcome = real(source, "-o", tmp_path / "out.bel", preexec_fn=limit)
    if outcome.status:
        assert_refused(outcome, 5, "ulimit -n")
        assert tree(tmp_path) == before


@pytest.mark.parametrize("mib", [60, 90, 110, 130, 170, 260])
def test_little_memory_is_an_error_and_no_traceback(tmp_path: Path, big: Path, mib: int) -> None:
    """Below what the interpreter itself needs nothing of ours runs yet; from there on it is success or status 5."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (mib * 2**20, mib * 2**20))

    outcome = real(big, "-o", tmp_path / "out.bel", "--no-verify", preexec_fn=limit)
    assert "Traceback" not in outcome.stderr, outcome.stderr
    if outcome.status:
        assert_refused(outcome, 5)
        assert list(tmp_path.iterdir()) == []


def test_a_descriptor_is_never_left_open(tmp_path: Path, source: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert run_cli(source, "-o", tmp_path / "out.bel").status == 0
    assert run_cli("verify", tmp_path / "out.bel", "--source", source).status == 0
    assert run_cli("verify", tmp_path / "out.bel", "--quick").status == 0
    assert run_cli("restore", tmp_path / "out.bel", "-o", tmp_path / "back").status == 0
    assert run_cli(source, "-o", tmp_path / "out.bel").status == 2
    assert len(list(Path("/proc/self/fd").iterdir())) == before
