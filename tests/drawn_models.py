"""Valid models, as odd as the format allows, for hypothesis."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import strategies as st

import synth
from bel.formats.ggml_types import GGML_TYPES
from synth import ARRAY, BOOL, F32, STRING, U32, Gguf, Tensor, key

ROW_TYPES = [k for k, t in GGML_TYPES.items() if t.block_elements in (1, 32)]
UNKNOWN = [43, 153, 2**31 - 1]


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
