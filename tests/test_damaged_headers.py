"""Headers that are damaged or cut: what each is refused with, to the byte."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import pytest

import synth
from bel.formats.gguf_model import open_model
from header_bytes import ARCH, START, head, info, nested, small
from refused import bad_model
from synth import ARRAY, F32, I32, STRING, U32, U64, Gguf, Tensor, key


def alignment(type_id: int, value: object) -> bytes:
    return key("general.alignment", type_id, value)


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
