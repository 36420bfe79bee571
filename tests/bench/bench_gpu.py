"""What a GPU gives, way by way, on a trained model made big, in one table: python tests/bench/bench_gpu.py --help

Each row is a fresh context: the prompt and a few tokens once to warm up, then the prompt as one batch and the held-out tokens
one by one, forced, so that all rows compute the same.  Rows: stock llama.cpp with everything on the GPU; with the experts in
host memory (`--cpu-moe`), by threads and load mode; with its own expert cache at three shares of the experts, from the GGUF and
from a bundle; the slot pool's modes, and what `auto` takes.  See `GROUPS` and gpu_pool.py.  docs/gpu.md has a run of it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gpu_pool
import numpy as np
import numpy.typing as npt
from gpu_work import MERGED, WORKLOADS, Orders, Tokens, Work, orders_of, texts_of
from inflate import DEFAULT_BYTES
from measure import timed_python
from models import BigModel, big_path, make_big
from real_routing import CONVERT, make_real

from bel.formats.bundle import open_bundle
from bel.formats.errors import BelError
from bel.formats.gguf_model import open_model
from bel.formats.units import parse_bytes
from bel.runtime.context import Context, ContextOptions
from bel.runtime.devices import Device, find_gpu, free_device_bytes
from bel.runtime.engine import Engine, Model
from bel.runtime.stock_cache import CacheSizes
from bel.runtime.stock_gpu import StockGpuOptions, load_stock_gpu, open_stock_context, stock_cache_sizes

Logits = npt.NDArray[np.float32]
SHARES = (0.25, 0.5, 0.75)
WARM_TOKENS = 8
PROFILE_TOKENS = 800
ROUNDS, SLOW_ROUNDS, SLOW_SECONDS = 5, 3, 2.0
"""Rounds of a case, and of one that decodes for longer than that."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What all cases share: a GGUF and the bundle that was made from it, and what is run.

    `orders`: what to keep, by the name of each profile; no profile was made from what is measured.
    """

    engine: Engine
    device: Device
    model: Path
    bundle: Path
    work: Work
    orders: dict[str, Orders]
    n_threads: int

    @property
    def n_pool_threads(self) -> int:
        """For the pool's experts on the CPU: a few cores less, for the thread that drives the GPU must never wait for one."""
        return max(1, len(os.sched_getaffinity(0)) - 4)

    def sizes(self, n_threads: int | None = None) -> ContextOptions:
        """One sequence for the work, whose prompt is one graph."""
        n_ctx = len(self.work.prompt) + max(len(self.work.decoded), WARM_TOKENS) + 1
        return ContextOptions(n_ctx, n_ctx, n_ctx, n_threads or self.n_threads, n_outputs=1)


@dataclass(frozen=True, slots=True)
class Hits:
    """Expert calls that found their expert on the GPU, and the others; of single tokens, the warm-up's too.  `in_time` of the
    others had been brought ahead, `ahead` experts in all."""

    hits: int
    misses: int
    in_time: int = 0
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """A context to be measured.  `begin_decode` is called before the tokens that count, `finish` behind them: it may free the
    context, and gives None where nothing is counted."""

    context: Context
    finish: Callable[[], Hits | None] = lambda: None
    begin_decode: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Case:
    """One row.  `share`: of the experts, how many have a place on the GPU; `facts` only tell people and the JSON more."""

    way: str
    share: float
    open: Callable[[], AbstractContextManager[Ready]]
    facts: dict[str, Any]


Group = Callable[[Bench], AbstractContextManager[Sequence[Case]]]
"""Loads what its cases share."""


@dataclass(frozen=True, slots=True)
class Row:
    """A measured case.  Speeds in tokens/s, the median of the rounds; `decode_all` has each."""

    way: str
    share: float
    prefill: float
    decode: float
    decode_all: list[float]
    hits: int | None
    misses: int | None
    in_time: int | None
    ahead: int | None
    vram_bytes: int
    largest_difference: float
    facts: dict[str, Any]

    @property
    def hit_rate(self) -> float | None:
        """None where nothing was counted."""
        return None if not self.hits and not self.misses else self.hits / (self.hits + self.misses)  # type: ignore[operator]


