"""Stock llama.cpp with a GPU: all of a model on it, its experts in host memory, or those with llama.cpp's own cache of them.

Facts: src/llama-model-loader.cpp, src/llama-model.cpp and common/common.h of llama.cpp build 11549.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bel.formats.errors import MachineError, UsageError
from bel.formats.experts import find_experts
from bel.formats.gguf_model import GgufModel
from bel.formats.units import format_bytes
from bel.runtime.context import Context, ContextOptions, Observer
from bel.runtime.devices import (
    Device,
    alignment_bytes,
    buffer_type,
    buffer_type_name,
    cpu_buffer_type,
    find_gpu,
    host_buffer_type,
)
from bel.runtime.engine import Engine, Model, ModelOptions
from bel.runtime.file_watch import FileWatch, watch_gguf
from bel.runtime.free_memory import free_bytes
from bel.runtime.llama_abi import CONTEXT_LAYOUTS, HOW_TO_INSTALL
from bel.runtime.stock_cache import CacheCounts, CacheSizes, cache_sizes, gguf_layers, read_counts, read_slots

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""LLM_FFN_EXPS_REGEX of common/common.h: what `--cpu-moe` keeps in host memory."""
PLACES = ("gpu", "cpu", "cache")
_ALL_LAYERS = -1
_HOST_LINE = re.compile(r"(\S+) model buffer size =\s*[\d.]+ MiB")


@dataclass(frozen=True, slots=True)
class StockGpuOptions:
    """Where the experts are: `gpu`, `cpu` (as by `--cpu-moe`), or `cache`: in host memory, `cache_bytes` of them on the GPU.

    `load_mode`: of `engine.LOAD_MODES`.  `mmap` leaves experts in the file's mapping; `none` copies them into pinned host
    memory.  A cache below one token cycle, or over memory that is not pinned, is refused unless `forced`.
    """

    experts: str = "gpu"
    cache_bytes: int = 0
    load_mode: str = "mmap"
    forced: bool = False
    gpu_number: int = 0


class StockGpuRun:
    """A stock model on a GPU that is ready.  `slots`: experts that the cache holds at once, None without a cache."""

    def __init__(self, model: Model, context: Context, device: Device, slots: int | None) -> None:
        self.model, self.context, self.device, self.slots = model, context, device, slots
        self._counts: CacheCounts | None = None

    @property
    def counts(self) -> CacheCounts | None:
        """What the cache did; None before `finish`, and without a cache."""
        return self._counts

    def finish(self) -> CacheCounts | None:
        """Free the context, upon which llama.cpp tells what its cache did; None without a cache.

        A second call says the same.  Raises MachineError where the counts cannot be read.
        """
        if self.slots is not None and self._counts is None:
            log = self.model.engine.log
            log.clear()
            self.context.close()
            self._counts = read_counts(line for _, line in log)
        self.context.close()
        return self._counts


@contextlib.contextmanager
def open_stock_gpu(
    engine: Engine,
    path: Path,
    sizes: ContextOptions | Callable[[Model], ContextOptions],
    options: StockGpuOptions,
    inner: Observer | None = None,
) -> Iterator[StockGpuRun]:
    """Load a GGUF on the GPU and make a context on it.  `sizes` may be a function of the model.

    Raises MachineError without a GPU, and where llama.cpp does not do what was asked; UsageError where it does not fit or
    would not pay; BadInputError for the file.
    """
    with load_stock_gpu(engine, path, options) as (model, device):
        given = sizes if isinstance(sizes, ContextOptions) else sizes(model)
        with open_stock_context(model, device, given, options, inner) as run:
            yield run


@contextlib.contextmanager
def load_stock_gpu(engine: Engine, path: Path, options: StockGpuOptions) -> Iterator[tuple[Model, Device]]:
    """The model alone, for several contexts on it: of `options`, only `cache_bytes` may differ between them."""
    device = find_gpu(engine, options.gpu_number)
    watch, source = watch_gguf(path)
    with watch, _loaded(engine, device, source, options, watch) as model:
        if options.experts == "cache" and options.load_mode != "mmap" and not options.forced:
            _check_pinned(engine, device)
        yield model, device


@contextlib.contextmanager
def _loaded(engine: Engine, device: Device, source: GgufModel, options: StockGpuOptions, watch: FileWatch) -> Iterator[Model]:
    check_options(engine, device, source, options)
    on_host = options.experts != "gpu"
    loading = ModelOptions(
        load_mode=options.load_mode,
        gpu_layers=_ALL_LAYERS,
        device=device.address,
        buffer_types=[(EXPERTS, cpu_buffer_type(engine))] if on_host else (),
    )
    engine.log.clear()
    with engine.load_files([header.path for header in source.files], loading, watch=watch) as model:
        yield model


