"""Traces that are cut, flipped or put together wrongly: the last block is lost, or all is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bel.formats import trace_layout as layout
from bel.formats.errors import BadInputError
from bel.formats.trace_calls import read_trace
from traced import HEADER, Call, assert_holds, calls_of, write


def file_of_blocks(tmp_path: Path, count: int = 3) -> tuple[bytes, list[Call], list[int]]:
    """The bytes of a closed trace, its calls (4 a block), and where each block and the end mark begin."""
    calls = calls_of(7, 4 * count)
    data = write(tmp_path / "blocks.trace", calls, flush_every=4).read_bytes()
    starts, at = [], data.index(layout.BLOCK_MARK)
    while at < len(data):
        starts.append(at)
        sizes = layout.BLOCK_HEAD.unpack_from(data, at)[5:13]
        at += layout.BLOCK_HEAD.size + sum(sizes)
    assert at == len(data)
    return data, calls, starts


def test_a_cut_anywhere_costs_the_last_block_only_and_is_said(tmp_path: Path) -> None:
    data, calls, starts = file_of_blocks(tmp_path)
    path = tmp_path / "cut.trace"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        if size < starts[0]:
            with pytest.raises(BadInputError):
                read_trace(path)
            continue
        trace = read_trace(path)
        whole = sum(start <= size for start in starts) - 1
        assert_holds(trace, calls[: 4 * whole])
        assert len(trace.notes) == 1
        said = "not closed in order" if size in starts else f"ends inside block {whole}"
        assert said in trace.notes[0]


def test_a_tail_of_zeros_is_torn(tmp_path: Path) -> None:
    data, calls, starts = file_of_blocks(tmp_path)
    path = tmp_path / "zeros.trace"
    for keep in (starts[2], starts[2] + layout.BLOCK_HEAD.size, starts[3]):
        path.write_bytes(data[:keep] + bytes(starts[3] - keep + (4096 if keep == starts[3] else 0)))
        trace = read_trace(path)
        assert "torn" in trace.notes[0]
        assert_holds(trace, calls[: 12 if keep == starts[3] else 8])


def test_no_flipped_bit_passes(tmp_path: Path) -> None:
    data, _, starts = file_of_blocks(tmp_path, 2)
    path = tmp_path / "flip.trace"
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1 << (at % 8)
        path.write_bytes(bad)
        try:
            trace = read_trace(path)
        except BadInputError as error:
            assert str(path) in str(error)
            continue
        # Only the payload of the last block before an end that is gone too could be taken for torn: never a closed trace.
        raise AssertionError(f"byte {at} of {len(data)} (blocks at {starts}) was flipped and {trace.notes} came of it")


def test_a_flip_in_the_last_block_of_an_unclosed_trace_costs_that_block(tmp_path: Path) -> None:
    data, calls, starts = file_of_blocks(tmp_path)
    bad = bytearray(data[: starts[3]])
    bad[-1] ^= 1
    (tmp_path / "a.trace").write_bytes(bad)
    trace = read_trace(tmp_path / "a.trace")
    assert_holds(trace, calls[:8])
    assert "torn" in trace.notes[0]


def test_blocks_keep_their_place_and_their_run(tmp_path: Path) -> None:
    data, _, starts = file_of_blocks(tmp_path)
    other = write(tmp_path / "other.trace", calls_of(8, 12), replace(HEADER, workload="chat"), 4).read_bytes()
    at = other.index(layout.BLOCK_MARK)
    one, two = data[starts[0] : starts[1]], data[starts[1] : starts[2]]
    for what, bad in {
        "swapped": data[: starts[0]] + two + one + data[starts[2] :],
        "left out": data[: starts[0]] + data[starts[1] :],
        "of another run": data[: starts[0]] + other[at:],
        "twice": data[: starts[1]] + one + data[starts[1] :],
        "two traces": data + other,
        "a byte too many": data + b"\0",
    }.items():
        (tmp_path / "bad.trace").write_bytes(bad)
        with pytest.raises(BadInputError, match=r"out of its place|damaged, or of another run|bytes follow the end"):
            read_trace(tmp_path / "bad.trace")
            raise AssertionError(what)
