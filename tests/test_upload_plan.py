"""What of a folder is uploaded: limits in decimal bytes, strays named and left, no path of a machine in what goes out."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bel.formats.errors import BadInputError, UsageError
from bel.repack.upload_plan import (
    MAX_FILE_BYTES,
    MAX_NAMED,
    check_limits,
    check_private,
    plan_upload,
    sums_bytes,
    sums_line,
    too_big,
)

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20)


def test_fifty_gb_are_decimal() -> None:
    """50 GiB are too much although `du -h` shows 50G; 50 * 10^9 bytes are not."""
    sizes = {"dense.gguf": 7 * 10**9, "experts.bin": 61 * 10**9, "edge_ok.bin": 50 * 10**9, "edge_gib.bin": 50 * 2**30}
    assert too_big(sizes) == ["experts.bin", "edge_gib.bin"]
    with pytest.raises(UsageError, match=r"experts\.bin, edge_gib\.bin: larger than the 50 GB.*--shard-size") as error:
        plan_upload(sizes, {}, [])
    assert error.value.exit_code == 2


@given(st.dictionaries(NAMES, st.integers(0, 2 * MAX_FILE_BYTES), max_size=5))
def test_the_limit_is_exact(sizes: dict[str, int]) -> None:
    over = [name for name, size in sizes.items() if size >= MAX_FILE_BYTES + 1]
    assert too_big(sizes) == over
    if over:
        with pytest.raises(UsageError):
            check_limits(sizes)
    else:
        check_limits(sizes)


@given(st.dictionaries(NAMES, st.integers(0, 10**9), max_size=6), st.lists(NAMES, max_size=6))
def test_only_what_was_asked_for_is_in_the_plan(data: dict[str, int], present: list[str]) -> None:
    plan = plan_upload(data, {"manifest.json": 5}, [*data, *present, "manifest.json"])
    assert {file.name: file.size_bytes for file in plan.files} == {**data, "manifest.json": 5}
    assert plan.files[-1].name == "manifest.json"
    assert plan.total_bytes == sum({**data, "manifest.json": 5}.values())
    assert len(plan.warnings) == len(set(present) - set(data) - {"manifest.json"})


def test_strays_are_named_and_counted() -> None:
    strays = [".env", "experts.bin.partial", ".cache/huggingface/upload/x.metadata", "notes.txt"]
    warnings = plan_upload({"a": 1}, {}, ["a", *strays]).warnings
    assert [w for w in warnings if w.startswith(".env") and "hidden" in w]
    assert [w for w in warnings if w.startswith("experts.bin.partial") and "partial" in w]
    assert len(warnings) == len(strays)
    many = plan_upload({}, {}, [f"x{i}" for i in range(MAX_NAMED + 7)]).warnings
    assert len(many) == MAX_NAMED + 1 and many[-1].startswith("7 more")


@pytest.mark.parametrize(
    "text",
    [
        '"path": "/home/ann/model.gguf"',
        "see /data/models/x",
        "C:\\Users\\ann\\x.gguf",
        '{"p": "C:\\\\Users\\\\ann"}',
        "file:///x/y",
        "(/tmp/run-1)",
        "see:/home/me/x.gguf",
        "host:/srv/x",
        "path=/root/x",
        "at /odd/place/of/mine here",
    ],
)
def test_a_path_of_a_machine_is_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="line 2 holds a path of a machine") as error:
        check_private("README.md", f"first line\n{text}\n", ["/odd/place/of/mine"])
    assert error.value.path == "README.md"


@pytest.mark.parametrize(
    "text",
    [
        "https://hub.example/data/models/x",
        "ORG/NAME",
        "and/or",
        "blk.0.ffn_up/x",
        "a /slash",
        "10 MB/s",
        "w:x",
        "~/model",
        "1/tmp/2",
    ],
)
def test_other_text_is_not(text: str) -> None:
    check_private("README.md", text)


@given(st.lists(NAMES, max_size=5, unique=True))
def test_the_size_of_the_sums_is_known_beforehand(names: list[str]) -> None:
    lines = "".join(sums_line(hashlib.sha256(name.encode()).hexdigest(), name) for name in names)
    assert sums_bytes(names) == len(lines.encode())


def test_sha256sum_reads_the_sums(tmp_path: Path) -> None:
    names = ["plain.bin", "with space", "back\\slash", "line\nbreak", "*star"]
    lines = []
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
        lines.append(sums_line(hashlib.sha256(name.encode()).hexdigest(), name))
    (tmp_path / "SHA256SUMS").write_text("".join(lines))
    check = ["sha256sum", "--strict", "-c", "SHA256SUMS"]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    (tmp_path / names[2]).write_bytes(b"other")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 1
