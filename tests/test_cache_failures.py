"""What a cache of experts cannot go on from: after a failed read nothing is in flight or served; and impossible slots."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bel.formats.bundle import Bundle, open_bundle
from bel.formats.errors import DamagedBundleError, MachineError, UsageError
from bel.formats.experts_file import PAGE_BYTES
from guarded import N_EXPERT, Made, everything, made
from guarded import bundle as bundle


@contextmanager
def cut_short(bundle: Bundle, tmp_path: Path, keep_bytes: int, **options: Any) -> Iterator[Made]:
    """A cache on a copy of the bundle whose experts file was cut after it was opened."""
    copy = open_bundle(Path(shutil.copytree(bundle.folder, tmp_path / "copy.bel")))
    (row,) = copy.manifest.experts
    whole = np.fromfile(copy.path(row.name), np.uint8)
    with made(copy, "lru", [4, 4, 4, 0], **options) as it:
        it.files = [whole]
        os.truncate(copy.path(row.name), keep_bytes)
        yield it


@pytest.mark.parametrize("kind", ["threads", "buffered", "auto"])
@pytest.mark.parametrize("half", ["first", "rest", "ahead"])
def test_a_failed_read_ends_the_cache(bundle: Bundle, kind: str, half: str, tmp_path: Path) -> None:
    """Nothing is left in flight, and nothing is served any more: the policy believes that the blob is there."""
    layer, following = bundle.manifest.layers[:2]
    end = {
        "first": layer.offset_bytes + 7 * layer.stride_bytes,
        "rest": layer.offset_bytes + 8 * layer.stride_bytes - PAGE_BYTES,
        "ahead": following.offset_bytes + PAGE_BYTES,
    }[half]
    ahead = 8 * layer.stride_bytes if half == "ahead" else 0
    with cut_short(bundle, tmp_path, end, reader=kind, prefetch_bytes=ahead) as it:
        it.cache.serve(0, np.array([[0, 1]], np.uint16))
        with pytest.raises(DamagedBundleError, match="the file ends"):
            if half == "ahead":
                it.cache.serve(0, everything(30))
                it.cache.settle()
            else:
                it.cache.serve(0, np.array([[7, 2]], np.uint16))
        assert not it.reader.in_flight
        it.cache.finish()  # there is nothing to wait for
        for again in (
            lambda: it.cache.serve(0, np.array([[0, 1]], np.uint16)),
            lambda: it.cache.serve(1, np.array([[0, 1]], np.uint16)),
            lambda: it.cache.preload([[3], [], [], []]),
            it.cache.settle,
        ):
            with pytest.raises(MachineError, match="cannot be trusted"):
                again()
            assert not it.reader.in_flight


def test_a_rest_that_fails_later_ends_the_cache(bundle: Bundle, tmp_path: Path) -> None:
    """The first half came, its products may have been computed; the last product never is."""
    layer = bundle.manifest.layers[0]
    with cut_short(bundle, tmp_path, layer.offset_bytes + 8 * layer.stride_bytes - PAGE_BYTES) as it:
        it.cache.serve(0, np.array([[7, 2]], np.uint16), whole=False)
        with pytest.raises(DamagedBundleError, match="the file ends"):
            it.cache.finish()
        assert not it.reader.in_flight
        with pytest.raises(MachineError, match="cannot be trusted"):
            it.cache.serve(1, np.array([[0, 1]], np.uint16))


def test_a_preload_that_fails_leaves_nothing_in_flight(bundle: Bundle, tmp_path: Path) -> None:
    layer = bundle.manifest.layers[0]
    with cut_short(bundle, tmp_path, layer.offset_bytes + PAGE_BYTES) as it:
        with pytest.raises(DamagedBundleError, match="the file ends"):
            it.cache.preload([[0, 1, 2], [], [], []])
        assert not it.reader.in_flight


@pytest.mark.parametrize("count", [-1, N_EXPERT + 1])
def test_slots_that_a_layer_cannot_have(bundle: Bundle, count: int) -> None:
    with pytest.raises(UsageError, match=f"has 8 experts, not room for {count} slots"), made(bundle, "lru", [2, count, 2, 0]):
        pass
