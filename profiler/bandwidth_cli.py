"""`bel-profile bandwidth`: a table on a terminal, or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bel.formats.console import SETTINGS, json_option, print_json, print_table, say
from bel.formats.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from bel.formats.costs import Costs
    from bel.profiler.bandwidth_target import Experts

NAME = "bel-profile"
_PATH = click.Path(path_type=Path)


@click.command("bandwidth", context_settings=SETTINGS)
@click.argument("path", type=_PATH, metavar="DIR")
@click.option("--block", "block_text", metavar="SIZE", help="Bytes of a read.  Default: an expert of the model, else 2592k.")
@click.option(
    "--threads", "n_threads", type=click.IntRange(1, 1024), help="Threads for memory and experts.  Default: all CPUs."
)
@click.option("-o", "output", type=_PATH, default=Path("costs.json"), show_default=True, help="The costs to write.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
@json_option
def bandwidth_command(
    path: Path, block_text: str | None, n_threads: int | None, output: Path, force: bool, as_json: bool
) -> None:
    """Measure what moving and computing an expert costs on this machine: reads from disk, memory, products on the CPU.

    DIR is a bundle or a GGUF, whose experts are read and multiplied, or a folder on the disk to be measured, where a file of up
    to 2 GiB is made and removed again.  Reads are random, direct (O_DIRECT) and as large as an expert.  A figure that is really
    the page cache's is refused.  It takes about 15 seconds; let the machine be idle.

    An output that holds costs already is replaced: they can be measured again.  Anything else needs --force.

    \b
    Examples:
      bel-profile bandwidth model.bel
      bel-profile bandwidth . --block 2592k -o costs.json --json
    """
    from bel.formats.costs import FORMAT, costs_json, encode_costs
    from bel.formats.staging import replace_file
    from bel.profiler.bandwidth import measure
    from bel.profiler.bandwidth_target import find_target
    from bel.profiler.output import check_inputs, check_output

    check_inputs([path])
    check_output(output, [path], force=force, replaces=FORMAT)
    target = find_target(path, None if block_text is None else parse_bytes(block_text))
    measured = measure(target, n_threads=n_threads, say=lambda text: say(NAME, text))
    for note in measured.notes:
        say(NAME, f"note: {note}")
    replace_file(output, encode_costs(measured.costs))
    if as_json:
        say(NAME, f"wrote {output}")
        print_json(costs_json(measured.costs))
    else:
        print_table(f"wrote {output}", _rows(measured.costs, target.experts))


def _rows(costs: Costs, experts: Experts | None) -> list[tuple[str, str]]:
    """What, how fast, and what that means for one expert or one token."""
    block = costs.block_bytes
    rows = [
        (f"disk, {depth} at once", f"{_rate(rate)}, {_time(block / rate)} for each {format_bytes(block)}")
        for depth, rate in costs.nvme_depths
    ]
    rows.append(("memory copy", _rate(costs.memory_bytes_per_s)))
    if costs.cpu_expert_seconds is not None:
        rows.append(("an expert on the CPU", f"{_time(costs.cpu_expert_seconds)} for one token"))
    if experts is not None and experts.bytes_per_token is not None:
        rows += _token_rows(costs, experts, experts.bytes_per_token)
    return [*rows, ("machine", costs.machine)]


def _token_rows(costs: Costs, experts: Experts, size: int) -> list[tuple[str, str]]:
    disk, memory = size / costs.nvme_bytes_per_s, size / costs.memory_bytes_per_s
    rows = [
        ("a token's experts", f"{experts.experts_per_token} of {format_bytes(size)} together"),
        ("  all from disk", f"{_time(disk)}: at most {1 / disk:.3g} tokens/s"),
        ("  copied in memory", f"{_time(memory)}: at most {1 / memory:.3g} tokens/s"),
    ]
    if costs.cpu_expert_seconds is not None and experts.experts_per_token is not None:
        cpu = costs.cpu_expert_seconds * experts.experts_per_token
        rows.append(("  on the CPU", f"{_time(cpu)}: at most {1 / cpu:.3g} tokens/s"))
    return rows


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
