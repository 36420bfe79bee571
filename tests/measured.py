"""A disk to measure, files and bundles on it, short measurements, and whether two ways are as fast."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bel.formats.gguf_model import open_model
from bel.formats.units import KIB, MIB
from bel.profiler.bandwidth import Effort
from bel.profiler.disk_speed import disk_read_bytes
from bel.repack.convert import convert
from bel.repack.layout import plan_layout

BLOCK = 128 * KIB
SMALL = Effort(seconds=0.02, file_bytes=16 * MIB, least_bytes=8 * MIB, write_seconds=1.0)


def has_direct_reads(folder: Path) -> bool:
    """Whether a plain direct read works here and is counted as one of a disk."""
    path = folder / "probe"
    path.write_bytes(os.urandom(64 * KIB))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            os.fsync(fd)
            before = disk_read_bytes()
            os.preadv(fd, [mmap.mmap(-1, 64 * KIB)], 0)
            after = disk_read_bytes()
        finally:
            os.close(fd)
    except OSError:
        return False
    finally:
        path.unlink()
    return before is not None and after is not None and after - before >= 64 * KIB


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder on a real disk."""
    if not has_direct_reads(tmp_path):
        pytest.skip("the folder for temporary files is not on a disk with direct reads that the kernel counts")
    return tmp_path


def random_file(path: Path, size_bytes: int) -> Path:
    with path.open("wb") as file:
        file.write(np.random.default_rng(0).bytes(size_bytes))
        os.fsync(file.fileno())
    return path


def bundle_of(path: Path, bundle: Path) -> Path:
    source = open_model(path)
    layout = plan_layout(source, "m", ple="keep", shard_bytes=2**40)
    convert(source, layout, bundle, force=False, check=True, progress=lambda *_: None)
    return bundle


def assert_alike(plain: Callable[[], float], ours: Callable[[], float]) -> None:
    """The best rates of two ways to do one thing are within a factor of 3.

    They are taken alternately, at least 5 times and up to 40: other work on the machine only ever lowers a rate, so the best
    ones meet as soon as each had a quiet moment, and never where a rate is counted wrongly.
    """
    rates: list[tuple[float, float]] = []
    while len(rates) < 40:
        rates.append((plain(), ours()))
        ratio = max(r for _, r in rates) / max(r for r, _ in rates)
        if len(rates) >= 5 and 1 / 3 < ratio < 3:
            return
    pytest.fail(f"ours / plain is {ratio:.2f}")
