"""Models of real size: sparse GGUFs with the shapes of published models go through every command, and stay sparse."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import shapes
from shapes import Form, Shape, SparseModel, load_shapes, write_sparse

PAGE = 4096
GB = 10**9
SHARD_BYTES = 45 * GB  # the default of --shard-size
RSS_LIMIT_BYTES = 200 * 10**6
HANG_SECONDS = 300
ALL = load_shapes()

FORMS = {
    "Mixtral-8x7B": Form(),
    "Qwen3-30B-A3B": Form("BF16", "BF16"),
    "Qwen3-235B-A22B": Form(shards=5),
    "Qwen3-Next-80B-A3B": Form(fused=True),
    "DeepSeek-V3": Form(),
    "GLM-4.5-Air": Form(out_type="Q8_0"),  # 1408 is not a multiple of 256: down is no K-quant
    "gpt-oss-120b": Form("MXFP4", "MXFP4"),
    "Kimi-K2": Form(),
    "MiniMax-M2": Form(alignment=64),
    "Gemma-4-26B-A4B": Form(out_type="Q8_0", fused=True),
    "Llama-4-Scout-17B-16E": Form("MXFP4", "Q8_0"),
}

# The command as it is installed, which tells the most memory that it held when it ends.  The kernel's figure for children
# (ru_maxrss) will not do: it remembers the process that the child was forked from.
RUN = """
import atexit, sys
def tell():
    with open('/proc/self/status') as file:
        sys.stderr.write(next(line for line in file if line.startswith('VmHWM:')))
