"""The type of a path on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class NonEmptyPath(click.Path):
    """A path that is not empty: an unset variable of a shell (`-o "$OUT"`) must not mean the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path.  Ends as a usage error of click's where it is empty."""
        if value == "":
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


PATH = NonEmptyPath(path_type=Path, readable=False)  # an unreadable file is an error of ours, not one of usage
