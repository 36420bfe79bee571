"""Properties of the whole conversion: any valid model comes back byte for byte; a damaged header is refused or does too."""

from __future__ import annotations

import random
import struct
import tempfile
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st

import synth
from bel.formats.bundle import Bundle, open_bundle
from bel.formats.digest import slice_count
from bel.formats.errors import BelError
from bel.formats.ggml_types import GGML_TYPES, tensor_bytes
from bel.formats.gguf_model import GgufModel, open_model
from bel.formats.shards import model_base_name
from bel.formats.units import MIB
from bel.repack.compare import compare_source
from bel.repack.convert import convert
from bel.repack.layout import Layout, plan_layout
from bel.repack.restore import restore
from bel.repack.verify import verify_bundle
from synth import ARRAY, BOOL, F32, STRING, U16, U32, Gguf, Tensor, gguf_string, key

NO_LIMIT = 2**63
ROW_TYPES = [k for k, t in GGML_TYPES.items() if t.block_elements in (1, 32)]
UNKNOWN = [43, 153, 2**31 - 1]


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


# --- random models ----------------------------------------------------------------------------------------------------


@dataclass
class Drawn:
    """A model to be written: its shards, and what each tensor holds."""

    shards: dict[str, Gguf]
    tensors: list[Tensor]
    ple: str
    shard_bytes_limit: bool
    data: dict[str, bytes] = field(default_factory=dict)


def expert_shapes(roles: list[str], experts: int) -> list[tuple[str, tuple[int, ...]]]:
    shapes = {"gate": (32, 3), "up": (32, 3), "gate_up": (32, 6), "down": (64, 2)}
    return [(role, (*shapes[role], experts) if experts > 1 else shapes[role]) for role in roles]


def drawn_tensor(draw: st.DrawFn, name: str, ne: tuple[int, ...], alignment: int, *, whole: int = 1) -> Tensor:
    """A tensor of a type from the table, or of an unknown one; then of `whole` slices of whole alignment units."""
    if draw(st.integers(0, 6)) == 0:
        size = whole * alignment if whole > 1 else draw(st.integers(1, 3)) * alignment
        return Tensor(name, ne, draw(st.sampled_from(UNKNOWN)), random.Random(name).randbytes(size))
    return Tensor(name, ne, draw(st.sampled_from(ROW_TYPES)))


@st.composite
def layer_tensors(draw: st.DrawFn, layer: int, alignment: int) -> list[Tensor]:
    """A MoE layer of any kind, with what stands beside its experts."""
    roles = draw(st.sampled_from([["gate", "up", "down"], ["up", "down"], ["gate_up", "down"]]))
    experts = draw(st.integers(1, 4))
    tensors = [
        drawn_tensor(draw, f"blk.{layer}.ffn_{role}_exps.weight", ne, alignment, whole=experts)
        for role, ne in expert_shapes(draw(st.permutations(roles)), experts)
    ]
    beside = ["ffn_gate_exps.bias", "ffn_down_exps.scale", "ffn_up_shexp.weight", "exp_probs_b.bias", "ffn_norm_exps.weight"]
    for suffix in draw(st.lists(st.sampled_from(beside), unique=True, max_size=3)):
        tensors.append(drawn_tensor(draw, f"blk.{layer}.{suffix}", (32, experts), alignment))
    return draw(st.permutations(tensors))


def drawn_entries(draw: st.DrawFn, layers: int, alignment: int) -> list[bytes]:
    odd = {
        "nan": key("odd.nan", 6, b"\1\0\xa0\x7f"),
        "bool": key("odd.bool", BOOL, 2),
        "bytes": key(b"odd.\xff", STRING, b"\x80\0"),
        "nested": key("odd.nested", ARRAY, (ARRAY, [(STRING, ["", "a"]), (U32, [])])),
        "empty": key("odd.empty", ARRAY, (STRING, [])),
        "tokens": key("tokenizer.ggml.tokens", ARRAY, (STRING, [f"t{i}" for i in range(50)])),
        "arch": key("general.architecture", STRING, "x"),
        "blocks": key("x.block_count", U32, layers),
        "mtp": key("x.nextn_predict_layers", U32, 1),
        "used": key("x.expert_used_count", U32, 1),
        "old": key("bel.content_digest", STRING, "from an earlier bundle"),
    }
    entries = [odd[name] for name in draw(st.lists(st.sampled_from(sorted(odd)), unique=True))]
    if alignment != 32 or draw(st.booleans()):
        entries.insert(draw(st.integers(0, len(entries))), key("general.alignment", U32, alignment))
    return entries


