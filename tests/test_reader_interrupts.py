"""Signals while a reader reads: none is lost, and none leaves a read in flight."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from bel.runtime.readers import KINDS, open_reader
from bel.runtime.reads import PAGE_BYTES, Read
from readable import FILE_PAGES, SMALL_PIECE, Memory, open_descriptors, random_files, reader_of


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return random_files(tmp_path_factory.mktemp("readers"))


@pytest.fixture(scope="module")
def contents(files: list[Path]) -> list[bytes]:
    return [path.read_bytes() for path in files]


@contextlib.contextmanager
def alarms(every_seconds: float, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, every_seconds, every_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", KINDS)
def test_signals_that_do_not_stop_us_change_nothing(files: list[Path], contents: list[bytes], kind: str) -> None:
    struck: list[int] = []
    size = FILE_PAGES * PAGE_BYTES
    memory = Memory(size)
    with reader_of(files, kind, piece_bytes=SMALL_PIECE) as reader, alarms(0.0005, lambda n, _f: struck.append(n)):
        for _ in range(20):
            memory.fill(0)
            reader.submit([Read(0, 0, size, memory.address)], 1)
            reader.wait(1)
            assert memory.bytes_at(memory.address, size) == contents[0][:size]
    assert struck


class Stopped(Exception):  # noqa: N818 - stands for KeyboardInterrupt, which pytest would take for its own
    pass


@pytest.mark.parametrize("kind", KINDS)
def test_after_an_interrupt_close_leaves_no_read_in_flight(files: list[Path], kind: str) -> None:
    size = FILE_PAGES * PAGE_BYTES
    memory, hits = Memory(8 * size), 0

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Stopped

    for round_number in range(8):
        with reader_of(files, kind, piece_bytes=SMALL_PIECE) as reader:
            before = signal.signal(signal.SIGALRM, stop)
            gc.disable()  # an exception that strikes within a callback of the collector is lost
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0004 * (round_number + 1))
                for place in range(8):
                    reader.submit([Read(place % 2, 0, size, memory.address + place * size)], place)
                for place in range(8):
                    reader.wait(place)
            except Stopped:
                hits += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
                gc.enable()
        memory.fill(0xEE)
        time.sleep(0.02)
        assert memory.bytes_at(memory.address, 8 * size) == b"\xee" * (8 * size)
    assert hits


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_at_any_line_of_a_wait_is_raised_as_it_is(files: list[Path], kind: str) -> None:
    """Those of the standard library included: some give back a lock that they do not hold at that moment."""
    size = FILE_PAGES * PAGE_BYTES
    memory = Memory(8 * size)
    for number in range(1, 25):
        lines = 0

        def trace(_frame: FrameType, event: str, _argument: Any, number: int = number) -> Any:
            nonlocal lines
            lines += event == "line"
            if event == "line" and lines == number:
                raise Stopped
            return trace

        with reader_of(files, kind, piece_bytes=SMALL_PIECE) as reader:
            reader.submit([Read(place % 2, 0, size, memory.address + place * size) for place in range(8)], 0)
            before = sys.gettrace()
            sys.settrace(trace)
            try:
                reader.wait(0)
            except Stopped:
                continue
            finally:
                sys.settrace(before)
        break  # there are no more lines
    assert number > 2


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_during_close_is_raised_behind_it(files: list[Path], kind: str) -> None:
    memory = Memory(FILE_PAGES * PAGE_BYTES)
    before = open_descriptors()
    reader = open_reader(files, kind="auto" if kind == "io_uring" else kind, piece_bytes=PAGE_BYTES)
    reader.submit([Read(0, 0, memory.size_bytes, memory.address)], 1)
    files_close = reader._files.close  # type: ignore[attr-defined]

    def struck() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        files_close()

    reader._files.close = struck  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        reader.close()
    assert open_descriptors() == before
