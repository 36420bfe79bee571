"""SPEC.md says what the code does: struct tables, manifest keys, constants."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

import synth
from bel.formats import experts_file, manifest, profile_json, trace_layout
from bel.formats.gguf_model import open_model
from bel.repack.convert import convert
from bel.repack.layout import plan_layout

SPEC = (Path(__file__).parent.parent / "formats" / "SPEC.md").read_text(encoding="utf-8")
TYPES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i64": "q"}


def section(title: str) -> str:
    """The text under a heading."""
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", SPEC, re.MULTILINE | re.DOTALL)
    assert match, f"SPEC.md has no section {title}"
    return match[1]


def rows(text: str) -> list[list[str]]:
    """The body rows of all tables of a text."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if not line.startswith("| ---")]


def struct_rows(title: str) -> list[list[str]]:
    """The rows of a struct table."""
    return [row for row in rows(section(title)) if row[0].isdigit()]


def packs_alike(code: str, layout: struct.Struct) -> bool:
    """Whether two structs read the same values from the same bytes (`8I` and `IIIIIIII` do)."""
    data = bytes(range(1, layout.size + 1))
    return struct.unpack(code, data) == layout.unpack(data)


@pytest.mark.parametrize(
    ("title", "layout", "fields"),
    [
        ("Experts file", experts_file.EXPERTS_HEADER, experts_file.EXPERTS_FIELDS),
        ("Digest table", experts_file.INDEX_HEADER, experts_file.INDEX_FIELDS),
        ("Trace file head", trace_layout.FILE_HEAD, trace_layout.FILE_FIELDS),
        ("Trace block", trace_layout.BLOCK_HEAD, trace_layout.BLOCK_FIELDS),
    ],
)
def test_a_struct_table_is_the_struct_of_the_code(title: str, layout: struct.Struct, fields: tuple[str, ...]) -> None:
    table = struct_rows(title)
    assert tuple(row[3] for row in table) == fields
    at, code = 0, "<"
    for offset, size, kind, _field, _unit in table:
        assert int(offset) == at
        code += f"{size}s" if kind == "bytes" else TYPES[kind]
        if kind != "bytes":
            assert struct.calcsize("<" + TYPES[kind]) == int(size)
        at += int(size)
    assert struct.Struct(code).size == layout.size == at
    assert packs_alike(code, layout)


def test_magics_and_versions_are_those_of_the_code() -> None:
    assert f"`{experts_file.EXPERTS_MAGIC.decode()}`" in section("Experts file")
    assert f"`{experts_file.INDEX_MAGIC.decode()}`" in section("Digest table")
    assert f"`{manifest.FORMAT}`" in section("Manifest")
    assert SPEC.startswith(f"# Formats of bel-toolkit\n\nVersion {manifest.VERSION} of the bundle, the trace and the profile.")
    assert trace_layout.VERSION == profile_json.VERSION == manifest.VERSION
    assert manifest.READABLE_VERSIONS == (manifest.VERSION,)


def flatten(value: Any, prefix: str = "") -> set[str]:
    """The paths of a manifest's keys, as SPEC.md writes them."""
    if isinstance(value, dict):
        found = set()
        for key, item in value.items():
            name = re.sub(r"^layers\.\d+$", "layers.N", f"{prefix}.{key}" if prefix else key)
            if re.fullmatch(r"files\.(dense|ple|index)", name):
                found |= {name} | ({f"file.{k}" for k in item} if item else set())
            else:
                found |= flatten(item, name)
        return found
    if isinstance(value, list) and value and isinstance(value[0], dict):
        if prefix == "files.experts":
            return {prefix} | {f"file.{k}" for k in value[0]}
        return set().union(*(flatten(item, f"{prefix}[]") for item in value))
    return {prefix}


def test_the_manifest_has_the_keys_of_the_table_and_no_others(tmp_path: Path) -> None:
    model = synth.moe()
    model.tensors.insert(1, synth.Tensor("per_layer_token_embd.weight", (32, 64)))
    source = open_model(model.write(tmp_path / "m.gguf"))
    layout = plan_layout(source, "m", ple="split", shard_bytes=2**40)
    convert(source, layout, tmp_path / "m.bel", force=False, check=True, progress=lambda *_: None)
    written = json.loads((tmp_path / "m.bel" / "manifest.json").read_text())
    documented = {name for row in rows(section("Manifest")) for name in re.findall(r"`([^`]+)`", row[0])}
    assert flatten(written) == documented


def test_the_bundle_has_the_files_of_the_table(tmp_path: Path) -> None:
    source = open_model(synth.moe().write(tmp_path / "NAME.gguf"))
    layout = plan_layout(source, "NAME", ple="keep", shard_bytes=2**40)
    convert(source, layout, tmp_path / "NAME.bel", force=False, check=True, progress=lambda *_: None)
    documented = {name for row in rows(section("Bundle"))[1:] for name in re.findall(r"`([^`]+)`", row[0])}
    made = {
        p.relative_to(tmp_path / "NAME.bel").as_posix().replace("NAME.gguf", "FILE")
        for p in (tmp_path / "NAME.bel").rglob("*.*")
    }
    assert made <= documented
    assert documented - made == {"NAME-ple.gguf", "NAME-experts-0000i-of-0000n.bin"}
