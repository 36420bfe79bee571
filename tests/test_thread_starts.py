"""Ctrl-C while a thread is being started: it ends, before what it works with is given back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from bel.formats.units import MIB
from bel.repack.stream import Read, Stream
from bel.runtime.cache_rows import Ints
from bel.runtime.pool_thread import CompiledThread
from bel.runtime.readers import open_reader

SIZE = 24 * MIB  # more than a stream has buffers for: its reader waits for one


@pytest.fixture
def interrupt_start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the n-th start from now on interrupted while it waits for its thread, which runs by then, or before it runs."""
    start = threading.Thread.start

    def arm(number: int, *, before_it_runs: bool = False) -> None:
        count = 0

        def interrupted(thread: threading.Thread) -> None:
            nonlocal count
            count += 1
            if count == number and before_it_runs:
                signal.raise_signal(signal.SIGINT)
            start(thread)
            if count == number and not before_it_runs:
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(threading.Thread, "start", interrupted)

    return arm


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A file to read; behind the test no thread is left."""
    before = set(threading.enumerate())
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(SIZE)
    yield path
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("number", [1, 2])
def test_of_a_stream(number: int, path: Path, interrupt_start: Callable[..., None]) -> None:
    with path.open("rb") as file:
        reads = [Read(path, file.fileno(), at, MIB) for at in range(0, SIZE, MIB)]
        interrupt_start(number)
        with pytest.raises(KeyboardInterrupt), Stream(reads, sha256=True):
            pytest.fail("it was interrupted before it was entered")
        assert not [thread for thread in threading.enumerate() if thread.daemon and "_loop" in thread.name]


@pytest.mark.parametrize("number", [1, 3, 4])
def test_of_a_reader(number: int, path: Path, interrupt_start: Callable[..., None]) -> None:
    before = os.listdir("/proc/self/fd")
    interrupt_start(number)
    with pytest.raises(KeyboardInterrupt):
        open_reader([path], kind="buffered", depth=4)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("before_it_runs", [True, False])
def test_of_a_thread_beside_the_callback(before_it_runs: bool, path: Path, interrupt_start: Callable[..., None]) -> None:
    del path
    table: Ints = np.zeros(1, np.int64)
    thread = CompiledThread("bel-test", table, 0)

    def run(_root: int) -> None:
        while not table[0]:
            os.eventfd_read(thread.descriptor)

    interrupt_start(1, before_it_runs=before_it_runs)
    with pytest.raises(KeyboardInterrupt):
        thread.start(run, table)
    thread.close()
