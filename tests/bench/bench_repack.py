"""`make bench`: the conversion against cp, verify against cat, the header scanner against two other readers.

Prints what was measured and the bars that must hold; the exit status is 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from machine import describe
from measure import BEL_REPACK, Took, make_cold, may_drop_caches, timed, timed_python
from models import BigModel, big_path, make_big, make_header
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
PAIRS = 3
MAX_PEAK_BYTES = 200 * 10**6
MAX_CONVERT_RATIO = 1.25  # of the wall time of cp and sync
MIN_VERIFY_RATIO = 0.8  # of the speed of cat
MAX_INSPECT_SECONDS = 1.0
HEADER_TOKENS = 200_000
COPY = ["sh", "-c", 'cp "$1" "$2" && sync "$2"', "copy"]
READ = ["sh", "-c", 'cat "$1" > /dev/null', "read"]
PACKAGE_READER = """
import gguf, json, sys, time
began = time.perf_counter()
gguf.GGUFReader(sys.argv[1])
print(json.dumps({"seconds": time.perf_counter() - began}))
"""
LLAMA_PARSER = f"""
import json, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT / "tests")!r})
import llama_reader
print(json.dumps({{"seconds": llama_reader.parse_seconds(Path(sys.argv[1]))}}))
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure that must hold."""

    what: str
    found: str
    wanted: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Row:
    """Runs of one command; its speed is reckoned from `size_bytes`, where that is not 0."""

    what: str
    size_bytes: int
    runs: list[Took]

    @property
    def median_seconds(self) -> float:
        """Median wall time."""
        return statistics.median(run.seconds for run in self.runs)

    @property
    def peak_bytes(self) -> int | None:
        """The largest peak memory of the runs, known of Python programs only."""
        return max((run.peak_rss_bytes for run in self.runs if run.peak_rss_bytes is not None), default=None)


@dataclass(slots=True)
class BigBench:
    """Convert, verify and restore a model of random weights, beside cp and cat."""

    folder: Path
    model: BigModel
    drop: bool
    stayed_cached: float = 0.0

    source: Path = field(init=False)
    bundle: Path = field(init=False)
    copied: Path = field(init=False)
    back: Path = field(init=False)

    def __post_init__(self) -> None:
        self.source = big_path(self.folder, self.model)
        self.bundle, self.copied, self.back = (self.folder / name for name in ("out.bel", "copy.gguf", "restored"))

    def run(self) -> list[Row]:
        """All runs: convert, copy, verify, read, restore.  Their outputs are removed again, the model is kept."""
        source_bytes = self.source.stat().st_size
        converts, copies = pairs(self.convert, self.copy)
        remove(self.copied)
        verifies, reads = pairs(self.verify, self.read_experts)
        experts_bytes = self.experts().stat().st_size
        restores = [self.restore() for _ in range(PAIRS)]
        self.check_restored(restores[-1])
        remove(self.bundle)
        remove(self.back)
        return [
            Row("bel-repack --no-verify, fsync included", source_bytes, converts),
            Row("cp and sync", source_bytes, copies),
            Row("bel-repack verify, of all files", experts_bytes, verifies),
            Row("cat experts.bin > /dev/null", experts_bytes, reads),
            Row("bel-repack restore, fsync included", source_bytes, restores),
        ]

    def cold(self, paths: list[Path]) -> None:
        """Make files cold, and remember the worst case of what stayed in the cache."""
        self.stayed_cached = max(self.stayed_cached, make_cold(paths, drop=self.drop))

    def convert(self) -> Took:
        """The conversion, without the verification that follows it by default."""
        remove(self.bundle)
        self.cold([self.source])
        return timed_python(BEL_REPACK, "convert", self.source, "-o", self.bundle, "--no-verify", "--json")

    def copy(self) -> Took:
        """What a copy takes until it is on the disk."""
        remove(self.copied)
        self.cold([self.source])
        return timed([*COPY, str(self.source), str(self.copied)])

    def files(self) -> list[Path]:
        """The files of the bundle."""
        return [path for path in self.bundle.rglob("*") if path.is_file()]

    def experts(self) -> Path:
        """The experts file."""
        return next(path for path in self.files() if path.name.endswith("-experts.bin"))

    def verify(self) -> Took:
        """The full verification of the bundle."""
        self.cold(self.files())
        return timed_python(BEL_REPACK, "verify", self.bundle, "--json")

    def read_experts(self) -> Took:
        """What reading the experts file alone takes."""
        self.cold(self.files())
        return timed([*READ, str(self.experts())])

    def restore(self) -> Took:
        """The way back."""
        remove(self.back)
        self.cold(self.files())
        return timed_python(BEL_REPACK, "restore", self.bundle, "-o", self.back, "--json")

    def check_restored(self, restore: Took) -> None:
        """A figure counts only where the work was done: the restored file hashes to what was converted."""
        want = json.loads((self.bundle / "manifest.json").read_bytes())["sources"][0]["sha256"]
        if json.loads(restore.stdout)["files"][0]["sha256"] != want:
            sys.exit("the restored file differs from the source")


def pairs(ours: Callable[[], Took], theirs: Callable[[], Took]) -> tuple[list[Took], list[Took]]:
    """PAIRS runs of each, in turn, the first of a pair alternating, so that a drift of the machine hits both."""
    mine: list[Took] = []
    other: list[Took] = []
    for number in range(PAIRS):
        both = [(ours, mine), (theirs, other)]
        for run, into in reversed(both) if number % 2 else both:
            into.append(run())
    return mine, other


def remove(path: Path) -> None:
    """Remove a file or folder that an earlier run may have left."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def big_bars(rows: list[Row]) -> list[Bar]:
    """The bars on the big model."""
    convert, copy, verify, read, restore = rows
    slower, text = ratio(convert, copy)
    bars = [Bar("convert, of cp and sync", text, f"at most {MAX_CONVERT_RATIO}", slower <= MAX_CONVERT_RATIO)]
    speed, text = ratio(read, verify)
    bars.append(Bar("verify's speed, of cat's", text, f"at least {MIN_VERIFY_RATIO}", speed >= MIN_VERIFY_RATIO))
    named = {"convert": convert, "verify": verify, "restore": restore}
    return bars + [memory_bar(f"peak memory, {name}", row) for name, row in named.items()]


