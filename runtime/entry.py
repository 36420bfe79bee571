"""`bel-run` as it is started.  Only its console script imports this: it takes SIGINT at once."""

import _signal  # type: ignore[import-not-found]  # `signal` itself takes a while to load
import os

# Before any import that takes time, and without a word, which `guard` can say: else Ctrl-C would end in a traceback.
if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, lambda *_: os._exit(130))

import sys

from bel.formats.entry import guard, start

NAME = "bel-run"
_LIGHT = {"--help", "-h", "--version", "--bench", "--check-against"}
"""Of these arguments alone none runs a model."""


def main() -> None:
    """Entry point."""
    guard(NAME)
    if _LIGHT.issuperset(sys.argv[1:]):
        _start()
        return
    from bel.runtime.supervisor import supervised

    supervised(NAME, _start)


def _start() -> None:
    start(NAME, "bel.runtime.cli")
