"""Small seeded GGUF files, written by hand so that every byte can be chosen: what no writer library lets one do."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field
from pathlib import Path

from bel.formats.ggml_types import tensor_bytes

Q8_0, F32 = 8, 0
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
U16, U32, I32, BOOL, STRING, ARRAY, U64 = 2, 4, 5, 7, 8, 9, 10


def gguf_string(text: str | bytes) -> bytes:
    """A GGUF string: u64 length and the bytes."""
    data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def key(name: str | bytes, type_id: int, value: object) -> bytes:
    """A metadata entry.  `value` is a number, a string, raw bytes, or for ARRAY a (item type, list) pair."""
    return gguf_string(name) + struct.pack("<I", type_id) + encode_value(type_id, value)


def encode_value(type_id: int, value: object) -> bytes:
    """The bytes of a value."""
    if isinstance(value, bytes) and type_id != STRING:
        return value
    if type_id == STRING:
        assert isinstance(value, str | bytes)
        return gguf_string(value)
    if type_id == ARRAY:
        assert isinstance(value, tuple)
        item, items = value
        return struct.pack("<IQ", item, len(items)) + b"".join(encode_value(item, v) for v in items)
    return struct.pack("<" + SCALARS[type_id], value)


@dataclass
class Tensor:
    """A tensor to be written.  `data` None: seeded random bytes of the size of its type; `gap_bytes` of slack follow it."""

    name: str
    ne: tuple[int, ...]
    type_id: int = Q8_0
    data: bytes | None = None
    gap_bytes: int = 0

    def bytes_of(self, seed: int) -> bytes:
        """The tensor's data."""
        if self.data is not None:
            return self.data
        size = tensor_bytes(self.type_id, self.ne)
        assert size is not None, "a tensor of unknown type needs its data given"
        return random.Random(f"{seed} {self.name}".encode("utf-8", "surrogateescape")).randbytes(size)


@dataclass
class Gguf:
    """A GGUF to be written; see `blob`."""

    entries: list[bytes]
    tensors: list[Tensor]
    version: int = 3
    alignment: int = 32
    seed: int = 0
    pad_byte: int = 0
    pad_last: bool = True
    tail: bytes = b""
    lead_gap_bytes: int = 0  # slack between the header and the first data, a multiple of the alignment
    order: list[int] | None = None  # the order of the data, where it is not that of the infos
    offsets: dict[str, int] = field(default_factory=dict)  # filled in by `blob`

    def blob(self) -> bytes:
        """The file's bytes."""
        offsets = [0] * len(self.tensors)
        order = self.order if self.order is not None else list(range(len(self.tensors)))
        body = bytearray([self.pad_byte]) * self.lead_gap_bytes
        at = len(body)
        for position, index in enumerate(order):
            tensor = self.tensors[index]
            offsets[index] = at
            body += tensor.bytes_of(self.seed)
            if position + 1 < len(order) or self.pad_last:
                body += bytes([self.pad_byte]) * (-len(body) % self.alignment + tensor.gap_bytes)
            at = len(body)
        head = struct.pack("<4sIQQ", b"GGUF", self.version, len(self.tensors), len(self.entries)) + b"".join(self.entries)
        for tensor, offset in zip(self.tensors, offsets, strict=True):
            head += gguf_string(tensor.name) + struct.pack("<I", len(tensor.ne))
            head += struct.pack(f"<{len(tensor.ne)}QIQ", *tensor.ne, tensor.type_id, offset)
        if self.tensors:
            head += bytes([self.pad_byte]) * (-len(head) % self.alignment)
        self.offsets = {t.name: len(head) + o for t, o in zip(self.tensors, offsets, strict=True)}
        return head + bytes(body) + self.tail

    def write(self, path: Path) -> Path:
        """Write the file and return its path."""
        path.write_bytes(self.blob())
        return path


def moe_entries(
    arch: str = "qwen3moe", *, layers: int = 2, experts: int = 4, used: int = 2, alignment: int | None = None
) -> list[bytes]:
    """The metadata of a small MoE model."""
    entries = [
        key("general.architecture", STRING, arch),
        key("general.name", STRING, "synth"),
        key(f"{arch}.block_count", U32, layers),
        key(f"{arch}.embedding_length", U32, 32),
        key(f"{arch}.expert_count", U32, experts),
        key(f"{arch}.expert_used_count", U32, used),
        key("tokenizer.ggml.tokens", ARRAY, (STRING, [f"t{i}" for i in range(8)])),
    ]
    if alignment is not None:
        entries.append(key("general.alignment", U32, alignment))
    return entries


def expert_stacks(layer: int, experts: int, *, width: int = 32, ff: int = 64, type_id: int = Q8_0) -> list[Tensor]:
    """gate, up and down of one layer."""
    return [
        Tensor(f"blk.{layer}.ffn_gate_exps.weight", (width, ff, experts), type_id),
        Tensor(f"blk.{layer}.ffn_up_exps.weight", (width, ff, experts), type_id),
        Tensor(f"blk.{layer}.ffn_down_exps.weight", (ff, width, experts), type_id),
    ]


def moe_tensors(layers: int = 2, experts: int = 4) -> list[Tensor]:
    """The tensors of a small MoE model."""
    tensors = [Tensor("token_embd.weight", (32, 8), F32)]
    for layer in range(layers):
        tensors.append(Tensor(f"blk.{layer}.attn_norm.weight", (32,), F32))
        tensors.append(Tensor(f"blk.{layer}.ffn_gate_inp.weight", (32, experts), F32))
        tensors += expert_stacks(layer, experts)
    return [*tensors, Tensor("output_norm.weight", (32,), F32)]


def moe(**settings: object) -> Gguf:
    """A small MoE model: 2 layers of 4 experts.  `settings` are fields of Gguf."""
    alignment = settings.get("alignment")
    entries = moe_entries(alignment=alignment if isinstance(alignment, int) else None)
    return Gguf(**{"entries": entries, "tensors": moe_tensors(), **settings})  # type: ignore[arg-type]


def split(model: Gguf, counts: list[int], base: str = "model", *, later_alignment: int = 32) -> dict[str, Gguf]:
    """`model` cut into shards that hold `counts` tensors each (0 is allowed): name -> file."""
    shards, at = {}, 0
    for number, count in enumerate(counts):
        entries = [] if number else list(model.entries)
        entries += [
            key("split.no", U16, number),
            key("split.count", U16, len(counts)),
            key("split.tensors.count", I32, len(model.tensors)),
        ]
        alignment = model.alignment if number == 0 else later_alignment
        if number and later_alignment != 32:
            entries.append(key("general.alignment", U32, later_alignment))
        name = f"{base}-{number + 1:05d}-of-{len(counts):05d}.gguf"
        shards[name] = Gguf(entries, model.tensors[at : at + count], model.version, alignment, model.seed)
        at += count
    assert at == len(model.tensors), "the shards hold every tensor"
    return shards
