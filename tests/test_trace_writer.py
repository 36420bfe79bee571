"""The writer of traces: what it takes, and what is left where a run, a disk or a kill ends it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bel.formats.errors import BadInputError, UsageError
from bel.formats.trace import DECODE, TraceWriter
from bel.formats.trace_calls import read_trace
from traced import HEADER, append, assert_holds, calls_of, write


def test_the_writer_copies_what_it_is_given(tmp_path: Path) -> None:
    ids, tokens = np.array([[1, 2]], np.uint16), np.array([5])
    with TraceWriter(tmp_path / "a.trace", HEADER) as writer:
        writer.append(phase=DECODE, ubatch=0, layer=0, tokens=tokens, ids=ids)
        ids[:], tokens[:] = 7, 9
    layer = read_trace(tmp_path / "a.trace").layers[0]
    assert (layer.ids.tolist(), layer.token.tolist()) == ([[1, 2]], [5])


def test_the_writer_refuses_what_cannot_be(tmp_path: Path) -> None:
    good = {"phase": DECODE, "ubatch": 0, "layer": 0, "tokens": np.array([0]), "ids": np.array([[1, 2]], np.uint16)}
    with TraceWriter(tmp_path / "a.trace", HEADER) as writer:
        with pytest.raises(BadInputError, match=r"layer 0 .*out of range; found 8, expected 0 to 7"):
            writer.append(**{**good, "ids": np.array([[1, 8]], np.uint16)})
        with pytest.raises(BadInputError, match="layer 1 is not in the header"):
            writer.append(**{**good, "layer": 1})
        for change in (
            {"ids": np.array([[1, 2]], np.int32)},
            {"ids": np.array([[1, 2, 3]], np.uint16)},
            {"ids": np.zeros((0, 2), np.uint16), "tokens": np.zeros(0, np.int64)},
            {"tokens": np.array([0, 1])},
            {"tokens": np.array([-1])},
            {"phase": 2},
            {"ubatch": -1},
            {"weights": np.zeros((1, 2), np.float16)},
        ):
            with pytest.raises(ValueError, match=r"layer 0|phase|weights"):
                writer.append(**{**good, **change})
        writer.append(**good)
    assert read_trace(tmp_path / "a.trace").id_count == 2


def test_an_existing_file_is_refused_or_taken_away_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "a.trace", calls_of(1, 9))
    with path.open("rb") as old:
        with pytest.raises(UsageError, match="exists already"):
            TraceWriter(path, HEADER)
        write(path, calls_of(2, 3), replace=True)
        assert old.read() != path.read_bytes(), "the old file is still whole for those who read it"
    assert_holds(read_trace(path), calls_of(2, 3))


def test_an_error_in_the_run_keeps_what_was_recorded(tmp_path: Path) -> None:
    calls = calls_of(3, 5)
    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / "a.trace", HEADER) as writer:
        append(writer, calls)
        raise KeyboardInterrupt
    trace = read_trace(tmp_path / "a.trace")
    assert_holds(trace, calls)
    assert trace.notes == ()


def test_a_write_that_fails_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt inside the write of a block must not lose the block, nor write it twice."""
    calls, real = calls_of(3, 8), os.pwrite
    armed = [True]

    def interrupted(fd: int, data: memoryview, offset: int) -> int:
        if armed.pop() if armed else False:
            real(fd, data[: len(data) // 2], offset)
            raise KeyboardInterrupt
        return real(fd, data, offset)

    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / "a.trace", HEADER) as writer:
        append(writer, calls)
        monkeypatch.setattr("os.pwrite", interrupted)
        writer.flush()
    assert not armed
    assert_holds(read_trace(tmp_path / "a.trace"), calls)


KILLED = """
import os, sys
import numpy as np
from pathlib import Path
from bel.formats.trace import TraceHeader, TraceLayer, TraceWriter
writer = TraceWriter(Path(sys.argv[1]), TraceHeader("m", "a", "f", (TraceLayer(0, 8, 2, None),), "w"))
for i in range(10**9):
    writer.append(phase=1, ubatch=i, layer=0, tokens=np.array([i]), ids=np.array([[i % 8, 7]], np.uint16))
    if i % 10 == 9:
        writer.flush()
        print(i + 1, flush=True)
"""


def test_a_killed_writer_loses_at_most_its_last_block(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    flushed = 0
    while flushed < 200:
        flushed = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    flushed = max([flushed, *map(int, process.stdout.read().split())])
    process.wait()
    process.stdout.close()
    trace = read_trace(path)
    assert len(trace.notes) == 1
    ids = trace.layers[0].ids
    assert flushed <= len(ids) <= flushed + 10
    assert ids.tolist() == [[i % 8, 7] for i in range(len(ids))]


def test_a_header_that_does_not_fit_on_the_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _data: memoryview, _offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(OSError, match="No space") as caught:
        TraceWriter(tmp_path / "a.trace", HEADER)
    assert caught.value.filename == str(tmp_path / "a.trace")
    assert os.listdir(tmp_path) == []
