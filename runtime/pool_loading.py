"""A bundle's model in memory before it has slots: dense weights in a device's, experts in the host's, and its graph learnt.

llama.cpp loads the dense weights and experts without memory.  What is made here stays as long as the run; the slots of
`pool_model.py` and the contexts of `gpu_cache.py` come and go upon it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bel.formats.bundle import Bundle, check_sizes
from bel.formats.errors import MachineError, UsageError
from bel.formats.experts_file import LayerLayout
from bel.formats.manifest import EXPERTS
from bel.formats.units import format_bytes
from bel.runtime.bundle_model import check_headers, load_bundle
from bel.runtime.context import ContextOptions
from bel.runtime.engine import Engine, Model
from bel.runtime.file_watch import FileWatch, watch_bundle
from bel.runtime.pool_graph import ARCHITECTURES, ChoiceObserver, GraphLearner, LayerGraph, choose_first, scratch_bytes
from bel.runtime.pool_home import Home
from bel.runtime.pool_hosts import HostExperts
from bel.runtime.pool_options import PoolOptions, check_options, host_counts, slot_counts
from bel.runtime.pool_stacks import read_experts
from bel.runtime.pool_tiers_hosts import TierHosts
from bel.runtime.slot_buffer import SlotType
from bel.runtime.slot_stage import StackShape, stage_bytes

_TRIAL = ContextOptions(32, 32, 32, 1, n_outputs=1)


@dataclass(frozen=True, slots=True)
class LoadedPool:
    """A loaded model without slots.  `layers`, `graphs` and `counts` go together: the bundle's layers that decoding reaches,
    and how many slots each is to have.  `sizes` are those of its contexts.
    """

    engine: Engine
    bundle: Bundle
    model: Model
    home: Home
    options: PoolOptions
    sizes: ContextOptions
    layers: tuple[LayerLayout, ...]
    graphs: tuple[LayerGraph, ...]
    counts: tuple[int, ...]
    hosts: HostExperts


@contextlib.contextmanager
def load_pool(
    engine: Engine,
    bundle: Bundle,
    options: ContextOptions | Callable[[Model], ContextOptions],
    pool: PoolOptions,
    home: Home,
    *,
    used_bytes: Callable[[], int] | None = None,
    watch: FileWatch | None = None,
) -> Iterator[LoadedPool]:
    """Load a bundle for slots in `home`.  Arguments and errors are those of `open_pool`; `watch` is that of `open_run`."""
    check_options(pool)
    check_architecture(bundle)
    places = [place for place, layer in enumerate(bundle.manifest.layers) if not layer.is_mtp]
    layers = tuple(bundle.manifest.layers[place] for place in places)
    stage = stage_bytes(_shapes(bundle, layers), home.reads_ahead)
    least = slot_counts(pool, layers, stage)  # what cannot do is refused before anything is loaded
    if pool.has_tiers:
        host_counts(pool, layers, least)
    with contextlib.ExitStack() as stack:
        watch = watch or stack.enter_context(watch_bundle(bundle))
        check_sizes(bundle)
        check_headers(bundle)
        # What is pushed is closed in reverse: first the model, then what its weights may point into.
        late = stack.enter_context(contextlib.ExitStack())
        model = stack.enter_context(_load(engine, bundle, watch, home))
        sizes = options if isinstance(options, ContextOptions) else options(model)
        graphs, taken = _learn(model, bundle, layers, home, sizes, used_bytes)
        counts = slot_counts(_less(pool, taken), layers, stage)
        hosts: HostExperts
        if pool.has_tiers:
            held = host_counts(pool, layers, counts)
            hosts = TierHosts(home, bundle, places, held, reader=pool.reader, checks=pool.checks)
        else:
            hosts = read_experts(home, bundle, places, reader=pool.reader, checks=pool.checks)
        late.callback(hosts.close)
        yield LoadedPool(engine, bundle, model, home, pool, sizes, layers, tuple(graphs), counts, hosts)


def _less(pool: PoolOptions, taken_bytes: int) -> PoolOptions:
    """The options with what is left of the budget."""
    if pool.budget_bytes is None or not taken_bytes:
        return pool
    if pool.budget_bytes <= taken_bytes:
        raise UsageError(
            f"the weights that every token uses, the KV cache and the buffers of llama.cpp take {format_bytes(taken_bytes)} of "
            f"the device's memory, and {format_bytes(pool.budget_bytes)} are allowed",
            hint="Give a larger --vram, a smaller --context, or a smaller --ubatch",
        )
    return dataclasses.replace(pool, budget_bytes=pool.budget_bytes - taken_bytes)


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
def _load(engine: Engine, bundle: Bundle, watch: FileWatch, home: Home) -> Iterator[Model]:
    names = [re.escape(row.name) for row in bundle.manifest.tensors if row.dest == EXPERTS]
    slot_type = SlotType(home)
    pattern = f"^({'|'.join(names)})$"
    with contextlib.ExitStack() as stack:
        with slot_type:
            # The CPU is no device that layers go to.  Of several GPUs only this one may have layers.
            device = home.abi.number(home.device) if home.gpu_layers else None
            types = [(pattern, slot_type.pointer)]
            loading = load_bundle(engine, bundle, watch, gpu_layers=home.gpu_layers, buffer_types=types, device=device)
            model = stack.enter_context(loading)
        yield model


def _learn(
    model: Model,
    bundle: Bundle,
    layers: Sequence[LayerLayout],
    home: Home,
    sizes: ContextOptions,
    used_bytes: Callable[[], int] | None,
) -> tuple[list[LayerGraph], int]:
    """Compute one token for nothing but the names of its nodes.  With `used_bytes` also a prompt as long as one graph can be,
    for what of the home's memory the model, a context, and the rooms that kernels ask for take."""
    abi = home.abi
    trial = sizes if used_bytes is not None else _TRIAL
    buffer = abi.lib.ggml_backend_buft_alloc_buffer(home.kind, scratch_bytes(layers))
    if buffer == abi.ffi.NULL:
        raise MachineError(f"{home.name} has no memory for a token's experts", path=abi.path)
    try:
        abi.lib.ggml_backend_buffer_clear(buffer, 0)
        base = abi.number(abi.lib.ggml_backend_buffer_get_base(buffer))
        learner = GraphLearner(home, model.engine.library.ffi, layers, bundle.manifest.tensors, base)
        with model.context(trial, learner) as context:
            context.decode([0])
        graphs, taken = learner.finish(), 0
        if used_bytes is not None:
            first = ChoiceObserver(graphs, lambda _, ids: choose_first(home, ids))
            with model.context(trial, first) as context:
                context.decode([0] * context.n_prompt)
                taken = used_bytes() - scratch_bytes(layers)
        return graphs, taken
    finally:
        abi.lib.ggml_backend_buffer_free(buffer)
