"""What a recording runs: a GGUF as stock llama.cpp has it, or a bundle with its experts in slots.

Both choose the same experts to the last bit, and both are described in the same words: their traces are equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bel.formats.bundle import Bundle, check_sizes, is_bundle, open_bundle
from bel.formats.errors import BadInputError, UsageError
from bel.formats.experts import find_experts
from bel.formats.gguf_model import GgufModel, open_model
from bel.formats.shards import model_base_name
from bel.formats.trace_header import TraceLayer
from bel.profiler.recording import RecordRequest
from bel.runtime.context import Context, ContextOptions, Observer
from bel.runtime.engine import Engine, Model

if TYPE_CHECKING:
    from bel.runtime.bundle_model import BundleRun

Source = GgufModel | Bundle
Sizes = Callable[[Model], ContextOptions]
"""The sizes of a context, which may depend on what the model makes of the prompts."""


@dataclass(frozen=True, slots=True)
class Run:
    """A context, and the run of a bundle that it belongs to, if it does."""

    context: Context
    bundle: BundleRun | None


def open_source(request: RecordRequest) -> Source:
    """Read the headers of what a request names.  Raises UsageError for options that are not for it."""
    if not is_bundle(request.model):
        if request.slots is not None or request.ram_bytes is not None:
            raise UsageError(
                f"{'--ram' if request.slots is None else '--slots'} is for a bundle, and this is none",
                path=str(request.model),
                hint="A GGUF is recorded as llama.cpp runs it; `bel-repack` makes a bundle of it",
            )
        return open_model(request.model)
    if request.times:
        raise UsageError(
            "the layer times of a bundle would have the reads of its experts in them",
            path=str(request.model),
            hint="Leave --timing out, or record the GGUF that the bundle was made from",
        )
    return open_bundle(request.model)


def model_name(source: Source) -> str:
    """The model's own name, or that of its file."""
    if isinstance(source, Bundle):
        return source.manifest.model_name or source.manifest.name
    return source.first.text("general.name") or model_base_name(source.first.path)


def architecture(source: Source) -> str:
    """`general.architecture`, or nothing."""
    return (source.manifest.arch if isinstance(source, Bundle) else source.arch) or ""


def trace_layers(source: Source) -> tuple[TraceLayer, ...]:
    """The layers that decoding routes in.  Raises BadInputError for a model without experts, or without a top-k.

    An expert's bytes are those of its weights: padding of a bundle does not count.
    """
    if isinstance(source, Bundle):
        where = source.folder
        sizes = [(x, sum(part.size_bytes for part in x.parts)) for x in source.manifest.layers if not x.is_mtp]
        found = [(x.layer, x.n_expert, x.n_used, size) for x, size in sizes]
    else:
        where = source.first.path
        layers = [x for x in find_experts(source) if not x.is_mtp]
        found = [(x.layer, x.n_expert, x.n_used, sum(part.slice_bytes for part in x.parts)) for x in layers]
    rows = [TraceLayer(layer, n_expert, n_used, size) for layer, n_expert, n_used, size in found if n_used is not None]
    if len(rows) < len(found):
        raise BadInputError(f"the header has no {architecture(source)}.expert_used_count", path=str(where))
    if not rows:
        raise BadInputError("all layers with experts are MTP blocks, which decoding never reaches", path=str(where))
    return tuple(rows)


@contextlib.contextmanager
def run_source(source: Source, request: RecordRequest, engine: Engine, sizes: Sizes, observer: Observer) -> Iterator[Run]:
    """A context on the model of `source`, which `observer` watches.

    Raises what loading raises, and UsageError where a bundle's experts do not fit into the memory that is given, or free.
    """
    if isinstance(source, Bundle):
        with _run_bundle(source, request, engine, sizes, observer) as run:
            yield run
        return
    with engine.load(request.model) as model, model.context(sizes(model), observer) as context:
        yield Run(context, None)


@contextlib.contextmanager
def _run_bundle(bundle: Bundle, request: RecordRequest, engine: Engine, sizes: Sizes, observer: Observer) -> Iterator[Run]:
    # Not above: the policies are to stay uncompiled here, which is said before their modules are imported.
    from bel.runtime.bundle_model import SlotOptions, open_run
    from bel.runtime.first_check import check_dense, check_tails
    from bel.runtime.policies import parse_policy
    from bel.runtime.run_options import DEFAULT_POLICY
    from bel.runtime.running import spare_bytes
    from bel.runtime.slot_budget import TooLittleMemory

    check_sizes(bundle)
    check_dense(bundle)
    check_tails(bundle)
    is_default = request.slots is None and request.ram_bytes is None
    ram_bytes = spare_bytes() if is_default else request.ram_bytes
    slots = SlotOptions(parse_policy(DEFAULT_POLICY), slots=request.slots, ram_bytes=ram_bytes)
    with contextlib.ExitStack() as stack:
        try:
            run = stack.enter_context(open_run(engine, bundle, sizes, slots, observer))
        except TooLittleMemory as error:
            if not is_default:
                raise
            raise TooLittleMemory(
                f"{error.cause}; no --ram was given, and this is what is free here", hint=error.hint
            ) from None
        yield Run(run.context, run)
