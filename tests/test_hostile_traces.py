"""Traces that lie with valid checksums, and files that are none: refused."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from bel.formats import trace_layout as layout
from bel.formats.errors import BadInputError
from bel.formats.trace_calls import read_trace
from bel.formats.trace_header import encode_header
from traced import HEADER, write


def head_with(**changes: Any) -> bytes:
    """The first bytes of a trace whose JSON header is changed, with valid digests."""
    body = encode_header(HEADER).decode()
    for old, new in changes.items():
        assert f'"{old}"' in body
        body = body.replace(f'"{old}": ', f'"{old}": {new}, "was_{old}": ', 1)
    return layout.pack_file_head(body.encode())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", '"other"'),
        ("top_k", "9"),
        ("top_k", "0"),
        ("n_expert", "65537"),
        ("n_expert", "-1"),
        ("n_expert", "NaN"),
        ("n_expert", "8.0"),
        ("layer", "3"),
        ("layer", "1e999"),
        ("expert_bytes", "0"),
        ("expert_bytes", str(2**60)),
        ("layers", "[]"),
        ("layers", "[5]"),
        ("model", "null"),
        ("prompts", "[1]"),
        ("sampling", '"' + "x" * 70000 + '"'),
        ("workload", '"' + "x" * 5000 + '"'),
        ("engine", "[" * 100000),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, key: str, value: str) -> None:
    path = tmp_path / "a.trace"
    path.write_bytes(head_with(**{key: value}))
    with pytest.raises(BadInputError, match="header of the trace is not valid"):
        read_trace(path)


def test_a_newer_version_is_refused_by_both_numbers(tmp_path: Path) -> None:
    data = bytearray(write(tmp_path / "a.trace", []).read_bytes())
    data[8] = 7
    (tmp_path / "b.trace").write_bytes(data)
    with pytest.raises(BadInputError, match=r"version 7 .* reads 1"):
        read_trace(tmp_path / "b.trace")


def block_with(columns: dict[str, bytes], **changes: Any) -> bytes:
    """A trace of one block with valid digests and the given raw columns; `changes` go into its head."""
    head = layout.pack_file_head(encode_header(HEADER))
    run = head[layout.FILE_HEAD.size - 16 : layout.FILE_HEAD.size]
    good = {
        "phase": b"\1",
        "layer": np.array([0], "<u2").tobytes(),
        "ubatch": np.array([4], "<i8").tobytes(),
        "rows": np.array([1], "<u4").tobytes(),
        "token": np.array([9], "<i8").tobytes(),
        "ids": bytes([3, 5, 0, 0]),
        "weights": b"",
        "times": b"",
    }
    raw = {**good, **columns}
    packed = [zstandard.compress(raw[name]) if raw[name] else b"" for name in layout.COLUMNS]
    payload = b"".join(packed)
    block = layout.BlockHead(layout.BLOCK_MARK, 0, 1, 1, 2, tuple(map(len, packed)), layout.short_digest(payload))
    return head + replace(block, **changes).pack(run) + payload


def test_the_block_of_the_lies_is_good_without_one(tmp_path: Path) -> None:
    (tmp_path / "a.trace").write_bytes(block_with({}))
    layer = read_trace(tmp_path / "a.trace").layers[0]
    assert (layer.ids.tolist(), layer.token.tolist(), layer.ubatch.tolist()) == ([[3, 5]], [9], [4])


@pytest.mark.parametrize(
    ("columns", "changes"),
    [
        ({"phase": b"\2"}, {}),
        ({"layer": b"\2\0"}, {}),
        ({"rows": bytes(4)}, {}),
        ({"rows": b"\2\0\0\0"}, {}),
        ({"rows": b"\xff\xff\xff\xff"}, {}),
        ({"ubatch": np.array([-1], "<i8").tobytes()}, {}),
        ({"token": np.array([-5], "<i8").tobytes()}, {}),
        ({"ids": bytes([3, 8, 0, 0])}, {}),
        ({"ids": bytes([3, 5, 0, 1])}, {}),
        ({"ids": bytes(6)}, {}),
        ({"ids": bytes(2**20)}, {}),
        ({"weights": bytes(4)}, {}),
        ({"times": bytes(8)}, {}),
        ({"token": b""}, {}),
        ({}, {"calls": 0}),
        ({}, {"calls": 2}),
        ({}, {"calls": 2**32 - 1}),
        ({}, {"rows": 2**31}),
        ({}, {"ids": 2**32 - 1}),
        ({}, {"ids": 1 << 24, "rows": 1 << 22}),
        ({}, {"number": 1}),
        ({}, {"mark": b"ELSE"}),
    ],
)
def test_a_block_that_lies_is_refused(tmp_path: Path, columns: dict[str, bytes], changes: dict[str, Any]) -> None:
    path = tmp_path / "a.trace"
    path.write_bytes(block_with(columns, **changes))
    with pytest.raises(BadInputError, match=r"not valid|claims|out of its place"):
        read_trace(path)


@pytest.mark.parametrize("data", [b"", b"BELTRAC", b"GGUF" + bytes(100), b"BELTRACE", b"BELTRACE" + bytes(3)])
def test_what_is_no_trace_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.trace").write_bytes(data)
    with pytest.raises(BadInputError, match=r"not a trace|cut off"):
        read_trace(tmp_path / "a.trace")


def test_a_folder_and_a_pipe_are_no_traces(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(BadInputError, match="not a file"):
            read_trace(path)
