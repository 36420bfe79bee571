"""The header scanner: the oddities that it takes verbatim, and where it finds a tensor's data."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

import synth
from bel.formats.gguf_header import scan_header
from bel.formats.gguf_model import open_model
from header_bytes import ARCH, FLOAT32, START, nested, small
from refused import refusal
from synth import ARRAY, BOOL, F32, I32, STRING, U32, Gguf, Tensor, key

SIGNALLING = struct.pack("<I", 0x7FA00001)
ODD = {
    "empty string": key("k", STRING, ""),
    "empty key": key("", U32, 5),
    "key of 65535 bytes": key("k" * 65535, U32, 5),
    "not UTF-8": key(b"\xff\xfe key", STRING, b"\x80\xff\0"),
    "signalling NaN": key("k", FLOAT32, SIGNALLING),
    "array of signalling NaNs": key("k", ARRAY, struct.pack("<IQ", FLOAT32, 2) + SIGNALLING * 2),
    "bool 2": key("k", BOOL, 2),
    "bools": key("k", ARRAY, (BOOL, [0, 1, 2, 255])),
    "empty array": key("k", ARRAY, (U32, [])),
    "empty array of strings": key("k", ARRAY, (STRING, [])),
    "array of empty strings": key("k", ARRAY, (STRING, ["", ""])),
    "empty array of arrays": key("k", ARRAY, (ARRAY, [])),
    "array of empty arrays": key("k", ARRAY, (ARRAY, [(U32, []), (STRING, [])])),
    "nested to 8": key("k", ARRAY, nested(8)),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("version", [2, 3])
def test_keeps_odd_entries_verbatim(odd: str, version: int, tmp_path: Path) -> None:
    entry, after = ODD[odd], key("behind", U32, 77)
    model = Gguf([ARCH, entry, after], [Tensor("a", (32,), F32)], version=version)
    header = scan_header(model.write(tmp_path / "model.gguf"))
    name = list(header.keys)[1]
    assert header.version == version
    assert header.entry(name) == entry
    assert header.integer("behind") == 77
    assert bytes(header.raw) == model.blob()[: header.data_start_bytes]


def test_decodes_values(tmp_path: Path) -> None:
    entries = [
        key(b"\xff", STRING, b"\x80"),
        key("nested", ARRAY, (ARRAY, [(STRING, ["a", ""]), (U32, [1, 2]), (ARRAY, [(BOOL, [0, 2])])])),
        key("true", BOOL, 2),
        key("negative", I32, -5),
    ]
    header = scan_header(Gguf(entries, []).write(tmp_path / "model.gguf"))
    assert header.value("\udcff") == header.text("\udcff") == "\udc80"
    assert header.value("nested") == [["a", ""], [1, 2], [[False, True]]]
    assert (header.value("true"), header.integer("true"), header.text("true")) == (True, None, None)
    assert (header.integer("negative"), header.text("negative")) == (-5, None)
    assert header.value("absent") is None


@pytest.mark.parametrize("alignment_bytes", [1, 8, 16, 32, 64, 4096, 65536])
def test_honours_the_alignment(alignment_bytes: int, tmp_path: Path) -> None:
    model = synth.moe(alignment=alignment_bytes, pad_byte=0xAA, tail=b"tail")
    opened = open_model(model.write(tmp_path / "model.gguf"))
    assert opened.first.alignment == alignment_bytes
    assert {t.name: t.start_bytes for t in opened.tensors} == model.offsets
    assert [t.size_bytes for t in opened.tensors] == [len(t.bytes_of(0)) for t in model.tensors]


def test_reads_data_in_any_order_with_gaps_and_a_tail(tmp_path: Path) -> None:
    model = synth.moe(order=[5, 0, 11, 3, 1, 2, 10, 9, 8, 7, 6, 4], tail=b"\1" * 77, pad_byte=0x55, lead_gap_bytes=64)
    model.tensors[3].gap_bytes = 96
    opened = open_model(model.write(tmp_path / "model.gguf"))
    assert [t.name for t in opened.tensors] == [t.name for t in model.tensors]
    assert {t.name: t.start_bytes for t in opened.tensors} == model.offsets
    assert min(model.offsets.values()) == opened.first.data_start_bytes + 64


def test_takes_empty_tensors(tmp_path: Path) -> None:
    tensors = [
        Tensor("none", (0,), F32),
        Tensor("a", (32,), F32),
        Tensor("no rows", (32, 0, 5), F32),
        Tensor("scalar", (), F32),
    ]
    opened = open_model(Gguf([ARCH], tensors).write(tmp_path / "model.gguf"))
    assert [t.size_bytes for t in opened.tensors] == [0, 128, 0, 4]
    assert opened.tensors[0].start_bytes == opened.tensors[1].start_bytes


def test_an_empty_tensor_may_stand_before_a_tensor_of_lower_index(tmp_path: Path) -> None:
    model = Gguf([ARCH], [Tensor("a", (32,), F32), Tensor("none", (0,), F32)], order=[1, 0])
    opened = open_model(model.write(tmp_path / "model.gguf"))
    assert [(t.start_bytes - opened.first.data_start_bytes, t.size_bytes) for t in opened.tensors] == [(0, 128), (0, 0)]


def test_an_unknown_type_takes_all_up_to_the_next_tensor(tmp_path: Path) -> None:
    tensors = [
        Tensor("dense", (7,), 153, bytes(100)),
        Tensor("a", (32,), F32),
        Tensor("last", (1,), 42 + 2**20, bytes(10)),
    ]
    opened = open_model(Gguf([ARCH], tensors, tail=b"tail").write(tmp_path / "model.gguf"))
    assert [(t.size_bytes, t.size_is_guessed) for t in opened.tensors] == [(128, True), (128, False), (36, True)]


def test_no_tensors_means_no_padding(tmp_path: Path) -> None:
    header = scan_header(Gguf([ARCH], []).write(tmp_path / "model.gguf"))
    assert header.data_start_bytes == header.file_bytes == START + len(ARCH)


def test_scans_without_the_data(tmp_path: Path) -> None:
    """A header can be looked at while its data are still being downloaded."""
    model = small()
    blob = model.blob()
    path = tmp_path / "model.gguf"
    path.write_bytes(blob[: model.offsets["a"]])
    header = scan_header(path)
    assert [t.name for t in header.tensors] == [t.name for t in model.tensors]
    assert "truncated" in refusal(lambda: open_model(path)).cause
