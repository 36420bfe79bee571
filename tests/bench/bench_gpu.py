"""What a GPU gives, way by way, on a trained model made big, in one table: python tests/bench/bench_gpu.py --help

Each row is a fresh context: the prompt and a few tokens once to warm up, then the prompt as one batch and the held-out tokens
one by one, forced, so that all rows compute the same.  Rows: stock llama.cpp with everything on the GPU; with the experts in
host memory (`--cpu-moe`), by threads and load mode; with its own expert cache at three shares of the experts, from the GGUF and
from a bundle; the slot pool's modes, and what `auto` takes.  See `GROUPS` and gpu_pool.py.  docs/gpu.md has a run of it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gpu_pool
from gpu_cases import ROUNDS, SHARES, SLOW_ROUNDS, Bench, Group, Logits, Row, add_work, make_bench, measure, parse_work
from gpu_stock import all_on_gpu, cpu_moe, stock_cache
from gpu_work import MERGED, WORKLOADS

from bel.formats.errors import BelError

GROUPS: list[Group] = [all_on_gpu, cpu_moe("none"), stock_cache("none")]
"""Stock from pinned memory.  The first case is the reference."""
SLOW: list[Group] = [cpu_moe("mmap"), stock_cache("mmap")]
"""Stock from a mapped file: measured behind everything else."""


def run_all(bench: Bench, free_bytes: int, options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Measure all groups.  A case that fails is told and left; none is begun after `--seconds`."""
    rows: list[Row] = []
    failed: list[str] = []
    reference: Logits | None = None
    for group in groups(options):
        try:
            with group(bench) as cases:
                for case in cases:
                    if time.perf_counter() - options.began > options.seconds:
                        failed.append(f"{case.way}, {case.share:.0%}: not measured, the time is over")
                        continue
                    try:
                        row, logits = measure(bench, case, reference, free_bytes)
                    except BelError as error:
                        if reference is None:
                            raise
                        failed.append(f"{case.way}, {case.share:.0%}: {error}")
                        continue
                    reference = logits if reference is None else reference
                    rows.append(row)
                    print(f"  {row.way}, {row.share:.0%}: {row.decode:.1f} tokens/s", file=sys.stderr)
                    write_json(options, bench, rows, failed)
        except BelError as error:
            failed.append(f"{group.__qualname__}: {error}")
            if reference is None:
                raise
    return rows, failed


def groups(options: argparse.Namespace) -> list[Group]:
    """What is measured: the reference, and the groups whose names `--only` finds."""
    others = [name for name in (*WORKLOADS, MERGED) if name != options.workload]
    ahead = [int(text) for text in options.ahead.split(",") if text]
    found = [*GROUPS[1:], *gpu_pool.groups(SHARES, options.workload, others, ahead), *SLOW]
    return [GROUPS[0], *(group for group in found if re.search(options.only, group.__qualname__))]


def write_json(options: argparse.Namespace, bench: Bench, rows: Sequence[Row], failed: Sequence[str]) -> None:
    """All rows so far: a machine that is taken away leaves what was measured."""
    if options.json is not None:
        answer = {"machine": machine(bench), "failed": list(failed), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(answer, indent=1), encoding="utf-8")


def machine(bench: Bench) -> dict[str, Any]:
    """What the figures hold for."""
    return {
        "gpu": str(bench.device),
        "engine": f"{bench.engine.name} {bench.engine.build}",
        "cores": len(os.sched_getaffinity(0)),
        "model": bench.model.name,
        "prompt_tokens": len(bench.work.prompt),
        "decoded_tokens": len(bench.work.decoded),
        "rounds": ROUNDS,
        "rounds_of_slow_ways": min(ROUNDS, SLOW_ROUNDS),
    }


def print_table(bench: Bench, rows: Sequence[Row], failed: Sequence[str]) -> None:
    """Rows with the share of experts, speeds, and how many times the best `--cpu-moe` that is."""
    print("; ".join(f"{name} {value}" for name, value in machine(bench).items()))
    baseline = max((row.decode for row in rows if row.share == 0), default=None)
    print(f"{'way':44} experts  decode/s   (min to max)  prefill/s  hits   GPU GB  max diff  x cpu-moe")
    for row in rows:
        spread = f"({min(row.decode_all):.0f} to {max(row.decode_all):.0f})"
        hits = "" if row.hit_rate is None else f"{row.hit_rate:.3f}"
        times = "" if baseline is None else f"{row.decode / baseline:.2f}"
        speeds = f"{row.decode:9.1f} {spread:>14} {row.prefill:10.0f}"
        memory = f"{row.vram_bytes / 1e9:7.2f}"
        print(f"{row.way:44} {row.share:6.0%} {speeds}  {hits:5} {memory} {row.largest_difference:9.4f} {times:>9}")
    for line in failed:
        print(f"NOT MEASURED: {line}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument(
        "--only", default="", help="a regular expression: beside the reference only groups that it finds in their names"
    )
    parser.add_argument("--ahead", default="", help="also rows with so many experts brought ahead: 0,1,3")
    parser.add_argument("--seconds", type=float, default=400.0, help="begin no case after so long")
    return parse_work(parser)


def main() -> None:
    """Measure and print."""
    options = _options()
    try:
        bench, free_bytes = make_bench(options)
        print(f"set up in {time.perf_counter() - options.began:.0f} s", file=sys.stderr)
        rows, failed = run_all(bench, free_bytes, options)
    except BelError as error:
        sys.exit(f"bench_gpu: {error}")
    write_json(options, bench, rows, failed)
    print_table(bench, rows, failed)
    print(f"{time.perf_counter() - options.began:.0f} s in all")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
