"""The whole conversion there and back, with every check on the way."""

from __future__ import annotations

from pathlib import Path

from bel.formats.bundle import Bundle, open_bundle
from bel.formats.gguf_model import GgufModel
from bel.repack.compare import compare_source
from bel.repack.convert import convert
from bel.repack.layout import Layout
from bel.repack.restore import restore
from bel.repack.verify import verify_bundle

NO_LIMIT = 2**63


def quiet(_phase: str, _done: int, _total: int) -> None:
    """No progress."""


def round_trip(path: Path, model: GgufModel, layout: Layout, folder: Path) -> Bundle:
    """Convert, verify, compare and restore the model of `path`; every restored file equals its source."""
    convert(model, layout, folder / "out.bel", force=False, check=False, progress=quiet)
    bundle = open_bundle(folder / "out.bel")
    report = verify_bundle(bundle, quick=False, progress=quiet)
    compare_source(bundle, model, report, quiet)
    assert report.problems == []
    assert verify_bundle(bundle, quick=True, progress=quiet).problems == []
    for file in restore(bundle, folder / "restored", force=False, progress=quiet):
        assert (folder / "restored" / file.name).read_bytes() == path.with_name(file.name).read_bytes()
    assert len(bundle.manifest.sources) == len(model.files)
    return bundle
