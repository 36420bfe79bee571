"""`bel-run` under a cap on memory, beside stock llama.cpp: python tests/bench/bench_run.py [--part A] [--rounds 2] ...

A  a 4.2 GB random model and fresh random tokens under 1536M, against stock under the same cap and without any
B  a trained model made big (`inflate.py`), held-out code, half of the experts in slots, under 1300M; policies and a plan
C  `--ram` as a promise: what is charged to the control group of the run, page cache included
D  what the slots count against `bel-profile simulate` of the trace of the same run
E  a soak at the smallest number of slots: memory, descriptors, mappings, and stock's tokens

Runs are cold and take turns in an order that is drawn; figures are medians of the rounds.  Caps need root.  The exit status
is 1 where a bar is missed, except with --quick, whose figures are no evidence.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from bench_repack import Bar, bar_table, machine_table
from capped import why_not
from comparison import Bench, compare, shown
from inflate import DEFAULT_BYTES
from measure import may_drop_caches, timed
from models import BigModel, big_path, make_big
from real_routing import CONVERT, Real, counted, make_plans, make_real, measure_costs, predicted, tokens_of
from rich.console import Console
from rich.table import Table
from runs import Case, figure

from bel.formats.units import GIB, MIB, format_bytes
from soak import soak

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "tiny-moe-q8_0.gguf"
TEXT = ROOT / "examples" / "prompts" / "code"
RANDOM_CAP, REAL_CAP = 1536 * MIB, 1300 * MIB
RANDOM_SLOTS = 40  # of 128, as the prototype had
PROMISES = (GIB, 3 * GIB // 2, 3 * GIB)
POLICIES = ("lru", "lfu-ghost", "lfu-decay:0.98", "repick:500", "arc", "s3fifo")
COUNTED_POLICIES = ("static", "lru", "lfu-ghost", "lfu-decay:0.98", "repick:100")
SEED_START, SEED_TOKENS = 1000, 600  # of the text: planned from what is not measured
MAX_GROWTH_BYTES = 4 * MIB
MAX_MORE_MAPPINGS = 8  # neighbours come and go as one mapping or two
DEFAULT = "lfu-decay:0.98"
CALIBRATING = "lru"
"""Its run says what a layer and a miss take; the times of the others are predicted from that."""
UPLOADING = "repick:500"
"""Not judged: what it uploads between tokens is waited for at other places than a miss."""
MAX_OFF = 0.1


def part_a(bench: Bench) -> Iterator[Bar]:
    """The random model."""
    folder = bench.options.folder
    big = BigModel(layers=2 if bench.options.quick else 12)
    model = big_path(folder, big)
    make_big(model, big)
    bundle = model.with_suffix(".bel")
    if not bundle.exists():
        timed([sys.executable, "-c", CONVERT, "convert", str(model), "-o", str(bundle), "--no-verify"])
    ours = [
        Case(f"{policy}, {RANDOM_SLOTS} of {big.experts} slots", bundle, ("--slots", str(RANDOM_SLOTS), "--policy", policy))
        for policy in ("lru", DEFAULT)
    ]
    ours.append(Case(f"{DEFAULT}, --ram {RANDOM_CAP >> 20}M", bundle, ("--ram", str(RANDOM_CAP), "--policy", DEFAULT)))
    title = f"A: {model.stat().st_size / 1e9:.2f} GB random model, random tokens, cap {format_bytes(RANDOM_CAP)}"
    yield from compare(bench, "A", title, model, ours, ours[-1].name, RANDOM_CAP, None)


def real(bench: Bench) -> Real:
    """The inflated model of parts B, C and D."""
    return make_real(bench.options.folder, bench.options.model, (256 * MIB) if bench.options.quick else DEFAULT_BYTES)


def part_b(bench: Bench) -> Iterator[Bar]:
    """The trained model."""
    made, text = real(bench), bench.options.text
    make_plans(made, tokens_of(made, text, SEED_START, SEED_TOKENS))
    small = ("--ubatch", "128")  # with 512 the buffers of the widened experts and a full call would not fit under the cap
    slots = (*small, "--slots", str(made.half))
    ours = [Case(policy, made.bundle, (*slots, "--policy", policy)) for policy in POLICIES]
    for name, plan in (("uniform, preloaded", made.uniform), ("planned", made.planned)):
        ours += [
            Case(f"{policy}, {name}", made.bundle, (*small, "--plan", str(plan), "--policy", policy))
            for policy in ("static", DEFAULT)
        ]
    title = (
        f"B: {made.model.stat().st_size / 1e9:.2f} GB, real routing, {made.half} slots a layer, cap {format_bytes(REAL_CAP)}"
    )
    measure_costs(made)
    ours = [replace(c, arguments=(*c.arguments, "--costs", str(made.costs))) if c.name == CALIBRATING else c for c in ours]
    found = yield from compare(bench, "B", title, made.model, ours, DEFAULT, REAL_CAP, text)
    table, bars = _simulated_table(bench, made, {p: figure(found[p], "ms_per_token") for p in POLICIES})
    bench.console.print(table)
    yield from bars


def _simulated_table(bench: Bench, made: Real, measured: dict[str, float | None]) -> tuple[Table, list[Bar]]:
    """What the simulator says of the same tokens, with Belady's bound; and its time per token beside the `measured` ms."""
    n_prompt, n_decode = bench.options.prompt_tokens, bench.options.tokens
    ids = tokens_of(made, bench.options.text, 0, n_prompt + n_decode)
    trace = made.folder / "measured.trace"
    slots = counted.SlotOptions(counted.parse_policy("lru"), slots=made.half)
    counted.run_counted(made.bundle, trace, (ids[:n_prompt], ids[n_prompt:]), slots, n_ubatch=128, threads=2)
    columns = ("policy", "hit rate", "MB/token", "ms predicted", "ms measured", "predicted of measured")
    title = f"B: the same tokens, simulated, slots empty at first; times by the clock of the run with {CALIBRATING}"
    table, bars = Table(*columns, title=title, title_justify="left"), []
    for row in predicted(made, trace, [*POLICIES, "belady"]):
        ms, real_ms = row["seconds_per_token"] * 1e3, measured.get(row["policy"])
        cells = [row["policy"], f"{row['hit_rate']:.3f}", f"{row['bytes_per_token']['nvme'] / 1e6:.1f}", f"{ms:.1f}"]
        table.add_row(*cells, shown(real_ms, "{:.1f}"), shown(real_ms and ms / real_ms, "{:.2f}"))
        if real_ms and row["policy"] not in (CALIBRATING, UPLOADING):
            off = abs(ms / real_ms - 1)
            bars.append(Bar(f"B: predicted time, {row['policy']}", f"{off:.0%} off", "10 % at most", off <= MAX_OFF))
    return table, bars


