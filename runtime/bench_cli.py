"""`bel-run --bench`: a table on a terminal, or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bel.formats.console import SETTINGS, json_option, print_json, say
from bel.runtime.options_cli import PATH, run_options

if TYPE_CHECKING:
    from bel.runtime.bench import BenchRequest, BenchResult, Ready
    from bel.runtime.run_options import RunOptions

NAME = "bel-run"


@click.command(context_settings=SETTINGS, options_metavar="--bench [OPTIONS]")
@run_options
@click.option("-f", "file", type=PATH, help="Tokens of this text, or of all files of a folder.  Default: drawn at random.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=256, show_default=True, help="Tokens of the prompt.")
@click.option("-n", "decode_tokens", type=click.IntRange(2), default=64, show_default=True, help="Tokens to decode.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=1, show_default=True, help="Seed of tokens drawn at random.")
@click.option("--cold-only", is_flag=True, help="Leave out the second pass, which finds the slots filled.")
@click.option(
    "--costs",
    "costs_file",
    type=PATH,
    help="Costs of `bel-profile bandwidth`; with the times of this run in them they are written beside, to NAME-run.json, for "
    "`simulate --clock blocking`.",
)
@json_option
@click.option("--bench", is_flag=True, expose_value=False, help="Measure: this command.")
def bench_command(
    options: RunOptions,
    file: Path | None,
    prompt_tokens: int,
    decode_tokens: int,
    seed: int,
    cold_only: bool,
    costs_file: Path | None,
    as_json: bool,
) -> None:
    """Measure how fast BUNDLE, or with --stock a GGUF, reads a prompt and decodes.

    The tokens are given ones, a prompt and then one by one, so the work is the same for every engine, policy and budget.
    Cold: the model's files are dropped from the page cache before they are opened.  Warm: a second pass, with the slots
    as the first one left them.

    \b
    Examples:
      bel-run model.bel --bench
      bel-run model.bel --bench -f code.txt --ram 8G --policy lru -n 128
      bel-run model.gguf --stock --bench -f code.txt --json
      bel-run model.bel --bench -f code.txt --ram 8G --costs costs.json
    """
    from bel.formats.costs import encode_costs, load_costs
    from bel.formats.errors import BadInputError, UsageError
    from bel.formats.staging import replace_file
    from bel.runtime.bench import BenchRequest, BenchResult, Ready, bench
    from bel.runtime.bench_report import pass_json, run_report
    from bel.runtime.prompts import read_prompts
    from bel.runtime.run_costs import run_costs
    from bel.runtime.run_report import report_json
    from bel.runtime.stopping import stop_requests

    if costs_file is not None and (options.stock or options.gpu is not None):
        raise UsageError("--costs is for a bundle on the CPU: no other run waits for reads alone", hint="Leave one of them out")
    if costs_file is not None and not costs_file.is_file():
        raise BadInputError("no such costs", path=str(costs_file), hint="`bel-profile bandwidth BUNDLE -o FILE` makes them")
    costs = None if costs_file is None else load_costs(costs_file)  # before the measurement, which takes a while
    text = None if file is None else "\n".join(prompt.text for prompt in read_prompts([file]))
    request = BenchRequest(options, text, prompt_tokens, decode_tokens, seed, is_warm=not cold_only)
    reports: list[dict[str, Any]] = []
    passes: list[dict[str, Any]] = []
    ready = None
    with stop_requests() as is_stopped:
        for event in bench(request, is_stopped):
            if isinstance(event, Ready):
                ready = event
                _say_ready(ready, request)
            elif isinstance(event, BenchResult):
                assert ready is not None, "the whole comes after its model"
                _print(event, reports, passes, request, _own_counts(ready, len(passes)), as_json=as_json)
                if costs is not None and costs_file is not None and ready is not None and ready.running.bundle is not None:
                    made = costs_file.with_name(f"{costs_file.stem}-run.json")
                    replace_file(made, encode_costs(run_costs(costs, event, ready.running.bundle)))
                    say(NAME, f"wrote {made}: the costs with the times of this run, for --clock blocking")
            else:
                assert ready is not None, "a pass comes after its model"
                # Now: the next pass counts the slots anew.
                reports.append(report_json(run_report(event, ready.decoded.tolist(), 0), ready.running))
                passes.append(pass_json(event))


def _say_ready(ready: Ready, request: BenchRequest) -> None:
    from bel.runtime.load_line import load_lines

    for line in load_lines(ready.running):
        say(NAME, line)
    of = f"drawn at random (seed {request.seed})" if request.text is None else "of the text"
    say(NAME, f"a prompt of {len(ready.prompt)} tokens and {len(ready.decoded)} to decode, {of}")


def _own_counts(ready: Ready, n_passes: int) -> dict[str, Any]:
    """llama.cpp's own cache tells of all passes together, once its context is gone: that is `cache` of the whole."""
    ready.running.finish()
    counts = ready.running.own_counts
    if counts is None:
        return {}
    from bel.runtime.generate import Speed
    from bel.runtime.gpu_report import own_cache_json

    speed = Speed(len(ready.prompt) * n_passes, 0.0, len(ready.decoded) * n_passes, 0.0)
    return {"cache": own_cache_json(counts, speed)}


def _print(
    result: BenchResult,
    reports: list[dict[str, Any]],
    passes: list[dict[str, Any]],
    request: BenchRequest,
    own: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    from bel.runtime.bench_report import load_warning, pass_rows, whole_json, whole_line

    warning = load_warning(result)
    if warning is not None:
        say(NAME, f"warning: {warning}")
    if as_json:
        source = "random" if request.text is None else "text"
        figures = [
            {**one, "speed": report["speed"], "cache": report["cache"]} for one, report in zip(passes, reports, strict=True)
        ]
        print_json({**reports[0], **own, **whole_json(result), "source": source, "seed": request.seed, "passes": figures})
        return
    lines = pass_rows(passes)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for number, (label, *cells) in enumerate(lines):
        shown = [label.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))]
        click.secho("  ".join(shown), bold=number == 0)
    click.echo(whole_line(result))
