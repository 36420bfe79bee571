"""`manifest.json`: what a bundle holds, where every tensor went, and what every byte must hash to.

`SPEC.md`, "Manifest", has the keys.  A manifest is read as hostile input: every number is bounded before it is used.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from bel.formats.digest import DIGEST_BYTES, bytes_digest
from bel.formats.errors import BadInputError, DamagedBundleError
from bel.formats.experts_file import INDEX_HEADER, MAX_PARTS, PAGE_BYTES, LayerLayout
from bel.formats.gguf_header import MAX_DIMS
from bel.formats.manifest_fields import (
    layer_from_json,
    layer_to_json,
    plain_name,
    read_digest,
    read_int,
    read_ints,
    read_list,
    read_map,
    read_text,
)

FORMAT = "bel-bundle"
VERSION = 1
READABLE_VERSIONS = (1,)
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 64 * 2**20
DENSE, PLE, EXPERTS = "dense", "ple", "experts"
_NO_DIGEST = "0" * 64


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One source file.  `kept` are the ranges [offset, bytes] of it, header first, that stand in `header_file`.

    `sha256` is None where the file has more holes than are worth hashing (`SPEC.md`, "Holes").
    """

    name: str
    size_bytes: int
    sha256: str | None
    hole_bytes: int
    header_file: str
    header_file_bytes: int
    header_file_digest: str
    kept: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor: its place in the source, its destination, and the digest of its data.

    `dest_offset_bytes` is absolute in the dense or PLE file; for an expert stack it is 0 (see the layers).
    """

    name: str
    type_id: int
    ne: tuple[int, ...]
    size_bytes: int
    source: int
    source_offset_bytes: int
    dest: str
    dest_offset_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class FileRow:
    """One file of the bundle.  `digest` covers the first `digest_bytes` bytes: a GGUF's header, or a whole table."""

    name: str
    size_bytes: int
    digest_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of `manifest.json` but its own digest."""

    toolkit: str
    name: str
    arch: str | None
    model_name: str | None
    content_digest: str
    sources: tuple[SourceRow, ...]
    tensors: tuple[TensorRow, ...]
    layers: tuple[LayerLayout, ...]
    dense: FileRow
    ple: FileRow | None
    index: FileRow
    experts: tuple[FileRow, ...]

    @property
    def files(self) -> list[tuple[str, int]]:
        """Name and size of every file of the bundle but the manifest itself."""
        rows = [self.dense, *([self.ple] if self.ple else []), self.index, *self.experts]
        return [(r.name, r.size_bytes) for r in rows] + [(s.header_file, s.header_file_bytes) for s in self.sources]


def encode(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`.  `digest` is BLAKE3 of these very bytes with 64 zeros in its place.

    Raises BadInputError where they would be more than a reader takes (names of the source that are megabytes long).
    """
    body: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "digest": _NO_DIGEST,
        "toolkit": manifest.toolkit,
        "name": manifest.name,
        "model": {"name": manifest.model_name, "arch": manifest.arch},
        "content_digest": manifest.content_digest,
        "sources": [
            {
                "name": s.name,
                "bytes": s.size_bytes,
                "sha256": s.sha256,
                "hole_bytes": s.hole_bytes,
                "header_file": s.header_file,
                "header_file_bytes": s.header_file_bytes,
                "header_file_digest": s.header_file_digest,
                "kept": [list(k) for k in s.kept],
            }
            for s in manifest.sources
        ],
        "files": {
            "dense": _file_to_json(manifest.dense),
            "ple": _file_to_json(manifest.ple) if manifest.ple else None,
            "index": _file_to_json(manifest.index),
            "experts": [_file_to_json(f) for f in manifest.experts],
        },
        "layers": {str(layer.layer): layer_to_json(layer) for layer in manifest.layers},
        "tensors": [
            {
                "name": t.name,
                "type": t.type_id,
                "ne": list(t.ne),
                "bytes": t.size_bytes,
                "source": t.source,
                "source_offset": t.source_offset_bytes,
                "dest": t.dest,
                "dest_offset": t.dest_offset_bytes,
                "digest": t.digest,
            }
            for t in manifest.tensors
        ],
    }
    # One line a tensor or source: a person can read and diff it, and it stays a third of the fully indented size.
    text = _one_line_a_row(body)
    if len(text) > MAX_MANIFEST_BYTES:
        raise BadInputError(
            "the manifest would be too large: the source's names are absurdly long",
            found=f"{len(text)} bytes",
            expected=f"at most {MAX_MANIFEST_BYTES}",
        )
    digest = bytes_digest(text.encode())
    return text.replace(f'"digest": "{_NO_DIGEST}"', f'"digest": "{digest}"', 1).encode()