def part_c(bench: Bench) -> Iterator[Bar]:
    """Promises: once in a group that only counts, and once in one of that very size."""
    if bench.no_cap:
        bench.console.print(f"C is skipped: {bench.no_cap}")
        return
    made, runner = real(bench), bench.runner(bench.options.text)
    table = Table(
        "--ram", "charged, no cap", "charged, capped", "slots", "decode t/s, capped", "faults", title="C", title_justify="left"
    )
    for promise in PROMISES:
        took = []
        for limit in (0, promise):
            case = Case("", made.bundle, ("--ram", str(promise)), limit, {}, bench.options.tokens)
            took.append(runner.run(case))
            bench.say(f"  --ram {format_bytes(promise)}: {took[-1].failed or 'ran'}, charged {took[-1].charged_bytes}")
        charged = [t.charged_bytes or 0 for t in took]
        answer = took[1].answer
        slots = "-" if answer is None else str(max(answer["load"]["slots_by_layer"].values()))
        speed, faults = (figure(took[1:], key) for key in ("decode_tokens_per_s", "last_half_major_faults_per_token"))
        cells = [
            *(format_bytes(c) for c in charged),
            slots,
            took[1].failed or shown(speed, "{:.2f}"),
            shown(faults, "{:.2f}"),
        ]
        table.add_row(format_bytes(promise), *cells)
        holds = charged[0] <= promise and not took[0].failed and not took[1].failed
        yield Bar(f"C: --ram {format_bytes(promise)}, charged", format_bytes(charged[0]), "at most that", holds)
    bench.console.print(table)