@contextlib.contextmanager
def open_stock_context(
    model: Model, device: Device, sizes: ContextOptions, options: StockGpuOptions, inner: Observer | None = None
) -> Iterator[StockGpuRun]:
    """A context on a model of `load_stock_gpu`."""
    is_cached = options.experts == "cache"
    log = model.engine.log
    log.clear()
    given = dataclasses.replace(sizes, moe_cache_bytes=options.cache_bytes if is_cached else 0)
    with model.context(given, inner) as context:
        run = StockGpuRun(model, context, device, read_slots(line for _, line in log) if is_cached else None)
        yield run
        run.finish()


def check_options(engine: Engine, device: Device, source: GgufModel, options: StockGpuOptions) -> None:
    """Raise UsageError for what does not fit or would not pay, MachineError for an engine that has no cache."""
    if options.experts not in PLACES:
        raise ValueError(f"experts on '{options.experts}', not on one of {PLACES}")
    if options.experts == "cache":
        check_cache(engine, stock_cache_sizes(engine, device, source), options)
    _check_room(device, source, options)


def stock_cache_sizes(engine: Engine, device: Device, source: GgufModel) -> CacheSizes:
    """How the slots of llama.cpp's own cache follow from its size, for a model on a device."""
    return cache_sizes(gguf_layers(source, find_experts(source)), alignment_bytes(engine, buffer_type(engine, device)))


def check_engine(engine: Engine) -> None:
    """Raise MachineError for an engine without a cache of its own."""
    if engine.library.context_params != CONTEXT_LAYOUTS[0]:
        raise MachineError(
            "this llama.cpp is too old to have an expert cache of its own",
            path=str(engine.library.path),
            found=engine.build,
            hint=HOW_TO_INSTALL,
        )


def check_cache(engine: Engine, sizes: CacheSizes, options: StockGpuOptions) -> None:
    """Raise MachineError for an engine without a cache, UsageError for one that would not pay."""
    check_engine(engine)
    if options.forced:
        return
    if options.load_mode == "mmap":
        raise UsageError(
            "llama.cpp's own expert cache is slow over a mapped file, up to half of the experts slower than none: the GPU "
            "copies from memory that is not pinned",
            hint="Load with load mode 'none', which needs memory for all experts",
        )
    if options.cache_bytes < sizes.cycle_bytes:
        slots, cycle = sum(sizes.slots(options.cache_bytes)), sum(group.cycle for group in sizes.groups)
        raise UsageError(
            "llama.cpp's own expert cache would hit nothing: each expert is dropped before the next token picks it",
            found=f"{format_bytes(options.cache_bytes)}, {slots} slots",
            expected=f"at least {format_bytes(sizes.cycle_bytes)}, for the {cycle} experts of a token",
        )


def _check_room(device: Device, source: GgufModel, options: StockGpuOptions) -> None:
    """What is known before loading: weights and cache.  KV cache and buffers come on top, and llama.cpp reports those."""
    experts = sum(tensor.size_bytes for tensor in source.tensors if re.search(EXPERTS, tensor.name))
    names = {tensor.name for tensor in source.tensors}
    dense = sum(
        tensor.size_bytes
        for tensor in source.tensors
        if not re.search(EXPERTS, tensor.name)
        # The input layer stays on the CPU; a model without an output layer has a copy of it on the GPU.
        and (tensor.name != "token_embd.weight" or "output.weight" not in names)
    )
    need = dense + {"gpu": experts, "cpu": 0, "cache": options.cache_bytes}[options.experts]
    if need > device.free_bytes:
        raise UsageError(
            "the model does not fit into the GPU's memory this way",
            found=f"{format_bytes(device.free_bytes)} free on {device.name}",
            expected=f"{format_bytes(need)}: {format_bytes(dense)} for what every token uses, the rest for experts",
            hint=f"Experts may have at most {format_bytes(max(0, device.free_bytes - dense))} there",
        )
    is_copied = options.experts != "gpu" and options.load_mode == "none"
    if is_copied and not options.forced and experts > free_bytes():
        raise UsageError(
            "the experts do not fit into memory",
            found=f"{format_bytes(free_bytes())} free",
            expected=format_bytes(experts),
            hint="Map the file instead (load mode 'mmap'), or run a bundle, which reads experts as they are needed",
        )


def _check_pinned(engine: Engine, device: Device) -> None:
    """llama.cpp falls back to plain memory where it gets no pinned one (ggml-cuda.cu), and says so only there."""
    kind = host_buffer_type(engine, device)
    wanted = None if kind is None else buffer_type_name(engine, kind)
    names = [match[1] for _, line in engine.log if (match := _HOST_LINE.search(line))]
    if wanted not in names:
        raise not_pinned(found=", ".join(names), expected=wanted)


def not_pinned(found: str | None = None, expected: str | None = None) -> MachineError:
    """What to say where the experts are in memory from which copies are slow."""
    return MachineError(
        "the experts are not in pinned memory, and llama.cpp's own cache is slow from any other",
        found=found,
        expected=expected,
        hint="The limit on locked memory (ulimit -l) or free memory may be too low",
    )
