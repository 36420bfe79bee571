"""Streams of a GPU for the CPU in its part: what is begun in a stream is done only when something that waits for it needs it,
or at random before; so an order that nothing enforces shows as other bits.

All streams are of this kind.  That of a context has done what it was given when the graph goes on behind a stop.
"""

from __future__ import annotations

import ctypes
import dataclasses
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from bel.runtime import pool_native
from bel.runtime.engine import Engine
from bel.runtime.pool_abi import PoolAbi
from bel.runtime.pool_home import Home, cpu_home

_OWN = pool_native._callback
_PAUSES, _PAUSE_SECONDS = 0.2, 0.0002
_CALLBACKS: dict[str, int] = {
    "ggml_backend_tensor_set_async": 5,
    "ggml_backend_tensor_set_2d_async": 8,
    "ggml_backend_tensor_copy_async": 4,
    "ggml_backend_event_record": 2,
    "ggml_backend_event_wait": 2,
    "ggml_backend_synchronize": 1,
}
_MADE = ("ggml_backend_dev_init", "ggml_backend_event_new", "ggml_backend_event_free", "ggml_backend_buffer_free")


@dataclass(slots=True)
class Copy:
    """`size` bytes from an address to another one."""

    source: int
    target: int
    size: int


@dataclass(slots=True)
class Stream:
    """What was begun, copies and waits for (stream, place); `done` of all that ever was begun is done."""

    is_context: bool
    begun: list[Copy | tuple[Stream, int]] = field(default_factory=list)
    done: int = 0


