"""A bundle that runs with a GPU: dense weights and slots for experts in its memory, the experts in the host's behind it.

The ways: `upload` brings a missing expert into a slot before it is used, which gives the logits of llama.cpp with everything on
the GPU, bit by bit, while decoding; `static` never changes the slots and has the CPU compute what is missing; `split` does both
at once; `cache` has llama.cpp's own cache of experts in the slots' place; `auto` tries those that can be and takes the fastest.
Where the host's memory does not do for all experts it holds some that have no slot, the others are on disk alone, and `upload`
is the only way.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

from bel.formats.bundle import Bundle, check_sizes
from bel.formats.errors import UsageError
from bel.formats.plan import Plan
from bel.formats.process import rss_bytes
from bel.formats.units import MIB, format_bytes
from bel.runtime.context import ContextOptions
from bel.runtime.devices import find_gpu, free_device_bytes
from bel.runtime.engine import Engine, Model
from bel.runtime.file_watch import FileWatch
from bel.runtime.first_check import check_dense, check_tails
from bel.runtime.gpu_cache import Promise, needs_all_experts
from bel.runtime.gpu_run import GpuRun
from bel.runtime.policies import STATIC, Policy, parse_policy
from bel.runtime.pool_home import device_home
from bel.runtime.pool_loading import load_pool
from bel.runtime.pool_options import N_AHEAD, PoolOptions
from bel.runtime.run_options import AUTO, CACHE, DEFAULT_POLICY, RunOptions
from bel.runtime.stock_gpu import check_engine

HOST_MARGIN_BYTES = 64 * MIB
"""Of host memory, for what no line of the sum has: buffers of readers, page tables, the driver's own."""
SPARE_CORES = 4
"""Not used for experts on the CPU: the thread that drives the GPU must never wait for a core (measured on 16 cores)."""
RESERVE_BYTES = 256 * MIB
"""Left free on a GPU where no --vram is given: for its driver, and for whoever draws the screen."""


@contextlib.contextmanager
def open_gpu(
    options: RunOptions,
    bundle: Bundle,
    plan: Plan | None,
    sizes: Callable[[Model], ContextOptions],
    watch: FileWatch,
) -> Iterator[GpuRun]:
    """Load a bundle, which `watch` watches, with its slots on a GPU.

    Raises MachineError where there is no GPU, or too little memory for the experts; UsageError for what does not go together.
    """
    policy = parse_policy(options.policy)
    pool = _pool_options(options, plan, policy)
    engine = Engine.open(options.engine)
    if options.gpu == CACHE:
        check_engine(engine)
    device = find_gpu(engine, options.gpu_number)
    home = device_home(engine, device.address)
    check_sizes(bundle)
    pool = _with_host_tier(pool, options, bundle)
    if options.checks:
        check_dense(bundle)
        check_tails(bundle)
    before = free_device_bytes(engine, device)
    vram_bytes = options.vram_bytes or max(0, before - RESERVE_BYTES)
    if pool.slots is None and pool.slots_by_layer is None:
        pool = replace(pool, budget_bytes=vram_bytes)

    def used() -> int:
        return before - free_device_bytes(engine, device)

    def one_thread(model: Model) -> ContextOptions:
        # What llama.cpp itself has the CPU do is a row of a table: its threads would be in the way of the missing experts'.
        return replace(sizes(model), n_threads=1)

    has_own_memory = home.kind != home.abi.lib.ggml_backend_cpu_buffer_type()
    with (
        load_pool(engine, bundle, one_thread, pool, home, used_bytes=used if has_own_memory else None, watch=watch) as loaded,
        GpuRun(loaded, device, options.gpu or AUTO, policy, Promise(vram_bytes, used), keeps_promise=has_own_memory) as run,
    ):
        yield run


def _pool_options(options: RunOptions, plan: Plan | None, policy: Policy) -> PoolOptions:
    way = options.gpu or AUTO
    if way == "static" and plan is None:
        raise UsageError("--gpu static keeps what a plan preloads, and there is no plan", hint="Give --plan, or another way")
    if policy.kind == STATIC and way != "static":
        raise UsageError(f"the policy static does not go with --gpu {way}", hint="Give --gpu static, or another --policy")
    if way == "static" and policy.kind != STATIC and options.policy != DEFAULT_POLICY:
        raise UsageError(
            f"the slots of --gpu static never change: --policy {options.policy} does not go with it",
            hint="Leave --policy out, or give another way",
        )
    threads = options.n_threads or max(1, len(os.sched_getaffinity(0)) - SPARE_CORES)
    return PoolOptions(
        mode={AUTO: "split", CACHE: "upload"}.get(way, way),  # split has all that the others need
        policy=parse_policy("static") if way == "static" else policy,
        slots=options.slots,
        slots_by_layer=None if plan is None else {x.layer: x.slots for x in plan.layers},
        wanted={} if plan is None else {x.layer: x.preload for x in plan.layers},
        n_threads=threads,
        n_ahead=N_AHEAD if options.prefetches else 0,
        reader=options.reader,
        checks=options.checks,
    )


def _with_host_tier(pool: PoolOptions, options: RunOptions, bundle: Bundle) -> PoolOptions:
    """The options as they are where host memory does for all experts; else with a host tier of what there is for them."""
    from bel.runtime.running import spare_bytes  # which opens this module's runs

    promised = spare_bytes() if options.ram_bytes is None else options.ram_bytes
    room = promised - rss_bytes() - bundle.manifest.dense.size_bytes - HOST_MARGIN_BYTES
    need = sum(layer.size_bytes for layer in bundle.manifest.layers if not layer.is_mtp)
    if room >= need:
        return pool
    if room <= 0:
        taken = promised - room
        raise UsageError(
            f"{format_bytes(promised)} of host memory leave nothing for experts: the program, dense weights while they load, "
            f"and buffers take {format_bytes(taken)}",
            hint="Give a larger --ram",
        )
    if options.gpu == CACHE:
        raise needs_all_experts()
    mode = "upload" if options.gpu == AUTO else pool.mode
    return replace(pool, mode=mode, host_bytes=room)