def disorder(draw: st.DrawFn, shard: Gguf) -> None:
    """Gaps, dirty padding, tails and data in another order than the infos."""
    shard.order = draw(st.permutations(range(len(shard.tensors)))) if draw(st.booleans()) else None
    shard.pad_byte = draw(st.sampled_from([0, 0, 0xAA]))
    shard.pad_last = draw(st.booleans())
    shard.lead_gap_bytes = shard.alignment * draw(st.sampled_from([0, 0, 1])) if shard.tensors else 0
    shard.tail = draw(st.sampled_from([b"", b"", b"\0" * 5000, b"tail"]))
    for tensor in shard.tensors:
        if tensor.type_id in GGML_TYPES:
            tensor.gap_bytes = shard.alignment * draw(st.sampled_from([0, 0, 0, 1, 2]))
    last = shard.tensors[shard.order[-1] if shard.order else -1] if shard.tensors else None
    if last is not None and last.type_id not in GGML_TYPES and "_exps.weight" in last.name:
        shard.tail = b""  # it would be taken for a part of the last tensor, and then not divide by the experts


def with_empties(draw: st.DrawFn, tensors: list[Tensor]) -> list[Tensor]:
    for number, ne in enumerate(
        draw(st.lists(st.sampled_from([(0,), (32, 0), (32, 0, 3), (0, 0, 0, 2)]), min_size=1, max_size=3))
    ):
        tensors.insert(draw(st.integers(0, len(tensors))), Tensor(f"empty.{number}", ne, F32))
    return tensors


@st.composite
def models(draw: st.DrawFn, *, empties: bool = False) -> Drawn:
    """A valid model, single or split, as odd as the format allows."""
    alignment = draw(st.sampled_from([16, 32, 32, 64, 4096]))
    numbers = draw(st.lists(st.integers(0, 3), unique=True, min_size=1, max_size=3))
    tensors = [t for n in sorted(numbers) for t in draw(layer_tensors(n, alignment))]
    for name in draw(
        st.lists(st.sampled_from(["token_embd.weight", "v.blk.0.ffn_up_exps.weight", "output.weight"]), unique=True)
    ):
        tensors.insert(draw(st.integers(0, len(tensors))), drawn_tensor(draw, name, (32, 2, 3), alignment))
    if draw(st.booleans()):
        tensors.insert(
            draw(st.integers(0, len(tensors))), Tensor("per_layer_token_embd.weight", (32, 9), draw(st.sampled_from([0, 8])))
        )
    if empties:
        tensors = with_empties(draw, tensors)
    model = Gguf(drawn_entries(draw, max(numbers) + 1, alignment), tensors, draw(st.sampled_from([2, 3])), alignment)
    shards = {"model.gguf": model}
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, len(tensors)), min_size=1, max_size=3)))
        counts = [b - a for a, b in zip([0, *cuts], [*cuts, len(tensors)], strict=True)]
        # An unknown type must fill whole units of its shard's alignment, or its region would not divide.
        shards = synth.split(model, counts, later_alignment=16 if alignment == 16 else 32)
    for shard in shards.values():
        disorder(draw, shard)
    return Drawn(shards, tensors, draw(st.sampled_from(["auto", "keep", "split"])), draw(st.booleans()))


def written(drawn: Drawn, folder: Path) -> Path:
    """Write the files; the path of one of them."""
    for name, shard in drawn.shards.items():
        shard.write(folder / name)
        ends = sorted([*shard.offsets.values(), (folder / name).stat().st_size])
        for tensor in shard.tensors:
            data = tensor.bytes_of(shard.seed)
            if tensor.type_id not in GGML_TYPES:  # all up to the next tensor
                start = shard.offsets[tensor.name]
                data = (folder / name).read_bytes()[start : next(e for e in ends if e > start)]
            drawn.data[tensor.name] = data
    return folder / sorted(drawn.shards)[-1]


# --- an independent reader --------------------------------------------------------------------------------------------


