"""The rows of `bench_gpu.py` that are llama.cpp's own ways to run a GGUF on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence

from gpu_cases import SHARES, Bench, Case, Group, Hits, Ready

from bel.formats.gguf_model import open_model
from bel.runtime.context import ContextOptions
from bel.runtime.devices import Device
from bel.runtime.engine import Model
from bel.runtime.stock_cache import CacheSizes
from bel.runtime.stock_gpu import StockGpuOptions, load_stock_gpu, open_stock_context, stock_cache_sizes


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
