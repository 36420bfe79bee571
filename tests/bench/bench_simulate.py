"""How fast recorded work is simulated: LRU and all policies, beside libCacheSim's Python binding, in one run.

    python tests/bench/bench_simulate.py [--accesses 10000000]

The work is drawn, seeded: 24 layers of 128 experts, top-8, decoded token by token; some experts are hotter than others, and
which ones drifts.  It is written as a trace to bench-out/ once (half a minute), and lies in the page cache.  A cache has half
of the experts of its layer.  Compiled code is warmed up by a short run and does not count; the best of three runs does.

libCacheSim is no dependency: `pip install libcachesim` into the same environment, else its lines are missing.  It serves the
same accesses from one cache for each layer, one object each: in bulk from files in its own binary format (page cache, two
threads and one, the better counts), and request by request from Python.  Its small hash tables are asked for: the default of
2^24 buckets a cache would make it slower.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from measure import TELL_PEAK, timed_python

from bel.formats.trace import DECODE, TraceWriter
from bel.formats.trace_calls import LayerCalls, Trace, read_trace
from bel.formats.trace_header import TraceHeader, TraceLayer
from bel.profiler.curves import lru_curves
from bel.profiler.replay import BELADY_POLICY, layer_stream, replay
from bel.runtime.policies import parse_policy

FOLDER = Path("bench-out")
LAYERS, N_EXPERT, TOP_K, SEGMENT = 24, 128, 8, 64
RUNS = 3
POLICIES = "lru,random,lfu-forget,lfu-ghost,lfu-decay:0.98,lfuda,slru,arc,s3fifo,repick:500,belady"
BAR_ACCESSES_PER_S, BAR_REQUEST_RATIO = 20e6, 10
BAR_REPORT_SECONDS, BAR_REPORT_BYTES = 60, 10**9
BEL_PROFILE = TELL_PEAK + "from bel.profiler.cli import main\nmain()\n"
_ORACLE_GENERAL = struct.Struct("<IQIq")


def main() -> None:
    """Measure, print, and fail where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accesses", type=int, default=10_000_000)
    accesses = parser.parse_args().accesses
    FOLDER.mkdir(exist_ok=True)
    path = make_trace(accesses)
    trace = read_trace(path)
    many = trace.id_count
    print(f"{many} accesses, {LAYERS} layers of {N_EXPERT} experts, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    rates = {name: many / seconds for name, seconds in policy_seconds(trace).items()}
    rates["lru, all capacities"] = many / best(lambda: each_layer(trace, lru_curves))
    for name, rate in rates.items():
        print(f"  {name:22} {rate / 1e6:8.2f} M accesses/s")
    missed = [] if rates["lru"] >= BAR_ACCESSES_PER_S else [f"LRU replay: {rates['lru'] / 1e6:.1f} M accesses/s"]
    missed += against_libcachesim(trace, rates["lru"])
    missed += whole_report(path)
    if missed:
        sys.exit("bars missed: " + "; ".join(missed))


def make_trace(accesses: int) -> Path:
    """The trace in bench-out/, made where it is missing."""
    tokens = accesses // (LAYERS * TOP_K)
    path = FOLDER / f"simulate-{LAYERS}-{N_EXPERT}-{TOP_K}-{tokens}.trace"
    if path.exists():
        return path
    layers = tuple(TraceLayer(layer, N_EXPERT, TOP_K, 2_654_208) for layer in range(LAYERS))
    ids = [draw_ids(layer, tokens) for layer in range(LAYERS)]
    fresh = path.with_suffix(".part")
    with TraceWriter(fresh, TraceHeader("bench", "qwen3moe", "", layers, "bench"), replace=True, sync=False) as writer:
        for token in range(tokens):
            where = np.array([token])
            for layer in range(LAYERS):
                rows = ids[layer][token : token + 1]
                writer.append(phase=DECODE, ubatch=token, layer=layer, tokens=where, ids=rows)
    fresh.replace(path)
    return path


def draw_ids(layer: int, tokens: int) -> npt.NDArray[np.uint16]:
    """(tokens, TOP_K): the best of scores that are part popularity, part the segment's topic, part chance."""
    random = np.random.default_rng(layer)
    popular = random.gumbel(size=N_EXPERT) * 0.5
    rows = []
    for at in range(0, tokens, SEGMENT):
        score = random.gumbel(size=(min(SEGMENT, tokens - at), N_EXPERT)) + popular + random.gumbel(size=N_EXPERT)
        rows.append(np.argpartition(-score, TOP_K, axis=1)[:, :TOP_K].astype(np.uint16))
    return np.concatenate(rows)


def best(run: Callable[[], object]) -> float:
    """Seconds of the fastest of some runs."""
    seconds = []
    for _ in range(RUNS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def each_layer(trace: Trace, run: Callable[[LayerCalls], object]) -> list[object]:
    """Run something on all layers, on two threads."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, trace.layers))


def policy_seconds(trace: Trace) -> dict[str, float]:
    """Seconds to replay the whole trace, for each policy."""
    ones = np.ones(N_EXPERT, np.int64)
    counted = [np.ones(len(c.phase), np.bool_) for c in trace.layers]
    answer = {}
    for name in POLICIES.split(","):
        policy = BELADY_POLICY if name == "belady" else parse_policy(name)

        def serve(calls: LayerCalls, policy: Any = policy) -> object:
            return replay(policy, layer_stream(calls, counted[calls.info.layer]), ones, N_EXPERT // 2)

        serve(trace.layers[0])
        answer[name] = best(lambda serve=serve: each_layer(trace, serve))  # type: ignore[misc]
    return answer


def against_libcachesim(trace: Trace, ours: float) -> list[str]:
    """Print its rates on the same accesses; the bars that are missed."""
    if importlib.util.find_spec("libcachesim") is None:
        print("  libCacheSim is not installed (pip install libcachesim): not compared")
        return []
    import libcachesim as lcs

    files = list(_oracle_general_files(trace))

    def bulk(file: Path) -> float:
        reader = lcs.TraceReader(trace=str(file), trace_type=lcs.TraceType.ORACLE_GENERAL_TRACE)
        cache = lcs.LRU(cache_size=N_EXPERT // 2, hashpower=10)
        return float(cache.process_trace(reader)[0])

    def bulk_all(threads: int) -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(bulk, files))

    bulk_rate = trace.id_count / min(best(lambda: bulk_all(1)), best(lambda: bulk_all(2)))
    single = trace.layers[0].ids.reshape(-1).tolist()

    def requests() -> None:
        cache = lcs.LRU(cache_size=N_EXPERT // 2, hashpower=10)
        request = lcs.Request()
        request.obj_size = 1
        for item in single:
            request.obj_id = item
            cache.get(request)

    request_rate = len(single) / best(requests)
    for name, rate in (("libCacheSim, bulk", bulk_rate), ("libCacheSim, requests", request_rate)):
        print(f"  {name:22} {rate / 1e6:8.2f} M accesses/s   LRU replay is {ours / rate:.1f} times as fast")
    missed = [] if ours >= bulk_rate else [f"libCacheSim in bulk has {bulk_rate / 1e6:.1f} M accesses/s"]
    if ours < BAR_REQUEST_RATIO * request_rate:
        missed.append(f"only {ours / request_rate:.1f} times libCacheSim request by request")
    return missed


def _oracle_general_files(trace: Trace) -> Iterator[Path]:
    """The accesses of each layer in libCacheSim's binary format: time, object, size, next access (not known: -1)."""
    kind = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])
    assert kind.itemsize == _ORACLE_GENERAL.size
    for calls in trace.layers:
        rows = np.zeros(calls.ids.size, kind)
        rows["time"], rows["object"] = np.arange(len(rows)), calls.ids.reshape(-1)
        rows["size"], rows["next"] = 1, -1
        path = FOLDER / f"simulate-{calls.info.layer}.oracleGeneral"
        rows.tofile(path)
        yield path


def whole_report(path: Path) -> list[str]:
    """`report`, and `simulate` with all policies at three sizes, as commands: seconds and peak memory of both."""
    commands: Sequence[tuple[str, ...]] = (
        ("report", str(path), "--json"),
        ("simulate", str(path), "--policy", f"{POLICIES},static-oracle", "--fraction", "0.25,0.5,0.75", "--json"),
    )
    seconds, peak = 0.0, 0
    for command in commands:
        took = timed_python(BEL_PROFILE, *command)
        json.loads(took.stdout)
        seconds, peak = seconds + took.seconds, max(peak, took.peak_rss_bytes or 0)
        print(f"  bel-profile {command[0]:10} {took.seconds:6.1f} s, {(took.peak_rss_bytes or 0) / 1e6:.0f} MB")
    missed = [] if seconds < BAR_REPORT_SECONDS else [f"the whole report took {seconds:.0f} s"]
    return missed + ([] if peak < BAR_REPORT_BYTES else [f"the whole report took {peak / 1e6:.0f} MB"])


if __name__ == "__main__":
    main()
