"""The header scanner: what it refuses and how it says so, the oddities it takes verbatim, and what it costs."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import pytest

import synth
from bel.formats.gguf_header import MAX_HEADER_BYTES, scan_header
from bel.formats.gguf_model import open_model
from bel.formats.units import MIB
from refused import bad_model, refusal
from synth import ARRAY, BOOL, F32, I32, STRING, U32, U64, Gguf, Tensor, gguf_string, key

FLOAT32, FLOAT64, U8 = 6, 12, 0


def info(name: str | bytes, ne: tuple[int, ...] = (32,), type_id: int = F32, offset: int = 0, dims: int | None = None) -> bytes:
    """A tensor info; `dims` is the dimension count that it claims."""
    head = gguf_string(name) + struct.pack("<I", len(ne) if dims is None else dims)
    return head + struct.pack(f"<{len(ne)}QIQ", *ne, type_id, offset)


def head(
    entries: list[bytes] | None = None,
    infos: list[bytes] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    keys: int | None = None,
    tensors: int | None = None,
    body: int = 4096,
) -> bytes:
    """A file whose counts may lie, with `body` zero bytes behind the header."""
    entries, infos = entries or [], infos or []
    counts = (len(infos) if tensors is None else tensors, len(entries) if keys is None else keys)
    return struct.pack("<4sIQQ", magic, version, *counts) + b"".join(entries + infos) + bytes(body)


def alignment(type_id: int, value: object) -> bytes:
    return key("general.alignment", type_id, value)


def nested(depth: int) -> object:
    """The value of arrays inside one another, `depth` of them, around the u32 7."""
    item: tuple[int, list[object]] = (U32, [7])
    for _ in range(depth - 1):
        item = (ARRAY, [item])
    return item


@dataclass(frozen=True, slots=True)
class Bad:
    """A damaged file and every attribute of the error that it must cause."""

    blob: bytes
    cause: str
    tensor: str | None = None
    offset_bytes: int | None = None
    found: object = None
    expected: object = None
    hint: str | None = None


START = 24  # magic, version and the two counts
ARCH = key("general.architecture", STRING, "x")
BAD = {
    "empty": Bad(b"", "the file is empty (0 bytes)"),
    "one byte": Bad(b"G", "the file is too short for a GGUF (1 bytes)"),
    "short by one": Bad(head()[:23], "the file is too short for a GGUF (23 bytes)"),
    "git lfs": Bad(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        "this is not a GGUF file: it is a Git LFS pointer; fetch the file itself with git lfs pull",
        found="b'vers'",
        expected="b'GGUF'",
    ),
    "link as text": Bad(
        b"../../blobs/0123456789abcdef",
        "this is not a GGUF file: it holds the text ../../blobs/0123456789abcdef, so it may be a symbolic link that was copied "
        "as text",
        found="b'../.'",
        expected="b'GGUF'",
    ),
    "short link as text": Bad(
        b"../blobs/012",
        "the file is too short for a GGUF (12 bytes): it holds the text ../blobs/012, so it may be a symbolic link that was "
        "copied as text",
    ),
    "magic": Bad(head(magic=b"GGJT"), "this is not a GGUF file", found="b'GGJT'", expected="b'GGUF'"),
    "version 0": Bad(head(version=0), "GGUF version 0 is not supported; versions 2 and 3 are"),
    "version 1": Bad(head(version=1), "GGUF version 1 is not supported; versions 2 and 3 are"),
    "version 4": Bad(head(version=4), "GGUF version 4 is not supported; versions 2 and 3 are"),
    "big-endian": Bad(
        head(version=struct.unpack("<I", struct.pack(">I", 3))[0]),
        "this is a big-endian GGUF (its byte order is not this machine's)",
        hint="Convert it with llama.cpp's gguf_convert_endian.py first",
    ),
    "alignment 0": Bad(
        head([alignment(U32, 0)]), "general.alignment is not a power of two", found=0, offset_bytes=START + 8 + 17 + 4
    ),
    "alignment 24": Bad(
        head([alignment(U32, 24)]), "general.alignment is not a power of two", found=24, offset_bytes=START + 8 + 17 + 4
    ),
    "alignment u64": Bad(
        head([alignment(U64, 32)]), "general.alignment has the wrong type", found="an entry of value type 10", expected="u32"
    ),
    "alignment i32": Bad(
        head([alignment(I32, 32)]), "general.alignment has the wrong type", found="an entry of value type 5", expected="u32"
    ),
    "alignment array": Bad(
        head([alignment(ARRAY, (U32, [32]))]), "general.alignment has the wrong type", found="an array", expected="u32"
    ),
    "duplicate key": Bad(head([ARCH, ARCH]), "duplicate metadata key general.architecture", offset_bytes=START + len(ARCH)),
    "duplicate key of two types": Bad(
        head([ARCH, key("general.architecture", U32, 1)]),
        "duplicate metadata key general.architecture",
        offset_bytes=START + len(ARCH),
    ),
    "duplicate tensor": Bad(
        head([], [info("a"), info("b", offset=128), info("a", offset=256)]),
        "duplicate tensor name",
        tensor="a",
        offset_bytes=START + 2 * len(info("a")),
    ),
    "5 dimensions": Bad(
        head([], [info("a", (1, 1, 1, 1, 1))]),
        "the tensor has 5 dimensions; ggml has at most 4",
        tensor="a",
        offset_bytes=START + 9,
    ),
    "2^32 - 1 dimensions": Bad(
        head([], [info("a", dims=2**32 - 1)]),
        "the tensor has 4294967295 dimensions; ggml has at most 4",
        tensor="a",
        offset_bytes=START + 9,
    ),
    "name of 64 bytes": Bad(
        head([], [info("n" * 64)]),
        "tensor info 1 of 1 has a name of 64 bytes; llama.cpp's limit is under 64",
        offset_bytes=START,
    ),
    "name of 2^64 - 1 bytes": Bad(
        head([], [struct.pack("<Q", 2**64 - 1) + bytes(64)]),
        f"tensor info 1 of 1 has a name of {2**64 - 1} bytes; llama.cpp's limit is under 64",
        offset_bytes=START,
    ),
    "key of 65536 bytes": Bad(
        head([ARCH, key("k" * 65536, U32, 1)]),
        "metadata key 2 of 2 has a name of 65536 bytes; llama.cpp's limit is under 65536",
        offset_bytes=START + len(ARCH),
    ),
    "dimension of 2^63": Bad(
        head([], [info("a", (2**63,))]),
        "the tensor's dimensions overflow",
        tensor="a",
        found=[2**63],
        expected="fewer than 2^63 elements",
    ),
    "dimensions of 2^64 together": Bad(
        head([], [info("a", (2**32, 2**32))]),
        "the tensor's dimensions overflow",
        tensor="a",
        found=[2**32, 2**32],
        expected="fewer than 2^63 elements",
    ),
    "a zero beside 2^63": Bad(
        head([], [info("a", (0, 2**63))]),
        "the tensor's dimensions overflow",
        tensor="a",
        found=[0, 2**63],
        expected="fewer than 2^63 elements",
    ),
    "negative type": Bad(head([], [info("a", type_id=2**32 - 1)]), "the tensor has a negative type id", tensor="a", found=-1),
    "misaligned offset": Bad(
        head([], [info("a", offset=16)]),
        "the tensor's data offset is not aligned",
        tensor="a",
        found="offset 16",
        expected="a multiple of general.alignment 32",
    ),
    "misaligned to 64": Bad(
        head([alignment(U32, 64)], [info("a", offset=32)]),
        "the tensor's data offset is not aligned",
        tensor="a",
        found="offset 32",
        expected="a multiple of general.alignment 64",
    ),
    "unknown value type": Bad(
        head([key("k", 13, b"\0" * 8)]), "the value of key k: unknown value type 13", offset_bytes=START + 9
    ),
    "unknown type of no items": Bad(
        head([key("k", ARRAY, struct.pack("<IQ", 99, 0))]),
        "the value of key k: unknown value type 99",
        offset_bytes=START + 9,
    ),
    "nested too deep": Bad(
        head([key("k", ARRAY, nested(9))]), "the value of key k: arrays are nested more than 8 deep", offset_bytes=START + 9
    ),
    "tensors that lie": Bad(
        head(tensors=2**64 - 1),
        f"the header declares {2**64 - 1} tensors, more than fit: truncated, or a damaged count",
        found="4120 bytes in the file",
        expected=f"at least {24 * (2**64 - 1)}",
    ),
    "keys that lie": Bad(
        head(keys=2**63),
        f"the header declares {2**63} metadata keys, more than fit: truncated, or a damaged count",
        found="4120 bytes in the file",
        expected=f"at least {13 * 2**63}",
    ),
    "string of 2^64 - 1 bytes": Bad(
        head([key("k", STRING, "")[:-8] + b"\xff" * 8]),
        "the header runs past the end of the file while reading the value of key k: truncated, or a damaged count",
        offset_bytes=START + 9 + 4 + 8 + 4096,
        found=f"{START + 21 + 4096} bytes in the file",
        expected=f"at least {START + 21 + 2**64 - 1}",
    ),
    "array of 2^63 numbers": Bad(
        head([key("k", ARRAY, struct.pack("<IQ", U64, 2**63))]),
        "the header runs past the end of the file while reading the value of key k: truncated, or a damaged count",
        offset_bytes=START + 13 + 12 + 4096,
        found=f"{START + 25 + 4096} bytes in the file",
        expected=f"at least {START + 25 + 2**66}",
    ),
    "key count one too high": Bad(
        head([key("k", U32, 1)], keys=2, body=4),
        "the header runs past the end of the file while reading metadata key 2 of 2: truncated, or a damaged count",
        offset_bytes=START + 17 + 4,
        found="45 bytes in the file",
        expected="at least 49",
    ),
    "no padding behind the header": Bad(
        head([], [info("a", (0,))], body=0),
        "the header runs past the end of the file while reading the padding between header and tensor data: truncated, or a "
        "damaged count",
        offset_bytes=57,
        found="57 bytes in the file",
        expected="at least 64",
    ),
    "half a block": Bad(
        head([], [info("a", (48,), synth.Q8_0)]),
        "the tensor's shape is damaged: rows of 48 elements are not whole Q8_0 blocks of 32",
        tensor="a",
    ),
    "overlap": Bad(
        head([], [info("a", (32,)), info("b", (32,), offset=96)]),
        "the tensor's data overlap the next tensor's, b",
        tensor="a",
        offset_bytes=96,
        found="128 bytes",
        expected="at most 96",
    ),
    "overlap of the first two by place": Bad(
        head([], [info("late", (32,), offset=64), info("early", (32,), offset=0)]),
        "the tensor's data overlap the next tensor's, late",
        tensor="early",
        offset_bytes=128,
        found="128 bytes",
        expected="at most 64",
    ),
    "an offset near 2^64": Bad(
        head([], [info("a", (32,), offset=2**64 - 32)]),
        "the file is truncated: this tensor's data reach past the end of the file",
        tensor="a",
        offset_bytes=64 + 2**64 - 32,
        found=f"{START + 33 + 4096} bytes in the file",
        expected=f"at least {64 + 2**64 - 32 + 128}, so {64 + 2**64 - 32 + 128 - START - 33 - 4096} are missing",
        hint="Download it again, or let the download finish",
    ),
    "an unknown type behind the end": Bad(
        head([], [info("a", (32,), 153, offset=8192)]),
        "the file is truncated: this tensor's data reach past the end of the file",
        tensor="a",
        offset_bytes=64 + 8192,
        found=f"{START + 33 + 4096} bytes in the file",
        expected=f"at least {64 + 8192}, so {64 + 8192 - START - 33 - 4096} are missing",
        hint="Download it again, or let the download finish",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(case: str, tmp_path: Path) -> None:
    bad, path = BAD[case], tmp_path / "model.gguf"
    path.write_bytes(bad.blob)
    error = bad_model(path)
    have = (error.cause, error.tensor, error.offset_bytes, error.found, error.expected, error.hint)
    assert have == (bad.cause, bad.tensor, bad.offset_bytes, bad.found, bad.expected, bad.hint)
    for fact in (bad.tensor, bad.offset_bytes, bad.found, bad.expected, bad.hint):
        assert fact is None or str(fact) in str(error)


def test_refuses_a_header_larger_than_any_real_one(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(head([key("k", STRING, "")[:-8] + struct.pack("<Q", MAX_HEADER_BYTES)], body=0))
    with path.open("r+b") as file:
        file.truncate(MAX_HEADER_BYTES + 2 * MIB)
    tracemalloc.start()
    try:
        error = bad_model(path)
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()
    assert error.cause == "the header is larger than 96 MiB at the value of key k: too large to be a real one"


def small() -> Gguf:
    """A file with every kind of field."""
    entries = [
        *synth.moe_entries(layers=1),
        key("x.u8", U8, 1),
        key("x.f64", FLOAT64, 0.5),
        key("x.nested", ARRAY, nested(3)),
        key("x.strings", ARRAY, (STRING, ["", "ab"])),
    ]
    return Gguf(entries, [Tensor("a", (32,), F32, gap_bytes=32), *synth.expert_stacks(0, 2), Tensor("z", (5,), F32)])


def test_truncation_at_every_byte_of_the_header(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = small()
    blob = model.blob()
    data_start = model.offsets["a"]
    causes = ("the file is empty", "the file is too short for a GGUF", "more than fit", "runs past the end of the file")
    seen = set()
    path.write_bytes(blob[:data_start])
    for cut in range(data_start - 1, -1, -1):
        with path.open("r+b") as file:
            file.truncate(cut)
        error = bad_model(path)
        kind = next(c for c in causes if c in error.cause)
        seen.add(kind)
        if kind == causes[-1]:
            assert error.found == f"{cut} bytes in the file"
            need = int(str(error.expected).removeprefix("at least "))
            assert cut < need <= data_start
    assert seen == set(causes)


@pytest.mark.parametrize(
    ("field", "doing"),
    [
        (b"qwen3moe.expert_count", "metadata key 5 of 11"),
        (b"t1", "the value of key tokenizer.ggml.tokens"),
        (b"t7", "the value of key tokenizer.ggml.tokens"),
        (b"blk.0.ffn_up_exps", "tensor info 3 of 5"),
    ],
)
def test_truncation_names_what_was_read(field: bytes, doing: str, tmp_path: Path) -> None:
    path, blob = tmp_path / "model.gguf", small().blob()
    path.write_bytes(blob[: blob.index(field) + 1])
    assert f"while reading {doing}:" in bad_model(path).cause


def test_truncation_of_the_data_names_the_first_tensor_that_does_not_fit(tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", small()
    blob = model.blob()
    ends = {t.name: model.offsets[t.name] + len(t.bytes_of(0)) for t in model.tensors}
    whole = max(ends.values())
    cuts = {at + step for at in (*ends.values(), *model.offsets.values()) for step in (-1, 0, 1)}
    for cut in sorted(c for c in cuts if model.offsets["a"] <= c < whole):
        path.write_bytes(blob[:cut])
        error = bad_model(path)
        assert error.cause == "the file is truncated: this tensor's data reach past the end of the file"
        assert error.tensor == next(name for name, end in ends.items() if end > cut)
        assert error.offset_bytes == model.offsets[error.tensor or ""]
        assert error.expected == f"at least {whole}, so {whole - cut} are missing"
    for cut in range(whole, len(blob) + 1):  # the padding behind the last tensor need not be there
        path.write_bytes(blob[:cut])
        assert len(open_model(path).tensors) == 5


def test_truncation_goes_by_place_not_by_header_order(tmp_path: Path) -> None:
    model = Gguf([ARCH], [Tensor("second", (32,), F32), Tensor("first", (32,), F32)], order=[1, 0])
    blob = model.blob()
    path = tmp_path / "model.gguf"
    path.write_bytes(blob[: model.offsets["first"] + 1])
    error = bad_model(path)
    assert (error.tensor, error.expected) == ("first", f"at least {len(blob)}, so 255 are missing")


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


def vocabulary(path: Path, tokens: int) -> Path:
    """A file whose header holds three arrays of `tokens` strings."""
    words = b"".join(gguf_string(f"tok{i:07d}") for i in range(tokens))
    value = struct.pack("<IQ", STRING, tokens) + words
    return Gguf([key(f"array{i}", ARRAY, value) for i in range(3)], [Tensor("a", (32,), F32)]).write(path)


def test_three_large_string_arrays_fit_in_memory(tmp_path: Path) -> None:
    path = vocabulary(tmp_path / "model.gguf", 200_000)
    program = (
        "import sys; from pathlib import Path; from bel.formats.gguf_model import open_model;"
        "from bel.formats.process import peak_rss_bytes;"
        "keys = open_model(Path(sys.argv[1])).first.keys; print(len(keys), peak_rss_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    keys, peak = map(int, done.stdout.split())
    assert keys == 3
    assert peak < 200e6


def test_scan_time_is_linear(tmp_path: Path) -> None:
    paths = [vocabulary(tmp_path / f"{n}.gguf", n) for n in (200_000, 400_000)]
    best = [float("inf")] * 2
    for _ in range(5):
        for number, path in enumerate(paths):
            began = time.perf_counter()
            scan_header(path)
            best[number] = min(best[number], time.perf_counter() - began)
    assert best[1] <= 3 * best[0]


def test_an_array_in_the_place_of_a_string_costs_no_memory(tmp_path: Path) -> None:
    value = struct.pack("<IQ", U8, 2**22) + bytes(2**22)
    names = ("general.architecture", "general.name", "split.count", "None.expert_count")
    path = Gguf([key(name, ARRAY, value) for name in names], [Tensor("a", (32,), F32)]).write(tmp_path / "model.gguf")
    size = path.stat().st_size
    header = open_model(path).first
    tracemalloc.start()
    try:
        assert (header.text("general.name"), header.integer("None.expert_count")) == (None, None)
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


def test_refuses_an_alignment_that_would_be_allocated(tmp_path: Path) -> None:
    """Of a metadata-only first shard nothing else bounds it: its header is not padded."""
    model = synth.moe(entries=synth.moe_entries(alignment=2**31), alignment=2**31)
    for name, shard in synth.split(model, [0, len(model.tensors)]).items():
        shard.write(tmp_path / name)
    path = tmp_path / "model-00001-of-00002.gguf"
    error = bad_model(path)
    assert "general.alignment" in error.cause
    assert error.found == 2**31


@pytest.mark.parametrize("what", ["keys", "tensors"])
def test_refuses_counts_that_no_model_has(what: str, tmp_path: Path) -> None:
    """96 MiB of the smallest keys would take 1.4 GB; the largest models have a few hundred keys and some thousand tensors."""
    path = tmp_path / "model.gguf"
    path.write_bytes(head(keys=10**6 * (what == "keys"), tensors=10**6 * (what == "tensors")))
    with path.open("r+b") as file:
        file.truncate(64 * MIB)
    assert "the header declares 1000000" in bad_model(path).cause
