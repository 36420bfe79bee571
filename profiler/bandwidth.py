"""The constants of a machine that the clock of a simulation needs, measured (disk, memory, CPU)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bel.formats.costs import Costs
from bel.formats.errors import MachineError
from bel.formats.units import GIB, MIB, format_bytes
from bel.profiler.bandwidth_target import Experts, Target
from bel.profiler.disk_speed import DiskSpeed, measure_disk, probe_direct
from bel.profiler.machine import cache_bytes, cpu_count, describe, load_warning, others_warning
from bel.profiler.memory_speed import copy_bytes_per_s, uncached_bytes
from bel.profiler.scratch_file import scratch_file
from bel.runtime.free_memory import free_bytes
from bel.runtime.machine_load import OtherLoad


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is done: `seconds` at each depth and for each other figure, the size of the file that is made and read.

    A file with less than `least_bytes` is not read, since its blocks would come again at once.
    """

    seconds: float = 1.0
    file_bytes: int = 2 * GIB
    least_bytes: int = 256 * MIB
    write_seconds: float = 6.0


@dataclass(frozen=True, slots=True)
class Measured:
    """The costs, what they were measured with, and what a reader of them should know: a sentence each."""

    costs: Costs
    disk: DiskSpeed
    notes: tuple[str, ...]


def measure(
    target: Target, *, n_threads: int | None = None, effort: Effort | None = None, say: Callable[[str], None] = lambda _: None
) -> Measured:
    """Measure disk, memory and CPU at what `find_target` found.  `say` is told what is being measured.

    Raises MachineError where the disk cannot be told from memory, and where memory is too short.
    """
    effort, threads, notes = effort or Effort(), n_threads or cpu_count(), [x for x in [load_warning()] if x]
    others = OtherLoad()
    say(f"reading blocks of {format_bytes(target.block_bytes)} at random from {target.path}")
    disk = _disk(target, effort, notes)
    if disk.counted_share is None:
        notes.append("this kernel does not count the bytes that come from a disk: that the reads were direct is unchecked")
    walk = uncached_bytes(cache_bytes(), free_bytes())
    if walk < 2 * cache_bytes():
        notes.append(
            f"memory allows {format_bytes(walk)} only, which the CPU's cache of {format_bytes(cache_bytes())} may hold"
        )
    say(f"copying {format_bytes(walk // 2)} of memory again and again")
    copied = copy_bytes_per_s(walk, threads)
    seconds = None
    if target.experts is None:
        notes.append("no model was named, so the time of an expert on the CPU was not measured")
    else:
        say(f"multiplying experts of layer {target.experts.layer} on the CPU")
        seconds = _expert_seconds(target.experts, walk, threads, effort.seconds, notes)
    if busy := others_warning(others.cores()):
        notes.append(busy)
    costs = Costs(
        block_bytes=target.block_bytes,
        nvme_bytes_per_s=disk.best_bytes_per_s,
        nvme_depths=disk.depths,
        memory_bytes_per_s=copied,
        cpu_expert_seconds=seconds,
        h2d_bytes_per_s=None,
        d2h_bytes_per_s=None,
        layer_seconds=None,
        machine=describe(target.folder, disk.reader, threads),
    )
    return Measured(costs, disk, tuple(notes))


def _disk(target: Target, effort: Effort, notes: list[str]) -> DiskSpeed:
    size = sum(path.stat().st_size for path in target.files)
    if size >= effort.least_bytes:
        return measure_disk(target.files, target.block_bytes, seconds=effort.seconds, shown=target.path)
    if target.files:
        notes.append(
            f"{target.path} has {format_bytes(size)} only, which would be read again and again: a larger file of random bytes "
            "on the same disk was read instead"
        )
    with scratch_file(
        target.folder,
        size_bytes=max(effort.file_bytes, 2 * target.block_bytes),
        least_bytes=max(effort.least_bytes, 2 * target.block_bytes),
        seconds=effort.write_seconds,
        check=lambda path: probe_direct(path, target.block_bytes, target.path),
    ) as path:
        return measure_disk([path], target.block_bytes, seconds=effort.seconds, shown=target.path)


def _expert_seconds(experts: Experts, walk: int, threads: int, seconds: float, notes: list[str]) -> float | None:
    """None, with a note, where llama.cpp is not installed or has no kernels for the model: the other figures stand."""
    from bel.profiler.expert_time import expert_time
    from bel.runtime.llama_library import open_library

    try:
        found = expert_time(open_library(), experts, range_bytes=walk, n_threads=threads, seconds=seconds)
    except MachineError as error:
        notes.append(f"the time of an expert on the CPU was not measured: {error}")
        return None
    if found.note:
        notes.append(found.note)
    return found.seconds
