"""Sparse GGUFs with the shapes of published models at full size: real headers, real sizes, and hardly a byte on the disk.

Tensor data are holes, but for a few marked places whose bytes tell where they must come out again.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
from dataclasses import dataclass, field
from pathlib import Path

from synth import ARRAY, I32, STRING, U16, U32, gguf_string, key

SHAPES = Path(__file__).parent / "data" / "shapes.json"
BLOCKS = {"F32": (0, 1, 4), "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144), "BF16": (30, 1, 2), "MXFP4": (39, 32, 17)}
"""Type id, elements and bytes of a block (ggml.h); written out here so that a fault of the project's table shows."""
MARK_BYTES = 64
MARKED_SLICES = 12
ROPE_DIM, NOPE_DIM, V_DIM = 64, 128, 128
"""Head dimensions of DeepSeek V2/V3's attention, which Kimi K2 shares (qk_rope, qk_nope and v_head_dim of their configs)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A published model, as `data/shapes.json` has it.  `slice_bytes`: type -> bytes of an expert's gate (or up) and down."""

    name: str
    gguf_arch: str
    n_layer: int
    n_embd: int
    n_ff_exp: int
    n_expert: int
    n_expert_used: int
    n_head: int
    vocab: int
    slice_bytes: dict[str, tuple[int, int | None]]
    source: list[str]
    n_head_kv: int = 0
    head_dim: int = 0
    n_ff: int = 0
    n_ff_shexp: int = 0
    n_dense_lead: int = 0
    n_nextn: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    biases: bool = False

    @property
    def moe_layers(self) -> range:
        """The blocks with experts, MTP blocks among them."""
        return range(self.n_dense_lead, self.n_layer + self.n_nextn)


@dataclass(frozen=True, slots=True)
class Form:
    """How a shape is written: the types of gate/up and of down, and the traits of the container."""

    in_type: str = "Q4_K"
    out_type: str = "Q4_K"
    fused: bool = False
    alignment: int = 32
    shards: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor: `ne` fastest first."""

    name: str
    type_name: str
    ne: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its data."""
        _, elements, size = BLOCKS[self.type_name]
        assert self.ne[0] % elements == 0, f"{self.name}: a row is whole blocks"
        count = self.ne[0] // elements * size
        for n in self.ne[1:]:
            count *= n
        return count


@dataclass(frozen=True, slots=True)
class Mark:
    """Bytes that were written into a tensor: `offset_bytes` counts from its start; `expert` is None in a dense one."""

    tensor: str
    expert: int | None
    offset_bytes: int
    data: bytes


@dataclass(slots=True)
class SparseModel:
    """What was written.  `starts`: tensor -> (file, absolute offset of its data)."""

    paths: list[Path]
    rows: list[Row]
    header_bytes: int = 0
    starts: dict[str, tuple[Path, int]] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)


def load_shapes() -> dict[str, Shape]:
    """All shapes, by name."""
    rows = json.loads(SHAPES.read_text(encoding="utf-8"))
    return {row["name"]: Shape(**{**row, "slice_bytes": {t: tuple(v) for t, v in row["slice_bytes"].items()}}) for row in rows}


def write_sparse(shape: Shape, form: Form, folder: Path, *, seed: int = 0) -> SparseModel:
    """Write the model's file or split set into `folder`.  Only headers and marks take space."""
    rows = [*_frame(shape), *(row for block in range(shape.n_layer + shape.n_nextn) for row in _block(shape, form, block))]
    names = _file_names(shape.name, form.shards)
    model = SparseModel([folder / n for n in names], rows)
    counts = _shard_counts(len(rows), form.shards)
    at = 0
    for number, (path, count) in enumerate(zip(model.paths, counts, strict=True)):
        entries = _entries(shape, form) if number == 0 else []
        if form.shards > 1:
            entries += [key("split.no", U16, number), key("split.count", U16, form.shards)]
            entries += [key("split.tensors.count", I32, len(rows))]
        _write_file(path, entries, rows[at : at + count], form.alignment if number == 0 else 32, model)
        at += count
    _write_marks(shape, model, random.Random(f"{shape.name} {seed}"))
    return model