# --- the ways ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _stock_case(model: Model, device: Device, sizes: ContextOptions, options: StockGpuOptions) -> Iterator[Ready]:
    with open_stock_context(model, device, sizes, options) as run:

        def finish() -> Hits | None:
            counts = run.finish()
            return None if counts is None else Hits(counts.hits, counts.misses)

        yield Ready(run.context, finish)


def _stock(way: str, share: float, bench: Bench, model: Model, sizes: ContextOptions, options: StockGpuOptions) -> Case:
    facts = {"load_mode": options.load_mode, "threads": sizes.n_threads}
    if options.cache_bytes:
        facts["cache_bytes"] = options.cache_bytes
    return Case(way, share, lambda: _stock_case(model, bench.device, sizes, options), facts)


@contextlib.contextmanager
def all_on_gpu(bench: Bench) -> Iterator[Sequence[Case]]:
    """The reference: what others differ from."""
    options = StockGpuOptions()
    with load_stock_gpu(bench.engine, bench.model, options) as (model, _):
        yield [_stock("stock, all on the GPU", 1.0, bench, model, bench.sizes(1), options)]


def cpu_moe(load_mode: str) -> Group:
    """The experts on the CPU."""

    @contextlib.contextmanager
    def group(bench: Bench) -> Iterator[Sequence[Case]]:
        options = StockGpuOptions(experts="cpu", load_mode=load_mode)
        cores = len(os.sched_getaffinity(0))
        threads = sorted({min(8, cores), max(1, cores - 2), max(1, cores - 1)})
        with load_stock_gpu(bench.engine, bench.model, options) as (model, _):
            yield [
                _stock(f"stock --cpu-moe, {load_mode}, {n} threads", 0.0, bench, model, bench.sizes(n), options)
                for n in threads
            ]

    group.__qualname__ = f"cpu-moe {load_mode}"
    return group


def stock_cache(load_mode: str) -> Group:
    """llama.cpp's own cache, at three sizes."""

    @contextlib.contextmanager
    def group(bench: Bench) -> Iterator[Sequence[Case]]:
        sizes = stock_sizes(bench)
        options = StockGpuOptions("cache", sizes.size_for_share(SHARES[0]), load_mode, forced=load_mode == "mmap")
        with load_stock_gpu(bench.engine, bench.model, options) as (model, _):
            yield [
                _stock(
                    f"stock cache, {load_mode}",
                    share,
                    bench,
                    model,
                    bench.sizes(),
                    dataclasses.replace(options, cache_bytes=sizes.size_for_share(share)),
                )
                for share in SHARES
            ]

    group.__qualname__ = f"stock cache {load_mode}"
    return group


def stock_sizes(bench: Bench) -> CacheSizes:
    """Sizes of llama.cpp's cache for the measured model."""
    return stock_cache_sizes(bench.engine, bench.device, open_model(bench.model))


GROUPS: list[Group] = [all_on_gpu, cpu_moe("none"), stock_cache("none")]
"""Stock from pinned memory.  The first case is the reference."""
SLOW: list[Group] = [cpu_moe("mmap"), stock_cache("mmap")]
"""Stock from a mapped file: measured behind everything else."""


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(bench: Bench, case: Case, reference: Logits | None, free_bytes: int) -> tuple[Row, Logits]:
    """Measure a case in `ROUNDS` fresh contexts.  `free_bytes`: of the GPU's memory before anything was loaded."""
    prefills, decodes, vram, hits, logits, seconds = [], [], 0, None, None, 0.0
    while len(decodes) < (ROUNDS if seconds < SLOW_SECONDS else min(ROUNDS, SLOW_ROUNDS)):
        with case.open() as ready:
            context = ready.context
            _prefill(context, bench.work)
            _decode(context, bench.work.decoded[:WARM_TOKENS])
            context.clear()
            prefills.append(_prefill(context, bench.work))
            ready.begin_decode()
            seconds, logits = _decode(context, bench.work.decoded)
            decodes.append(len(bench.work.decoded) / seconds)
            vram = max(vram, free_bytes - free_device_bytes(bench.engine, bench.device))
            hits = ready.finish()
    assert logits is not None, "there is a round"
    row = Row(
        case.way,
        case.share,
        len(bench.work.prompt) / statistics.median(prefills),
        statistics.median(decodes),
        decodes,
        None if hits is None else hits.hits,
        None if hits is None else hits.misses,
        None if hits is None else hits.in_time,
        None if hits is None else hits.ahead,
        vram,
        0.0 if reference is None else float(np.abs(logits - reference).max()),
        case.facts,
    )
    return row, logits


