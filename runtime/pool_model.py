"""A model whose experts have slots in the memory of a device, with all or some of the others in host memory behind them.

llama.cpp loads the dense weights and experts without memory; the graph's stops let each choice of the router find its
experts in the slots, or on the stage, or have the CPU compute them.  Nothing of llama.cpp is changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bel.formats.bundle import Bundle
from bel.formats.errors import UsageError
from bel.formats.experts_file import LayerLayout
from bel.runtime.context import Context, ContextOptions
from bel.runtime.engine import Engine, Model
from bel.runtime.policies import Policy, parse_policy
from bel.runtime.pool_costs import MissCosts, measure_costs
from bel.runtime.pool_counters import PoolCounters
from bel.runtime.pool_experts import CpuExperts
from bel.runtime.pool_graph import LayerGraph
from bel.runtime.pool_home import Home
from bel.runtime.pool_layers import LayerSlots, layer_slots
from bel.runtime.pool_loading import LoadedPool, load_pool
from bel.runtime.pool_native import NativePool
from bel.runtime.pool_observer import PoolObserver
from bel.runtime.pool_options import MODES, PoolOptions, check_options
from bel.runtime.pool_parts import PoolParts
from bel.runtime.pool_self_test import observed, self_test
from bel.runtime.pool_step import SPLIT, UPLOAD
from bel.runtime.pool_tiers import HostTier, make_tier
from bel.runtime.pool_tiers_hosts import TierHosts
from bel.runtime.pool_tiers_observer import TierObserver
from bel.runtime.slot_memory import SLOT, HomeBytes, SlotMemory


@dataclass(frozen=True, slots=True)
class Pool:
    """The slots of a running model.  `layers` go with `counts`, those of the bundle that decoding reaches.

    `mode` and `policy` are those in force; `share` of a decoded token's misses is uploaded in the mode `split`, as `costs` say
    where it was not given.  `host_bytes` is the host memory that holds the experts, `is_pinned` whether the home copies from it
    by itself, `preloaded_bytes` what was copied to the home before the first token.  `tier`: what host memory holds where that
    is not all experts.
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
    mode: str
    policy: str
    share: float
    costs: MissCosts | None
    tier: HostTier | None = None


class PoolRun:
    """A running model with its pool."""

    def __init__(self, model: Model, context: Context, pool: Pool, use: Callable[[str, Policy], Pool] | None = None) -> None:
        self.model, self.context, self.pool = model, context, pool
        self._use = use

    @property
    def can_change(self) -> bool:
        """Whether `use` works: for a pool with a compiled callback and the CPU's experts."""
        return self._use is not None

    def use(self, mode: str, policy: Policy) -> None:
        """Go on in another mode, with slots as they were at the start; between decodes.  Raises UsageError for what does not go
        together."""
        if self._use is None:
            raise UsageError("this pool stays in the mode in which it was opened")
        self.pool = self._use(mode, policy)


@contextlib.contextmanager
def open_pool(
    engine: Engine,
    bundle: Bundle,
    options: ContextOptions | Callable[[Model], ContextOptions],
    pool: PoolOptions,
    home: Home,
    *,
    used_bytes: Callable[[], int] | None = None,
) -> Iterator[PoolRun]:
    """Load a bundle with its experts in slots of `home`, and make a context.  `options` may be a function of the model.

    `used_bytes` says how much of the home's memory this process has taken; with it a budget is for everything there, and
    without it for the pool alone.  Raises DamagedBundleError for a bundle that is not whole, UsageError for an architecture
    that the pool does not know and for slots that do not do, MachineError where the machine refuses.
    """
    with load_pool(engine, bundle, options, pool, home, used_bytes=used_bytes) as loaded, open_slots(loaded, pool) as run:
        yield run


