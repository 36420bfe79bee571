"""Models with a damaged header: refused in little memory, or back byte for byte."""

from __future__ import annotations

import struct
import tempfile
import tracemalloc
from pathlib import Path

from hypothesis import event, given, settings
from hypothesis import strategies as st

import synth
from bel.formats.digest import slice_count
from bel.formats.errors import BelError
from bel.formats.gguf_model import GgufModel, open_model
from bel.formats.units import MIB
from bel.repack.layout import Layout, plan_layout
from round_trips import NO_LIMIT, round_trip
from synth import ARRAY, F32, STRING, U16, U32, Gguf, Tensor, key

SPLICED = [0, 1, 31, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]


def seeds() -> list[tuple[bytes, int]]:
    """(file, bytes of its header) of small models of several kinds."""
    kinds = [
        synth.moe(),
        synth.moe(version=2, alignment=64, tail=b"tail", pad_byte=0xAA),
        Gguf(
            [key("general.architecture", STRING, "x"), key("odd", ARRAY, (ARRAY, [(U32, [1, 2]), (STRING, ["a"])]))],
            [
                Tensor("e", (0,), F32),
                *synth.expert_stacks(0, 2),
                Tensor("u", (1, 1, 2), 153, bytes(64)),
                Tensor("z", (4,), F32),
            ],
        ),
    ]
    return [(blob, min(model.offsets.values())) for model in kinds for blob in [model.blob()]]


SEEDS = seeds()


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A file one to three of whose header fields were hit."""
    blob, header = draw(st.sampled_from(SEEDS))
    data = bytearray(blob)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, header - 1))
        kind = draw(st.sampled_from(["flip", "flip", "u64", "u64", "u32", "insert", "remove", "cut", "copy"]))
        if kind == "flip":
            data[min(at, len(data) - 1)] ^= 1 << draw(st.integers(0, 7))
        elif kind == "u64":
            data[at : at + 8] = struct.pack("<Q", draw(st.sampled_from(SPLICED)))
        elif kind == "u32":
            data[at : at + 4] = struct.pack("<I", draw(st.integers(0, 45) | st.integers(0, 2**32 - 1)))
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=40))
        elif kind == "remove":
            del data[at : at + draw(st.integers(1, 40))]
        elif kind == "cut":
            del data[draw(st.integers(0, len(data) - 1)) :]
        else:
            data[at : at + 16] = data[draw(st.integers(0, header - 1)) :][:16]
        if not data:
            break
    return bytes(data)


def opened_within_bounds(path: Path) -> tuple[GgufModel, Layout] | None:
    """The model and its plan, or None where it is refused; either way it takes little memory."""
    tracemalloc.start()
    try:
        model = open_model(path)
        return model, plan_layout(model, "m", ple="auto", shard_bytes=NO_LIMIT)
    except BelError as error:
        assert error.exit_code in (2, 3)
        str(error).encode("utf-8", "backslashreplace")
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= max(4 * path.stat().st_size, 8 * MIB)


def check_damaged(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = folder / "m.gguf"
        path.write_bytes(data)
        done = opened_within_bounds(path)
        event("refused" if done is None else "accepted")
        if done is not None:
            slices = sum(slice_count(t.ne, t.size_bytes) for t in done[0].tensors)
            assert slices <= len(data), "each slice takes time and 32 bytes"
            round_trip(path, *done, folder)


@settings(max_examples=600)
@given(damaged())
def test_a_damaged_header_is_refused_or_comes_back_byte_for_byte(data: bytes) -> None:
    check_damaged(data)


def test_every_field_of_a_header_spliced_with_every_extreme(tmp_path: Path) -> None:
    """The fields of a small file one after the other: what random positions seldom hit."""
    model = Gguf([key("general.architecture", STRING, "x"), key("n", U16, 1)], [*synth.expert_stacks(0, 2)])
    blob = model.blob()
    path = tmp_path / "m.gguf"
    for at in range(0, min(model.offsets.values()) - 8):
        for value in (0, 2**31, 2**63 - 1, 2**63, 2**64 - 1):
            path.write_bytes(blob[:at] + struct.pack("<Q", value) + blob[at + 8 :])
            try:
                found = open_model(path)
                plan_layout(found, "m", ple="auto", shard_bytes=NO_LIMIT)
            except BelError:
                continue
            assert sum(t.size_bytes for t in found.tensors) <= len(blob)