def ratio(one: Row, other: Row) -> tuple[float, str]:
    """Ratio of the median wall times, and as text with that of every pair."""
    whole = one.median_seconds / other.median_seconds
    each = ", ".join(f"{a.seconds / b.seconds:.3f}" for a, b in zip(one.runs, other.runs, strict=True))
    return whole, f"{whole:.3f} (pairs {each})"


def memory_bar(what: str, row: Row) -> Bar:
    """The bar on peak memory."""
    found = row.peak_bytes
    assert found is not None, "our own commands tell their memory"
    return Bar(what, f"{found / 1e6:.0f} MB", f"under {MAX_PEAK_BYTES / 1e6:.0f} MB", found < MAX_PEAK_BYTES)


def header_rows(folder: Path) -> tuple[list[Row], list[float]]:
    """`inspect`, the gguf package and llama.cpp on one large header, warm; and the seconds of the two readers alone."""
    path = folder / "header.gguf"
    make_header(path, HEADER_TOKENS)
    path.read_bytes()
    ours, package, llama = [], [], []
    for number in range(PAIRS):
        ours.append(timed_python(BEL_REPACK, "inspect", path, "--json"))
        llama.append(timed_python(LLAMA_PARSER, path))
        if number == 0:  # ten seconds and more each, and no bar hangs on it
            package.append(timed_python(PACKAGE_READER, path))
    rows = [
        Row("bel-repack inspect", 0, ours),
        Row("gguf package, GGUFReader", 0, package),
        Row("llama.cpp, gguf_init_from_file", 0, llama),
    ]
    return rows, [statistics.median(json.loads(run.stdout)["seconds"] for run in row.runs) for row in rows[1:]]


