"""The running model that options ask for: a bundle with its experts in slots, or a GGUF as stock llama.cpp has it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bel.formats.bundle import Bundle, check_sizes, is_bundle, open_bundle
from bel.formats.errors import BadInputError, DamagedBundleError, UsageError, printable
from bel.formats.fingerprint import fingerprint
from bel.formats.plan import Plan
from bel.formats.plan_json import load_plan
from bel.formats.process import rss_bytes
from bel.formats.units import MIB, format_bytes
from bel.runtime.bundle_model import BundleRun, SlotOptions, context_buffers, open_run
from bel.runtime.context import Context, ContextOptions, Observer
from bel.runtime.engine import Engine, Model
from bel.runtime.file_watch import watch_bundle
from bel.runtime.first_check import check_dense, check_tails
from bel.runtime.free_memory import free_bytes
from bel.runtime.policies import parse_policy
from bel.runtime.run_options import AUTO, DEFAULT_CONTEXT, DEFAULT_POLICY, POOL_WAYS, STOCK_WAYS, RunOptions
from bel.runtime.slot_budget import PREFETCH_BYTES, TooLittleMemory

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from bel.runtime.gpu_run import GpuRun
    from bel.runtime.stock_cache import CacheCounts
    from bel.runtime.stock_gpu import StockGpuRun

TRIED_CONTEXT, TRIAL_CONTEXT = 1 << 16, 1024
"""A longer context is tried with a short one first, to see what a position costs."""
_ATTEMPTS = 3
"""To open a bundle that is replaced meanwhile."""
RESERVE_SHARE, RESERVE_BYTES, MOST_RESERVE_SHARE = 0.1, 256 * MIB, 0.25
"""Left to others of the memory that is free, where no budget is given: a share, at least so many bytes, but no more than a
larger share: in a container of 100 MiB the bytes alone would leave nothing."""


@dataclass(frozen=True, slots=True)
class Running:
    """A model that is ready.  `bundle` is None for a stock one; `policy` is the name of the one in force.

    `opened` is the context that it began with, and `context` the one in force.  `promised_bytes` is the memory that the run
    keeps to, None where slots were given instead; `is_default` says that it was taken from what is free.  `n_positions`: how
    many tokens the context is good for.  `asked_slots` is what --slots said.
    """

    model: Model
    opened: Context
    bundle: BundleRun | None
    policy: str | None
    promised_bytes: int | None
    is_default: bool
    n_positions: int
    gpu: GpuRun | None = None
    stock_gpu: StockGpuRun | None = None
    asked_slots: int | None = None

    @property
    def context(self) -> Context:
        """Where tokens are computed.  To choose a way for a GPU makes another one."""
        return self.opened if self.gpu is None else self.gpu.context

    @property
    def own_counts(self) -> CacheCounts | None:
        """What llama.cpp's own cache of experts did; None before `finish`, and without such a cache."""
        own = self.stock_gpu if self.gpu is None else self.gpu.cache
        return None if own is None else own.counts

    def finish(self) -> None:
        """Nothing more is computed: llama.cpp tells what its own cache did when it is freed.  Before any answer is given.

        Raises what the watch of the model's files raises where one was changed.
        """
        self.model.watch.check()
        own = self.stock_gpu if self.gpu is None else self.gpu
        if own is not None:
            own.finish()

    def choose(self, tokens: npt.NDArray[np.int32]) -> None:
        """Where a way is still to be chosen, take the one that is fastest on these tokens.  Before anything is computed."""
        if self.gpu is not None:
            self.gpu.choose(tokens)

    def begin_decode(self) -> None:
        """Count what follows as decode and no longer as prompt."""
        if self.bundle is not None:
            counters = self.bundle.cache.counters
            counters.now = counters.decode
        if self.gpu is not None:
            self.gpu.begin_decode()


@contextlib.contextmanager
def open_running(options: RunOptions, inner: Observer | None = None, *, all_logits: bool = False) -> Iterator[Running]:
    """Load what the options name.  `inner` may look at every node of the graphs.  `all_logits`: those of each token of a
    decode may be asked for, not of the last alone.

    Raises UsageError for options that do not go together or do not fit, BadInputError and DamagedBundleError for the files
    (also in the place of any error of the block, where one was changed meanwhile), MachineError where the machine refuses.
    """

    def sizes(model: Model) -> ContextOptions:
        n_ctx = options.n_ctx or min(DEFAULT_CONTEXT, model.n_ctx_train or DEFAULT_CONTEXT)
        _check_context(model, n_ctx)
        n_ubatch = min(options.n_ubatch, n_ctx)
        n_threads = options.n_threads or len(os.sched_getaffinity(0))
        return ContextOptions(n_ctx, n_ubatch, n_ubatch, n_threads, n_outputs=None if all_logits else 1)

    with contextlib.ExitStack() as stack:
        running = _opened(stack, options, sizes, inner)
        try:
            yield running
        except Exception:
            running.model.watch.check()  # for then whatever went wrong did so for that
            raise