@contextlib.contextmanager
def open_slots(loaded: LoadedPool, pool: PoolOptions, known: MissCosts | None = None) -> Iterator[PoolRun]:
    """Make the slots of a loaded model, and a context; at its end their memory is free for others, and the model as before.

    `pool` may differ from the options of the loading in its mode and policy.  `known`: the costs of misses, where they were
    measured before.  One at a time, and with no context of another kind on the model.
    """
    check_options(pool)
    engine, model, home, sizes = loaded.engine, loaded.model, loaded.home, loaded.sizes
    layers, graphs, counts, hosts = loaded.layers, loaded.graphs, loaded.counts, loaded.hosts
    with contextlib.ExitStack() as stack:
        # What is pushed is closed in reverse: first the context, then what its callback works with.
        late = stack.enter_context(contextlib.ExitStack())
        memory = SlotMemory(home, engine.library.ffi, graphs, counts, hosts)
        late.callback(memory.close)
        late.callback(_restore_biases, engine, graphs)
        for i in range(len(layers)):
            memory.point(i, SLOT)
        slots, counters = _slots(graphs, counts, pool.policy), PoolCounters()
        mode, native, cpu, costs, tier = MODES[pool.mode], None, None, None, None
        if isinstance(hosts, TierHosts):
            tier = make_tier(home.abi, hosts, memory, slots, pool.host_tier, counters)
        if mode != UPLOAD:
            cpu = CpuExperts(engine.library, home.abi, graphs, hosts, memory, pool.n_threads)
            late.callback(cpu.close)
            if mode == SPLIT and pool.share is None:
                costs = known or measure_costs(graphs, memory, cpu)
        share = costs.share if costs is not None else pool.share or 0.0
        parts = PoolParts(graphs, slots, hosts, memory, cpu, counters, mode, share)
        tested = dataclasses.replace(parts, layers=_slots(graphs, counts, parse_policy("lru")), mode=UPLOAD)
        if pool.is_native and tier is None:
            native = NativePool(engine.library, home, tested, n_rows=sizes.n_ubatch, spin_us=pool.spin_us, n_ahead=pool.n_ahead)
            late.callback(native.close)
            self_test(model, graphs, memory, native.context)
        else:
            self_test(model, graphs, memory, observed(PoolObserver(home.abi, dataclasses.replace(tested, cpu=None))))
        counters.reset()
        preloaded = _preload(memory, layers, slots, pool, tier)
        made = Pool(
            home=home.name,
            layers=layers,
            counts=counts,
            slots=slots,
            counters=counters,
            bytes=memory.bytes,
            host_bytes=hosts.size_bytes,
            is_pinned=hosts.is_pinned,
            preloaded_bytes=preloaded,
            mode=pool.mode,
            policy=pool.policy.name,
            share=share,
            costs=costs,
            tier=tier,
        )
        if native is None:
            observer = PoolObserver(home.abi, parts) if tier is None else TierObserver(home.abi, parts, tier.mover)
            context = stack.enter_context(model.context(sizes, observer, observer.end))
            yield PoolRun(model, context, made)
            return
        native.use(slots, mode, share)
        context = stack.enter_context(native.context(model, sizes))

        def use(name: str, policy: Policy) -> Pool:
            changed = dataclasses.replace(pool, mode=name, policy=policy)
            check_options(changed)
            fresh = _slots(graphs, counts, policy)
            native.wait()  # nobody need have asked for the last logits
            size = _preload(memory, layers, fresh, changed)
            native.use(fresh, MODES[name], share)
            return dataclasses.replace(made, slots=fresh, preloaded_bytes=size, mode=name, policy=policy.name)

        yield PoolRun(model, context, made, None if cpu is None else use)


def _restore_biases(engine: Engine, graphs: Sequence[LayerGraph]) -> None:
    """Let them be where the loader put them: from there the next slots copy them, and llama.cpp's own layout reads them."""
    ffi = engine.library.ffi
    for bias in (bias for graph in graphs for bias in graph.biases):
        ffi.cast("struct ggml_tensor *", bias.tensor).data = ffi.cast("void *", bias.data)


def _slots(graphs: Sequence[LayerGraph], counts: Sequence[int], policy: Policy) -> tuple[LayerSlots, ...]:
    for graph, count in zip(graphs, counts, strict=True):
        if count < graph.top_k:
            raise UsageError(
                f"{count} slots in layer {graph.layer} are fewer than its top-k: a token needs {graph.top_k} at once"
            )
    return tuple(layer_slots(x.n_expert, count, x.top_k, policy) for x, count in zip(graphs, counts, strict=True))


def _preload(
    memory: SlotMemory,
    layers: Sequence[LayerLayout],
    slots: Sequence[LayerSlots],
    pool: PoolOptions,
    tier: HostTier | None = None,
) -> int:
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
        if tier is not None:
            total += tier.mover.preload(i, wanted)
            continue
        for expert, slot in state.preload(wanted):
            total += memory.upload(i, expert, slot)
    memory.wait()
    return total