def header_bars(rows: list[Row]) -> list[Bar]:
    """The bars on the large header."""
    ours, package, _ = rows
    seconds = ours.median_seconds
    times = package.median_seconds / seconds
    found = f"{seconds:.3f} s, the gguf package takes {times:.0f} times as long"
    return [
        Bar("inspect, in all", found, f"under {MAX_INSPECT_SECONDS:.0f} s", seconds < MAX_INSPECT_SECONDS),
        memory_bar("peak memory, inspect", ours),
    ]


def run_table(title: str, rows: list[Row]) -> Table:
    """Wall times, speed and memory."""
    table = Table(title=title, title_justify="left")
    for column in ("what", "seconds", "median", "MB/s", "peak MB"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        speed = f"{row.size_bytes / row.median_seconds / 1e6:.0f}" if row.size_bytes else ""
        memory = f"{row.peak_bytes / 1e6:.0f}" if row.peak_bytes is not None else ""
        seconds = " ".join(f"{run.seconds:.2f}" for run in row.runs)
        table.add_row(row.what, seconds, f"{row.median_seconds:.3f}", speed, memory)
    return table


def bar_table(bars: list[Bar]) -> Table:
    """The bars and whether they hold."""
    table = Table(title="bars", title_justify="left")
    for column in ("what", "found", "wanted", "holds"):
        table.add_column(column)
    for bar in bars:
        table.add_row(bar.what, bar.found, bar.wanted, "yes" if bar.holds else "NO")
    return table


def main() -> int:
    """Measure, print, and give 1 where a bar is missed (0 with --quick, whose figures are no evidence)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a 0.36 GB model, to try the benchmark itself; judges nothing")
    parser.add_argument("--folder", type=Path, default=ROOT / "bench-out", help="where models and outputs go (13 GB)")
    parser.add_argument(
        "--cold", choices=["auto", "drop", "files"], default="auto", help="drop all caches (root), or the files' own"
    )
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    options.folder.mkdir(exist_ok=True)
    console.print(machine_table(options.folder))

    drop = options.cold == "drop" or (options.cold == "auto" and may_drop_caches())
    bench = BigBench(options.folder, BigModel(layers=1 if options.quick else 12), drop)
    made = make_big(bench.source, bench.model)
    size = bench.source.stat().st_size
    console.print(f"model: {size:,} bytes, {'made now' if made else 'as made before'}: {bench.model}")
    rows = bench.run()
    how = "sync and drop_caches" if drop else "sync and posix_fadvise(DONTNEED) on the files read"
    console.print(f"cold before every run: {how}; at most {bench.stayed_cached:.2%} of a file stayed in the cache")
    console.print(run_table(f"{size / 1e9:.2f} GB model, cold, {PAIRS} runs of each in turn", rows))
    console.print(f"information: restore takes {rows[4].median_seconds / rows[1].median_seconds:.3f} of cp and sync")

    headers, alone = header_rows(options.folder)
    console.print(run_table(f"header with 3 arrays of {HEADER_TOKENS:,} elements, warm, whole processes", headers))
    console.print(f"information: in the process GGUFReader takes {alone[0]:.3f} s, gguf_init_from_file {alone[1]:.3f} s")
    bars = big_bars(rows) + header_bars(headers)
    console.print(bar_table(bars))
    if options.quick:
        console.print("a trial: too small to judge by")
        return 0
    return 0 if all(bar.holds for bar in bars) else 1


def machine_table(folder: Path) -> Table:
    """The machine, as a table."""
    table = Table(title="machine", title_justify="left", show_header=False)
    for name, value in describe(folder):
        table.add_row(name, value)
    return table


if __name__ == "__main__":
    sys.exit(main())
