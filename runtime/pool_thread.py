"""A thread beside the compiled callback: machine code that sleeps on an eventfd when nothing is asked of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from bel.formats.signals import signals_deferred
from bel.runtime.cache_rows import Ints


class CompiledThread:
    """Runs `target` with the address of `root`, until the word `stop` of `table` is set.  `descriptor` wakes it.  Close it."""

    def __init__(self, name: str, table: Ints, stop: int) -> None:
        self._name, self._table, self._stop = name, table, stop
        self._thread: threading.Thread | None = None
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC)

    def start(self, target: Callable[[int], None], root: Ints) -> None:
        """Begin, once the tables are filled."""
        self._thread = threading.Thread(target=target, args=(root.ctypes.data,), name=self._name, daemon=True)
        with signals_deferred():  # a thread that is not known to have started cannot be waited for
            self._thread.start()

    def wake(self) -> None:
        """End its sleep."""
        os.eventfd_write(self.descriptor, 1)

    def close(self) -> None:
        """End it.  A second call does nothing."""
        if self.descriptor < 0:
            return
        self._table[self._stop] = 1
        self.wake()
        if self._thread is not None:
            with signals_deferred():  # what it computes with is freed next
                self._thread.join()
        os.close(self.descriptor)
        self.descriptor = -1