atexit.register(tell)
from bel.repack.cli import main
main()
"""


@dataclass(frozen=True, slots=True)
class Done:
    """A command that ended well: its `--json` answer and its peak memory."""

    answer: dict[str, Any]
    peak_rss_bytes: int


def bel_repack(*arguments: str | Path) -> Done:
    command = [sys.executable, "-c", RUN, *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    name, number, unit = done.stderr.splitlines()[-1].split()
    assert (name, unit) == ("VmHWM:", "kB")
    return Done(json.loads(done.stdout), int(number) * 1024)


@dataclass(frozen=True, slots=True)
class Case:
    """A written model and its bundle."""

    shape: Shape
    form: Form
    model: SparseModel
    bundle: Path
    converted: Done
    manifest: dict[str, Any]


@pytest.fixture(scope="module", params=FORMS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """One model after the other, converted once.  Gone afterwards: apparent terabytes would frighten a backup."""
    shape, form = ALL[request.param], FORMS[request.param]
    folder = tmp_path_factory.mktemp("sparse")
    model = write_sparse(shape, form, folder)
    done = bel_repack("convert", model.paths[-1], "-o", folder / "out.bel", "--no-verify")
    manifest = json.loads((folder / "out.bel" / "manifest.json").read_bytes())
    yield Case(shape, form, model, folder / "out.bel", done, manifest)
    shutil.rmtree(folder)


def page_up(count: int) -> int:
    return (count + PAGE - 1) // PAGE * PAGE


def slices(shape: Shape, form: Form) -> list[int]:
    """Bytes of the parts of a blob, from the published widths alone."""
    enter, leave = shape.slice_bytes[form.in_type][0], shape.slice_bytes[form.out_type][1]
    assert leave is not None
    return [2 * enter, leave] if form.fused else [enter, enter, leave]


def stride(shape: Shape, form: Form) -> int:
    """Every part begins on a page: for all these widths that costs under 2 %."""
    parts = slices(shape, form)
    paged = sum(map(page_up, parts))
    assert paged <= sum(parts) * 1.02
    return paged


def experts_files(shape: Shape, form: Form) -> list[int]:
    """Sizes of the experts files: whole layers, as many as fit below 45 GB with the header page."""
    layer = stride(shape, form) * shape.n_expert
    most, left, sizes = (SHARD_BYTES - PAGE) // layer, len(shape.moe_layers), []
    while left:
        sizes.append(PAGE + min(most, left) * layer)
        left -= min(most, left)
    return sizes


def on_disk(paths: list[Path]) -> int:
    return sum(p.stat().st_blocks * 512 for p in paths)


def bundle_files(case: Case) -> list[Path]:
    return [p for p in case.bundle.rglob("*") if p.is_file()]


def test_sizes_and_layout_follow_from_the_published_shape(case: Case) -> None:
    shape, form, answer = case.shape, case.form, case.converted.answer
    trunk = [b for b in shape.moe_layers if b < shape.n_layer]
    assert answer["moe_layers"] == list(shape.moe_layers)
    assert answer["mtp_layers"] == [b for b in shape.moe_layers if b >= shape.n_layer]
    assert answer["n_experts_by_layer"] == {str(b): shape.n_expert for b in shape.moe_layers}
    assert answer["n_expert_used_by_layer"] == {str(b): shape.n_expert_used for b in shape.moe_layers}
    assert answer["expert_stride_bytes"] == {str(b): stride(shape, form) for b in shape.moe_layers}
    assert answer["token_cycle_bytes"] == len(trunk) * shape.n_expert_used * stride(shape, form)
    sizes = experts_files(shape, form)
    assert answer["experts_bytes"] == sum(sizes)
    assert answer["padding_bytes"] == sum(sizes) - sum(slices(shape, form)) * shape.n_expert * len(shape.moe_layers)
    found = sorted(p.stat().st_size for p in case.bundle.glob("*-experts*.bin"))
    assert found == sorted(sizes)
    assert max(found) <= SHARD_BYTES
    dense = sum(row.size_bytes for row in case.model.rows if "_exps.weight" not in row.name)
    assert dense <= answer["dense_bytes"] <= dense + case.model.header_bytes + len(case.model.rows) * form.alignment + PAGE


def test_blobs_are_aligned_and_follow_one_another(case: Case) -> None:
    layers, at, shard = case.manifest["layers"], PAGE, 0
    for block in case.shape.moe_layers:
        layer = layers[str(block)]
        if layer["shard"] != shard:
            shard, at = shard + 1, PAGE
        assert (layer["shard"], layer["offset"], layer["stride"]) == (shard, at, stride(case.shape, case.form))
        assert layer["offset"] % PAGE == 0 and layer["stride"] % PAGE == 0
        assert [p["offset"] % PAGE for p in layer["parts"]] == [0] * len(layer["parts"])
        assert [p["bytes"] for p in layer["parts"]] == slices(case.shape, case.form)
        at += layer["stride"] * layer["n_expert"]
    assert len(case.manifest["files"]["experts"]) == shard + 1


def test_marked_bytes_come_out_where_the_manifest_says(case: Case) -> None:
    manifest, model = case.manifest, case.model
    rows = {row["name"]: row for row in manifest["tensors"]}
    layers = {manifest["tensors"][p["tensor"]]["name"]: (la, p) for la in manifest["layers"].values() for p in la["parts"]}
    for mark in model.marks:
        if mark.expert is None:
            name, at = manifest["files"]["dense"]["name"], rows[mark.tensor]["dest_offset"] + mark.offset_bytes
        else:
            layer, part = layers[mark.tensor]
            inside = mark.offset_bytes - mark.expert * part["bytes"]
            name = manifest["files"]["experts"][layer["shard"]]["name"]
            at = layer["offset"] + mark.expert * layer["stride"] + part["offset"] + inside
        with (case.bundle / name).open("rb") as file:
            file.seek(at)
            assert file.read(shapes.MARK_BYTES) == mark.data, mark


def test_a_bundle_takes_hardly_more_disk_than_its_headers(case: Case) -> None:
    files = bundle_files(case)
    apparent = sum(p.stat().st_size for p in files)
    tables = sum(p.stat().st_size for p in files if p.suffix in (".json", ".idx", ".zst"))
    marks = len(case.model.marks) * 2 * PAGE  # a mark may lie across two blocks of the file system
    assert on_disk(files) <= tables + case.model.header_bytes + marks + len(files) * 16 * PAGE
    assert on_disk(files) < apparent / 1000
    assert case.converted.answer["bytes_read"] <= on_disk(case.model.paths)


def test_verify_reads_all_of_it_and_finds_it_sound(case: Case) -> None:
    blobs = len(case.shape.moe_layers) * case.shape.n_expert
    quick = bel_repack("verify", case.bundle, "--quick")
    files = len(case.manifest["files"]["experts"])
    assert quick.answer["ok"] and quick.answer["blobs_checked"] == 32 * files < blobs
    full = bel_repack("verify", case.bundle, "--source", case.model.paths[0])
    assert full.answer["ok"] and full.answer["blobs_checked"] == blobs
    sizes = sum(p.stat().st_size for p in bundle_files(case) if p.name != "manifest.json")
    assert full.answer["bytes_checked"] == sizes
    assert max(quick.peak_rss_bytes, full.peak_rss_bytes) < RSS_LIMIT_BYTES


def test_inspect_says_the_same_of_source_and_bundle(case: Case) -> None:
    source, bundle = (bel_repack("inspect", path) for path in (case.model.paths[0], case.bundle))
    for row in [*source.answer["model"]["sources"], *bundle.answer["model"]["sources"]]:
        del row["sha256"]  # a bundle knows it of files that were not mostly holes
    differ = {k for k in bundle.answer if bundle.answer[k] != source.answer[k]}
    one_file = len(case.manifest["files"]["experts"]) == 1
    assert differ <= {"format", "content_digest"} | (set() if one_file else {"experts_bytes", "padding_bytes"})
    assert source.answer["expert_stride_bytes"] == case.converted.answer["expert_stride_bytes"]
    assert max(source.peak_rss_bytes, bundle.peak_rss_bytes) < RSS_LIMIT_BYTES


def test_restore_gives_the_sparse_source_back(case: Case, tmp_path: Path) -> None:
    done = bel_repack("restore", case.bundle, "-o", tmp_path)
    restored = [tmp_path / p.name for p in case.model.paths]
    assert [f["name"] for f in done.answer["files"]] == [p.name for p in case.model.paths]
    for ours, theirs in zip(restored, case.model.paths, strict=True):
        assert ours.stat().st_size == theirs.stat().st_size
        assert differing_ranges(ours, theirs) == []
    blocks = len(case.model.marks) * 2  # a block of the bundle lies across two of the restored file
    assert on_disk(restored) <= on_disk(case.model.paths) + (blocks + len(restored) * 16) * PAGE
    assert done.peak_rss_bytes < RSS_LIMIT_BYTES
    for path in restored:
        path.unlink()


def test_conversion_stays_under_the_memory_bar(case: Case) -> None:
    assert case.converted.peak_rss_bytes < RSS_LIMIT_BYTES


def differing_ranges(one: Path, other: Path) -> list[tuple[int, int]]:
    """Where two sparse files differ: outside of both files' data all bytes are zero, so only data need be compared."""
    with one.open("rb") as a, other.open("rb") as b:
        ranges = sorted(set(data_ranges(a.fileno()) + data_ranges(b.fileno())))
        assert ranges, "a file without data was never written"
        return [(at, end) for at, end in ranges if os.pread(a.fileno(), end - at, at) != os.pread(b.fileno(), end - at, at)]


