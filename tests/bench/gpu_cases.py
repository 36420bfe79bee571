"""What a GPU is measured on, and how: cases, each a row of a table, in fresh contexts."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gpu_work import WORKLOADS, Orders, Tokens, Work, orders_of, texts_of
from inflate import DEFAULT_BYTES
from measure import timed_python
from models import BigModel, big_path, make_big
from real_routing import CONVERT, make_real

from bel.formats.bundle import open_bundle
from bel.formats.units import parse_bytes
from bel.runtime.context import Context, ContextOptions
from bel.runtime.devices import Device, find_gpu, free_device_bytes
from bel.runtime.engine import Engine
from bel.runtime.stock_gpu import StockGpuOptions, load_stock_gpu

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
    workload: str
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


@dataclass(frozen=True, slots=True)
class Round:
    """A case measured once: seconds of the prompt and of the tokens, and their logits."""

    prefill_seconds: float
    decode_seconds: float
    logits: Logits
    vram_bytes: int
    hits: Hits | None


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(bench: Bench, case: Case, reference: Logits | None, free_bytes: int) -> tuple[Row, Logits]:
    """Measure a case in `ROUNDS` fresh contexts.  `free_bytes`: of the GPU's memory before anything was loaded."""
    rounds = [measure_round(bench, case, free_bytes)]
    while len(rounds) < (ROUNDS if rounds[-1].decode_seconds < SLOW_SECONDS else min(ROUNDS, SLOW_ROUNDS)):
        rounds.append(measure_round(bench, case, free_bytes))
    hits, logits = rounds[-1].hits, rounds[-1].logits
    decodes = [len(bench.work.decoded) / x.decode_seconds for x in rounds]
    row = Row(
        case.way,
        case.share,
        len(bench.work.prompt) / statistics.median(x.prefill_seconds for x in rounds),
        statistics.median(decodes),
        decodes,
        None if hits is None else hits.hits,
        None if hits is None else hits.misses,
        None if hits is None else hits.in_time,
        None if hits is None else hits.ahead,
        max(x.vram_bytes for x in rounds),
        0.0 if reference is None else float(np.abs(logits - reference).max()),
        case.facts,
    )
    return row, logits


def measure_round(bench: Bench, case: Case, free_bytes: int) -> Round:
    """Once, in a fresh context."""
    with case.open() as ready:
        context = ready.context
        _prefill(context, bench.work)
        _decode(context, bench.work.decoded[:WARM_TOKENS])
        context.clear()
        prefill = _prefill(context, bench.work)
        ready.begin_decode()
        decode, logits = _decode(context, bench.work.decoded)
        vram = free_bytes - free_device_bytes(bench.engine, bench.device)
        return Round(prefill, decode, logits, vram, ready.finish())


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
    return Bench(engine, device, model_path, bundle, work, orders, options.workload, n_threads), free_device_bytes(
        engine, device
    )


def add_work(parser: argparse.ArgumentParser) -> None:
    """Options of `make_bench`."""
    parser.add_argument("--engine", required=True, help="folder of a llama.cpp with CUDA (docs/gpu.md)")
    parser.add_argument("--model", type=Path, help="a trained MoE model with experts in Q4_0 or Q8_0, which is made big")
    parser.add_argument("--text", type=Path, help="folder with code/ and chat/: texts that the model has not seen")
    parser.add_argument("--workload", choices=WORKLOADS, default="code", help="which of them is decoded")
    parser.add_argument(
        "--random-layers", type=int, default=0, help="a random model of so many layers instead, on random tokens"
    )
    parser.add_argument("--size", default=str(DEFAULT_BYTES), help="bytes of the experts of the model made big")
    parser.add_argument("--folder", type=Path, default=Path("bench-out"), help="where models are made, and kept")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)


def parse_work(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options; `began` is now."""
    options = parser.parse_args()
    if not options.random_layers and (options.model is None or options.text is None):
        parser.error("--model and --text are needed, or --random-layers")
    options.began = time.perf_counter()
    return options
