"""A model larger than the memory of GPU and host together: python tests/bench/bench_tiers.py --engine FOLDER --model M --text T

A quarter of the experts has slots on the GPU, a quarter in host memory, the rest is on disk.  Ours with exclusive and with
inclusive tiers, and stock llama.cpp's ways, each in a process of its own under one limit on host memory, page cache included.
The limit is what ours takes at most without one, and a tenth more.  Counts of ours stand beside the simulator's for the same
tokens, recorded with everything on the GPU.  Needs root.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from capped import capped, why_not
from gpu_work import texts_of
from inflate import DEFAULT_BYTES
from measure import make_cold
from real_routing import PLAN, make_real

if "--case" in sys.argv:  # a child: nothing of it is worth the half minute that the compiler takes
    from bel.runtime.compiled import stay_plain

    stay_plain()

from bel.formats.bundle import open_bundle
from bel.formats.errors import BelError
from bel.formats.fingerprint import fingerprint
from bel.formats.gguf_model import open_model
from bel.formats.trace import TraceWriter
from bel.formats.trace_header import TraceHeader, TraceLayer
from bel.profiler.record_worker import Recorder
from bel.profiler.router import RouterObserver
from bel.runtime.context import ContextOptions
from bel.runtime.devices import find_gpu
from bel.runtime.engine import Engine
from bel.runtime.policies import parse_policy
from bel.runtime.pool_home import device_home
from bel.runtime.pool_model import open_pool
from bel.runtime.pool_options import PoolOptions
from bel.runtime.stock_gpu import StockGpuOptions, open_stock_gpu, stock_cache_sizes

POLICY = "lfu-decay:0.98"
SHARE = 0.25
PROMPT_TOKENS, DECODED_TOKENS, STOCK_TOKENS = 64, 96, 24
STOCK_SECONDS = 15.0
"""Stock decodes for so long, or `STOCK_TOKENS`: it may be slow to the point of standing still."""
OURS = ("exclusive", "inclusive")
STOCK = ("cpu-moe, mmap, all but one", "own cache, mmap", "cpu-moe, in memory", "cpu-moe, mmap, 4 threads")


def measured(context: Any, prompt: Any, decoded: Any, begin: Any = lambda: None, seconds: float = math.inf) -> dict[str, float]:
    """Tokens per second of the prompt as one batch, and then one by one, none begun after so many seconds."""
    began = time.perf_counter()
    context.decode(prompt)
    context.logits  # noqa: B018 - waits for the GPU
    prefill = time.perf_counter() - began
    begin()
    began, count = time.perf_counter(), 0
    for token in decoded:
        if time.perf_counter() - began > seconds:
            break
        context.decode([int(token)])
        context.logits  # noqa: B018
        count += 1
    return {"prefill": len(prompt) / prefill, "decode": count / (time.perf_counter() - began), "decoded": count}


def run_case(options: argparse.Namespace) -> dict[str, Any]:
    """What the child does: one case."""
    engine = Engine.open(options.engine)
    device = find_gpu(engine)
    tokens = np.load(options.tokens)
    prompt, decoded = tokens[:PROMPT_TOKENS], tokens[PROMPT_TOKENS:]
    sizes = ContextOptions(len(tokens) + 1, PROMPT_TOKENS, PROMPT_TOKENS, 1, n_outputs=1)
    if options.case in OURS:
        bundle = open_bundle(options.bundle)
        n_slots = round(SHARE * max(layer.n_expert for layer in bundle.manifest.layers))
        pool = PoolOptions(policy=parse_policy(POLICY), slots=n_slots, host_slots=n_slots, host_tier=options.case)
        with open_pool(engine, bundle, sizes, pool, device_home(engine, device.address)) as run:
            tier = run.pool.tier
            assert tier is not None, "host_slots were given"
            found: dict[str, Any] = measured(run.context, prompt, decoded, run.pool.counters.begin_decode)
            counts = tier.counters.decode
            n = len(decoded)
            found |= {
                "nvme": counts.nvme_bytes / n,
                "h2d": counts.h2d_bytes / n,
                "d2h": counts.d2h_bytes / n,
                "hits": run.pool.counters.decode.hits,
                "host_bytes": run.pool.host_bytes,
            }
            return found
    cores = len(os.sched_getaffinity(0))
    decoded = decoded[:STOCK_TOKENS]
    threads = 4 if "4 threads" in options.case else cores - 1
    given = StockGpuOptions("cpu", load_mode="none" if "memory" in options.case else "mmap", forced=True)
    if "cache" in options.case:
        size = stock_cache_sizes(engine, device, open_model(options.gguf)).size_for_share(SHARE)
        given = StockGpuOptions("cache", size, "mmap", forced=True)
    sizes = ContextOptions(sizes.n_ctx, sizes.n_batch, sizes.n_ubatch, threads, n_outputs=1)
    with open_stock_gpu(engine, options.gguf, sizes, given) as stock:
        return measured(stock.context, prompt, decoded, seconds=STOCK_SECONDS)


def child(options: argparse.Namespace, case: str, real: Any, tokens: Path, limit: int | None) -> tuple[dict[str, Any], int]:
    """Run a case in a control group; what it found, and the most that was charged."""
    make_cold([*(path for path in real.bundle.iterdir() if path.is_file()), real.model], drop=True)
    command = [sys.executable, __file__, "--engine", options.engine, "--case", case, "--tokens", str(tokens)]
    command += ["--bundle", str(real.bundle), "--gguf", str(real.model)]
    with capped(limit) as group:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, preexec_fn=group.join, timeout=options.seconds
        )
        charged = group.peak_bytes or 0
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {"failed": f"exit {done.returncode}: {last}"}, charged
    return json.loads(done.stdout.splitlines()[-1]), charged


def record(options: argparse.Namespace, real: Any, folder: Path) -> tuple[Path, Path]:
    """The tokens, and the trace of them with everything on the GPU."""
    engine = Engine.open(options.engine)
    bundle = open_bundle(real.bundle)
    layers = tuple(
        TraceLayer(x.layer, x.n_expert, x.n_used or x.n_expert, x.stride_bytes) for x in bundle.manifest.layers if not x.is_mtp
    )
    arch = bundle.manifest.arch or ""
    observer = RouterObserver(arch, layers)
    count = PROMPT_TOKENS + DECODED_TOKENS
    sizes = ContextOptions(count + 1, PROMPT_TOKENS, PROMPT_TOKENS, 1)
    with open_stock_gpu(engine, real.model, sizes, StockGpuOptions(), observer) as run:
        tokens = texts_of(run.model, options.text, count)["code"]
        np.save(folder / "tiers.npy", tokens)
        header = TraceHeader("tiers", arch, fingerprint(bundle), layers, "tiers")
        with TraceWriter(folder / "tiers.trace", header, replace=True) as writer:
            recorder = Recorder(run.context, observer, writer)
            for _ in recorder.prompt(tokens[:PROMPT_TOKENS]):
                pass
            for token in tokens[PROMPT_TOKENS:]:
                recorder.decode(int(token))
            recorder.flush()
    return folder / "tiers.npy", folder / "tiers.trace"


def simulated(trace: Path, n_slots: int, tier: str) -> dict[str, Any]:
    """The simulator's row for the same tokens."""
    how = ["--policy", POLICY, "--slots", str(n_slots), "--host-slots", str(n_slots), "--host-tier", tier, "--phase", "decode"]
    command = [sys.executable, "-c", PLAN, "simulate", str(trace), *how, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout)["rows"][0]
    return row


