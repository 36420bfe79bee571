"""What recording costs: decode time with and without it, token by token in turn, in one run on one loaded model.

    python tests/bench/bench_record.py [--model MODEL.gguf] [--tokens 96]

Without a model it uses the 4.2 GB random one in bench-out/, which is made where it is missing; on that one the bar holds.
Every side decodes the same tokens one by one behind the same prompt, with logits for each; the plain side without a
callback, as any program would run it.  A token's times on all sides lie next to each other and their order is drawn, so that
what else the machine does meets all alike.  The weights are in the page cache: the first tokens warm up and do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from models import BigModel, big_path, make_big

from bel.formats.gguf_model import open_model
from bel.formats.trace import TraceWriter
from bel.formats.trace_header import TraceHeader
from bel.profiler.record_worker import FLUSH_TOKENS, Recorder, trace_layers
from bel.profiler.router import RouterObserver
from bel.runtime.context import Context, ContextOptions
from bel.runtime.engine import Engine, Model

FOLDER = Path("bench-out")
BAR_RATIO = 1.10
WARM_UP_TOKENS = 8
SIDES: dict[str, dict[str, bool]] = {"plain": {}, "ids": {}, "ids, weights, times": {"weights": True, "times": True}}


@dataclass(frozen=True, slots=True)
class Side:
    """A context, and what records it; None on the plain side."""

    context: Context
    recorder: Recorder | None

    def decode(self, number: int, token: int) -> float:
        """Seconds for one token, all that recording does for it included."""
        began = time.perf_counter()
        if self.recorder is None:
            self.context.decode([token], all_logits=True)
        else:
            self.recorder.decode(token)
            if (number + 1) % FLUSH_TOKENS == 0:
                self.recorder.flush()
        return time.perf_counter() - began


def main() -> None:
    """Measure, print, and fail where recording ids costs more than the bar on the random model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    path = options.model or big_path(FOLDER, BigModel())
    if options.model is None:
        make_big(path, BigModel())
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(Engine.open().load(path))
        sides = dict(_sides(stack, model, path, options.tokens))
        seconds = measure(sides, model, options.tokens)
    ratios = report(path, seconds)
    if options.model is None and ratios["ids"] > BAR_RATIO:
        raise SystemExit(f"recording costs {100 * (ratios['ids'] - 1):.1f} % of decode time; the bar is 10 %")


def _sides(stack: contextlib.ExitStack, model: Model, path: Path, n_tokens: int) -> Iterator[tuple[str, Side]]:
    source = open_model(path)
    layers, arch = trace_layers(source), source.arch or ""
    for number, (name, columns) in enumerate(SIDES.items()):
        observer = RouterObserver(arch, layers, **columns) if number else None
        header = TraceHeader("bench", arch, "", layers, "", has_weights=bool(columns), has_times=bool(columns))
        context = stack.enter_context(model.context(ContextOptions(WARM_UP_TOKENS + n_tokens, 64, 64), observer))
        if observer is None:
            yield name, Side(context, None)
            continue
        trace = stack.enter_context(TraceWriter(FOLDER / f"record-{number}.trace", header, replace=True))
        yield name, Side(context, Recorder(context, observer, trace))


def measure(sides: dict[str, Side], model: Model, n_tokens: int) -> dict[str, list[float]]:
    """Seconds of each token on each side."""
    tokens = np.random.default_rng(0).integers(0, min(model.n_vocab, 256), WARM_UP_TOKENS + n_tokens)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    order = random.Random(0)
    for number, token in enumerate(tokens):
        order.shuffle(names)  # in a fixed cycle each side would always follow the same other one, and inherit its cache
        for name in names:
            spent = sides[name].decode(number, int(token))
            if number >= WARM_UP_TOKENS:
                seconds[name].append(spent)
    return seconds


def report(path: Path, seconds: dict[str, list[float]]) -> dict[str, float]:
    """Print the times; the median over the tokens of each side's time by the plain side's time of the same token."""
    plain = seconds["plain"]
    ratios = {name: statistics.median(s / p for s, p in zip(spent, plain, strict=True)) for name, spent in seconds.items()}
    print(
        f"recording, {path.name}, {len(plain)} tokens decoded one by one, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    )
    for name, spent in seconds.items():
        print(f"  {name:20} {1000 * statistics.median(spent):8.2f} ms/token   {ratios[name]:.3f} of plain")
    return ratios


if __name__ == "__main__":
    main()