def part_d(bench: Bench) -> Iterator[Bar]:
    """Counters."""
    made, options = real(bench), bench.options
    n_prompt, n_decode = options.prompt_tokens, options.tokens
    seed = tokens_of(made, options.text, SEED_START, n_prompt + n_decode)
    ids = tokens_of(made, options.text, 0, n_prompt + n_decode)
    slots = counted.SlotOptions(counted.parse_policy("lru"), slots=made.half)
    counted.run_counted(made.bundle, made.folder / "seed.trace", (seed[:n_prompt], seed[n_prompt:]), slots, threads=2)
    table = Table("policy", "phase", "accesses", "hits of the run", "simulated", "uploads", title="D", title_justify="left")
    for policy in COUNTED_POLICIES:
        found = counted.compare(made.bundle, made.folder, (ids[:n_prompt], ids[n_prompt:]), policy, made.half, threads=2)
        for phase, (run, simulated) in found.items():
            table.add_row(policy, phase, f"{run.accesses}", f"{run.hits}", f"{simulated.hits}", f"{run.uploads}")
        wrong = [phase for phase, (run, simulated) in found.items() if run != simulated]
        yield Bar(f"D: {policy}, counts of run and simulator", f"differ in {wrong}" if wrong else "equal", "equal", not wrong)
    bench.console.print(table)


def part_e(bench: Bench) -> Iterator[Bar]:
    """The soak."""
    bundle, count = bench.options.folder / "tiny.bel", bench.options.soak
    if not bundle.exists():
        timed([sys.executable, "-c", CONVERT, "convert", str(EXAMPLE), "-o", str(bundle), "--no-verify"])
    first_wrong, seen = soak(bundle, EXAMPLE, count, policy=DEFAULT, threads=1)
    table = Table(
        "tokens", "RSS MB", "descriptors", "mappings", title=f"E: {count} tokens at the floor of slots", title_justify="left"
    )
    for number, x in enumerate(seen, 1):
        table.add_row(f"{number * (count // len(seen))}", f"{x.rss_bytes / 1e6:.2f}", f"{x.descriptors}", f"{x.mappings}")
    bench.console.print(table)
    late = seen[len(seen) // 2 :]
    grown = late[-1].rss_bytes - late[0].rss_bytes
    found = "all" if first_wrong is None else f"the first {first_wrong}"
    yield Bar("E: tokens equal to stock's", found, "all", first_wrong is None)
    yield Bar("E: memory, growth in the later half", format_bytes(grown), "at most 4 MiB", grown <= MAX_GROWTH_BYTES)
    yield Bar(
        "E: descriptors in the later half",
        f"{late[0].descriptors} to {late[-1].descriptors}",
        "the same",
        late[0].descriptors == late[-1].descriptors,
    )
    more = late[-1].mappings - late[0].mappings
    yield Bar("E: mappings, growth in the later half", str(more), f"at most {MAX_MORE_MAPPINGS}", more <= MAX_MORE_MAPPINGS)


PARTS: dict[str, Callable[[Bench], Iterator[Bar]]] = {"A": part_a, "B": part_b, "C": part_c, "D": part_d, "E": part_e}


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=sorted(PARTS), help="only this part; may be given again")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to decode")
    parser.add_argument("--stock-tokens", type=int, default=8, help="tokens that stock decodes under the cap (seconds each)")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each case of A and B")
    parser.add_argument("--model", type=Path, default=EXAMPLE, help="a trained Q4_0 or Q8_0 model, made big for B, C and D")
    parser.add_argument("--text", type=Path, default=TEXT, help="held-out text (a file or a folder) for B, C and D")
    parser.add_argument("--soak", type=int, default=20_000, help="tokens of E")
    parser.add_argument("--folder", type=Path, default=ROOT / "bench-out", help="where models and bundles go (13 GB)")
    parser.add_argument("--cold", choices=["auto", "drop", "files"], default="auto", help="drop all caches, or the files' own")
    parser.add_argument("--quick", action="store_true", help="small models, to try the benchmark itself; judges nothing")
    return parser.parse_args()


def main() -> int:
    """Measure, print, and give 1 where a bar is missed."""
    options = parse_options()
    console = Console(width=None if sys.stdout.isatty() else 240, highlight=False)
    options.folder.mkdir(exist_ok=True)
    console.print(machine_table(options.folder))
    no_cap = why_not()
    if no_cap:
        console.print(f"nothing is capped, and what needs a cap is left out: {no_cap}")
    drop = options.cold == "drop" or (options.cold == "auto" and may_drop_caches())
    bench = Bench(options, console, no_cap, drop)
    bars = [bar for name in options.part or sorted(PARTS) for bar in PARTS[name](bench)]
    console.print(bar_table(bars))
    if options.quick:
        console.print("a trial: too small to judge by")
        return 0
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