def data_ranges(fd: int) -> list[tuple[int, int]]:
    ranges, at, size = [], 0, os.fstat(fd).st_size
    while at < size:
        try:
            begin = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: no data behind `at`
            break
        at = os.lseek(fd, begin, os.SEEK_HOLE)
        ranges.append((begin, at))
    return ranges


def test_verify_finds_one_byte_in_a_hole(tmp_path: Path) -> None:
    """The verification above can fail: a byte is written where the source was never written."""
    model = write_sparse(ALL["DeepSeek-V2-Lite"], Form("MXFP4", "MXFP4"), tmp_path)
    bel_repack("convert", model.paths[0], "--no-verify", "-o", tmp_path / "out.bel")
    layer = json.loads((tmp_path / "out.bel" / "manifest.json").read_bytes())["layers"]["17"]
    with (tmp_path / "out.bel" / "DeepSeek-V2-Lite-experts.bin").open("r+b") as file:
        file.seek(layer["offset"] + 40 * layer["stride"] + layer["parts"][1]["offset"] + 4096)
        file.write(b"\x01")
    command = [sys.executable, "-c", RUN, "verify", str(tmp_path / "out.bel"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 4
    problems = json.loads(done.stdout)["problems"]
    assert len(problems) == 1 and "layer 17 expert 40 part up" in problems[0]


def test_the_largest_is_hundreds_of_gigabytes_and_the_forms_cover_what_they_should() -> None:
    sizes = {name: sum(experts_files(ALL[name], form)) for name, form in FORMS.items()}
    assert len(FORMS) >= 8
    assert max(sizes.values()) > 500 * GB
    assert any(form.shards > 1 for form in FORMS.values())
    assert any(ALL[n].n_dense_lead and ALL[n].n_nextn for n in FORMS)
    assert any(part % PAGE for n, form in FORMS.items() for part in slices(ALL[n], form))
