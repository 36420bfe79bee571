"""Make a trained MoE model big without changing what it routes: python tests/bench/inflate.py IN.gguf OUT.gguf [SIZE]

Every expert gets more hidden units, as many times over as fit into SIZE (2040MB).  The added rows of gate and
up and the added columns of down are blocks that decode to exact zeros under random scales: so the new bytes are neither
zeros nor holes, and each new unit contributes nothing.  Routing and text stay those of the trained model (up to the order of
float additions), while a token touches as many bytes as in a model of that size.  A random model would not do: its routing
has no structure that a cache or a plan could use.  Q4_0 and Q8_0 experts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from bel.formats.units import parse_bytes

Kind = gguf.GGMLQuantizationType
BLOCK_ELEMENTS = 32
ZERO_BYTES = {Kind.Q4_0: (16, 0x88), Kind.Q8_0: (32, 0x00)}
"""Bytes of a block behind its scale, and the value of each that decodes to zero: a Q4_0 nibble stands for itself minus 8."""
SCALE_BYTES = 2
MIN_SCALE, MAX_SCALE = 0.01, 0.02
DEFAULT_BYTES = 2_040_000_000
"""48 times the experts of a model of 49 MB in Q4_0 with 12 layers of 64: 2.65 MB each."""
SEED = 0
Bytes = npt.NDArray[np.uint8]


def is_stack(tensor: gguf.ReaderTensor) -> bool:
    """Whether a tensor holds weights of all experts of a layer."""
    return tensor.name.endswith("_exps.weight")


def widens_rows(tensor: gguf.ReaderTensor) -> bool:
    """Whether hidden units are the columns: those of `down` are, of gate and up they are the rows."""
    return "_down_" in tensor.name


def zero_blocks(rng: np.random.Generator, kind: Kind, rows: int, columns: int) -> Bytes:
    """(rows, bytes of a row) of blocks that decode to zeros; `columns` counts elements."""
    size, value = ZERO_BYTES[kind]
    per_row = columns // BLOCK_ELEMENTS
    blocks = np.full((rows * per_row, SCALE_BYTES + size), value, np.uint8)
    scales = rng.uniform(MIN_SCALE, MAX_SCALE, len(blocks)).astype("<f2")
    blocks[:, :SCALE_BYTES] = scales.view(np.uint8).reshape(-1, SCALE_BYTES)
    return blocks.reshape(rows, per_row * (SCALE_BYTES + size))


def widened(rng: np.random.Generator, tensor: gguf.ReaderTensor, factor: int) -> Bytes:
    """The bytes of a stack with `factor` times the hidden units: (experts, rows, bytes of a row)."""
    columns, rows, experts = (int(n) for n in tensor.shape)
    old = np.asarray(tensor.data).view(np.uint8).reshape(experts, rows, -1)
    more = factor - 1
    if widens_rows(tensor):
        zeros = zero_blocks(rng, tensor.tensor_type, experts * rows, columns * more).reshape(experts, rows, -1)
        return np.concatenate([old, zeros], axis=2)
    zeros = zero_blocks(rng, tensor.tensor_type, experts * rows * more, columns).reshape(experts, rows * more, -1)
    return np.concatenate([old, zeros], axis=1)


def copy_metadata(source: gguf.GGUFReader, writer: gguf.GGUFWriter, width_key: str, width: int) -> None:
    """All keys as they are, but for the hidden width of an expert."""
    for field in source.fields.values():
        if field.name == width_key:
            writer.add_uint32(width_key, width)
        elif not field.name.startswith("GGUF.") and field.name != gguf.Keys.General.ARCHITECTURE:
            kind = field.types[0]
            sub = field.types[1] if kind is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub)


def inflate(source_path: Path, target: Path, size_bytes: int = DEFAULT_BYTES) -> int:
    """Write the model; the factor by which its experts were widened."""
    source = gguf.GGUFReader(source_path)
    stacks = [tensor for tensor in source.tensors if is_stack(tensor)]
    unfit = [tensor.name for tensor in stacks if tensor.tensor_type not in ZERO_BYTES]
    if unfit or not stacks:
        sys.exit(f"{source_path}: {unfit[0] if unfit else 'no experts'}: experts of Q4_0 or Q8_0 are needed")
    factor = max(1, size_bytes // sum(int(tensor.n_bytes) for tensor in stacks))
    arch = str(source.fields[gguf.Keys.General.ARCHITECTURE].contents())
    width_key = gguf.Keys.LLM.EXPERT_FEED_FORWARD_LENGTH.format(arch=arch)
    writer = gguf.GGUFWriter(target, arch)
    copy_metadata(source, writer, width_key, int(source.fields[width_key].contents()) * factor)
    for tensor in source.tensors:
        grown = factor if is_stack(tensor) else 1
        shape = list(tensor.data.shape)  # of bytes for quantized tensors
        shape[-1 if widens_rows(tensor) else -2 if grown > 1 else -1] *= grown
        writer.add_tensor_info(tensor.name, shape, tensor.data.dtype, int(tensor.n_bytes) * grown, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(SEED)
    for tensor in source.tensors:
        writer.write_tensor_data(widened(rng, tensor, factor) if is_stack(tensor) else np.array(tensor.data))
    writer.close()
    return factor


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    print(inflate(Path(sys.argv[1]), Path(sys.argv[2]), parse_bytes(sys.argv[3]) if len(sys.argv) > 3 else DEFAULT_BYTES))
