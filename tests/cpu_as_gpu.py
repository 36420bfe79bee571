"""The CPU in the part of a GPU: its device, its pinned memory, the slots made in it, and how fast each way is said to be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bel.runtime import gpu_run
from bel.runtime.context import Context, ContextOptions
from bel.runtime.devices import Device, devices
from bel.runtime.engine import Engine
from bel.runtime.gpu_choice import Trial
from bel.runtime.pool_home import Home, cpu_home
from bel.runtime.slot_memory import SlotMemory

SMALL = ContextOptions(64, 64, 64, 1)


@pytest.fixture(scope="module")
def device() -> Device:
    """The CPU in the part of a GPU."""
    return devices(Engine.open())[0]


def pinned_home() -> Home:
    """The CPU, whose memory passes for pinned."""
    home = cpu_home(Engine.open())
    return dataclasses.replace(home, host_kind=home.kind)


class Memories:
    """Counts the slots' memories that are made and given back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self.closed, self.most = 0, 0, 0
        init, close = SlotMemory.__init__, SlotMemory.close

        def counted(memory: SlotMemory, *arguments: Any) -> None:
            init(memory, *arguments)
            self.made += 1
            self.most = max(self.most, self.made - self.closed)

        def closing(memory: SlotMemory) -> None:
            self.closed += memory._buffer is not None
            close(memory)

        monkeypatch.setattr(SlotMemory, "__init__", counted)
        monkeypatch.setattr(SlotMemory, "close", closing)


@pytest.fixture
def without_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's own layout with no cache of it: what is left of the way without a GPU."""
    monkeypatch.setattr(gpu_run, "fitting_cache", lambda *_: 0)


def speeds(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> list[str]:
    """All ways are computed, and said to have taken so long.  Returns the list of what was timed, in order."""
    measure, timed = Trial.seconds_per_token, []
    order = iter(seconds)

    def told(trial: Trial, context: Context) -> float:
        assert measure(trial, context) > 0
        timed.append(next(order))
        return seconds[timed[-1]]

    monkeypatch.setattr(Trial, "seconds_per_token", told)
    return timed
