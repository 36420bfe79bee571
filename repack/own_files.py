"""What of a folder is a bundle's own: that is what `--force` may delete, and nothing else.

A bundle is told by a marker, never by names alone, since other tools have a `manifest.json` too: the manifest's `format`,
or, where the manifest is lost, the magic of a digest table or an experts file.  A manifest of another version and a damaged
one count, since replacing those is what `--force` is for.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bel.formats.atomic import read_head
from bel.formats.bundle import DATA_NAME
from bel.formats.experts_file import EXPERTS_MAGIC, INDEX_MAGIC
from bel.formats.manifest import FORMAT, MANIFEST_NAME, MAX_MANIFEST_BYTES
from bel.repack.upload_plan import LICENSE_NAMES, PLAN_NAME, PROFILE_NAME, SUMS_NAME

README_NAME = "README.md"
SOURCE_NAME = "source"
MAX_TEXT_BYTES = 4 << 20  # of a card or of the sums of a thousand shards, many times over
_HEAD_BYTES = 64 << 10  # a manifest begins with its format and name, whatever befell the rest
_MARK = re.compile(rb'"format"\s*:\s*' + json.dumps(FORMAT).encode())
_NAME = re.compile(rb'"name"\s*:\s*("(?:[^"\\]|\\.)*")')
_KEPT_SUFFIX = ".hdr.zst"
_KEPT_MAGIC = b"\x28\xb5\x2f\xfd"  # of a zstandard frame (RFC 8878)
_SUM = re.compile(r"\\?[0-9a-f]{64}  (.+)", re.ASCII)
_UNESCAPED = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}


@dataclass(frozen=True, slots=True)
class Contents:
    """What a folder holds: whether a bundle is there at all, and the names, relative to it, of all that is not its own."""

    is_bundle: bool
    foreign: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Claims:
    """What the manifest, or what is left of it, says: the files of the bundle, and the base names that others have."""

    is_ours: bool
    files: frozenset[str] = frozenset()
    bases: frozenset[str] = frozenset()


def contents(folder: Path) -> Contents:
    """Look at an existing folder.  Raises OSError where something cannot be read: what is not known is not deleted."""
    names = os.listdir(folder)
    claims = _claims(folder, names)
    if not claims.is_ours:
        return Contents(False, tuple(sorted(names)))
    foreign = [name for name in names if name != SOURCE_NAME and not _is_own(folder, name, claims)]
    return Contents(True, tuple(sorted([*foreign, *_foreign_kept(folder, claims.files)])))


def foreign_leftovers(folder: Path, also: Collection[str] = ()) -> tuple[str, ...]:
    """What of a temporary folder that a kill left no run of ours put there; `also` are names that are ours in it too.

    Its files may be empty still, or some of them deleted, so that names must do.  A link is no loss.
    """
    if not folder.is_dir() or folder.is_symlink():
        return ()
    try:
        return tuple(sorted(_foreign_leftovers(folder, {SOURCE_NAME, SUMS_NAME, *also})))
    except FileNotFoundError:  # another run is at work there, or removes it at this moment: the lock tells them apart
        return ()


def _foreign_leftovers(folder: Path, known: Collection[str]) -> list[str]:
    names = os.listdir(folder)
    said = _claims(folder, names)
    bases = said.bases | {match[1] for match in map(DATA_NAME.fullmatch, names) if match}
    claims = _Claims(True, said.files, bases)
    checked = [name for name in names if name not in known and not (folder / name).is_symlink()]
    place = folder / SOURCE_NAME
    kept = {f"{SOURCE_NAME}/{name}" for name in (os.listdir(place) if place.is_dir() else []) if name.endswith(_KEPT_SUFFIX)}
    return [name for name in checked if not _is_own(folder, name, claims)] + _foreign_kept(folder, kept | said.files)


def _claims(folder: Path, names: list[str]) -> _Claims:
    path = folder / MANIFEST_NAME
    if not path.is_file():
        bases = _bases_by_magic(folder, names)
        return _Claims(bool(bases), frozenset([MANIFEST_NAME] if path.is_symlink() else []), bases)
    data = read_head(path, MAX_MANIFEST_BYTES)
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return _claims_of_damaged(data[:_HEAD_BYTES], folder, names)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        bases = _bases_by_magic(folder, names)
        return _Claims(bool(bases), frozenset(), bases)  # whole, and not ours: another tool's, even beside files of ours
    base = body.get("name")
    bases = frozenset([base]) if isinstance(base, str) else _bases_by_magic(folder, names)
    return _Claims(True, frozenset([MANIFEST_NAME, *_file_names(body)]), bases)


def _claims_of_damaged(head: bytes, folder: Path, names: list[str]) -> _Claims:
    """A manifest that is not JSON any more is ours where its beginning says so, or where the other files do."""
    bases, is_marked, name = _bases_by_magic(folder, names), _MARK.search(head) is not None, _NAME.search(head)
    if is_marked and name:
        with contextlib.suppress(ValueError):  # the damage is in the name itself; the magics say what they can
            bases |= {json.loads(name[1])}
    is_ours = is_marked or bool(bases)
    return _Claims(is_ours, frozenset([MANIFEST_NAME] if is_ours else []), bases)


def _file_names(body: dict[str, Any]) -> Iterator[str]:
    """Every name of a file in a manifest of any version: `name` anywhere below `files`, `header_file` of the sources."""
    pending: list[Any] = [body.get("files")]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if isinstance(value.get("name"), str):
                yield value["name"]
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
    sources = body.get("sources")
    for row in sources if isinstance(sources, list) else []:
        if isinstance(row, dict) and isinstance(row.get("header_file"), str):
            yield row["header_file"]


def _bases_by_magic(folder: Path, names: list[str]) -> frozenset[str]:
    """NAME of every NAME-experts.idx and NAME-experts.bin that begins as one does."""
    bases = set()
    for name in names:
        match = DATA_NAME.fullmatch(name)
        magic = INDEX_MAGIC if name.endswith(".idx") else EXPERTS_MAGIC if name.endswith(".bin") else b""
        if match and magic and (folder / name).is_file() and read_head(folder / name, len(magic)) == magic:
            bases.add(match[1])
    return frozenset(bases)


def is_generated(path: Path) -> bool:
    """Whether a card or the sums beside a bundle are as a command made them, so that they can be made again."""
    if path.name == README_NAME:
        return _is_generated_card(path)
    names = os.listdir(path.parent)
    return path.name == SUMS_NAME and _is_sums(path, path.parent, _claims(path.parent, names))


def _is_own(folder: Path, name: str, claims: _Claims) -> bool:
    path = folder / name
    if path.is_dir() and not path.is_symlink():
        return False
    match = DATA_NAME.fullmatch(name)
    if name in claims.files or (match is not None and match[1] in claims.bases):
        return name not in (README_NAME, PROFILE_NAME, PLAN_NAME, *LICENSE_NAMES)  # whatever a manifest says
    if name == README_NAME:
        return _is_generated_card(path)
    return name == SUMS_NAME and _is_sums(path, folder, claims)


def _foreign_kept(folder: Path, named: Collection[str]) -> list[str]:
    """What is in `source/` and no kept header of the bundle."""
    place = folder / SOURCE_NAME
    if not os.path.lexists(place):
        return []
    if not place.is_dir():
        return [SOURCE_NAME]
    return [f"{SOURCE_NAME}/{name}" for name in os.listdir(place) if not _is_kept(place / name, f"{SOURCE_NAME}/{name}", named)]


def _is_kept(path: Path, name: str, named: Collection[str]) -> bool:
    if path.is_dir():
        return False
    if name in named:
        return True
    return name.endswith(_KEPT_SUFFIX) and path.is_file() and read_head(path, len(_KEPT_MAGIC)) == _KEPT_MAGIC


def _is_generated_card(path: Path) -> bool:
    """Whether a card is what `publish` wrote, and `fetch` brought: no word in it is of the user."""
    text = _text(path)
    if text is None or importlib.util.find_spec("yaml") is None:  # without it nothing was fetched
        return False
    from bel.repack.card import is_generated

    return is_generated(text)


def _is_sums(path: Path, folder: Path, claims: _Claims) -> bool:
    """Whether checksums are of files that a bundle may have; those can be taken again, and those of other files not."""
    lines = (_text(path) or "").removesuffix("\n").split("\n")
    return all(_is_summed(line, folder, claims) for line in lines)


def _is_summed(line: str, folder: Path, claims: _Claims) -> bool:
    match = _SUM.fullmatch(line)
    if match is None:
        return False
    name = match[1]
    if line.startswith("\\"):
        name = re.sub(r"\\[\\nr]", lambda found: _UNESCAPED[found.group()], name)
    if name.startswith(f"{SOURCE_NAME}/"):
        return name.endswith(_KEPT_SUFFIX)
    return name in (PROFILE_NAME, PLAN_NAME, *LICENSE_NAMES) or (name != SUMS_NAME and _is_own(folder, name, claims))


def _text(path: Path) -> str | None:
    if not path.is_file() or path.stat().st_size > MAX_TEXT_BYTES:
        return None
    return read_head(path, MAX_TEXT_BYTES).decode("utf-8", "surrogateescape")