def _opened(
    stack: contextlib.ExitStack, options: RunOptions, sizes: Callable[[Model], ContextOptions], inner: Observer | None
) -> Running:
    """Open a model; a bundle once more where another one took its name meanwhile, for then files of both were looked at."""
    opener = _open_stock if options.stock else _open_bundle if options.gpu is None else _open_gpu
    for _ in range(_ATTEMPTS - 1):
        before = _folder_by_name(options.path)
        try:
            return stack.enter_context(opener(options, sizes, inner))
        except DamagedBundleError:
            if _folder_by_name(options.path) == before:
                raise
    return stack.enter_context(opener(options, sizes, inner))


def _folder_by_name(path: Path) -> tuple[int, int] | None:
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    return state.st_dev, state.st_ino


@contextlib.contextmanager
def _open_stock(options: RunOptions, sizes: Callable[[Model], ContextOptions], inner: Observer | None) -> Iterator[Running]:
    for name, value in (("--plan", options.plan), ("--slots", options.slots), ("--ram", options.ram_bytes)):
        if value is not None:
            raise UsageError(f"--stock has no slots: {name} is for a bundle")
    if options.policy != DEFAULT_POLICY:
        raise UsageError("--stock has no slots: --policy is for a bundle")
    if is_bundle(options.path):
        raise UsageError(
            "--stock runs a GGUF as llama.cpp does, and this is a bundle",
            path=str(options.path),
            hint="Name the GGUF that it was made from, or leave --stock out",
        )
    if options.gpu is not None:
        with _open_stock_gpu(options, sizes) as running:
            yield running
        return
    with (
        Engine.open(options.engine).load(options.path) as model,
        model.context(sizes(model), inner) as context,
    ):
        yield Running(model, context, None, None, None, False, _positions(options, model, context))


@contextlib.contextmanager
def _open_stock_gpu(options: RunOptions, sizes: Callable[[Model], ContextOptions]) -> Iterator[Running]:
    """Stock llama.cpp's own ways to use a GPU."""
    from bel.runtime.stock_gpu import StockGpuOptions, open_stock_gpu

    place = STOCK_WAYS.get(options.gpu or "")
    if place is None:
        what = (
            "stock llama.cpp does not choose a way to use a GPU"
            if options.gpu == AUTO
            else f"--stock has no way '{options.gpu}'"
        )
        raise UsageError(what, expected=f"--gpu {', '.join(STOCK_WAYS)}")
    if place == "cache" and options.vram_bytes is None:
        raise UsageError("--stock --gpu cache has a cache of experts on the GPU, and needs its size", hint="Give --vram SIZE")
    if place != "cache" and options.vram_bytes is not None:
        raise UsageError(
            f"--stock --gpu {options.gpu} has no cache of experts, whose size --vram would be", hint="Leave --vram out"
        )
    mode = "none" if place == "cache" else "mmap"
    given = StockGpuOptions(place, options.vram_bytes or 0, mode, gpu_number=options.gpu_number)
    with open_stock_gpu(Engine.open(options.engine), options.path, sizes, given) as run:
        n_positions = _positions(options, run.model, run.context)
        yield Running(run.model, run.context, None, None, None, False, n_positions, stock_gpu=run)


@contextlib.contextmanager
def _open_gpu(options: RunOptions, sizes: Callable[[Model], ContextOptions], inner: Observer | None) -> Iterator[Running]:
    """A bundle with its slots on a GPU."""
    from bel.runtime.gpu_running import open_gpu

    if inner is not None:
        raise UsageError("nothing can look into a run with --gpu: its callback is machine code", hint="Leave --gpu out")
    if options.gpu not in POOL_WAYS:
        raise UsageError(
            f"--gpu {options.gpu} is a way of stock llama.cpp",
            expected=", ".join(POOL_WAYS),
            hint="Give --stock and a GGUF, or one of those",
        )
    given = {"--plan": options.plan, "--slots": options.slots, "--vram": options.vram_bytes}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise UsageError(
            f"{' and '.join(names)} exclude each other: each says how many slots there are", hint="Give one of them"
        )
    if options.path.is_file():
        raise UsageError(
            "this is a file, and only a bundle has slots on a GPU",
            path=str(options.path),
            hint=f"Make a bundle: bel-repack {options.path}",
        )
    bundle = open_bundle(options.path)
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(watch_bundle(bundle))
        plan = None if options.plan is None else checked_plan(options.plan, bundle)
        run = stack.enter_context(open_gpu(options, bundle, plan, sizes, watch))
        model, context = run.loaded.model, run.context
        positions, asked = _positions(options, model, context), options.slots
        yield Running(model, context, None, None, None, False, positions, gpu=run, asked_slots=asked)


