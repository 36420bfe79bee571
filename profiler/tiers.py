"""Experts in three tiers, VRAM, RAM and NVMe: all calls of a run, compiled.

`tier_links.py` has the rules in words, `bel.runtime.tier_step` in code: a running model goes by the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bel.profiler.compiled import compiled
from bel.runtime.cache_rows import COUNT, Floats, Ints
from bel.runtime.cache_step import serve
from bel.runtime.tier_step import VRAM_ITEM, VRAM_STATE, meet_in_line


@compiled
def serve_calls(
    vram: Ints,
    reals: Floats,
    ram: Ints,
    places: Ints,
    ids: npt.NDArray[np.uint16],
    id_start: Ints,
    top_k: Ints,
    base: Ints,
    ticks: npt.NDArray[np.bool_],
    next_use: Ints,
    kind: int,
    on_cpu: bool,
    counts: npt.NDArray[np.int32],
    moved: Ints,
) -> None:
    """Serve all calls of a run: fill `counts` (COUNTS, C) and `moved` (LINKS, C), in units of BYTES.

    `vram` and `reals` (caches, rows, columns), `ram` likewise, `places` (5, items of the run); the calls are those of a
    Stream of all layers.  `next_use` (N,) for Belady, else empty.
    """
    seen = np.zeros(places.shape[1], np.bool_)
    start = int(np.int64(0))  # a literal 0 has a type of its own: all policies would be compiled a second time for it
    for c in range(len(top_k)):
        first, last = id_start[c], id_start[c + 1]
        rows = (last - first) // top_k[c]
        shift = places[VRAM_ITEM, base[c]]
        state = places[VRAM_STATE, base[c]]
        if len(next_use):
            for i in range(first, last):
                reals[state, COUNT, shift + np.int64(ids[i])] = next_use[i]
        call = ids[first:last].reshape((rows, top_k[c]))
        served = serve(vram[state], reals[state], call, start, rows, shift, ticks[c])
        meet_in_line(vram, reals, ram, places, seen, base[c], served, kind, on_cpu, c, c, counts, moved)
