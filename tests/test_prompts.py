"""Prompts of files, folders and the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from bel.formats.errors import BadInputError, UsageError
from bel.runtime.prompts import read_prompts


def test_prompts_of_a_folder_come_sorted(tmp_path: Path) -> None:
    """Every file below it, by path; texts of the command line first; the text is kept as it is."""
    for name in ("b.txt", "a/z.txt", "a/y.md", "c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(f"{name}\r\nä".encode())
    prompts = read_prompts([tmp_path / "c", tmp_path], ["first"])
    names = ["c", "a/y.md", "a/z.txt", "b.txt", "c"]
    assert [p.name for p in prompts] == ["-p number 1", *(str(tmp_path / name) for name in names)]
    assert [p.text for p in prompts] == ["first", *(f"{name}\r\nä" for name in names)]
    assert len({p.digest for p in prompts}) == 5


def test_bad_prompts_are_refused_by_name(tmp_path: Path) -> None:
    """Nothing, nothing in it, not text."""
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"abc\xe4\n")
    (tmp_path / "none").mkdir()
    for name, what in (
        ("empty.txt", "is empty"),
        ("latin.txt", r"not UTF-8 text \(at byte 3\)"),
        ("none", "no files"),
        ("x", "no such"),
    ):
        with pytest.raises(BadInputError, match=f"{name}.*{what}"):
            read_prompts([tmp_path / name])
    with pytest.raises(BadInputError, match=r"number 1.*not UTF-8"):
        read_prompts([], [b"\xff".decode("utf-8", "surrogateescape")])
    with pytest.raises(UsageError, match="no prompt"):
        read_prompts([])
