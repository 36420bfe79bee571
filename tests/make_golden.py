"""Writes tests/golden/vN for the format version of today.  Run by hand, once a version: `python tests/make_golden.py`.

What it writes must be read for ever, so that an existing folder is left alone unless --again is given, which is right
only for a version that was never released.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import synth
from bel.formats.gguf_model import open_model
from bel.formats.manifest import VERSION
from bel.repack.convert import convert
from bel.repack.layout import plan_layout
from synth import ARRAY, BOOL, F32, STRING, U32, Gguf, Tensor, key

GOLDEN = Path(__file__).parent / "golden"
SHARD_BYTES = 4096 * 4


def source() -> dict[str, Gguf]:
    """A split set with all that the format has a place for: PLE, unknown types, gaps, dirty padding, tails, MTP, biases."""
    tensors = [
        Tensor("token_embd.weight", (8, 16), F32),
        Tensor("per_layer_token_embd.weight", (32, 16)),
        Tensor("odd.weight", (7,), 153, b"unknown type"),
        *synth.expert_stacks(1, 2, ff=32),
        Tensor("blk.1.ffn_gate_exps.bias", (32, 2), F32),
        Tensor("blk.2.ffn_gate_up_exps.weight", (32, 16, 3)),
        Tensor("blk.2.ffn_down_exps.weight", (8, 32, 3), F32),
        Tensor("empty.weight", (0,), F32),
        Tensor("output_norm.weight", (8,), F32),
    ]
    entries = [
        key("general.architecture", STRING, "golden"),
        key("general.name", STRING, b"a golden model \xff"),
        key("general.alignment", U32, 64),
        key("golden.block_count", U32, 3),
        key("golden.nextn_predict_layers", U32, 1),
        key("golden.expert_used_count", ARRAY, (U32, [0, 2, 1])),
        key("odd.bool", BOOL, 2),
        key("odd.nan", 6, b"\1\0\xa0\x7f"),
        key("odd.nested", ARRAY, (ARRAY, [(STRING, ["", "a"]), (U32, [])])),
    ]
    shards = synth.split(Gguf(entries, tensors, alignment=64, seed=1), [3, 8], "golden")
    first, second = shards.values()
    first.pad_byte, first.tail, first.order = 0xAA, b"behind the last tensor", [2, 0, 1]
    second.order, second.lead_gap_bytes = [6, 7, 3, 4, 0, 1, 2, 5], 32
    second.tensors[0].gap_bytes = 32
    return shards


def make(folder: Path) -> None:
    """Write the source files and the bundle."""
    for name, shard in source().items():
        shard.write(folder / name)
    model = open_model(folder / next(iter(source())))
    layout = plan_layout(model, "golden", ple="split", shard_bytes=SHARD_BYTES)
    convert(model, layout, folder / "golden.bel", force=False, check=True, progress=lambda *_: None)


def main() -> None:
    """Write the folder of this version."""
    target = GOLDEN / f"v{VERSION}"
    if target.exists():
        if sys.argv[1:] != ["--again"]:
            sys.exit(f"{target} exists already, and must be read for ever; --again replaces it")
        shutil.rmtree(target)
    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=GOLDEN) as folder:
        made = Path(folder) / "made"
        made.mkdir()
        make(made)
        made.rename(target)


if __name__ == "__main__":
    main()