def _one_line_a_row(body: dict[str, Any]) -> str:
    lines = []
    for key, value in body.items():
        if key in ("sources", "tensors"):
            rows = ",\n  ".join(json.dumps(v) for v in value)
            shown = f"[\n  {rows}\n ]" if value else "[]"
        elif key in ("layers", "files"):
            rows = ",\n  ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            shown = f"{{\n  {rows}\n }}"
        else:
            shown = json.dumps(value)
        lines.append(f" {json.dumps(key)}: {shown}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def decode(data: bytes, path: str) -> Manifest:
    """The manifest in `data`.  Raises DamagedBundleError for damage, and for a version that this toolkit does not read."""
    body = _parse(data, path)
    try:
        return _from_json(body)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedBundleError(f"the manifest is damaged: {error}", path=path) from None


def _parse(data: bytes, path: str) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedBundleError(f"the manifest is not JSON: {error}", path=path) from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise DamagedBundleError("this is not the manifest of a bundle", path=path, expected=f"format {FORMAT}")
    version = body.get("version")
    if not isinstance(version, int) or version not in READABLE_VERSIONS:
        raise DamagedBundleError(
            f"bundle version {version} is not supported; this toolkit reads {', '.join(map(str, READABLE_VERSIONS))}",
            path=path,
            hint="Upgrade bel-toolkit if the bundle is newer",
        )
    digest = body.get("digest")
    if not isinstance(digest, str) or len(digest) != 64:
        raise DamagedBundleError("the manifest has no digest", path=path)
    blank = data.replace(f'"digest": "{digest}"'.encode(), f'"digest": "{_NO_DIGEST}"'.encode(), 1)
    if blank == data or bytes_digest(blank) != digest:
        raise DamagedBundleError("the manifest's checksum does not match: it was damaged or edited", path=path)
    return body


def _from_json(body: dict[str, Any]) -> Manifest:
    files = read_map(body, "files")
    model = read_map(body, "model")
    sources = tuple(_source(row) for row in read_list(body, "sources"))
    tensors = tuple(_tensor(row, len(sources)) for row in read_list(body, "tensors"))
    experts = tuple(_file_from_json(row) for row in read_list(files, "experts"))
    tensor_bytes, file_bytes = [t.size_bytes for t in tensors], [f.size_bytes for f in experts]
    layers = tuple(layer_from_json(int(key), row, tensor_bytes, file_bytes) for key, row in read_map(body, "layers").items())
    if not sources or not layers or [x.layer for x in layers] != sorted({x.layer for x in layers}):
        raise ValueError("it lists no sources, or no layers in order")
    manifest = Manifest(
        toolkit=read_text(body, "toolkit"),
        name=plain_name(read_text(body, "name")),
        arch=None if model.get("arch") is None else read_text(model, "arch"),
        model_name=None if model.get("name") is None else read_text(model, "name"),
        content_digest=read_digest(body, "content_digest"),
        sources=sources,
        tensors=tensors,
        layers=layers,
        dense=_file_from_json(read_map(files, "dense")),
        ple=None if files.get("ple") is None else _file_from_json(read_map(files, "ple")),
        index=_file_from_json(read_map(files, "index")),
        experts=experts,
    )
    _check_places(manifest)
    return manifest


def _check_places(manifest: Manifest) -> None:
    """Every byte of a destination has one owner, and every tensor a destination that exists."""
    names = [name for name, _ in manifest.files] + [MANIFEST_NAME]
    if len(set(names)) != len(names) or len({s.name for s in manifest.sources}) != len(manifest.sources):
        raise ValueError("two files have one name")
    in_blobs = [part.tensor for layer in manifest.layers for part in layer.parts]
    if sorted(in_blobs) != [i for i, t in enumerate(manifest.tensors) if t.dest == EXPERTS]:
        raise ValueError("the layers do not hold each expert tensor once")
    parts = sum(layer.n_expert * len(layer.parts) for layer in manifest.layers)
    if parts > MAX_PARTS or manifest.index.size_bytes != INDEX_HEADER.size + parts * DIGEST_BYTES:
        raise ValueError(f"the digest table's size does not fit the layers' {parts} parts")
    for layer in manifest.layers:
        for part in layer.parts:
            if manifest.tensors[part.tensor].name != f"blk.{layer.layer}.ffn_{part.role}_exps.weight":
                raise ValueError(f"layer {layer.layer} has a part {part.role} that is another tensor")
    if any(source.sha256 is None and not source.hole_bytes for source in manifest.sources):
        raise ValueError("a source without holes has no sha256")
    _check_own_files(manifest)
    spans: list[list[tuple[int, int]]] = [list(source.kept) for source in manifest.sources]
    for tensor in manifest.tensors:
        spans[tensor.source].append((tensor.source_offset_bytes, tensor.size_bytes))
    for source, ranges in zip(manifest.sources, spans, strict=True):
        _check_apart(f"source {source.name}", ranges, source.size_bytes)


def _check_own_files(manifest: Manifest) -> None:
    for row, kind in ((manifest.dense, DENSE), (manifest.ple, PLE)):
        places = [(t.dest_offset_bytes, t.size_bytes) for t in manifest.tensors if t.dest == kind]
        if row is None:
            if places:
                raise ValueError("tensors are in a PLE file that is not there")
            continue
        _check_apart(row.name, [(0, row.digest_bytes), *places], row.size_bytes)
    shards: list[list[tuple[int, int]]] = [[(0, PAGE_BYTES)] for _ in manifest.experts]
    for layer in manifest.layers:
        shards[layer.shard].append((layer.offset_bytes, layer.size_bytes))
    for row, places in zip(manifest.experts, shards, strict=True):
        if len(places) == 1 or _check_apart(row.name, places, row.size_bytes) != row.size_bytes:
            raise ValueError(f"{row.name} does not end with the last of its layers")


def _check_apart(where: str, ranges: list[tuple[int, int]], size_bytes: int) -> int:
    """The end of the last of some [offset, bytes], which must lie apart and inside `size_bytes`."""
    at = 0
    for offset, size in sorted(ranges):
        if offset < at:
            raise ValueError(f"two ranges of {where} overlap")
        at = offset + size
    if at > size_bytes:
        raise ValueError(f"a range of {where} ends behind it")
    return at


def _source(row: dict[str, Any]) -> SourceRow:
    sha = row["sha256"]
    kept = tuple(_pair(k) for k in read_list(row, "kept"))
    folder, _, name = read_text(row, "header_file").partition("/")
    if folder != "source":
        raise ValueError("a header file is not in source/")
    return SourceRow(
        plain_name(read_text(row, "name")),
        read_int(row, "bytes"),
        None if sha is None else read_digest(row, "sha256"),
        read_int(row, "hole_bytes"),
        "source/" + plain_name(name),
        read_int(row, "header_file_bytes"),
        read_digest(row, "header_file_digest"),
        kept,
    )


def _pair(value: Any) -> tuple[int, int]:
    pair = read_ints({"kept": value}, "kept", 2)
    if len(pair) != 2:
        raise ValueError("a kept range is not an offset and a size")
    return pair[0], pair[1]


def _tensor(row: dict[str, Any], source_count: int) -> TensorRow:
    ne = read_ints(row, "ne", MAX_DIMS)
    dest, source = read_text(row, "dest"), read_int(row, "source")
    if dest not in (DENSE, PLE, EXPERTS) or source >= source_count:
        raise ValueError("a tensor has no such source or destination")
    return TensorRow(
        read_text(row, "name"),
        read_int(row, "type"),
        ne,
        read_int(row, "bytes"),
        source,
        read_int(row, "source_offset"),
        dest,
        read_int(row, "dest_offset"),
        read_digest(row, "digest"),
    )


def _file_to_json(row: FileRow) -> dict[str, Any]:
    return {"name": row.name, "bytes": row.size_bytes, "digest_bytes": row.digest_bytes, "digest": row.digest}


def _file_from_json(row: dict[str, Any]) -> FileRow:
    size, covered = read_int(row, "bytes"), read_int(row, "digest_bytes")
    if covered > size:
        raise ValueError("a digest covers more than its file")
    return FileRow(plain_name(read_text(row, "name")), size, covered, read_digest(row, "digest"))