@contextlib.contextmanager
def _open_bundle(options: RunOptions, sizes: Callable[[Model], ContextOptions], inner: Observer | None) -> Iterator[Running]:
    if options.path.is_file():
        raise UsageError(
            "this is a file, and only a bundle runs with its experts in slots",
            path=str(options.path),
            hint=f"Make a bundle: bel-repack {options.path}; or run the GGUF as llama.cpp does: --stock",
        )
    bundle = open_bundle(options.path)
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(watch_bundle(bundle))
        slots, promised_bytes, is_default = _slot_options(options, bundle)
        if options.checks:
            check_sizes(bundle)
            check_dense(bundle)
            check_tails(bundle)
        engine = Engine.open(options.engine)
        try:
            run = stack.enter_context(open_run(engine, bundle, sizes, slots, inner, watch))
        except TooLittleMemory as error:
            if not is_default:
                raise
            said = "no --ram was given, and this is what is free here, less a reserve for others"
            raise UsageError(f"{error.cause}; {said}", hint=error.hint) from None
        positions = _positions(options, run.model, run.context)
        policy, asked = slots.policy.name, options.slots
        yield Running(run.model, run.context, run, policy, promised_bytes, is_default, positions, asked_slots=asked)


def _slot_options(options: RunOptions, bundle: Bundle) -> tuple[SlotOptions, int | None, bool]:
    """The slots asked for, the memory promised, and whether that is only a default."""
    given = {"--plan": options.plan, "--slots": options.slots, "--ram": options.ram_bytes}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise UsageError(
            f"{' and '.join(names)} exclude each other: each says how many slots there are", hint="Give one of them"
        )
    plan = None if options.plan is None else checked_plan(options.plan, bundle)
    ram_bytes = spare_bytes() if not names else options.ram_bytes
    slots = SlotOptions(
        policy=parse_policy(options.policy),
        slots=options.slots,
        slots_by_layer=None if plan is None else {x.layer: x.slots for x in plan.layers},
        ram_bytes=ram_bytes,
        wanted=None if plan is None else {x.layer: x.preload for x in plan.layers},
        reader=options.reader,
        checks=options.checks,
        prefetch_bytes=PREFETCH_BYTES if options.prefetches else 0,
    )
    return slots, ram_bytes, not names


def checked_plan(path: Path, bundle: Bundle) -> Plan:
    """The plan of a file, which must be one for this bundle's model.  Raises BadInputError, naming both, where it is not."""
    if not path.is_file():
        what = "this is not a plan, which is a file" if path.exists() else "no such plan"
        raise BadInputError(what, path=str(path), hint="`bel-profile plan` makes one")
    plan = load_plan(path)
    reached = {x.layer: (x.n_expert, x.n_used) for x in bundle.manifest.layers if not x.is_mtp}
    planned = {x.layer: (x.n_expert, x.top_k) for x in plan.layers}
    if reached.keys() != planned.keys() or any(n_used and planned[n] != (e, n_used) for n, (e, n_used) in reached.items()):
        raise _other_model(path, plan, bundle, "its layers, experts or top-k differ")
    if plan.fingerprint and plan.fingerprint != fingerprint(bundle):
        raise _other_model(path, plan, bundle, "the fingerprints differ")
    return plan


def _other_model(path: Path, plan: Plan, bundle: Bundle, why: str) -> BadInputError:
    name = printable(bundle.manifest.model_name or bundle.manifest.name)
    return BadInputError(
        f"this is the plan of another model: {why}",
        path=str(path),
        found=f"a plan for '{printable(plan.model_name)}'",
        expected=f"one for '{name}' ({bundle.folder})",
        hint="Make one: bel-profile plan PROFILE --model BUNDLE",
    )


def spare_bytes() -> int:
    """The memory that a run may have where none is named: what this process holds and what is free, less a reserve."""
    free = free_bytes()
    reserve = min(max(int(RESERVE_SHARE * free), RESERVE_BYTES), int(MOST_RESERVE_SHARE * free))
    return rss_bytes() + free - reserve


def _check_context(model: Model, n_ctx: int) -> None:
    """Raise UsageError for a large context whose KV cache is more than the memory that is free, before llama.cpp fills it."""
    if n_ctx <= TRIED_CONTEXT:
        return
    model.engine.log.clear()
    with model.context(ContextOptions(TRIAL_CONTEXT, 1, 1, 1, n_outputs=1)):
        trial_bytes, _ = context_buffers(model.engine)
    free = free_bytes()
    need = trial_bytes * n_ctx // TRIAL_CONTEXT
    if need > free:
        raise UsageError(
            f"a context of {n_ctx} positions needs about {format_bytes(need)} for its KV cache, and {format_bytes(free)} are "
            "free",
            hint=f"At most about --context {max(1, free * TRIAL_CONTEXT // trial_bytes)} fits",
        )


def describe_promise(running: Running) -> str:
    """The memory that the run keeps to, for people."""
    if running.promised_bytes is None:
        return "no limit given, by the slots asked for"
    what = format_bytes(running.promised_bytes)
    return f"{what} that is free now" if running.is_default else f"--ram {what}"


def _positions(options: RunOptions, model: Model, context: Context) -> int:
    """A context that nobody asked for ends where the model was trained to: behind that it writes nonsense."""
    n_ctx: int = context.n_ctx
    return n_ctx if options.n_ctx is not None or not model.n_ctx_train else min(n_ctx, model.n_ctx_train)
