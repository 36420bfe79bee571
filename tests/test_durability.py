"""What durable means: all is on the disk before it has its name, and the name too before the run ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from faults import run_cli
from repack_runs import source as source


def test_every_file_and_folder_is_flushed_before_the_final_name_appears(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, rename, flushed = os.fsync, os.rename, []

    def noted_fsync(fd: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def noted_rename(old: Path, new: Path) -> None:
        staged = {str(p) for p in Path(old).rglob("*")} | {str(old)}
        assert staged <= set(flushed), "a crash after the rename would leave empty files under the final name"
        flushed.clear()
        rename(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    assert run_cli(source, "-o", tmp_path / "out.bel").status == 0
    assert flushed == [str(tmp_path)], "the new name itself is flushed"


def test_restored_files_and_their_folders_are_flushed(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_cli(source, "-o", tmp_path / "m.bel").status == 0
    fsync, flushed = os.fsync, set()

    def noted_fsync(fd: int) -> None:
        flushed.add(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    assert run_cli("restore", tmp_path / "m.bel", "-o", tmp_path / "back").status == 0
    staged = {str(tmp_path / "back" / ".bel-restore.bel-tmp" / p.name) for p in source.parent.iterdir()}
    assert staged | {str(tmp_path / "back")} <= flushed
    assert str(tmp_path) in flushed, "a new folder's own name is lost in a crash unless its parent is flushed"
