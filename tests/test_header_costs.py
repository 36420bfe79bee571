"""What a header may cost: memory and time in proportion to what it is, whatever it claims."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

import synth
from bel.formats.gguf_header import MAX_HEADER_BYTES, scan_header
from bel.formats.gguf_model import open_model
from bel.formats.units import MIB
from header_bytes import U8, head
from refused import bad_model
from synth import ARRAY, F32, STRING, Gguf, Tensor, gguf_string, key


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
