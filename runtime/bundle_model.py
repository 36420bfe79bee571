"""A model that runs from its bundle: dense weights in llama.cpp's hands, experts in slots under a budget.

llama.cpp loads the dense file and a skeleton that declares the experts; the first graph shows where their weights are, and
they are pointed into the arena.  Nothing of llama.cpp is changed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bel.formats.atomic import read_head
from bel.formats.bundle import Bundle, check_sizes, expected_experts_header
from bel.formats.errors import DamagedBundleError, UsageError
from bel.formats.experts_file import PAGE_BYTES, LayerLayout
from bel.formats.process import rss_bytes
from bel.runtime.arena import Arena
from bel.runtime.context import Context, ContextOptions, Observer
from bel.runtime.engine import Engine, Model, ModelOptions
from bel.runtime.expert_cache import ExpertCache
from bel.runtime.expert_observer import ExpertObserver
from bel.runtime.file_watch import FileWatch, watch_bundle
from bel.runtime.pager import Pager
from bel.runtime.policies import Policy
from bel.runtime.readers import open_reader
from bel.runtime.skeleton import make_skeleton
from bel.runtime.slot_budget import (
    PREFETCH_BYTES,
    MemorySum,
    ahead_bytes,
    call_bytes,
    check_floor,
    fitting_slots,
    slots_bytes,
    uniform_slots,
)

_MIB = 1 << 20
_BUFFER_LINE = re.compile(r"(KV|RS|compute) buffer size =\s*([\d.]+) MiB")


@dataclass(frozen=True, slots=True)
class SlotOptions:
    """How many slots, and how they are managed.

    One of `slots` (in each layer, clamped to its experts), `slots_by_layer` (a plan's) and `ram_bytes` (as many as fit into
    this memory, everything included); without any, all experts have slots.  `wanted` {layer: experts} are loaded before the
    first token, as far as there are slots.  `reader`: auto, io_uring, threads or buffered.
    """

    policy: Policy
    slots: int | None = None
    slots_by_layer: dict[int, int] | None = None
    ram_bytes: int | None = None
    wanted: dict[int, Sequence[int]] | None = None
    reader: str = "auto"
    checks: bool = True
    prefetch_bytes: int = PREFETCH_BYTES


@dataclass(frozen=True, slots=True)
class BundleRun:
    """A running bundle.  `memory` is the sum that the slots were computed from."""

    model: Model
    context: Context
    cache: ExpertCache
    pager: Pager
    layers: tuple[LayerLayout, ...]
    memory: MemorySum
    uploaded_bytes: int


@contextlib.contextmanager
def open_run(
    engine: Engine,
    bundle: Bundle,
    options: ContextOptions | Callable[[Model], ContextOptions],
    slots: SlotOptions,
    inner: Observer | None = None,
    watch: FileWatch | None = None,
) -> Iterator[BundleRun]:
    """Load a bundle and make a context on it.  `options` may be a function of the model, for sizes that depend on its tokens.

    `watch` is one of `watch_bundle` from before anything of the bundle was checked, and stays the caller's; without it one
    begins here.

    Raises DamagedBundleError for a bundle that is not whole, UsageError where slots or memory do not do, MachineError where
    the machine refuses.
    """
    layers, manifest = bundle.manifest.layers, bundle.manifest
    process_bytes = rss_bytes()
    with contextlib.ExitStack() as stack:
        watch = watch or stack.enter_context(watch_bundle(bundle))
        check_sizes(bundle)
        check_headers(bundle)
        arena = Arena(layers)
        stack.callback(arena.close)  # the last to go: the model's weights point into it
        reader = open_reader([bundle.path(row.name) for row in manifest.experts], kind=slots.reader)
        stack.callback(reader.close)
        pager = Pager(bundle, reader, watch=watch, checks=slots.checks)
        model = stack.enter_context(load_bundle(engine, bundle, watch))
        observer = ExpertObserver(layers, manifest.tensors, arena, inner)
        sizes = options if isinstance(options, ContextOptions) else options(model)
        engine.log.clear()
        context = stack.enter_context(model.context(sizes, observer, observer.end))
        kv_bytes, compute_bytes = context_buffers(engine)
        other = process_bytes + manifest.dense.size_bytes + kv_bytes + compute_bytes
        ahead = ahead_bytes(slots.prefetch_bytes, slots.ram_bytes)
        counts = _counts(layers, slots, other, context.n_ubatch, ahead)
        observer.cache = ExpertCache(pager, arena, slots.policy, counts, prefetch_bytes=ahead)
        memory = MemorySum(
            process=process_bytes,
            dense=manifest.dense.size_bytes,
            kv=kv_bytes,
            compute=compute_bytes,
            call=call_bytes(layers, counts, context.n_ubatch, ahead),
            slots=slots_bytes(layers, counts),
        )
        wanted = slots.wanted or {}
        uploaded = observer.cache.preload([wanted.get(layer.layer, ()) for layer in layers])
        yield BundleRun(model, context, observer.cache, pager, layers, memory, uploaded)


def _counts(layers: Sequence[LayerLayout], options: SlotOptions, other_bytes: int, rows: int, ahead: int) -> tuple[int, ...]:
    """Slots of each layer; none for MTP blocks, which no run reaches."""
    given = [x for x in (options.slots, options.slots_by_layer, options.ram_bytes) if x is not None]
    if len(given) > 1:
        raise UsageError("slots, a plan and a memory budget exclude each other", hint="Give one of them")
    reached = [layer for layer in layers if not layer.is_mtp]
    if options.ram_bytes is not None:
        counts = fitting_slots(reached, other_bytes, options.ram_bytes, rows, ahead)
    elif options.slots_by_layer is not None:
        plan = options.slots_by_layer
        missing = [layer.layer for layer in reached if layer.layer not in plan]
        if missing:
            raise UsageError(f"the plan has no slots for layer {missing[0]}")
        counts = tuple(plan[layer.layer] for layer in reached)
    else:
        counts = uniform_slots(reached, options.slots if options.slots is not None else max(x.n_expert for x in layers))
    check_floor(reached, counts)
    by_layer = {layer.layer: count for layer, count in zip(reached, counts, strict=True)}
    return tuple(0 if layer.is_mtp else by_layer[layer.layer] for layer in layers)


@contextlib.contextmanager
def load_bundle(
    engine: Engine,
    bundle: Bundle,
    watch: FileWatch,
    *,
    gpu_layers: int = 0,
    buffer_types: Sequence[tuple[str, Any]] = (),
    device: int | None = None,
) -> Iterator[Model]:
    """The model with its experts declared and nowhere.  `gpu_layers`, `buffer_types`, `device`: see `ModelOptions`.

    The dense file is pristine: that it is the first of a split set is said by overrides (llama-model-loader.cpp, `get_key`).
    """
    manifest = bundle.manifest
    names = [manifest.dense.name, *([manifest.ple.name] if manifest.ple else [])]
    with make_skeleton(manifest, len(names)) as skeleton:
        overrides: dict[str, int | float | bool | str] = {
            "split.no": 0,
            "split.count": len(names) + 1,
            "split.tensors.count": len(manifest.tensors),
        }
        options = ModelOptions(
            overrides=overrides,
            reads_tables_lazily=True,
            gpu_layers=gpu_layers,
            buffer_types=buffer_types,
            device=device,
        )
        engine.on_loading = skeleton.empty
        try:
            model = engine.load_files([*map(bundle.path, names), skeleton.path], options, watch=watch)
        finally:
            engine.on_loading = None
        with model:
            skeleton.empty()
            yield model


def check_headers(bundle: Bundle) -> None:
    """The first page of each experts file names its bundle: blobs of another one are not read."""
    for shard, row in enumerate(bundle.manifest.experts):
        path = bundle.path(row.name)
        if read_head(path, PAGE_BYTES) != expected_experts_header(bundle.manifest, shard):
            raise DamagedBundleError("the header of the experts file is not this bundle's", path=str(path))


def context_buffers(engine: Engine) -> tuple[int, int]:
    """Bytes of the KV (and recurrent state) buffers and of the compute buffers, as llama.cpp logs them for a new context."""
    sizes = {"KV": 0.0, "RS": 0.0, "compute": 0.0}
    for _, line in engine.log:
        match = _BUFFER_LINE.search(line)
        if match:
            sizes[match[1]] += float(match[2])
    return int((sizes["KV"] + sizes["RS"]) * _MIB), int(sizes["compute"] * _MIB)
