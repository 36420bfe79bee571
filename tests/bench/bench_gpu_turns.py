"""`--gpu auto` beside what it chooses from and beside `--cpu-moe`, in turns: python tests/bench/bench_gpu_turns.py --help

What a host shared with others takes from a way it takes a minute later from another one: a tenth, or a third where the CPU
computes.  Here all ways of one size are loaded at once, and each round measures each of them once; a ratio is the median of
those within a round.  For the memory of a large GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_pool
import numpy as np
from gpu_cases import SHARES, Bench, Case, Group, Logits, Round, add_work, make_bench, measure_round, parse_work
from gpu_stock import all_on_gpu, cpu_moe, stock_cache

from bel.formats.errors import BelError

LEAST_ROUNDS = 3
MOST_BASELINES = 3
"""Of `--cpu-moe` so many, of all threads and load modes, are measured: the fastest in a first round."""


def _enter(stack: contextlib.ExitStack, bench: Bench, groups: Sequence[Group], share: float) -> list[Case]:
    found = [case for group in groups for case in stack.enter_context(group(bench))]
    return [case for case in found if case.share in (0.0, share)]


def _speed(bench: Bench, one: Round) -> float:
    return len(bench.work.decoded) / one.decode_seconds


def _baselines(bench: Bench, cases: Sequence[Case]) -> list[Case]:
    """The thread counts and load modes that may be the best."""
    first = [(_speed(bench, measure_round(bench, case, 0)), n) for n, case in enumerate(cases)]
    return [cases[n] for _, n in sorted(first, reverse=True)[:MOST_BASELINES]]


def _ways(share: float, workload: str) -> list[Group]:
    """`auto` first, and what may be the best beside it."""
    pools = [gpu_pool.pool(mode, policy, share, workload) for mode, policy in gpu_pool.MODES]
    return [gpu_pool.auto(share, workload), *pools, gpu_pool.own_cache(), stock_cache("none")]


def measure_share(
    bench: Bench, share: float, baselines: Sequence[Case], reference: Logits, until: float, most: int
) -> dict[str, Any]:
    """Rounds of all ways of one size; fewer, but not below `LEAST_ROUNDS`, where the time is over."""
    with contextlib.ExitStack() as stack:
        cases = [*_enter(stack, bench, _ways(share, bench.workload), share), *baselines]
        speeds: list[list[float]] = [[] for _ in cases]
        prompts: list[list[float]] = [[] for _ in cases]
        differences = [0.0] * len(cases)
        while len(speeds[-1]) < most and (len(speeds[-1]) < LEAST_ROUNDS or time.perf_counter() < until):
            for n, case in enumerate(cases):
                one = measure_round(bench, case, 0)
                speeds[n].append(_speed(bench, one))
                prompts[n].append(len(bench.work.prompt) / one.prefill_seconds)
                differences[n] = max(differences[n], float(np.abs(one.logits - reference).max()))
    rows = [
        {
            "way": case.way,
            "decode": statistics.median(speeds[n]),
            "decode_all": speeds[n],
            "prefill": statistics.median(prompts[n]),
            "largest_difference": differences[n],
            "auto_is_times": statistics.median(x / y for x, y in zip(speeds[0], speeds[n], strict=True)),
        }
        for n, case in enumerate(cases)
    ]
    return {"share": share, "rows": rows}


def _print(found: dict[str, Any]) -> None:
    print(f"{found['share']:.0%} of the experts; {len(found['rows'][0]['decode_all'])} rounds")
    for row in found["rows"]:
        spread = f"({min(row['decode_all']):.0f} to {max(row['decode_all']):.0f})"
        speeds = f"{row['decode']:8.1f} {spread:>14} {row['prefill']:9.0f}"
        print(
            f"  {row['way']:44} {speeds} {row['largest_difference']:9.4f}   auto is {row['auto_is_times']:.2f} times that",
            flush=True,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=240.0, help="begin no round after so long, but for three of each size")
    parser.add_argument("--json", type=Path, help="also write the rounds to this file")
    options = parse_work(parser)
    answer = []
    try:
        bench, _ = make_bench(options)
        with all_on_gpu(bench) as cases:
            reference = measure_round(bench, cases[0], 0).logits
        with contextlib.ExitStack() as stack:
            baselines = _baselines(bench, _enter(stack, bench, [cpu_moe("none"), cpu_moe("mmap")], 0.0))
            began = time.perf_counter()
            left = options.began + options.seconds - began
            for n, share in enumerate(SHARES):
                until = began + left * (n + 1) / len(SHARES)
                answer.append(measure_share(bench, share, baselines, reference, until, options.rounds))
                _print(answer[-1])
                if options.json is not None:
                    options.json.write_text(json.dumps(answer, indent=1), encoding="utf-8")
    except BelError as error:
        sys.exit(f"bench_gpu_turns: {error}")
    print(f"{time.perf_counter() - options.began:.0f} s in all")


if __name__ == "__main__":
    main()
