"""llama.cpp's own cache of experts on a GPU, over the host memory that a bundle was read into.

llama.cpp caches a layer whose expert tensors are weights in a host's buffer (`llama_moe_cache_is_host_weight` in
src/llama-moe-cache.cpp of build 11549).  A model of `pool_loading.py` has expert tensors without memory; while they are the
stacks of `pool_stacks.py`, it is the model that stock llama.cpp makes of a GGUF with its experts in host memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bel.formats.errors import UsageError
from bel.formats.units import format_bytes
from bel.runtime.context import ContextOptions
from bel.runtime.devices import Device, alignment_bytes
from bel.runtime.pool_abi import USAGE_ANY, USAGE_WEIGHTS
from bel.runtime.pool_loading import LoadedPool
from bel.runtime.pool_stacks import StackedExperts
from bel.runtime.stock_cache import CacheSizes, bundle_layers, cache_sizes, group_slots
from bel.runtime.stock_gpu import (
    StockGpuOptions,
    StockGpuRun,
    check_cache,
    check_engine,
    not_pinned,
    open_stock_context,
)

_ATTEMPTS = 4
"""A smaller cache takes less by as much as it is smaller, to within a slot and what the driver hands out at once (2 MiB)."""


@dataclass(frozen=True, slots=True)
class Promise:
    """Of a device's memory `used_bytes()` are in use; there shall be at most `size_bytes`."""

    size_bytes: int
    used_bytes: Callable[[], int]


@contextlib.contextmanager
def stock_layout(loaded: LoadedPool) -> Iterator[None]:
    """Within it the model's expert tensors are the stacks in host memory; what they were is put back.

    The contexts made within must be closed within, and no pool be open on the model.
    """
    ffi, abi = loaded.engine.library.ffi, loaded.home.abi
    buffer = abi.pointer(loaded.hosts.buffer)
    kept = []
    abi.lib.ggml_backend_buffer_set_usage(buffer, USAGE_WEIGHTS)
    try:
        for graph, rooms in zip(loaded.graphs, loaded.hosts.parts, strict=True):
            for part in graph.parts:
                tensor = ffi.cast("struct ggml_tensor *", part.weight)
                kept.append((tensor, tensor.buffer, tensor.data))
                tensor.buffer = ffi.cast("void *", loaded.hosts.buffer)
                tensor.data = ffi.cast("void *", rooms[part.number].base)
        yield
    finally:
        for tensor, own_buffer, data in kept:
            tensor.buffer, tensor.data = own_buffer, data
        abi.lib.ggml_backend_buffer_set_usage(buffer, USAGE_ANY)


def check_own_cache(loaded: LoadedPool) -> None:
    """Raise MachineError for an engine without a cache and for host memory that is not pinned, UsageError for one that does not
    hold all experts."""
    check_engine(loaded.engine)
    if not isinstance(loaded.hosts, StackedExperts):
        raise needs_all_experts()
    if not loaded.hosts.is_pinned:
        raise not_pinned(found="common memory")


def needs_all_experts() -> UsageError:
    """What to say where host memory holds some of them."""
    return UsageError(
        "llama.cpp's own cache needs all experts in host memory: it copies them from there",
        hint="Give a larger --ram, or --gpu upload, which reads the others from disk",
    )


def own_cache_sizes(loaded: LoadedPool) -> CacheSizes:
    """How the slots of llama.cpp's cache follow from its size."""
    return cache_sizes(bundle_layers(loaded.bundle), alignment_bytes(loaded.engine, loaded.home.kind))


def own_cache_bytes(loaded: LoadedPool) -> int:
    """The cache that has as many experts of each group of layers as a pool has slots there."""
    return own_cache_sizes(loaded).size_for(group_slots(bundle_layers(loaded.bundle), loaded.counts))


@contextlib.contextmanager
def open_own_cache(loaded: LoadedPool, device: Device, sizes: ContextOptions, cache_bytes: int) -> Iterator[StockGpuRun]:
    """A context with a cache of so many bytes, or for 0 with none: then llama.cpp's CPU computes the experts."""
    options = StockGpuOptions("cache" if cache_bytes else "cpu", cache_bytes, "none")
    with stock_layout(loaded), open_stock_context(loaded.model, device, sizes, options) as run:
        yield run


def fitting_cache(loaded: LoadedPool, device: Device, sizes: ContextOptions, promise: Promise | None) -> int:
    """Bytes of the cache to use: as many experts as the pool's slots, and fewer where a budget would not be kept.

    With a promise a context is made and a prompt computed, to see what all takes.  Raises UsageError below one token cycle, and
    where slots that were asked for do not fit; it says what does.
    """
    cache, size = own_cache_sizes(loaded), own_cache_bytes(loaded)
    check_cache(loaded.engine, cache, StockGpuOptions("cache", size, "none"))
    if promise is None:
        return size
    over, tried = 0, size
    for _ in range(_ATTEMPTS):
        over, tried = _used(loaded, device, sizes, size, promise) - promise.size_bytes, size
        if over <= 0:
            return size
        size -= over
        if loaded.options.budget_bytes is None or size < cache.cycle_bytes:
            break
    raise _too_large(cache, tried, promise.size_bytes, over)


def _used(loaded: LoadedPool, device: Device, sizes: ContextOptions, size: int, promise: Promise) -> int:
    with open_own_cache(loaded, device, sizes, size) as run:
        before = promise.used_bytes()
        run.context.decode([0] * run.context.n_prompt)  # kernels ask for rooms of their own
        run.context.logits  # noqa: B018 - waits for the device
        return max(before, promise.used_bytes())


def _too_large(cache: CacheSizes, size: int, promised: int, over: int) -> UsageError:
    most = size - over
    what = f"{sum(cache.slots(most))} experts would fit" if most >= cache.cycle_bytes else "no cache of a token's experts fits"
    return UsageError(
        "llama.cpp's own cache does not keep to the memory that is allowed on the GPU",
        found=f"{format_bytes(promised + over)} with a cache of {sum(cache.slots(size))} experts",
        expected=f"at most {format_bytes(promised)}: {what}",
        hint="Give a larger --vram or fewer slots, a smaller --context, or a smaller --ubatch",
    )


def cache_context(loaded: LoadedPool) -> ContextOptions:
    """Sizes of its context: with all threads, for a batch that neither the cache nor the GPU takes.  Of a single token the CPU
    looks up the embedding alone, and waking threads for that would take longer."""
    return dataclasses.replace(loaded.sizes, n_threads=loaded.options.n_threads, n_threads_single=1)
