"""Whatever call fails, and whenever: no half output under its name, nothing beside it, the inputs as they were."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

import faults
from faults import Outcome, in_child, run_cli, tree
from repack_runs import assert_refused, write_set
from repack_runs import reference as reference
from repack_runs import source as source


def only_cleaning_failed(outcome: Outcome) -> bool:
    """Whether a run was complete before the fault, which then cost nothing but the removal of the temporary folder."""
    return outcome.status == 0 and "could not be removed" in outcome.stderr and "the next run" in outcome.stderr


@pytest.mark.parametrize(("code", "step"), [(errno.EIO, 1), (errno.ENOSPC, 3)])
def test_an_error_of_any_call_leaves_nothing_behind(tmp_path: Path, source: Path, code: int, step: int) -> None:
    before = tree(tmp_path, times=True)
    struck = 0
    for outcome in faults.every_call(source, "-o", tmp_path / "out.bel", act=faults.raises(code), step=step):
        assert_refused(outcome, 5, os.strerror(code))
        assert tree(tmp_path, times=True) == before, outcome
        struck += step
    assert struck > 60, "most calls of a conversion are reached"
    assert run_cli("verify", tmp_path / "out.bel").status == 0, "the run in which no fault struck"


def test_an_error_of_any_call_names_the_file_that_it_happened_to(tmp_path: Path, source: Path) -> None:
    nameless = [
        (outcome.hit, outcome.path, outcome.stderr)
        for outcome in faults.every_call(source, "-o", tmp_path / "out.bel", act=faults.raises(errno.EIO))
        if str(outcome.path) not in outcome.stderr and outcome.hit not in ("fstat", "posix_fadvise")
    ]
    assert nameless == []


def test_an_error_of_any_call_of_a_forced_run_keeps_a_whole_bundle(tmp_path: Path, source: Path) -> None:
    old = write_set(tmp_path / "old", seed=1)
    assert run_cli(old, "-o", tmp_path / "out.bel").status == 0
    before, torn = tree(tmp_path), []
    for outcome in faults.every_call(source, "-o", tmp_path / "out.bel", "--force", act=faults.raises(errno.EIO), step=2):
        if only_cleaning_failed(outcome):
            assert run_cli("verify", tmp_path / "out.bel", "--source", source).status == 0
            assert run_cli(old, "-o", tmp_path / "out.bel", "--force").status == 0, "the next run cleans up"
            assert tree(tmp_path) == before
            continue
        assert_refused(outcome, 5)
        if tree(tmp_path) != before:
            torn.append(outcome)
            shutil.rmtree(tmp_path / "out.bel")
            assert run_cli(old, "-o", tmp_path / "out.bel").status == 0
    assert torn == [], "the old bundle is there after every error"


@pytest.mark.parametrize(("code", "step"), [(errno.EIO, 1), (errno.ENOSPC, 3)])
def test_an_error_of_any_call_of_a_restore_leaves_nothing_behind(tmp_path: Path, source: Path, code: int, step: int) -> None:
    bundle = tmp_path / "m.bel"
    assert run_cli(source, "-o", bundle).status == 0
    before = tree(tmp_path, times=True)
    struck = 0
    for outcome in faults.every_call("restore", bundle, "-o", tmp_path / "back", act=faults.raises(code), step=step):
        if only_cleaning_failed(outcome):
            assert {k: v for k, v in tree(tmp_path / "back").items() if "bel-tmp" not in k} == tree(source.parent)
            shutil.rmtree(tmp_path / "back")
            continue
        assert_refused(outcome, 5, os.strerror(code))
        assert tree(tmp_path, times=True) == before, outcome
        struck += step
    assert struck > 30, "most calls of a restore are reached"
    assert tree(tmp_path / "back") == tree(source.parent)


def test_an_error_of_any_call_of_a_forced_restore_keeps_every_old_file(tmp_path: Path, source: Path) -> None:
    bundle, back = tmp_path / "m.bel", tmp_path / "back"
    assert run_cli(source, "-o", bundle).status == 0
    back.mkdir()
    for path in source.parent.iterdir():
        (back / path.name).write_text("what was here before")
    before = tree(back)
    for outcome in faults.every_call("restore", bundle, "-o", back, "--force", act=faults.raises(errno.EIO), step=2):
        if only_cleaning_failed(outcome):
            assert {k: v for k, v in tree(back).items() if "bel-tmp" not in k} == tree(source.parent)
            for path in source.parent.iterdir():
                (back / path.name).write_text("what was here before")
            shutil.rmtree(back / ".bel-restore.bel-tmp")
            continue
        assert_refused(outcome, 5)
        assert tree(back) == before, outcome


def test_an_error_of_any_call_of_verify_is_no_verdict_on_the_bundle(tmp_path: Path, source: Path) -> None:
    bundle = tmp_path / "m.bel"
    assert run_cli(source, "-o", bundle).status == 0
    for outcome in faults.every_call("verify", bundle, "--source", source, act=faults.raises(errno.EIO)):
        assert_refused(outcome, 5)
        assert "damaged" not in outcome.stderr


def test_short_reads_and_writes_change_nothing(
    tmp_path: Path, source: Path, reference: dict[str, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, pread, pwrite, write = os.preadv, os.pread, os.pwrite, os.write
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:701]], at))
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 701), at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:499], at))
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:97]))
    assert run_cli(source, "-o", tmp_path / "out.bel").status == 0
    assert tree(tmp_path / "out.bel") == reference
    assert run_cli("restore", tmp_path / "out.bel", "-o", tmp_path / "back").status == 0
    assert tree(tmp_path / "back") == tree(source.parent)


@pytest.mark.parametrize("nth", range(1, 12))
def test_a_disk_that_writes_other_bytes_is_found_before_the_bundle_gets_its_name(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    pwrite, count = os.pwrite, 0

    def flips(fd: int, data: memoryview, at: int) -> int:
        nonlocal count
        count += 1
        if count != nth:
            return pwrite(fd, data, at)
        wrong = bytearray(data)
        wrong[len(wrong) // 2] ^= 1
        return pwrite(fd, wrong, at)

    before = tree(tmp_path)
    monkeypatch.setattr(os, "pwrite", flips)
    outcome = run_cli(source, "-o", tmp_path / "out.bel")
    assert_refused(outcome, 4, "does not read back as it was written", ".out.bel.bel-tmp")
    assert tree(tmp_path) == before


def test_a_failing_hash_thread_ends_the_run(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that fails must not leave the others waiting for it."""

    class Failing:
        def update(self, _data: object) -> None:
            raise MemoryError

        def hexdigest(self) -> str:
            return ""

    monkeypatch.setattr("bel.repack.stream.hashlib", type("hashlib", (), {"sha256": Failing}))
    monkeypatch.setattr("bel.repack.stream.CHUNK_BYTES", 1024)  # so that the file is many of them
    monkeypatch.setattr(faults, "HANG_SECONDS", 3.0)
    before = tree(tmp_path)
    outcome = in_child(source, "-o", tmp_path / "out.bel")
    assert_refused(outcome, 5, "memory")
    assert tree(tmp_path) == before
