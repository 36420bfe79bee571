"""The readers of the runtime's pager against fio: same file, block size, depth, direct I/O, random order.

    python tests/bench/bench_pager.py [--rounds 15] [--seconds 0.4]

Reads whole blocks at random places of a file of random bytes in bench-out/, which is made where it is missing.  The
programs take turns in short rounds, in an order that is drawn for each.  A rate is the median of its rounds, a ratio the
median of the ratios within each round: a disk that is shared changes its pace by half within seconds.  Direct I/O: the page
cache plays no part.  The bar: both readers reach 90 % of fio at the blocks of a real expert.  Without fio the readers are
measured alone and no bar is checked.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from machine import describe
from rich.console import Console
from rich.table import Table

from bel.runtime.readers import open_reader
from bel.runtime.reads import PAGE_BYTES, Read

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "bench-out" / "pager.bin"
FILE_BYTES = 2 * 2**30
SEED = 7
MIN_RATIO = 0.9
EXPERT_BYTES = 648 * PAGE_BYTES  # 2.65 MB: an expert of the inflated small model
BLOCKS = (EXPERT_BYTES, 2**20, 128 * 2**10)
DEPTHS = (8, 16)
READERS = ("io_uring", "threads")


def make_file() -> None:
    """Random bytes: holes or zeros would be answered by some disks without reading."""
    FILE.parent.mkdir(exist_ok=True)
    part = FILE.with_suffix(".part")
    rng = random.Random(SEED)
    with part.open("wb") as file:
        for _ in range(FILE_BYTES >> 26):
            file.write(rng.randbytes(1 << 26))
        file.flush()
        os.fsync(file.fileno())
    part.replace(FILE)


def fio(block_bytes: int, depth: int, seconds: float) -> float:
    """Bytes per second of fio's io_uring engine (psync threads where there is no io_uring)."""
    engine = ["--ioengine=io_uring", f"--iodepth={depth}"]
    done = _run_fio(engine, block_bytes, seconds)
    if done.returncode:
        done = _run_fio(["--ioengine=psync", "--thread", f"--numjobs={depth}", "--group_reporting"], block_bytes, seconds)
    if done.returncode:
        sys.exit(f"fio ended with {done.returncode}: {done.stderr[-2000:]}")
    return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["bw_bytes"])


def _run_fio(engine: list[str], block_bytes: int, seconds: float) -> subprocess.CompletedProcess[str]:
    what = ["--name=pager", f"--filename={FILE}", "--rw=randread", f"--bs={block_bytes}", "--direct=1", "--norandommap"]
    how = ["--randrepeat=0", "--time_based", f"--runtime={round(seconds * 1000)}ms", "--output-format=json"]
    return subprocess.run(["fio", *what, *engine, *how], capture_output=True, text=True, check=False)


def ours(kind: str, block_bytes: int, depth: int, seconds: float, rng: random.Random) -> float:
    """Bytes per second of a reader that is kept at `depth` blocks, from the first submission to the last arrival."""
    n_blocks = FILE_BYTES // block_bytes
    memory = mmap.mmap(-1, depth * block_bytes)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(base, 1, depth * block_bytes)  # fio's buffers are there before its clock starts, too
    with contextlib.closing(open_reader([FILE], kind=kind, depth=depth)) as reader:

        def start(slot: int) -> None:
            read = Read(0, rng.randrange(n_blocks) * block_bytes, block_bytes, base + slot * block_bytes)
            reader.submit([read], slot)

        began = time.perf_counter()
        for slot in range(depth):
            start(slot)
        done = 0
        for slot in itertools.cycle(range(depth)):
            reader.wait(slot)
            done += 1
            if time.perf_counter() - began >= seconds:
                break
            start(slot)
        for other in set(range(depth)) - {slot}:
            reader.wait(other)
        return (done + depth - 1) * block_bytes / (time.perf_counter() - began)


def measure(block_bytes: int, depth: int, rounds: int, seconds: float, *, has_fio: bool) -> dict[str, list[float]]:
    """Rates of each program, round by round."""
    rng = random.Random(SEED)
    runs: dict[str, Callable[[], float]] = {
        kind: lambda kind=kind: ours(kind, block_bytes, depth, seconds, rng) for kind in READERS
    }
    if has_fio:
        runs["fio"] = lambda: fio(block_bytes, depth, seconds)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in rng.sample(sorted(runs), len(runs)):
            rates[name].append(runs[name]())
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.4)
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    if not FILE.is_file() or FILE.stat().st_size != FILE_BYTES:
        make_file()
    for key, value in describe(FILE.parent):
        console.print(f"[dim]{key}:[/] {value}", highlight=False)
    has_fio = shutil.which("fio") is not None
    if not has_fio:
        console.print("fio is not installed: the readers are measured alone, and no bar is checked")
    missed = report(console, arguments.rounds, arguments.seconds, has_fio=has_fio)
    sys.exit(1 if missed else 0)


def report(console: Console, rounds: int, seconds: float, *, has_fio: bool) -> bool:
    """Print the table; whether a bar was missed."""
    table = Table("block", "depth", "fio MB/s", *(f"{kind} MB/s" for kind in READERS), *(f"{kind} / fio" for kind in READERS))
    missed = False
    for block_bytes, depth in itertools.product(BLOCKS, DEPTHS):
        rates = measure(block_bytes, depth, rounds, seconds, has_fio=has_fio)
        shown = [_shown(rates[name]) if name in rates else "-" for name in ("fio", *READERS)]
        ratios = [_ratio(rates[kind], rates["fio"]) if has_fio else None for kind in READERS]
        missed |= block_bytes == EXPERT_BYTES and any(ratio is not None and ratio < MIN_RATIO for ratio in ratios)
        table.add_row(f"{block_bytes / 1e6:.2f} MB", str(depth), *shown, *("-" if r is None else f"{r:.2f}" for r in ratios))
    console.print(table)
    console.print(
        f"medians of {rounds} rounds of {seconds:g} s, best in brackets; the bar is {MIN_RATIO} at the first block size"
    )
    if missed:
        console.print("[bold red]a bar was missed[/]")
    return missed


def _ratio(rates: list[float], base: list[float]) -> float:
    return statistics.median(rate / other for rate, other in zip(rates, base, strict=True))


def _shown(rates: list[float]) -> str:
    return f"{statistics.median(rates) / 1e6:.0f} ({max(rates) / 1e6:.0f})"


if __name__ == "__main__":
    main()
