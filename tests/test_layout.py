"""The plan of a conversion: every offset, and where files are cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import synth
from bel.formats.errors import UsageError
from bel.formats.experts_file import CHEAP_PADDING_RATIO, PAGE_BYTES, PART_ALIGNMENT, blob_layout
from bel.formats.gguf_header import scan_header
from bel.formats.gguf_model import GgufModel, open_model
from bel.formats.units import align_up
from bel.repack.layout import BUNDLE_VERSION_KEY, CONTENT_DIGEST_KEY, Layout, dense_header, plan_layout
from refused import refusal
from synth import ARRAY, BOOL, F32, I32, STRING, U16, U32, Gguf, Tensor, expert_stacks, key

NO_LIMIT = 2**63
ARCH = key("general.architecture", STRING, "x")
DIGEST = "0123456789abcdef" * 4


def plan(model: GgufModel, *, ple: str = "auto", shard_bytes: int = NO_LIMIT) -> Layout:
    return plan_layout(model, "m", ple=ple, shard_bytes=shard_bytes)


def opened(model: Gguf, folder: Path) -> GgufModel:
    return open_model(model.write(folder / "m.gguf"))


@given(st.lists(st.integers(1, 2**20) | st.integers(2**20, 2**26), min_size=1, max_size=3))
def test_blobs(sizes: list[int]) -> None:
    offsets, stride = blob_layout(sizes)
    ends = [o + s for o, s in zip(offsets, sizes, strict=True)]
    assert offsets[0] == 0
    assert all(0 <= o - e < PAGE_BYTES for e, o in zip(ends, offsets[1:], strict=False))
    assert all(o % PART_ALIGNMENT == 0 for o in offsets)
    assert stride % PAGE_BYTES == 0
    assert 0 <= stride - ends[-1] < PAGE_BYTES
    tight_stride = align_up(sum(align_up(s, PART_ALIGNMENT) for s in sizes[:-1]) + sizes[-1], PAGE_BYTES)
    paged_stride = sum(align_up(s, PAGE_BYTES) for s in sizes)
    cheap = paged_stride - tight_stride <= CHEAP_PADDING_RATIO * tight_stride
    assert stride == (paged_stride if cheap else tight_stride)
    assert all(o % PAGE_BYTES == 0 for o in offsets) or not cheap


def test_pages_where_they_are_cheap() -> None:
    assert blob_layout([100, 100, 100]) == ([0, 128, 256], 4096)
    assert blob_layout([4096 * 3, 4096, 4096 * 2]) == ([0, 4096 * 3, 4096 * 4], 4096 * 6)  # costs nothing
    assert blob_layout([4096 * 100 + 1, 4096]) == ([0, 4096 * 101], 4096 * 102)  # the same stride either way
    assert blob_layout([1, 4096 * 49]) == ([0, 4096], 4096 * 50)
    assert blob_layout([1, 4000, 1]) == ([0, 64, 4096], 8192)  # three pages would cost half as much again


def test_strides_and_layer_offsets(tmp_path: Path) -> None:
    tensors = [*expert_stacks(0, 3), *expert_stacks(1, 5, width=64, ff=96), *expert_stacks(4, 1, type_id=F32)]
    layout = plan(opened(Gguf([ARCH], tensors), tmp_path))
    at = PAGE_BYTES
    for layer in layout.layers:
        assert layer.offset_bytes == at
        assert layer.stride_bytes % PAGE_BYTES == 0
        at += layer.stride_bytes * layer.n_expert
        for expert in range(layer.n_expert):
            for part in layer.parts:
                assert layer.part_offset(expert, part) == layer.offset_bytes + expert * layer.stride_bytes + part.offset_bytes
    assert layout.experts_bytes == (at,)
    assert layout.experts_names == ("m-experts.bin",)
    assert (layout.dense_name, layout.ple_name, layout.index_name) == ("m-dense.gguf", "m-ple.gguf", "m-experts.idx")


def sizes_of(layout: Layout) -> list[int]:
    return [layer.size_bytes for layer in layout.layers]


def test_cuts_on_layer_boundaries_only(tmp_path: Path) -> None:
    tensors = [t for layer, experts in enumerate((2, 3, 1, 4, 2)) for t in expert_stacks(layer, experts)]
    model = opened(Gguf([ARCH], tensors), tmp_path)
    whole = plan(model)
    blob = whole.layers[0].stride_bytes
    assert sizes_of(whole) == [blob * n for n in (2, 3, 1, 4, 2)]
    cut = plan(model, shard_bytes=PAGE_BYTES + 5 * blob)
    assert [layer.shard for layer in cut.layers] == [0, 0, 1, 1, 2]
    assert [layer.offset_bytes - PAGE_BYTES for layer in cut.layers] == [0, 2 * blob, 0, blob, 0]
    assert cut.experts_bytes == tuple(PAGE_BYTES + n * blob for n in (5, 5, 2))
    assert cut.experts_names == tuple(f"m-experts-{i:05d}-of-00003.bin" for i in (1, 2, 3))
    tighter = plan(model, shard_bytes=PAGE_BYTES + 5 * blob - 1)
    assert [layer.shard for layer in tighter.layers] == [0, 1, 1, 2, 3]


def test_a_layer_larger_than_the_limit_is_refused(tmp_path: Path) -> None:
    tensors = [*expert_stacks(0, 2), *expert_stacks(7, 3)]
    model = opened(Gguf([ARCH], tensors), tmp_path)
    need = PAGE_BYTES + plan(model).layers[1].size_bytes
    assert plan(model, shard_bytes=need).experts_bytes[1] == need
    error = refusal(lambda: plan(model, shard_bytes=need - 1), UsageError)
    assert error.cause == f"layer blk.7 alone takes {need} bytes ({need / 1024:.2f} KiB), more than --shard-size {need - 1}"
    assert error.hint == f"Use --shard-size {need} or more"


def odd_entries() -> list[bytes]:
    """Every way of writing a value that a reader could change by decoding it and writing it again."""
    return [
        ARCH,
        key("general.name", STRING, b"\xff\0"),
        key(b"\xfe", 6, b"\1\0\xa0\x7f"),
        key("split.no", U16, 0),
        key("bool", BOOL, 2),
        key("nested", ARRAY, (ARRAY, [(STRING, ["", "a"]), (U32, [])])),
        key("split.count", U16, 1),
        key("general.alignment", U32, 64),
        key("split.tensors.count", I32, 7),
        key("splitting", U32, 1),
    ]


def test_the_dense_header(tmp_path: Path) -> None:
    tensors = [
        Tensor("z", (3,), F32),
        *expert_stacks(0, 2),
        Tensor("empty", (0,), F32),
        Tensor("odd", (5,), 153, b"12345", gap_bytes=64),
        Tensor("a", (7,), F32),
    ]
    source = Gguf(odd_entries(), tensors, version=2, alignment=64, order=[5, 2, 6, 0, 1, 3, 4])
    model = opened(source, tmp_path)
    layout = plan(model)
    path = tmp_path / "dense.gguf"
    path.write_bytes(dense_header(model, layout, DIGEST))
    dense = scan_header(path)
    kept = [e for e in odd_entries() if b"split." not in e]
    assert [dense.entry(k) for k in dense.keys][: len(kept)] == kept
    assert list(dense.keys)[len(kept) :] == [BUNDLE_VERSION_KEY, CONTENT_DIGEST_KEY]
    assert (dense.integer(BUNDLE_VERSION_KEY), dense.text(CONTENT_DIGEST_KEY)) == (1, DIGEST)
    assert (dense.version, dense.alignment) == (2, 64)
    assert [t.name for t in dense.tensors] == ["z", "empty", "odd", "a"]
    assert [(t.ne, t.type_id) for t in dense.tensors] == [((3,), F32), ((0,), F32), ((5,), 153), ((7,), F32)]
    at = 0
    sizes = {t.name: t.size_bytes for t in model.tensors}
    for tensor in dense.tensors:  # llama.cpp refuses any other offset
        assert tensor.offset_bytes == at
        at += -(-sizes[tensor.name] // 64) * 64
    assert dense.data_start_bytes == dense.file_bytes == layout.dense.data_start_bytes
    assert layout.dense.size_bytes == dense.data_start_bytes + at
    for source_tensor, place in zip(model.tensors, layout.destinations, strict=True):
        if place.dest == "experts":
            assert place.offset_bytes == 0
        else:
            info = next(t for t in dense.tensors if t.name == source_tensor.name)
            assert place.offset_bytes == dense.data_start_bytes + info.offset_bytes


def test_keys_of_an_earlier_bundle_are_not_written_twice(tmp_path: Path) -> None:
    """A file put together again from a bundle has them; a GGUF with a key twice loads nowhere."""
    model = opened(synth.moe(entries=[*synth.moe_entries(), key(CONTENT_DIGEST_KEY, STRING, "old")]), tmp_path)
    path = tmp_path / "dense.gguf"
    path.write_bytes(dense_header(model, plan(model), DIGEST))
    assert scan_header(path).text(CONTENT_DIGEST_KEY) == DIGEST


def test_later_shards_are_laid_out_at_the_first_ones_alignment(tmp_path: Path) -> None:
    model = Gguf([ARCH, key("general.alignment", U32, 4096)], synth.moe_tensors(), alignment=4096)
    for name, shard in synth.split(model, [2, 10], later_alignment=64).items():
        shard.write(tmp_path / name)
    layout = plan(open_model(tmp_path / "model-00002-of-00002.gguf"))
    assert layout.dense.alignment == 4096
    assert [t.offset_bytes for t in layout.dense.tensors] == [4096 * i for i in range(6)]


def ple_model(table_rows: int, other_rows: int, name: str = "per_layer_token_embd.weight") -> Gguf:
    tensors = [Tensor(name, (8, table_rows), F32), Tensor("token_embd.weight", (8, other_rows), F32), *expert_stacks(0, 2)]
    return Gguf([ARCH, key("general.name", STRING, "m")], [*tensors, Tensor("per_layer_proj_norm.weight", (8, 0), F32)])


@pytest.mark.parametrize(("rows", "is_split"), [(5, True), (4, False)])
def test_ple_auto_splits_from_five_percent_on(rows: int, is_split: bool, tmp_path: Path) -> None:
    layout = plan(opened(ple_model(rows, 100 - rows), tmp_path))
    assert (layout.ple is not None) is is_split


@pytest.mark.parametrize(("mode", "rows", "is_split"), [("keep", 90, False), ("split", 1, True), ("split", 90, True)])
def test_ple_as_told(mode: str, rows: int, is_split: bool, tmp_path: Path) -> None:
    layout = plan(opened(ple_model(rows, 100 - rows), tmp_path), ple=mode)
    assert (layout.ple is not None) is is_split
    names = {"per_layer_token_embd.weight", "token_embd.weight", "per_layer_proj_norm.weight"}
    assert {t.name for t in layout.dense.tensors} == names - ({"per_layer_token_embd.weight"} if is_split else set())


@pytest.mark.parametrize("mode", ["auto", "split"])
def test_nothing_to_split_without_a_table(mode: str, tmp_path: Path) -> None:
    assert plan(opened(ple_model(90, 10, "per_layer_token_embdx.weight"), tmp_path), ple=mode).ple is None


def test_kin_alone_are_split_only_when_told(tmp_path: Path) -> None:
    model = opened(ple_model(90, 10, "per_layer_token_embd.scale"), tmp_path)
    assert plan(model).ple is None
    assert plan(model, ple="split").ple is not None


def test_the_ple_file_is_a_second_split(tmp_path: Path) -> None:
    source = ple_model(90, 10)
    source.entries.append(key("general.alignment", U32, 64))
    source.alignment = 64
    model = opened(source, tmp_path)
    layout = plan(model)
    assert layout.ple is not None
    path = tmp_path / "ple.gguf"
    path.write_bytes(layout.ple.header())
    ple = scan_header(path)
    values = {k: ple.value(k) for k in ple.keys}
    assert values == {
        "general.architecture": "x",
        "general.alignment": 64,
        "split.no": 1,
        "split.count": 2,
        "split.tensors.count": 3,
        BUNDLE_VERSION_KEY: 1,
    }
    assert [(t.name, t.ne, t.offset_bytes) for t in ple.tensors] == [("per_layer_token_embd.weight", (8, 90), 0)]
    assert layout.destinations[0].offset_bytes == ple.data_start_bytes
    assert layout.ple.size_bytes == ple.data_start_bytes + 2880


def test_a_model_of_nothing_but_experts(tmp_path: Path) -> None:
    layout = plan(opened(Gguf([ARCH], expert_stacks(0, 2)), tmp_path))
    assert layout.dense.tensors == ()
    assert layout.dense.size_bytes == layout.dense.data_start_bytes == len(layout.dense.header())
