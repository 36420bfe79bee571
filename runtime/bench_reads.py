"""What the reads of decoded tokens take by themselves: the same number of blobs, layer by layer, with nothing computed."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time

import numpy as np
import numpy.typing as npt

from bel.runtime.bundle_model import BundleRun
from bel.runtime.pager import FIRST, REST, Load

_SEED = 1


def seconds_alone(run: BundleRun, missed: npt.NDArray[np.int64]) -> float:
    """Seconds of reading `missed` (n,) experts of each token through the run's pager, into memory of its own.

    A token's blobs are spread evenly over the layers and drawn from all of a layer; the next layer's are asked for when
    those of one have arrived, as decoding has to.
    """
    places = [place for place, layer in enumerate(run.layers) if not layer.is_mtp]
    rng = np.random.default_rng(_SEED)
    shares = [spread(int(count), len(places)) for count in missed]
    most = max(max(share) for share in shares)
    with contextlib.closing(mmap.mmap(-1, most * max(layer.stride_bytes for layer in run.layers))) as memory:
        view = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(view)
        ctypes.memset(address, 1, len(memory))  # page faults are no part of a read: slots have their pages
        began = time.perf_counter()
        for share in shares:
            for place, count in zip(places, share, strict=True):
                _read(run, place, rng.permutation(run.layers[place].n_expert)[:count].tolist(), address)
        seconds = time.perf_counter() - began
        del view  # else the memory could not be given back
    return seconds


def spread(count: int, parts: int) -> list[int]:
    """`count` in `parts` whole numbers that differ by one at most."""
    return [count * (i + 1) // parts - count * i // parts for i in range(parts)]


def _read(run: BundleRun, place: int, experts: list[int], address: int) -> None:
    if not experts:
        return
    stride = run.layers[place].stride_bytes
    loads = [Load(place, expert, address + number * stride) for number, expert in enumerate(experts)]
    halves = (FIRST, REST) if run.pager.has_rest(place) else (FIRST,)
    for tag in [run.pager.start(loads, half) for half in halves]:
        run.pager.finish(tag)
