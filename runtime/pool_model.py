"""A model whose experts have slots in the memory of a device, with all experts in host memory behind them.

llama.cpp loads the dense weights and experts without memory; the graph's stops let each choice of the router find its
experts in the slots, or on the stage, or have the CPU compute them.  Nothing of llama.cpp is changed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bel.formats.bundle import Bundle, check_sizes
from bel.formats.errors import MachineError, UsageError
from bel.formats.experts_file import LayerLayout
from bel.formats.manifest import EXPERTS
from bel.runtime.bundle_model import check_headers, load_bundle
from bel.runtime.context import Context, ContextOptions
from bel.runtime.engine import Engine, Model
from bel.runtime.pool_costs import MissCosts, measure_costs
from bel.runtime.pool_counters import PoolCounters
from bel.runtime.pool_experts import CpuExperts
from bel.runtime.pool_graph import ARCHITECTURES, GraphLearner, LayerGraph, scratch_bytes
from bel.runtime.pool_home import Home
from bel.runtime.pool_hosts import HostExperts
from bel.runtime.pool_layers import LayerSlots, layer_slots
from bel.runtime.pool_native import NativePool
from bel.runtime.pool_observer import PoolObserver
from bel.runtime.pool_options import MODES, PoolOptions, check_options, slot_counts
from bel.runtime.pool_parts import PoolParts
from bel.runtime.pool_step import SPLIT, UPLOAD
from bel.runtime.slot_buffer import SlotType
from bel.runtime.slot_memory import SLOT, HomeBytes, SlotMemory
from bel.runtime.slot_stage import StackShape, stage_bytes

_TRIAL_POSITIONS = 32


@dataclass(frozen=True, slots=True)
class Pool:
    """The slots of a running model.  `layers` go with `counts`, those of the bundle that decoding reaches.

    `share` of a decoded token's misses is uploaded in the mode `split`, as `costs` say where it was not given.  `host_bytes` of
    host memory hold the experts; `is_pinned`: the home copies from there by itself.  `preloaded_bytes` were copied to the home
    before the first token.
    """

    home: str
    layers: tuple[LayerLayout, ...]
    counts: tuple[int, ...]
    slots: tuple[LayerSlots, ...]
    counters: PoolCounters
    bytes: HomeBytes
    host_bytes: int
    is_pinned: bool
    preloaded_bytes: int
    share: float
    costs: MissCosts | None


@dataclass(frozen=True, slots=True)
class PoolRun:
    """A running model with its pool."""

    model: Model
    context: Context
    pool: Pool


@contextlib.contextmanager
def open_pool(
    engine: Engine,
    bundle: Bundle,
    options: ContextOptions | Callable[[Model], ContextOptions],
    pool: PoolOptions,
    home: Home,
) -> Iterator[PoolRun]:
    """Load a bundle with its experts in slots of `home`, and make a context.  `options` may be a function of the model.

    Raises DamagedBundleError for a bundle that is not whole, UsageError for an architecture that the pool does not know and
    for slots that do not do, MachineError where the machine refuses.
    """
    check_options(pool)
    check_architecture(bundle)
    check_sizes(bundle)
    check_headers(bundle)
    places = [place for place, layer in enumerate(bundle.manifest.layers) if not layer.is_mtp]
    layers = tuple(bundle.manifest.layers[place] for place in places)
    counts = slot_counts(pool, layers, stage_bytes(_shapes(bundle, layers), home.reads_ahead))
    with contextlib.ExitStack() as stack:
        # What is pushed is closed in reverse: first the context and the model, then what their weights point into.
        hosts = HostExperts(home, bundle, places, reader=pool.reader, checks=pool.checks)
        stack.callback(hosts.close)
        late = stack.enter_context(contextlib.ExitStack())
        model = stack.enter_context(_load(engine, bundle, home))
        graphs = _learn(model, bundle, layers, home)
        memory = SlotMemory(home, engine.library.ffi, graphs, counts, hosts)
        late.callback(memory.close)
        slots = _slots(graphs, counts, pool)
        for i in range(len(layers)):
            memory.point(i, SLOT)
        preloaded = _preload(memory, layers, slots, pool)
        mode, counters, cpu, costs = MODES[pool.mode], PoolCounters(), None, None
        if mode != UPLOAD:
            cpu = CpuExperts(engine.library, home.abi, graphs, hosts, memory, pool.n_threads)
            late.callback(cpu.close)
            costs = measure_costs(graphs, memory, cpu) if mode == SPLIT and pool.share is None else None
        share = costs.share if costs is not None else pool.share or 0.0
        sizes = options if isinstance(options, ContextOptions) else options(model)
        parts = PoolParts(graphs, slots, hosts, memory, cpu, counters, mode, share)
        if pool.is_native:
            native = NativePool(engine.library, home.abi, parts, n_rows=sizes.n_ubatch, spin_us=pool.spin_us)
            late.callback(native.close)
            context = stack.enter_context(model.context(sizes, native.callback, native.end))
        else:
            observer = PoolObserver(home.abi, parts)
            context = stack.enter_context(model.context(sizes, observer, observer.end))
        yield PoolRun(
            model,
            context,
            Pool(
                home=home.name,
                layers=layers,
                counts=counts,
                slots=slots,
                counters=counters,
                bytes=memory.bytes,
                host_bytes=hosts.size_bytes,
                is_pinned=hosts.is_pinned,
                preloaded_bytes=preloaded,
                share=share,
                costs=costs,
            ),
        )


def check_architecture(bundle: Bundle) -> None:
    """Raise UsageError for a model whose graph the pool does not know."""
    manifest = bundle.manifest
    if manifest.arch not in ARCHITECTURES:
        raise UsageError(f"the slot pool does not know the architecture {manifest.arch}", expected=", ".join(ARCHITECTURES))
    if not any(not layer.is_mtp for layer in manifest.layers):
        raise UsageError("the model has no layer with experts", path=str(bundle.folder))


def _shapes(bundle: Bundle, layers: Sequence[LayerLayout]) -> list[list[StackShape]]:
    rows = bundle.manifest.tensors
    return [
        [StackShape(rows[p.tensor].type_id, rows[p.tensor].ne[0], p.size_bytes, layer.n_expert) for p in layer.parts]
        for layer in layers
    ]


@contextlib.contextmanager
def _load(engine: Engine, bundle: Bundle, home: Home) -> Iterator[Model]:
    names = [re.escape(row.name) for row in bundle.manifest.tensors if row.dest == EXPERTS]
    slot_type = SlotType(home)
    pattern = f"^({'|'.join(names)})$"
    with contextlib.ExitStack() as stack:
        with slot_type:
            loading = load_bundle(engine, bundle, gpu_layers=home.gpu_layers, buffer_types=[(pattern, slot_type.pointer)])
            model = stack.enter_context(loading)
        yield model


def _learn(model: Model, bundle: Bundle, layers: Sequence[LayerLayout], home: Home) -> list[LayerGraph]:
    """Compute one token for nothing but the names of its nodes."""
    abi = home.abi
    buffer = abi.lib.ggml_backend_buft_alloc_buffer(home.kind, scratch_bytes(layers))
    if buffer == abi.ffi.NULL:
        raise MachineError(f"{home.name} has no memory for a token's experts", path=abi.path)
    try:
        abi.lib.ggml_backend_buffer_clear(buffer, 0)
        base = abi.number(abi.lib.ggml_backend_buffer_get_base(buffer))
        learner = GraphLearner(home, model.engine.library.ffi, layers, bundle.manifest.tensors, base)
        sizes = ContextOptions(_TRIAL_POSITIONS, _TRIAL_POSITIONS, _TRIAL_POSITIONS, 1, n_outputs=1)
        with model.context(sizes, learner) as context:
            context.decode([0])
        return learner.finish()
    finally:
        abi.lib.ggml_backend_buffer_free(buffer)


def _slots(graphs: Sequence[LayerGraph], counts: Sequence[int], pool: PoolOptions) -> tuple[LayerSlots, ...]:
    for graph, count in zip(graphs, counts, strict=True):
        if count < graph.top_k:
            raise UsageError(
                f"{count} slots in layer {graph.layer} are fewer than its top-k: a token needs {graph.top_k} at once"
            )
    return tuple(layer_slots(x.n_expert, count, x.top_k, pool.policy) for x, count in zip(graphs, counts, strict=True))


def _preload(memory: SlotMemory, layers: Sequence[LayerLayout], slots: Sequence[LayerSlots], pool: PoolOptions) -> int:
    """Fill the slots with the experts that are wanted.  Returns the bytes."""
    total = 0
    for i, (layer, state) in enumerate(zip(layers, slots, strict=True)):
        wanted = list(pool.wanted.get(layer.layer, ()))
        if not all(0 <= expert < layer.n_expert for expert in wanted):
            raise UsageError(
                f"an expert is wanted that layer {layer.layer} does not have", expected=f"0 to {layer.n_expert - 1}"
            )
        if pool.mode == "static":  # a slot that stays empty would be lost
            wanted += range(layer.n_expert)
        for expert, slot in state.preload(wanted):
            total += memory.upload(i, expert, slot)
    memory.wait()
    return total
