"""Hostile manifests: edited, with a right digest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bel.formats.digest import bytes_digest

Edit = Callable[[dict[str, Any]], Any]


def rewrite(bundle: Path, edit: Edit) -> None:
    """Edit a manifest as an attacker would: whatever its digest covers is digested again."""
    path = bundle / "manifest.json"
    body = json.loads(path.read_bytes())
    edit(body)
    body["digest"] = "0" * 64
    text = json.dumps(body)
    digest = bytes_digest(text.encode())
    path.write_text(text.replace(f'"digest": "{"0" * 64}"', f'"digest": "{digest}"', 1))


def put(*keys: str | int, value: object) -> Edit:
    """Set the value at a path of keys."""

    def edit(body: dict[str, Any]) -> None:
        at: Any = body
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = value

    return edit


def drop(*keys: str | int) -> Edit:
    """Remove the value at a path of keys."""

    def edit(body: dict[str, Any]) -> None:
        at: Any = body
        for key in keys[:-1]:
            at = at[key]
        del at[keys[-1]]

    return edit
