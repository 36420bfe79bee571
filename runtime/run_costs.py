"""What a measured run says about the constants of its machine: a layer's time and a miss's, as they are in a run.

`bel-profile bandwidth` measures the disk alone and a recording times the layers alone.  In a run they share cores and
memory, part of a read hides behind computing, and the callback takes its time too.
"""

from __future__ import annotations

from dataclasses import replace

from bel.formats.costs import MAX_BYTES_PER_S, Costs
from bel.formats.errors import UsageError
from bel.runtime.bench import BenchResult
from bel.runtime.bundle_model import BundleRun

_WORDS = "; layers and misses as bel-run took them"


def run_costs(costs: Costs, result: BenchResult, run: BundleRun) -> Costs:
    """`costs` with the times of the last pass's decoding, so that the clock `blocking` gives back the time of its tokens.

    A layer's time is an equal share of all that is not waiting for reads.  The rate is that at which a miss was waited for:
    above the disk's own where part of it hid behind computing.  A pass that missed nothing says nothing about it.  Raises
    UsageError for a run without experts in layers.
    """
    last = result.passes[-1]
    reached = [layer.layer for layer in run.layers if not layer.is_mtp]
    phase, n_tokens = last.decode, len(last.token_seconds)
    if phase is None or not reached:
        raise UsageError("only a run of a bundle says what its layers and misses take")
    wait = phase.wait_ns * 1e-9
    each = (float(last.token_seconds.sum()) - wait) / n_tokens / len(reached)
    rate, depths = costs.nvme_bytes_per_s, costs.nvme_depths
    if phase.missed and wait > 0:
        loaded = phase.missed + phase.uploads
        missed_bytes = phase.read_bytes * phase.missed / (loaded + phase.wasted)
        rate, depths = min(missed_bytes / wait, MAX_BYTES_PER_S), ()
    return replace(
        costs,
        nvme_bytes_per_s=rate,
        nvme_depths=depths,
        layer_seconds=tuple((layer, each) for layer in reached),
        machine=costs.machine.removesuffix(_WORDS) + _WORDS,
    )
