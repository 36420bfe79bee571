"""What `plan` reads: a profile or traces, the sizes of a model's slots, and measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from bel.formats.bundle import is_bundle, open_bundle
from bel.formats.costs import Costs
from bel.formats.errors import UsageError
from bel.formats.fingerprint import fingerprint
from bel.formats.gguf_model import open_model
from bel.formats.profile import Profile
from bel.formats.trace_calls import read_trace
from bel.formats.trace_header import TraceLayer
from bel.formats.trace_layout import MAGIC
from bel.profiler.clock import Clock, make_clock
from bel.profiler.demand import WorkDemand, missing_tables, profile_demand, traced_demand
from bel.profiler.footprint import Footprint, read_footprint
from bel.profiler.inputs import page_sized, read_profile
from bel.profiler.same_model import Identity, check_same_model
from bel.profiler.summarize import summarize

NVME, H2D = "disk", "host to GPU"


@dataclass(frozen=True, slots=True)
class PlanInput:
    """A profile, or that of the traces, and what each workload asks.  `by_counts`: only counts are known of a workload.

    `is_traced`: decode steps are as recorded.  `digests` are BLAKE3 of the files; `notes` belong on stderr.
    """

    path: str
    profile: Profile
    works: tuple[WorkDemand, ...]
    by_counts: tuple[str, ...]
    is_traced: bool
    digests: tuple[str, ...]
    notes: tuple[str, ...]


def read_plan_input(paths: Sequence[Path]) -> PlanInput:
    """One profile, or one or more traces of one model.  Raises BadInputError, or UsageError for a mixture."""
    digests = tuple(blake3().update_mmap(path).hexdigest() for path in paths)
    kinds = {_is_trace(path) for path in paths}
    if kinds == {True}:
        summary = summarize(list(paths))
        traces = [read_trace(path) for path in paths]
        works = traced_demand(summary.profile, traces, str(paths[0]))
        return PlanInput(str(paths[0]), summary.profile, works, (), True, digests, summary.notes)
    if len(paths) > 1:
        raise UsageError("a plan is made from one profile, or from traces", hint="Merge profiles first: bel-profile --merge")
    profile = read_profile(paths[0])
    by_counts = tuple(missing_tables(profile))
    works = profile_demand(profile, by_counts=bool(by_counts), path=str(paths[0]))
    return PlanInput(str(paths[0]), profile, works, by_counts, False, digests, ())


def _is_trace(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def with_model(given: PlanInput, path: Path) -> tuple[PlanInput, Footprint]:
    """The input with the slot sizes of a model, and the model's footprint.  Raises BadInputError where it is another one."""
    footprint = read_footprint(path)
    profile = given.profile
    notes = list(given.notes)
    if profile.fingerprint:
        own = fingerprint(open_bundle(path) if is_bundle(path) else open_model(path))
    else:
        own = ""
        notes.append(f"{given.path} does not say of which model it is: only the layers are compared with {path}")
    reached = {x.layer: x for x in footprint.reached}
    known = {x.layer: x for x in profile.layers}
    layers = tuple(known.get(x.layer, TraceLayer(x.layer, x.n_expert, x.top_k, None)) for x in footprint.reached)
    layers = tuple(replace(x, n_expert=reached[x.layer].n_expert) for x in layers)
    check_same_model(
        Identity(str(path), profile.model_name, profile.arch, own, layers),
        Identity(given.path, profile.model_name, profile.arch, profile.fingerprint, profile.layers),
    )
    sized = tuple(replace(x, expert_bytes=reached[x.layer].stride_bytes) for x in profile.layers)
    return replace(given, profile=replace(profile, layers=sized), notes=tuple(notes)), footprint


def without_model(given: PlanInput) -> PlanInput:
    """The input with slots of whole pages, as far as an expert's bytes are known; a note says that they may be larger."""
    note = (
        "without --model a slot is taken as the expert's bytes, rounded up to 4096: what a bundle's slots take is known only "
        "with it"
    )
    layers = page_sized(given.profile.layers)
    return replace(given, profile=replace(given.profile, layers=layers), notes=(*given.notes, note))


def slot_sizes(given: PlanInput) -> npt.NDArray[np.int64]:
    """(L,): the bytes of a slot of each layer.  Raises UsageError where one is not known."""
    sizes = []
    for x in given.profile.layers:
        if x.expert_bytes is None:
            raise UsageError(f"the bytes of an expert of layer {x.layer} are not known", path=given.path, hint="Give --model")
        sizes.append(x.expert_bytes)
    return np.array(sizes, np.int64)


def known_sizes(given: PlanInput) -> list[int]:
    """The bytes of a slot of each layer of which they are known."""
    return [x.expert_bytes for x in given.profile.layers if x.expert_bytes is not None]


def layer_seconds(given: PlanInput, costs: Costs) -> npt.NDArray[np.float64]:
    """(L,): measured compute of each layer for one decode token: of the costs, else the median of the profile's decode calls.

    Raises UsageError, naming the first layer without one.
    """
    measured = dict(costs.layer_seconds or ())
    seconds = []
    for place, info in enumerate(given.profile.layers):
        known = _profile_seconds(given.profile, place) if costs.layer_seconds is None else measured.get(info.layer)
        if known is None:
            source = "the costs" if costs.layer_seconds is not None else given.path
            raise UsageError(
                f"--objective stall needs measured layer times, and {source} has none of layer {info.layer}",
                hint="Record with --timing, or use --objective misses",
            )
        seconds.append(known)
    return np.array(seconds)


def _profile_seconds(profile: Profile, place: int) -> float | None:
    """The weighted mean over the workloads that were timed."""
    timed = [(w.weight, w.layers[place].decode.time) for w in profile.workloads]
    known = [(weight, time.median_ns * 1e-9) for weight, time in timed if time is not None and weight]
    return sum(w * s for w, s in known) / sum(w for w, _ in known) if known else None


def plan_clock(given: PlanInput, costs: Costs | None, kind: str, link: str) -> Clock:
    """The clock of a plan.  Raises UsageError, naming what is missing and how to get it."""
    if given.by_counts:
        raise UsageError(
            "--objective stall needs to know how misses are spread over tokens, and only counts are known of "
            + ", ".join(given.by_counts),
            path=given.path,
            hint="Make the profile with `bel-profile summarize` from its traces, or use --objective misses",
        )
    if costs is None:
        hint = "Measure them with `bel-profile bandwidth` and give --costs, or use --objective misses"
        raise UsageError("--objective stall needs the costs of this machine", hint=hint)
    rate = costs.h2d_bytes_per_s if link == H2D else costs.nvme_bytes_per_s
    if rate is None:
        raise UsageError(
            f"--objective stall needs the rate of the link {link}, and the costs have none",
            hint="Measure it with `bel-profile bandwidth` on the machine with the GPU, or use --objective misses",
        )
    return make_clock(kind, layer_seconds(given, costs), slot_sizes(given) / rate)
