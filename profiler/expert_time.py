"""How long one expert takes on the CPU: its products for one token, by ggml's kernels, with weights that no cache holds."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bel.formats.errors import BadInputError
from bel.formats.experts_file import PAGE_BYTES, PART_ALIGNMENT
from bel.formats.units import align_up
from bel.profiler.bandwidth_target import Experts, read_slice
from bel.runtime.expert_product import ExpertProducts, Projection
from bel.runtime.llama_library import LlamaLibrary

STEPS = 8
"""Experts of one graph: starting one, and waking the threads for it, is not an expert's own time."""
MIN_GRAPHS = 4
REPEATS = 5
FAR_RATIO = 3.0
"""Repeats this far apart are not of one machine's speed: ggml's threads wait for each other at a barrier, and where others take
their CPUs one product waits for as long as the scheduler likes, a thousand times its own time."""
_Turns = Iterator[tuple[int, range]]


@dataclass(frozen=True, slots=True)
class ExpertTime:
    """Seconds of one expert for one token with `n_threads`; `note` says why they are to be doubted, "" where they are not."""

    seconds: float
    n_threads: int
    note: str


def expert_time(library: LlamaLibrary, experts: Experts, *, range_bytes: int, n_threads: int, seconds: float) -> ExpertTime:
    """The least of five repeats, each the median over graphs of up to eight experts; all together run for about `seconds`.

    Copies of the layer's stack fill `range_bytes`, and their experts are taken in turn; a layer that is larger is cut to as
    many experts as fill it.  One thread, which waits for none, is timed too, and taken where it is much faster than
    `n_threads`.  Raises MachineError where the library cannot multiply their types.
    """
    parts, stride = _layout(experts)
    blobs = _load(experts, parts, stride, range_bytes)
    stacks, count, _ = blobs.shape
    steps = min(STEPS, count)
    turns = itertools.cycle([(s, range(e, e + steps)) for s in range(stacks) for e in range(0, count - steps + 1, steps)])

    def repeats(threads: int, number: int) -> list[float]:
        with ExpertProducts(library, blobs, parts, steps=steps, n_threads=threads) as products:
            products.compute(*next(turns))  # the threads are made in the first one
            return [_median(products, turns, steps, seconds / (REPEATS + 1)) for _ in range(number)]

    many = repeats(n_threads, REPEATS)
    return judge(many, repeats(1, 1)[0] if n_threads > 1 else min(many), n_threads)


def judge(many: Sequence[float], alone: float, n_threads: int) -> ExpertTime:
    """What repeats with `n_threads` and one with one thread, in seconds, say together."""
    least, most = min(many), max(many)
    if least > FAR_RATIO * alone:
        note = (
            f"an expert takes {least:.2g} s with {n_threads} threads on the CPU and {alone:.2g} s with one, which is given: "
            "threads wait for each other, as they do where other programs use the CPUs"
        )
        return ExpertTime(alone, 1, note)
    note = ""
    if most > FAR_RATIO * least:
        note = (
            f"an expert took {least:.2g} to {most:.2g} s on the CPU in {len(many)} repeats; the least is given. Is the machine "
            "idle, and has it as many CPUs as there are threads?"
        )
    return ExpertTime(least, n_threads, note)


def _median(products: ExpertProducts, turns: _Turns, steps: int, seconds: float) -> float:
    deadline, taken = time.monotonic() + seconds, list[float]()
    while len(taken) < MIN_GRAPHS or time.monotonic() < deadline:
        stack, chosen = next(turns)
        begin = time.perf_counter()
        products.compute(stack, chosen)
        taken.append((time.perf_counter() - begin) / steps)
    return statistics.median(taken)


def _layout(experts: Experts) -> tuple[list[Projection], int]:
    parts, at = [], 0
    for part in experts.slices:
        parts.append(Projection(part.type_id, part.columns, part.rows, at))
        if parts[-1].size_bytes != part.size_bytes:  # else a product would read behind its weights
            raise BadInputError(
                f"the {part.role} weights of an expert of layer {experts.layer} do not fit their dimensions",
                path=str(part.path),
                found=f"{part.size_bytes} bytes",
                expected=f"{parts[-1].size_bytes}",
            )
        at = align_up(at + part.size_bytes, PART_ALIGNMENT)
    return parts, align_up(at, PAGE_BYTES)


def _load(experts: Experts, parts: list[Projection], stride: int, range_bytes: int) -> npt.NDArray[np.uint8]:
    """uint8 (stacks, experts, stride): real weights, since made-up bytes may be numbers that a CPU multiplies slowly."""
    count = min(experts.n_expert, -(-range_bytes // stride))
    blobs = np.zeros((-(-range_bytes // (count * stride)), count, stride), np.uint8)
    for expert in range(count):
        for part, place in zip(experts.slices, parts, strict=True):
            data = np.frombuffer(read_slice(part, expert), np.uint8)
            blobs[0, expert, place.offset_bytes : place.offset_bytes + len(data)] = data
    blobs[1:] = blobs[0]
    return blobs