def _prefill(context: Context, work: Work) -> float:
    """Seconds of the prompt as one batch."""
    began = time.perf_counter()
    context.decode(work.prompt)
    context.logits  # noqa: B018 - waits for the GPU
    return time.perf_counter() - began


def _decode(context: Context, tokens: Tokens) -> tuple[float, Logits]:
    """Seconds of the tokens one by one, and their logits (n, n_vocab)."""
    kept = np.empty((len(tokens), context.model.n_vocab), np.float32)
    began = time.perf_counter()
    for number, token in enumerate(tokens):
        context.decode([int(token)])
        kept[number] = context.logits[0]
    return time.perf_counter() - began, kept


# --- what is measured on ----------------------------------------------------------------------------------------------


def make_bench(options: argparse.Namespace) -> tuple[Bench, int]:
    """Make the models and the profiles; and what is free on the GPU once everything has run and is gone again."""
    engine = Engine.open(options.engine)
    device = find_gpu(engine)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.random_layers:
        big = BigModel(layers=options.random_layers)
        model_path = big_path(options.folder, big)
        bundle = model_path.with_suffix(".bel")
        make_big(model_path, big)
        if not bundle.exists():
            timed_python(CONVERT, "convert", model_path, "-o", bundle, "--no-verify")
    else:
        real = make_real(options.folder, options.model, parse_bytes(options.size))
        model_path, bundle = real.model, real.bundle
    n_expert = max(layer.n_expert for layer in open_bundle(bundle).manifest.layers)
    n_prompt, n_decoded = options.prompt_tokens, options.tokens
    with load_stock_gpu(engine, model_path, StockGpuOptions()) as (model, _):
        texts = texts_of(model, None if options.random_layers else options.text, n_prompt + n_decoded + PROFILE_TOKENS)
        orders = orders_of(model, {name: text[n_prompt + n_decoded :] for name, text in texts.items()}, n_expert)
    text = texts[options.workload]
    work = Work(text[:n_prompt], text[n_prompt : n_prompt + n_decoded])
    n_threads = max(1, len(os.sched_getaffinity(0)) - 2)
    return Bench(engine, device, model_path, bundle, work, orders, n_threads), free_device_bytes(engine, device)


# --- the report -------------------------------------------------------------------------------------------------------


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
    parser.add_argument("--engine", required=True, help="folder of a llama.cpp with CUDA (docs/gpu.md)")
    parser.add_argument("--model", type=Path, help="a trained MoE model with experts in Q4_0 or Q8_0, which is made big")
    parser.add_argument("--text", type=Path, help="folder with code/ and chat/: texts that the model has not seen")
    parser.add_argument("--workload", choices=WORKLOADS, default="code", help="which of them is decoded")
    parser.add_argument(
        "--random-layers", type=int, default=0, help="a random model of so many layers instead, on random tokens"
    )
    parser.add_argument("--size", default=str(DEFAULT_BYTES), help="bytes of the experts of the model made big")
    parser.add_argument("--folder", type=Path, default=Path("bench-out"), help="where models are made, and kept")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument(
        "--only", default="", help="a regular expression: beside the reference only groups that it finds in their names"
    )
    parser.add_argument("--ahead", default="", help="also rows with so many experts brought ahead: 0,1,3")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=280.0, help="begin no case after so long")
    options = parser.parse_args()
    if not options.random_layers and (options.model is None or options.text is None):
        parser.error("--model and --text are needed, or --random-layers")
    options.began = time.perf_counter()
    return options


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
