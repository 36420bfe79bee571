"""Speeds of the disk: those of a plain loop, or a refusal where something else was read; and the file made for them."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bel.formats.errors import MachineError
from bel.formats.units import MIB
from bel.profiler.bandwidth import measure
from bel.profiler.bandwidth_target import find_target
from bel.profiler.disk_speed import MAX_BLOCKS, check_counted, disk_read_bytes, measure_disk, random_blocks
from bel.profiler.scratch_file import CHUNK_BYTES, scratch_file
from measured import BLOCK, SMALL, assert_alike, random_file
from measured import disk as disk

# The disk


def plain_bytes_per_s(path: Path, seconds: float) -> float:
    """One direct read after the other with nothing of ours in between."""
    fd, buffer = os.open(path, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, BLOCK)
    try:
        order = np.random.default_rng(1).permutation(os.fstat(fd).st_size // BLOCK)
        begin, done = time.perf_counter(), 0
        for block in itertools.cycle(order):
            done += os.preadv(fd, [buffer], int(block) * BLOCK)
            if time.perf_counter() - begin > seconds:
                return done / (time.perf_counter() - begin)
    finally:
        os.close(fd)
    raise AssertionError("the order has no end")


def test_one_read_at_once_is_as_fast_as_a_plain_loop(disk: Path) -> None:
    path = random_file(disk / "data", 32 * MIB)
    assert_alike(
        lambda: plain_bytes_per_s(path, 0.05),
        lambda: measure_disk([path], BLOCK, shown=path, depths=(1,), seconds=0.05).best_bytes_per_s,
    )


def test_all_depths_are_measured_and_counted(disk: Path) -> None:
    paths = [random_file(disk / name, 5 * MIB) for name in ("a", "b")]
    speed = measure_disk(paths, BLOCK, shown=disk, seconds=0.02)
    assert [depth for depth, _ in speed.depths] == [1, 2, 4, 8, 16, 32]
    assert speed.best_bytes_per_s == max(rate for _, rate in speed.depths) > 0
    assert speed.counted_share is not None and speed.counted_share >= 0.95
    assert speed.reader != "buffered"


def test_a_depth_that_would_read_a_block_twice_at_once_is_left_out(disk: Path) -> None:
    path = random_file(disk / "data", 5 * BLOCK)
    assert [depth for depth, _ in measure_disk([path], BLOCK, shown=path, seconds=0).depths] == [1, 2]
    with pytest.raises(MachineError, match="no whole block"):
        measure_disk([path], 8 * BLOCK, shown=path, seconds=0)


def test_a_file_of_holes_is_not_a_disk(disk: Path) -> None:
    path = disk / "holes"
    with path.open("wb") as file:
        file.truncate(16 * MIB)
    with pytest.raises(MachineError, match=r"did not come from a disk.*found 0.0 %") as caught:
        measure_disk([path], BLOCK, shown=disk, depths=(1, 4), seconds=0.02)
    assert caught.value.path == str(disk)


def test_reads_of_the_page_cache_are_told_by_the_kernels_count(disk: Path) -> None:
    path = random_file(disk / "data", 4 * MIB)
    path.read_bytes()
    before = disk_read_bytes()
    asked = len(path.read_bytes())
    with pytest.raises(MachineError, match="page cache") as caught:
        check_counted(asked, before, disk_read_bytes(), path)
    assert caught.value.exit_code == 5
    assert check_counted(asked, 0, asked, path) == 1.0
    assert check_counted(asked, None, None, path) is None


def test_a_file_system_without_direct_reads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(MachineError, match=r"no direct reads.*page cache, not the disk") as caught:
        measure(find_target(tmp_path, BLOCK), n_threads=1, effort=SMALL)
    assert (caught.value.path, os.listdir(tmp_path)) == (str(tmp_path), [])


def test_a_very_long_file_is_sampled_in_all_its_parts() -> None:
    """Two files of a tebibyte, which are holes and are not read."""
    with tempfile.TemporaryFile() as one, tempfile.TemporaryFile() as other:
        paths = [Path(f"/proc/self/fd/{file.fileno()}") for file in (one, other)]
        for file in (one, other):
            file.truncate(2**40)
        blocks = random_blocks(paths, 4096, 0)
    assert len(blocks) == len(set(blocks)) == MAX_BLOCKS
    for file in (0, 1):
        offsets = np.array([at for number, at in blocks if number == file])
        assert not (offsets % 4096).any() and 0 <= offsets.min() < 2**34 and 2**40 - 2**34 < offsets.max() < 2**40
        assert 0.45 < len(offsets) / MAX_BLOCKS < 0.55


# The file that is made


def scratch(folder: Path, **changes: Any) -> Any:
    settings = {"size_bytes": 2 * CHUNK_BYTES, "least_bytes": CHUNK_BYTES, "seconds": 60.0, "check": lambda _: None}
    return scratch_file(folder, **{**settings, **changes})


def test_the_scratch_file_is_random_and_goes(tmp_path: Path) -> None:
    with scratch(tmp_path) as path:
        assert path.stat().st_size == 2 * CHUNK_BYTES
        data = path.read_bytes()
        assert data[:CHUNK_BYTES] != data[CHUNK_BYTES:]
        assert abs(np.bincount(np.frombuffer(data, np.uint8)[:MIB]) / MIB * 256 - 1).max() < 0.2
    assert os.listdir(tmp_path) == []


def test_the_scratch_file_stops_at_its_time_but_not_below_its_least_size(tmp_path: Path) -> None:
    with scratch(tmp_path, size_bytes=64 * CHUNK_BYTES, seconds=0.0) as path:
        assert path.stat().st_size == CHUNK_BYTES


@pytest.mark.parametrize("error", [KeyboardInterrupt, MachineError("no")])
def test_the_scratch_file_goes_after_an_error_in_the_check_and_in_use(tmp_path: Path, error: BaseException) -> None:
    def fail(_path: Path) -> None:
        raise error

    with pytest.raises((KeyboardInterrupt, MachineError)), scratch(tmp_path, check=fail):
        pytest.fail("the check was not asked")
    with pytest.raises((KeyboardInterrupt, MachineError)), scratch(tmp_path) as path:
        fail(path)
    assert os.listdir(tmp_path) == []


def test_a_scratch_file_larger_than_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="too little free space"), scratch(tmp_path, size_bytes=2**60, least_bytes=2**60):
        pytest.fail("there is no such disk")
    assert os.listdir(tmp_path) == []