def _file_names(name: str, shards: int) -> list[str]:
    return [f"{name}.gguf"] if shards == 1 else [f"{name}-{i + 1:05d}-of-{shards:05d}.gguf" for i in range(shards)]


def _shard_counts(tensors: int, shards: int) -> list[int]:
    """Of a split set the first file holds metadata only, as `--no-tensor-first-split` makes it."""
    if shards == 1:
        return [tensors]
    each = tensors // (shards - 1)
    return [0, *[each] * (shards - 2), tensors - each * (shards - 2)]


def _entries(shape: Shape, form: Form) -> list[bytes]:
    arch = shape.gguf_arch
    numbers = {
        "block_count": shape.n_layer + shape.n_nextn,
        "context_length": 131072,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff or shape.n_ff_exp,
        "expert_feed_forward_length": shape.n_ff_exp,
        "expert_count": shape.n_expert,
        "expert_used_count": shape.n_expert_used,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "leading_dense_block_count": shape.n_dense_lead,
        "nextn_predict_layers": shape.n_nextn,
    }
    entries = [key("general.architecture", STRING, arch), key("general.name", STRING, shape.name)]
    entries += [key(f"{arch}.{name}", U32, value) for name, value in numbers.items() if value]
    if form.alignment != 32:
        entries.append(key("general.alignment", U32, form.alignment))
    tokens = b"".join(gguf_string(f"token{i}") for i in range(shape.vocab))
    entries.append(key("tokenizer.ggml.model", STRING, "gpt2"))
    entries.append(key("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, shape.vocab) + tokens))
    types = struct.pack("<i", 1) * shape.vocab
    entries.append(key("tokenizer.ggml.token_type", ARRAY, struct.pack("<IQ", I32, shape.vocab) + types))
    return entries


def _frame(shape: Shape) -> list[Row]:
    return [
        Row("token_embd.weight", "Q8_0", (shape.n_embd, shape.vocab)),
        Row("output_norm.weight", "F32", (shape.n_embd,)),
        Row("output.weight", "Q8_0", (shape.n_embd, shape.vocab)),
    ]


def _block(shape: Shape, form: Form, block: int) -> list[Row]:
    p, width = f"blk.{block}.", shape.n_embd
    rows = [Row(p + "attn_norm.weight", "F32", (width,)), *_attention(shape, p), Row(p + "ffn_norm.weight", "F32", (width,))]
    if block in shape.moe_layers:
        rows += _experts(shape, form, p)
    else:
        rows += _feed_forward(p, "", width, shape.n_ff)
    if block >= shape.n_layer:
        rows += [Row(p + "nextn.eh_proj.weight", "Q8_0", (2 * width, width)), Row(p + "nextn.enorm.weight", "F32", (width,))]
    return rows


def _attention(shape: Shape, p: str) -> list[Row]:
    width, heads = shape.n_embd, shape.n_head
    if not shape.kv_lora_rank:
        q, kv = heads * shape.head_dim, shape.n_head_kv * shape.head_dim
        return [
            Row(p + "attn_q.weight", "Q8_0", (width, q)),
            Row(p + "attn_k.weight", "Q8_0", (width, kv)),
            Row(p + "attn_v.weight", "Q8_0", (width, kv)),
            Row(p + "attn_output.weight", "Q8_0", (q, width)),
        ]
    low, query = shape.kv_lora_rank, heads * (NOPE_DIM + ROPE_DIM)
    rows = [Row(p + "attn_q.weight", "Q8_0", (width, query))]
    if shape.q_lora_rank:
        rows = [
            Row(p + "attn_q_a.weight", "Q8_0", (width, shape.q_lora_rank)),
            Row(p + "attn_q_b.weight", "Q8_0", (shape.q_lora_rank, query)),
        ]
    return [
        *rows,
        Row(p + "attn_kv_a_mqa.weight", "Q8_0", (width, low + ROPE_DIM)),
        Row(p + "attn_k_b.weight", "Q8_0", (NOPE_DIM, low, heads)),
        Row(p + "attn_v_b.weight", "Q8_0", (low, V_DIM, heads)),
        Row(p + "attn_output.weight", "Q8_0", (heads * V_DIM, width)),
    ]


def _feed_forward(p: str, suffix: str, width: int, ff: int) -> list[Row]:
    return [
        Row(f"{p}ffn_gate{suffix}.weight", "Q8_0", (width, ff)),
        Row(f"{p}ffn_up{suffix}.weight", "Q8_0", (width, ff)),
        Row(f"{p}ffn_down{suffix}.weight", "Q8_0", (ff, width)),
    ]


def _experts(shape: Shape, form: Form, p: str) -> list[Row]:
    width, ff, n = shape.n_embd, shape.n_ff_exp, shape.n_expert
    rows = [Row(p + "ffn_gate_inp.weight", "F32", (width, n))]
    if form.fused:
        rows.append(Row(p + "ffn_gate_up_exps.weight", form.in_type, (width, 2 * ff, n)))
    else:
        rows += [Row(f"{p}ffn_{role}_exps.weight", form.in_type, (width, ff, n)) for role in ("gate", "up")]
    rows.append(Row(p + "ffn_down_exps.weight", form.out_type, (ff, width, n)))
    if shape.biases:
        rows += [Row(f"{p}ffn_{role}_exps.bias", "F32", (ff, n)) for role in ("gate", "up")]
        rows.append(Row(p + "ffn_down_exps.bias", "F32", (width, n)))
    if shape.gguf_arch == "gemma4":
        rows += [Row(p + "ffn_down_exps.scale", "F32", (n,)), *_feed_forward(p, "", width, shape.n_ff)]
    return rows + (_feed_forward(p, "_shexp", width, shape.n_ff_shexp) if shape.n_ff_shexp else [])


def _write_file(path: Path, entries: list[bytes], rows: list[Row], alignment: int, model: SparseModel) -> None:
    infos, at = [], 0
    for row in rows:
        head = gguf_string(row.name) + struct.pack("<I", len(row.ne))
        infos.append(head + struct.pack(f"<{len(row.ne)}QIQ", *row.ne, BLOCKS[row.type_name][0], at))
        model.starts[row.name] = (path, at)
        at += -(-row.size_bytes // alignment) * alignment
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(rows), len(entries)) + b"".join(entries + infos)
    if rows:
        header += bytes(-len(header) % alignment)
    for row in rows:
        model.starts[row.name] = (path, model.starts[row.name][1] + len(header))
    with path.open("xb") as file:
        file.write(header)
        file.truncate(len(header) + at)  # EFBIG where the file system's largest file is smaller than the model
    model.header_bytes += len(header)


def _write_marks(shape: Shape, model: SparseModel, chance: random.Random) -> None:
    """Mark both ends of some experts' slices, the first and the last of all among them, and the start of some dense tensors."""
    stacks = [row for row in model.rows if "_exps.weight" in row.name]
    picked = {(stacks[0].name, 0), (stacks[-1].name, shape.n_expert - 1)}
    while len(picked) < MARKED_SLICES:
        picked.add((chance.choice(stacks).name, chance.randrange(shape.n_expert)))
    sizes = {row.name: row.size_bytes for row in model.rows}
    for name, expert in sorted(picked):
        step = sizes[name] // shape.n_expert
        for offset in (0, step - MARK_BYTES):
            model.marks.append(_mark(name, expert, expert * step + offset))
    dense = [row.name for row in model.rows if "_exps.weight" not in row.name and row.size_bytes >= MARK_BYTES]
    model.marks += [_mark(name, None, 0) for name in chance.sample(dense, 6)]
    for mark in model.marks:
        path, start = model.starts[mark.tensor]
        fd = os.open(path, os.O_WRONLY)
        try:
            os.pwrite(fd, mark.data, start + mark.offset_bytes)
        finally:
            os.close(fd)


def _mark(name: str, expert: int | None, offset: int) -> Mark:
    return Mark(name, expert, offset, hashlib.blake2b(f"{name} {expert} {offset}".encode(), digest_size=MARK_BYTES).digest())
