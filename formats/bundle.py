"""A bundle on disk: its manifest and digest table, read and checked as far as every command needs."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from bel.formats.atomic import named_errors, read_all
from bel.formats.digest import DIGEST_BYTES, bytes_digest
from bel.formats.errors import BadInputError, DamagedBundleError
from bel.formats.experts_file import INDEX_HEADER, PAGE_BYTES, experts_header, unpack_index
from bel.formats.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, decode

DATA_NAME = re.compile(r"(.*)(?:-dense\.gguf|-ple\.gguf|-experts\.idx|-experts(?:-\d{5}-of-\d{5})?\.bin)", re.DOTALL | re.ASCII)
"""The name of a file that a conversion wrote: the bundle's name, and what it is (SPEC.md); its manifest may be lost."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle whose manifest is sound.  `folder` is its place, `manifest_bytes` the manifest file's size."""

    folder: Path
    manifest: Manifest
    manifest_bytes: int

    def path(self, name: str) -> Path:
        """The path of one of its files."""
        return self.folder / name


def is_bundle(path: Path) -> bool:
    """Whether a path looks like a bundle: a folder with a manifest."""
    return path.is_dir() and os.path.lexists(path / MANIFEST_NAME)


def open_bundle(folder: Path) -> Bundle:
    """Read the manifest of a bundle.  Raises BadInputError for what is no bundle, DamagedBundleError for a damaged one."""
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        what = "this is not a bundle (a folder with a manifest.json)" if os.path.lexists(folder) else "no such bundle"
        raise BadInputError(what, path=str(folder))
    if not path.is_file():
        if not any(DATA_NAME.fullmatch(name) for name in os.listdir(folder)):
            raise BadInputError("this is not a bundle: the folder has no manifest.json", path=str(folder))
        raise DamagedBundleError("the bundle has no manifest.json: it was lost", path=str(folder))
    data = read_file(path, MAX_MANIFEST_BYTES)
    return Bundle(folder, decode(data, str(path)), len(data))


def read_file(path: Path, limit_bytes: int) -> bytes:
    """A small file of a bundle, whole.  Raises DamagedBundleError where it is missing or larger than `limit_bytes`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise DamagedBundleError("the file is missing from the bundle", path=str(path)) from None
    try:
        with named_errors(path):
            size = os.fstat(fd).st_size
            if size > limit_bytes:
                raise DamagedBundleError(
                    "the file is larger than it can be", path=str(path), found=size, expected=f"at most {limit_bytes}"
                )
            return read_all(fd, size, 0)
    finally:
        os.close(fd)


def size_problem(path: Path, expected_bytes: int) -> DamagedBundleError | None:
    """What is wrong with the size of a bundle's file, or None."""
    try:
        found = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return DamagedBundleError("the file is missing from the bundle", path=str(path))
    if found == expected_bytes:
        return None
    what = "truncated: the file is too short" if found < expected_bytes else "the file has extra bytes at its end: wrong size"
    return DamagedBundleError(what, path=str(path), found=f"{found} bytes", expected=f"{expected_bytes}")


def check_sizes(bundle: Bundle) -> None:
    """Raise the first size problem of a bundle's files."""
    for name, size in bundle.manifest.files:
        problem = size_problem(bundle.path(name), size)
        if problem:
            raise problem


def read_index(bundle: Bundle) -> memoryview:
    """The digests of all parts, 32 bytes each, in `parts_in_order`.  Raises DamagedBundleError."""
    manifest = bundle.manifest
    count = sum(layer.n_expert * len(layer.parts) for layer in manifest.layers)
    path = bundle.path(manifest.index.name)
    data = read_file(path, INDEX_HEADER.size + count * DIGEST_BYTES)
    if bytes_digest(data) != manifest.index.digest:
        raise DamagedBundleError("the digest table's checksum does not match the manifest", path=str(path))
    return unpack_index(data, count, str(path))


def expected_experts_header(manifest: Manifest, shard: int) -> bytes:
    """The first page that experts file number `shard` must have."""
    size = manifest.experts[shard].size_bytes
    page = experts_header(shard, len(manifest.experts), size, bytes.fromhex(manifest.index.digest))
    assert len(page) == PAGE_BYTES, "the experts header is one page"
    return page
