"""`bel-run` as it is started."""

from __future__ import annotations

import sys

from bel.formats.entry import start

NAME = "bel-run"
_LIGHT = {"--help", "-h", "--version", "--bench", "--check-against"}
"""Of these arguments alone none runs a model."""


def main() -> None:
    """Entry point."""
    if _LIGHT.issuperset(sys.argv[1:]):
        _start()
        return
    from bel.runtime.supervisor import supervised

    supervised(NAME, _start)


def _start() -> None:
    start(NAME, "bel.runtime.cli")
