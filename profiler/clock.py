"""What misses cost in time: seconds per token from measured layer times and the time to fetch an expert.

All models know the misses of each decode step and layer, and the same measured times of a layer: its compute, and the fetch
of one expert (bytes over the measured rate of the link; from NVMe or from RAM).  They differ in what a fetch can hide behind.

- `blocking`: a layer's fetches start when its router has chosen and its compute waits for them: they hide behind nothing.
- `demand`: they start then too, and hide behind the compute of their own layer, the slack s_l:
  stall_l = max(0, n_l * fetch_l - s_l).
- `arrival`: all fetches of a token are known at its start and go over one first-in first-out link.  Those of layer l must be
  done at its arrival a_l, the sum of the times and stalls of the layers before: stall_l = max(0, done_l - a_l), which shifts
  every later arrival.  So the stall of a token is the largest of 0 and (fetches up to layer l) - (compute before l) over
  l.  A token ends with none under way, so that the next one finds the link free.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bel.profiler.compiled import compiled

ARRIVAL, DEMAND, BLOCKING = "arrival", "demand", "blocking"
KINDS = (ARRIVAL, DEMAND, BLOCKING)
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Clock:
    """Times of L layers in seconds, each (L,) f64.

    `layer_s`: compute of the layer for one decode step; `fetch_s`: fetch of one of its experts; `slack_s`: what the fetches
    of a layer hide behind (not used by `arrival`); `cpu_expert_s`: one expert computed on the CPU instead of being fetched;
    `ram_fetch_s`: fetch of an expert that a tier of RAM has, 0 where there is no such tier.
    """

    kind: str
    layer_s: Seconds
    fetch_s: Seconds
    slack_s: Seconds
    cpu_expert_s: Seconds
    ram_fetch_s: Seconds


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of T decode steps, each (T,) f64; `layer_stall_s` (L,) f64 is the stall of each layer, summed over the steps.

    A step takes compute + stall.  `transfer_s`, the time in which the link is busy, is partly hidden behind compute.
    """

    compute_s: Seconds
    stall_s: Seconds
    transfer_s: Seconds
    layer_stall_s: Seconds

    @property
    def seconds(self) -> Seconds:
        """(T,): compute and stall."""
        return self.compute_s + self.stall_s


def make_clock(
    kind: str,
    layer_s: npt.ArrayLike,
    fetch_s: npt.ArrayLike,
    cpu_expert_s: npt.ArrayLike = 0.0,
    ram_fetch_s: npt.ArrayLike = 0.0,
) -> Clock:
    """A clock from measured times, in seconds: (L,) each, or one number for all layers (but for `layer_s`).

    Raises ValueError for another kind, or a time that is negative or not finite.
    """
    if kind not in KINDS:
        raise ValueError(f"'{kind}' is not one of the clocks {', '.join(KINDS)}")
    layer = np.asarray(layer_s, np.float64)
    fetch, cpu, ram = (
        np.broadcast_to(np.asarray(s, np.float64), layer.shape).copy() for s in (fetch_s, cpu_expert_s, ram_fetch_s)
    )
    for what, values in (("layer", layer), ("fetch", fetch), ("CPU", cpu), ("RAM", ram)):
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise ValueError(f"a {what} time is negative or not finite")
    slack = layer.copy() if kind == DEMAND else np.zeros_like(layer)
    return Clock(kind, layer, fetch, slack, cpu, ram)


def price(
    clock: Clock,
    misses: npt.NDArray[np.int32],
    on_cpu: npt.NDArray[np.int32] | None = None,
    from_ram: npt.NDArray[np.int32] | None = None,
) -> StepTimes:
    """The times of T decode steps with `misses` (T, L) i32 fetched experts.

    With a tier of RAM those are the experts read from NVMe, `from_ram` (T, L) i32 more are fetched from RAM, and all go over
    one link, one after the other.  `on_cpu` (T, L) i32 are computed on the CPU: a layer's compute is the longer of its own
    time and that of its experts on the CPU, which run beside each other.
    """
    steps, layers = misses.shape
    if len(clock.layer_s) != layers:
        raise ValueError(f"misses of {layers} layers and times of {len(clock.layer_s)}")
    times = np.zeros((3, steps))
    layer_stall = np.zeros(layers)
    cpu = np.zeros_like(misses) if on_cpu is None else on_cpu
    fetches = misses * clock.fetch_s
    if from_ram is not None:
        fetches += from_ram * clock.ram_fetch_s
    is_arrival = clock.kind == ARRIVAL
    _price(fetches, cpu, is_arrival, clock.layer_s, clock.slack_s, clock.cpu_expert_s, times, layer_stall)
    return StepTimes(times[0], times[1], times[2], layer_stall)


def layer_stall(clock: Clock, layer: int, most: int) -> Seconds:
    """(most + 1,): the stall of 0, 1, .. `most` misses in a layer; for clocks in which layers do not depend on each other."""
    if clock.kind == ARRIVAL:
        raise ValueError("with the arrival clock the stall of a layer depends on the others")
    late: Seconds = np.arange(most + 1) * clock.fetch_s[layer] - clock.slack_s[layer]
    return np.maximum(late, 0.0)


@compiled
def _price(
    fetches: Seconds,
    on_cpu: npt.NDArray[np.int32],
    is_arrival: bool,
    layer_s: Seconds,
    slack_s: Seconds,
    cpu_expert_s: Seconds,
    times: Seconds,
    layer_stall: Seconds,
) -> None:
    """Fill `times` (3, T), compute, stall and transfer, and add to `layer_stall` (L,); `fetches` (T, L) in seconds."""
    for t in range(fetches.shape[0]):
        now = 0.0
        done = 0.0  # when the link has brought all fetches so far
        for i in range(fetches.shape[1]):
            done += fetches[t, i]
            stall = max(0.0, done - now) if is_arrival else max(0.0, fetches[t, i] - slack_s[i])
            compute = max(layer_s[i], on_cpu[t, i] * cpu_expert_s[i])
            now += stall + compute
            times[0, t] += compute
            times[1, t] += stall
            layer_stall[i] += stall
        times[2, t] = done
