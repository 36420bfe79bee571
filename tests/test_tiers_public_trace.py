"""Three tiers on the public trace: what an independent replay of it read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from bel.formats.trace import DECODE
from bel.formats.trace_calls import LayerCalls, Trace, read_trace
from bel.formats.units import MIB
from bel.profiler.tier_caches import HOST_TIERS, Room, Tiers
from bel.profiler.tier_links import serve_tiers, total
from bel.runtime.policies import parse_policy
from public_trace import READ_BYTES, import_public_trace


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return read_trace(import_public_trace(tmp_path_factory.mktemp("public")))


def decode_only(trace: Trace) -> list[np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    return [x.phase == DECODE for x in trace.layers]


SAID = {"exclusive": 70, "copy-on-read": 187, "inclusive": 260}
"""NVMe "MiB"/token by an independent replay of the public trace, of which only the results are known: 24 LRU slots in VRAM and
24 in RAM in each layer."""


@pytest.mark.parametrize("host", HOST_TIERS)
def test_public_trace(public: Trace, host: str) -> None:
    slots = Room(slots=(24,) * len(public.layers))
    answer = total([serve_tiers(public.layers, decode_only(public), Tiers(parse_policy("lru"), slots, slots, host))])
    assert answer.tokens == 128
    assert answer.nvme_bytes == READ_BYTES[host]
    assert answer.nvme_bytes / answer.tokens / 1e6 == pytest.approx(SAID[host], rel=0.025)  # as 10^6 bytes


@pytest.mark.parametrize("host", HOST_TIERS)
def test_public_trace_id_by_id(public: Trace, host: str) -> None:
    """In MiB it is the other reading that gives their figures: no calls, but one id after the other."""
    read = sum(id_by_id(calls, host, 24, 24) * (calls.info.expert_bytes or 0) for calls in public.layers)
    assert read / 128 / MIB == pytest.approx(SAID[host], rel=0.02)


def id_by_id(calls: LayerCalls, host: str, vram_slots: int, ram_slots: int) -> int:
    """Decode reads where an id evicts others of its own call, and a victim of VRAM is demoted before the id leaves RAM."""
    vram: dict[int, None] = {}
    ram: dict[int, None] = {}
    reads = 0
    for phase, first, last in zip(calls.phase, calls.row_start, calls.row_start[1:], strict=False):
        for e in calls.ids[first:last].ravel().tolist():
            if e not in vram:
                reads += phase == DECODE and e not in ram
                if host == "exclusive":
                    make_room(vram, vram_slots - 1, lambda gone: into(ram, gone, ram_slots))
                    ram.pop(e, None)
                else:
                    into(ram, e, ram_slots, (lambda gone: vram.pop(gone, None)) if host == "inclusive" else ignore)
            into(vram, e, vram_slots)
    return reads


def ignore(_: int) -> None:
    """What is evicted goes nowhere."""


def into(tier: dict[int, None], item: int, slots: int, gone: Callable[[int], object] = ignore) -> None:
    tier.pop(item, None)
    tier[item] = None
    make_room(tier, slots, gone)


def make_room(tier: dict[int, None], slots: int, gone: Callable[[int], object]) -> None:
    while len(tier) > slots:
        oldest = next(iter(tier))
        del tier[oldest]
        gone(oldest)