class Reader:
    """Reads a GGUF from its first byte on, with nothing of this project: `keys` and `tensors` by name, in order."""

    def __init__(self, path: Path) -> None:
        self.data, self.at = path.read_bytes(), 4
        assert self.data[:4] == b"GGUF"
        self.version, n_tensors, n_keys = self.take("<IQQ")
        self.keys: dict[bytes, bytes] = {}
        for _ in range(n_keys):
            name, start = self.string(), self.at
            self.skip(self.take("<I")[0])
            assert name not in self.keys
            self.keys[name] = self.data[start : self.at]
        infos = {self.string(): self.info() for _ in range(n_tensors)}
        assert len(infos) == n_tensors
        unit = self.keys.get(b"general.alignment", b"\4\0\0\0\x20\0\0\0")
        self.alignment = int.from_bytes(unit[4:8], "little")
        self.start = -(-self.at // self.alignment) * self.alignment if infos else self.at
        self.offsets = {name: offset for name, (_, _, offset) in infos.items()}
        self.tensors = {name: (ne, kind) for name, (ne, kind, _) in infos.items()}

    def take(self, form: str) -> tuple[int, ...]:
        self.at += struct.calcsize(form)
        return struct.unpack_from(form, self.data, self.at - struct.calcsize(form))

    def string(self) -> bytes:
        (length,) = self.take("<Q")
        self.at += length
        return self.data[self.at - length : self.at]

    def info(self) -> tuple[tuple[int, ...], int, int]:
        (dims,) = self.take("<I")
        return self.take(f"<{dims}Q"), *self.take("<IQ")  # type: ignore[return-value]

    def skip(self, kind: int) -> None:
        if kind == 8:
            self.string()
        elif kind == 9:
            item, count = self.take("<IQ")
            for _ in range(count):
                self.skip(item)
        else:
            self.at += {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}[kind]


def raw_name(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def check_dense(path: Path, first: Path, drawn: Drawn, names: list[str]) -> None:
    """`path` holds the tensors `names`, each with its bytes at the place that llama.cpp demands, and the keys of `first`."""
    dense, source = Reader(path), Reader(first)
    assert list(dense.tensors) == [raw_name(n) for n in names]
    assert (dense.version, dense.alignment) == (source.version, source.alignment)
    by_name, at = {t.name: t for t in drawn.tensors}, 0
    for name in names:
        data = drawn.data[name]
        assert dense.tensors[raw_name(name)] == (by_name[name].ne, by_name[name].type_id)
        assert dense.offsets[raw_name(name)] == at
        assert dense.data[dense.start + at : dense.start + at + len(data)] == data
        at += -(-len(data) // dense.alignment) * dense.alignment
    assert dense.start + at == len(dense.data)
    kept = {k: v for k, v in source.keys.items() if not k.startswith((b"split.", b"bel."))}
    assert {k: v for k, v in dense.keys.items() if not k.startswith(b"bel.")} == kept
    assert list(kept) == [k for k in dense.keys if k in kept]


def check_blobs(bundle: Bundle, drawn: Drawn) -> None:
    """Every slice of every stack stands where the manifest says."""
    for layer in bundle.manifest.layers:
        data = bundle.path(bundle.manifest.experts[layer.shard].name).read_bytes()
        assert layer.offset_bytes % 4096 == layer.stride_bytes % 4096 == 0
        for expert in range(layer.n_expert):
            for part in layer.parts:
                start = layer.offset_bytes + expert * layer.stride_bytes + part.offset_bytes
                stack = drawn.data[bundle.manifest.tensors[part.tensor].name]
                size = len(stack) // layer.n_expert
                assert data[start : start + size] == stack[expert * size : (expert + 1) * size]


def is_routed(name: str) -> bool:
    return name.startswith("blk.") and name.endswith("_exps.weight") and "norm" not in name


def check_round_trip(drawn: Drawn) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = written(drawn, folder)
        model, name = open_model(path), model_base_name(path)
        layout = plan_layout(model, name, ple=drawn.ple, shard_bytes=NO_LIMIT)
        if drawn.shard_bytes_limit:
            limit = 4096 + max(layer.size_bytes for layer in layout.layers)
            layout = plan_layout(model, name, ple=drawn.ple, shard_bytes=limit)
            assert all(size <= limit for size in layout.experts_bytes)
        bundle = round_trip(path, model, layout, folder)
        rest = [t.name for t in drawn.tensors if not is_routed(t.name)]
        tables = [n for n in rest if n == "per_layer_token_embd.weight" and bundle.manifest.ple]
        first = folder / sorted(drawn.shards)[0]
        check_dense(bundle.path(bundle.manifest.dense.name), first, drawn, [n for n in rest if n not in tables])
        if bundle.manifest.ple:
            ple = Reader(bundle.path(bundle.manifest.ple.name))
            data = drawn.data[tables[0]]
            assert ple.data[ple.start : ple.start + len(data)] == data
        check_blobs(bundle, drawn)
        event(f"{len(drawn.shards)} files, {len(bundle.manifest.experts)} experts files, PLE {bundle.manifest.ple is not None}")


@settings(max_examples=50)
@given(models())
def test_any_model_comes_back_byte_for_byte(drawn: Drawn) -> None:
    check_round_trip(drawn)


@settings(max_examples=30, phases=[Phase.explicit, Phase.generate])
@given(models(empties=True))
def test_any_model_with_empty_tensors_comes_back(drawn: Drawn) -> None:
    check_round_trip(drawn)


# --- damaged headers --------------------------------------------------------------------------------------------------

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


# --- single finds -----------------------------------------------------------------------------------------------------


def whole_trip(path: Path) -> Bundle:
    model = open_model(path)
    layout = plan_layout(model, model_base_name(path), ple="auto", shard_bytes=NO_LIMIT)
    return round_trip(path, model, layout, path.parent)


@pytest.mark.parametrize("kind", ["before a tail", "before a gap"])
def test_an_empty_tensor_between_bytes_that_are_kept(kind: str, tmp_path: Path) -> None:
    model = synth.moe(pad_byte=0xAA, pad_last=False, tail=b"tail" if kind == "before a tail" else b"")
    empty = Tensor("empty", (0,), F32, gap_bytes=32)
    model.tensors = [*model.tensors[:-1], Tensor("odd", (3,), F32), empty]
    if kind == "before a gap":
        model.tensors.append(Tensor("behind", (3,), F32))
    whole_trip(model.write(tmp_path / "m.gguf"))


def test_a_header_with_a_hole(tmp_path: Path) -> None:
    """Token scores are often all zero, and `cp --sparse=always` makes a hole of 600 KB of them."""
    model = synth.moe()
    model.entries.append(key("tokenizer.ggml.scores", ARRAY, (6, [0.0] * 20_000)))
    blob, path = model.blob(), tmp_path / "m.gguf"
    with path.open("wb") as file:
        for at in range(0, len(blob), 4096):
            if any(blob[at : at + 4096]):
                file.seek(at)
                file.write(blob[at : at + 4096])
        file.truncate(len(blob))
    assert path.read_bytes() == blob
    if path.stat().st_blocks * 512 >= len(blob):
        pytest.skip("this file system keeps no holes")
    whole_trip(path)


@pytest.mark.parametrize("name", ["..gguf", "...gguf"])
def test_a_file_name_of_dots(name: str, tmp_path: Path) -> None:
    whole_trip(synth.moe().write(tmp_path / name))


@pytest.mark.parametrize(
    "name", ["-o.gguf", "a b.gguf", "two\nlines.gguf", "\udcff.gguf", ".gguf", "no suffix", "\u202emodel.gguf"]
)
def test_odd_file_names(name: str, tmp_path: Path) -> None:
    whole_trip(synth.moe().write(tmp_path / name))


def test_names_of_any_bytes(tmp_path: Path) -> None:
    model = synth.moe()
    for name in ("", "a\0b", "line\nbreak", "\udcff\udcfe", "n" * 63, "\U0001f600\udc80"):
        model.tensors.append(Tensor(name, (3,), F32))
    bundle = whole_trip(model.write(tmp_path / "m.gguf"))
    dense = Reader(bundle.path(bundle.manifest.dense.name))
    assert list(dense.tensors)[-6:] == [raw_name(t.name) for t in model.tensors[-6:]]
    assert gguf_string("\udcff\udcfe")[8:] in dense.tensors


@pytest.mark.parametrize("ne", [(1, 1, 4096), (1, 1, 8, 512)])
def test_a_tensor_of_many_tiny_slices(ne: tuple[int, ...], tmp_path: Path) -> None:
    model = synth.moe()
    model.tensors.insert(3, Tensor("tiny", ne, F32))
    assert tensor_bytes(F32, ne) == 4 * 4096
    whole_trip(model.write(tmp_path / "m.gguf"))
