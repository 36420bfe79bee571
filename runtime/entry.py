"""`bel-run` as it is started."""

from __future__ import annotations

from bel.formats.entry import start


def main() -> None:
    """Entry point."""
    start("bel-run", "bel.runtime.cli")