class Streams:
    """Streams by the addresses of their backends.  `haste`: how likely something is done before it must be, at each call;
    `spite`: how likely all that a context does not wait for is done right before or right behind what it waits for.

    `patch` has the graph's stops go by here.

    `before` is called before the graph goes on.  `errors`: what must not be, in words.
    """

    def __init__(self, engine: Engine, seed: int, haste: float, spite: float) -> None:
        self._ffi = engine.library.ffi
        self._random, self._haste, self.spite, self._lock = random.Random(seed), haste, spite, threading.RLock()
        self._streams: dict[int, Stream] = {}
        self._events: dict[int, tuple[Stream, int] | None] = {}
        self.has_events = True
        self.before: Callable[[], None] = lambda: None
        self.errors: list[str] = []
        home = cpu_home(engine)
        self._real: PoolAbi = home.abi
        self._made = {name: self._callback(name, count) for name, count in _CALLBACKS.items()}
        self.home: Home = dataclasses.replace(home, abi=_Abi(home.abi.ffi, _Library(self, home.abi.lib), home.abi.path))

    def _callback(self, name: str, count: int) -> Any:
        function = getattr(self, name.removeprefix("ggml_backend_"))

        def run(*numbers: int) -> int:
            try:
                with self._lock:
                    function(*numbers)
                    while self._random.random() < self._haste:
                        self._do_some()
            except BaseException as error:  # it would be lost in the library
                self.errors.append(repr(error))
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * count)(run)

    def function(self, name: str) -> Any:
        """The function in the place of the library's, or None."""
        return self._made.get(name)

    @property
    def n_waiting(self) -> int:
        """How much that was begun is not done."""
        return sum(len(stream.begun) - stream.done for stream in self._streams.values())

    def _stream(self, backend: int) -> Stream:
        return self._streams.setdefault(backend, Stream(True))

    def _begin(self, backend: int, what: Copy | tuple[Stream, int]) -> None:
        self._stream(backend).begun.append(what)

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> Streams:
        """Come between the graph and the compiled callback."""
        inner = _OWN()
        kind = ctypes.CFUNCTYPE(ctypes.c_uint8, ctypes.c_int64, ctypes.c_uint8, ctypes.c_int64)
        own = kind(inner.address)

        def on_node(node: int, is_ask: int, user_data: int) -> int:
            answer = int(own(node, is_ask, user_data))
            if not is_ask:
                self._go_on()
            return answer

        self._kept = kind(on_node)
        address = ctypes.cast(self._kept, ctypes.c_void_p).value
        monkeypatch.setattr(pool_native, "_callback", lambda: SimpleNamespace(address=address))
        return self

    def _go_on(self) -> None:
        """The graph goes on behind a stop: first let the helper come up to here."""
        if self._random.random() < _PAUSES:
            time.sleep(_PAUSE_SECONDS)
        self.before()
        with self._lock:
            draw = self._random.random() / max(self.spite, 1e-9)
            others = [x for x in self._streams.values() if not x.is_context]
            self._random.shuffle(others)
            if draw < 0.5:
                self._finish_all(others)
            self._finish_all([x for x in self._streams.values() if x.is_context])
            if draw < 1:
                self._finish_all(others)

    def _finish_all(self, streams: list[Stream]) -> None:
        for stream in streams:
            self._finish(stream, len(stream.begun))

    def _finish(self, stream: Stream, place: int) -> None:
        while stream.done < place:
            what = stream.begun[stream.done]
            if isinstance(what, Copy):
                ctypes.memmove(what.target, what.source, what.size)
            else:
                self._finish(*what)
            stream.done += 1

    def _do_some(self) -> None:
        waiting = [stream for stream in self._streams.values() if stream.done < len(stream.begun)]
        if waiting:
            stream = self._random.choice(waiting)
            self._finish(stream, stream.done + 1)

    def _word(self, tensor: int, name: str) -> int:
        return int(ctypes.c_int64.from_address(tensor + self._ffi.offsetof("struct ggml_tensor", name)).value)

    def tensor_set_async(self, backend: int, tensor: int, data: int, offset: int, size: int) -> None:
        self._begin(backend, Copy(data, self._word(tensor, "data") + offset, size))

    def tensor_set_2d_async(
        self, backend: int, tensor: int, data: int, offset: int, size: int, count: int, apart: int, data_apart: int
    ) -> None:
        for n in range(count):
            self.tensor_set_async(backend, tensor, data + n * data_apart, offset + n * apart, size)

    def tensor_copy_async(self, source_backend: int, backend: int, source: int, target: int) -> None:
        assert source_backend == backend
        self._begin(backend, Copy(self._word(source, "data"), self._word(target, "data"), self._word(target, "ne")))

    def event_record(self, event: int, backend: int) -> None:
        stream = self._stream(backend)
        assert event in self._events
        self._events[event] = (stream, len(stream.begun))

    def event_wait(self, backend: int, event: int) -> None:
        recorded = self._events[event]
        if recorded is not None:
            self._begin(backend, recorded)

    def synchronize(self, backend: int) -> None:
        stream = self._stream(backend)
        self._finish(stream, len(stream.begun))

    def dev_init(self, device: Any, params: Any) -> Any:
        backend = self._real.lib.ggml_backend_dev_init(device, params)
        self._streams[self._real.number(backend)] = Stream(False)
        return backend

    def event_new(self, _device: Any) -> Any:
        if not self.has_events:
            return self._real.ffi.NULL
        with self._lock:
            self._events[16 * (len(self._events) + 1)] = None
            return self._real.pointer(16 * len(self._events))

    def event_free(self, event: Any) -> None:
        assert self._real.number(event) in self._events

    def buffer_free(self, buffer: Any) -> None:
        """A GPU's driver waits here; whoever relies on that does not know what it is waiting for."""
        with self._lock:
            start = self._real.number(self._real.lib.ggml_backend_buffer_get_base(buffer))
            end = start + self._real.lib.ggml_backend_buffer_get_size(buffer)
            for stream in self._streams.values():
                for what in stream.begun[stream.done :]:
                    if isinstance(what, Copy) and any(start <= x < end for x in (what.source, what.target)):
                        stream.done = len(stream.begun)
                        self.errors.append("memory is given back before a copy to or from it is done")
                        break
        self._real.lib.ggml_backend_buffer_free(buffer)


class _Library:
    """The library with these streams."""

    def __init__(self, streams: Streams, lib: Any) -> None:
        self._streams, self.real = streams, lib

    def __getattr__(self, name: str) -> Callable[..., Any]:
        made = self._streams.function(name)
        if made is not None:
            number = self._streams._real.number
            return lambda *values: made(*[x if isinstance(x, int) else number(x) for x in values])
        if name in _MADE:
            return getattr(self._streams, name.removeprefix("ggml_backend_"))  # type: ignore[no-any-return]
        return getattr(self.real, name)  # type: ignore[no-any-return]


class _Abi(PoolAbi):
    """Addresses for compiled code likewise."""

    def function(self, name: str) -> int:
        made = self.lib._streams.function(name)
        if made is not None:
            return int(ctypes.cast(made, ctypes.c_void_p).value or 0)
        return self.number(self.ffi.addressof(self.lib.real, name))
