"""The public trace of `data_traces/`, and what its authors' own replay says about it."""

from __future__ import annotations

import csv
import lzma
from dataclasses import dataclass
from pathlib import Path

from bel.formats.console import run_command
from bel.formats.units import MIB
from bel.profiler.cli import NAME, main_group

FOLDER = Path(__file__).parent / "data_traces"
READ_BYTES = {"exclusive": 8927170560, "copy-on-read": 23409008640, "inclusive": 33337479168}
"""What decoding reads from NVMe with 24 LRU slots in VRAM and 24 in RAM in each layer, by what RAM holds; 128 tokens."""


@dataclass(frozen=True, slots=True)
class Published:
    """One row of the authors' table; hit rates in percent."""

    budget_bytes: int
    policy: str
    hit_percent: float
    decode_hit_percent: float
    read_mib: float


def import_public_trace(folder: Path) -> Path:
    """Unpack the authors' file into `folder` and import it with the command, to `public.trace` there."""
    source, trace = folder / "qwen3-30b-a3b.route.csv", folder / "public.trace"
    source.write_bytes(lzma.decompress((FOLDER / f"{source.name}.xz").read_bytes()))
    command = ["import", str(source), "--from", "bigmoe-csv", "--workload", "public", "-o", str(trace)]
    assert run_command(main_group, NAME, command) == 0
    return trace


def published() -> list[Published]:
    """The authors' table."""
    with (FOLDER / "qwen3-30b-a3b.curve.csv").open(encoding="ascii", newline="") as file:
        return [
            Published(
                int(row["budget_mib"]) * MIB,
                row["policy"],
                float(row["hit_pct_cum"]),
                float(row["hit_pct_decode"]),
                float(row["read_mib"]),
            )
            for row in csv.DictReader(file)
        ]
