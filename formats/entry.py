"""The first moments of a command: its modules take a tenth of a second to load, and Ctrl-C may come before they have."""

from __future__ import annotations

import importlib
import os
import signal
from types import FrameType

from bel.formats.errors import InterruptedRun


def start(name: str, module: str) -> None:
    """Load a command's module and run its `main`, which sees to signals itself.  Ctrl-C before that ends with a line.

    A signal that is ignored, as in a job behind nohup, stays so.
    """

    def stop(_number: int, _frame: FrameType | None) -> None:
        os.write(2, f"{name}: error: interrupted\n".encode())
        os._exit(InterruptedRun.exit_code)  # nothing has begun that would have to end

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)
    importlib.import_module(module).main()