def main() -> None:
    """Measure, print, and end with 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("bench-out"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="the most that a case may take")
    for name in ("--case", "--tokens", "--bundle", "--gguf"):
        parser.add_argument(name, type=str if name == "--case" else Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        try:
            print(json.dumps(run_case(options)))
        except BelError as error:
            sys.exit(str(error))
        return
    if why_not():
        sys.exit(f"nothing can be capped here: {why_not()}")
    real = make_real(options.folder, options.model, DEFAULT_BYTES)
    tokens, trace = record(options, real, real.folder)
    n_slots = round(SHARE * max(layer.n_expert for layer in open_bundle(real.bundle).manifest.layers))
    rows: dict[str, dict[str, Any]] = {}
    _, free = child(options, "exclusive", real, tokens, None)
    limit = free * 11 // 10
    print(f"host memory limited to {limit / 1e6:.0f} MB; {n_slots} slots a layer on the GPU and {n_slots} in host memory")
    for case in (*OURS, *STOCK):
        try:
            found, charged = child(options, case, real, tokens, limit)
        except subprocess.TimeoutExpired:
            found, charged = {"failed": f"not done in {options.seconds:.0f} s"}, 0
        rows[case] = {**found, "charged": charged}
        if case in OURS:
            rows[case]["simulated"] = simulated(trace, n_slots, case)["bytes_per_token"]
        print(case, rows[case], flush=True)
        if options.json:
            options.json.write_text(json.dumps({"limit": limit, "rows": rows}, indent=1), encoding="utf-8")
    sys.exit(judge(rows))


def judge(rows: dict[str, dict[str, Any]]) -> int:
    """The bars."""
    best = max((row["decode"] for name, row in rows.items() if name in STOCK and "decode" in row), default=None)
    ours, other = rows["exclusive"], rows["inclusive"]
    if "decode" not in ours or "decode" not in other:
        print("ours did not run")
        return 1
    bars = {
        "times the best of stock under the limit, 5 at least": (ours["decode"] / best if best else float("inf"), 5.0, True),
        "NVMe bytes of exclusive, of inclusive, 0.6 at most": (ours["nvme"] / other["nvme"], 0.6, False),
    }
    for name in OURS:
        off = abs(rows[name]["nvme"] / rows[name]["simulated"]["nvme"] - 1)
        bars[f"simulated NVMe bytes, {name}, off by 0.01 at most"] = (off, 0.01, False)
    held = True
    for name, (value, bar, is_least) in bars.items():
        holds = value >= bar if is_least else value <= bar
        held = held and holds
        print(f"{'holds ' if holds else 'MISSED'} {name}: {value:.3f}")
    return 0 if held else 1


if __name__ == "__main__":
    main()
