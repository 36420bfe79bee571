"""Bundles of every format version that was ever written: they decode, verify and restore for ever."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from make_golden import GOLDEN, make, source

from bel.formats.bundle import open_bundle
from bel.formats.errors import DamagedBundleError
from bel.formats.gguf_model import open_model
from bel.formats.manifest import MANIFEST_NAME, READABLE_VERSIONS, VERSION, FileRow, encode
from bel.repack.compare import compare_source
from bel.repack.restore import restore
from bel.repack.verify import verify_bundle
from refused import refusal

VERSIONS = [f"v{version}" for version in READABLE_VERSIONS]
FILES = {
    "v1": {
        "golden-00001-of-00002.gguf",
        "golden-00002-of-00002.gguf",
        "golden.bel/golden-dense.gguf",
        "golden.bel/golden-experts-00001-of-00002.bin",
        "golden.bel/golden-experts-00002-of-00002.bin",
        "golden.bel/golden-experts.idx",
        "golden.bel/golden-ple.gguf",
        "golden.bel/manifest.json",
        "golden.bel/source/golden-00001-of-00002.gguf.hdr.zst",
        "golden.bel/source/golden-00002-of-00002.gguf.hdr.zst",
    }
}


def quiet(_phase: str, _done: int, _total: int) -> None:
    """No progress."""


def names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("version", VERSIONS)
def test_no_golden_file_is_missing(version: str) -> None:
    assert names(GOLDEN / version) == FILES[version]
    assert sum((GOLDEN / version / name).stat().st_size for name in FILES[version]) < 150_000


@pytest.mark.parametrize("version", VERSIONS)
def test_verifies_and_equals_its_source(version: str) -> None:
    bundle = open_bundle(GOLDEN / version / "golden.bel")
    report = verify_bundle(bundle, quick=False, progress=quiet)
    assert (report.problems, report.blobs_checked) == ([], 5)
    compare_source(bundle, open_model(GOLDEN / version / "golden-00002-of-00002.gguf"), report, quiet)
    assert report.problems == []
    assert verify_bundle(bundle, quick=True, progress=quiet).problems == []


@pytest.mark.parametrize("version", VERSIONS)
def test_restores(version: str, tmp_path: Path) -> None:
    restored = restore(open_bundle(GOLDEN / version / "golden.bel"), tmp_path, force=False, progress=quiet)
    for file in restored:
        assert (tmp_path / file.name).read_bytes() == (GOLDEN / version / file.name).read_bytes()
    assert {f.name for f in restored} == names(tmp_path) == {n for n in FILES[version] if "/" not in n}


def test_the_manifest_of_today_is_encoded_as_it_was() -> None:
    path = GOLDEN / f"v{VERSION}" / "golden.bel"
    assert encode(open_bundle(path).manifest) == (path / MANIFEST_NAME).read_bytes()


def test_the_code_of_today_writes_the_same_bundle(tmp_path: Path) -> None:
    """All but the toolkit's version and the compressed headers, which a new zstandard may pack in other bytes."""
    make(tmp_path)
    golden = GOLDEN / f"v{VERSION}"
    assert names(tmp_path) == FILES[f"v{VERSION}"]
    for name in sorted(names(tmp_path)):
        if name.endswith(".hdr.zst"):
            continue
        new, old = (tmp_path / name).read_bytes(), (golden / name).read_bytes()
        if name.endswith(MANIFEST_NAME):
            assert comparable(new) == comparable(old)
        else:
            assert new == old, name


def test_an_experts_file_without_layers_is_damage(tmp_path: Path) -> None:
    """`verify --quick` samples every experts file; a bundle from a stranger must not end in a traceback."""
    folder = tmp_path / "golden.bel"
    shutil.copytree(GOLDEN / f"v{VERSION}" / "golden.bel", folder)
    manifest = open_bundle(folder).manifest
    (folder / "extra.bin").write_bytes(bytes(4096))
    extra = FileRow("extra.bin", 4096, 0, "0" * 64)
    (folder / MANIFEST_NAME).write_bytes(encode(dataclasses.replace(manifest, experts=(*manifest.experts, extra))))
    refusal(lambda: verify_bundle(open_bundle(folder), quick=True, progress=quiet), DamagedBundleError)


def comparable(manifest: bytes) -> object:
    """A manifest without what may differ between two runs on different machines."""
    body = json.loads(manifest)
    del body["digest"], body["toolkit"]
    for row in body["sources"]:
        del row["header_file_bytes"], row["header_file_digest"]
    return body


def test_the_golden_source_is_what_the_maker_makes() -> None:
    for name, shard in source().items():
        assert (GOLDEN / f"v{VERSION}" / name).read_bytes() == shard.blob()
