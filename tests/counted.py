"""A run out of a bundle whose slots count, recorded meanwhile, beside what the simulator says of that recording."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bel.formats.bundle import Bundle, open_bundle
from bel.formats.fingerprint import fingerprint
from bel.formats.profile_json import encode_profile, load_profile
from bel.formats.trace import TraceWriter
from bel.formats.trace_calls import read_trace
from bel.formats.trace_header import TraceHeader, TraceLayer
from bel.profiler.locality import by_use
from bel.profiler.record_worker import Recorder
from bel.profiler.router import RouterObserver
from bel.profiler.simulate import Row, parse_policies, simulate
from bel.profiler.slot_budgets import Budget
from bel.profiler.summarize import summarize
from bel.profiler.work import count_work
from bel.runtime.bundle_model import SlotOptions, open_run
from bel.runtime.context import ContextOptions
from bel.runtime.counters import PhaseCounters
from bel.runtime.engine import Engine
from bel.runtime.policies import parse_policy

Tokens = npt.NDArray[np.int32]
PHASES = ("prompt", "decode")


@dataclass(frozen=True, slots=True)
class Counted:
    """What the slots of a run counted in one phase, of which the simulator knows the same."""

    accesses: int
    hits: int
    uploads: int


@dataclass(frozen=True, slots=True)
class CountedRun:
    """A run: its counts by phase, the seconds of each decoded token, and whether the bytes read are those of its misses."""

    counts: dict[str, Counted]
    token_seconds: npt.NDArray[np.float64]
    reads_add_up: bool


def trace_layers(bundle: Bundle) -> tuple[TraceLayer, ...]:
    """The layers that a run reaches; an expert's bytes are those that a read brings."""
    reached = [layer for layer in bundle.manifest.layers if not layer.is_mtp]
    return tuple(TraceLayer(x.layer, x.n_expert, x.n_used or x.n_expert, x.stride_bytes) for x in reached)


def run_counted(
    folder: Path, trace: Path, tokens: tuple[Tokens, Tokens], slots: SlotOptions, *, n_ubatch: int = 64, threads: int = 1
) -> CountedRun:
    """Run a prompt and then given tokens one by one, and record them into `trace`."""
    bundle = open_bundle(folder)
    arch, layers = bundle.manifest.arch or "", trace_layers(bundle)
    observer = RouterObserver(arch, layers)
    options = ContextOptions(sum(map(len, tokens)), n_ubatch, n_ubatch, threads)
    header = TraceHeader("counted", arch, fingerprint(bundle), layers, "counted")
    with open_run(Engine.open(), bundle, options, slots, observer) as run, TraceWriter(trace, header, replace=True) as writer:
        recorder = Recorder(run.context, observer, writer)
        for _ in recorder.prompt(tokens[0]):
            pass
        counters = run.cache.counters
        counters.now = counters.decode
        seconds = np.zeros(len(tokens[1]))
        for number, token in enumerate(tokens[1]):
            began = time.perf_counter()
            recorder.decode(int(token))
            seconds[number] = time.perf_counter() - began
        recorder.flush()
        both = (counters.prompt, counters.decode)
        return CountedRun(
            {name: _counted(phase) for name, phase in zip(PHASES, both, strict=True)},
            seconds,
            _adds_up(both, [layer.stride_bytes for layer in run.layers if not layer.is_mtp]),
        )


def _counted(phase: PhaseCounters) -> Counted:
    return Counted(phase.accesses, phase.hits, phase.uploads)


def _adds_up(phases: Sequence[PhaseCounters], strides: Sequence[int]) -> bool:
    """Every miss and upload was read once, and so was what was read ahead in vain.  Unknown where blobs differ in size."""
    blobs = sum(phase.missed + phase.uploads + phase.wasted for phase in phases)
    read = sum(phase.read_bytes for phase in phases)
    return min(strides) * blobs <= read <= max(strides) * blobs


def simulated(trace: Path, policies: str, slots: Sequence[int], phase: str, profile: Path | None = None) -> tuple[Row, ...]:
    """Rows of `bel-profile simulate` for one trace, `slots` in each layer."""
    read = read_trace(trace)
    profiles = {} if profile is None else {str(profile): load_profile(profile)}
    work = count_work([read], read.header.layers, phase)
    return simulate(work, parse_policies(policies), (Budget(tuple(slots)),), profiles)


def counts_of(row: Row) -> Counted:
    """A simulated row in the terms of a run."""
    return Counted(row.accesses, row.hits, row.found.uploads)


def make_profile(trace: Path, profile: Path) -> None:
    """The profile of a trace."""
    profile.write_bytes(encode_profile(summarize([trace]).profile))


def wanted_of(trace: Path) -> dict[int, list[int]]:
    """For each layer its experts, those first that decoding used most."""
    profile = summarize([trace]).profile
    counts = {info.layer: profile.workloads[0].layers[i].decode.counts for i, info in enumerate(profile.layers)}
    return {layer: by_use(np.array(uses, np.float64)).tolist() for layer, uses in counts.items()}


def compare(
    folder: Path,
    work: Path,
    tokens: tuple[Tokens, Tokens],
    policy: str,
    slots: int,
    *,
    threads: int = 1,
    prefetch_bytes: int = 0,
) -> dict[str, tuple[Counted, Counted]]:
    """By phase what a run counted and what the simulator says, for one policy with `slots` in each layer.

    A static set is made of the trace `seed.trace` in the folder `work`, which must be there then; it is a set for decoding,
    and the simulator has one for each phase, so that the prompt is left out.
    """
    trace, profile = work / "counted.trace", work / "seed.json"
    is_static = policy == "static"
    wanted = None
    if is_static:
        make_profile(work / "seed.trace", profile)
        wanted = wanted_of(work / "seed.trace")
    options = SlotOptions(parse_policy(policy), slots=slots, wanted=wanted, prefetch_bytes=prefetch_bytes)
    run = run_counted(folder, trace, tokens, options, threads=threads)
    if not run.reads_add_up:
        raise AssertionError("the bytes read are not those of the misses")
    budget = [min(slots, x.n_expert) for x in trace_layers(open_bundle(folder))]
    if is_static:
        (row,) = simulated(trace, f"static:{profile}", budget, "decode", profile)
        return {"decode": (run.counts["decode"], counts_of(row))}
    return {phase: (run.counts[phase], counts_of(simulated(trace, policy, budget, phase)[0])) for phase in PHASES}
