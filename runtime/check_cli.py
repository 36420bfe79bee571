"""`bel-run BUNDLE --check-against MODEL.gguf`: a few lines that say yes or no, or JSON."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bel.formats.console import SETTINGS, TOKENS, Progress, Utf8Text, json_option, print_json, print_table, say
from bel.formats.errors import DamagedBundleError, UsageError
from bel.runtime.options_cli import PATH, run_options

if TYPE_CHECKING:
    from bel.runtime.bundle_model import BundleRun
    from bel.runtime.context import ContextOptions, Observer
    from bel.runtime.differences import Differences, Mismatch
    from bel.runtime.run_options import RunOptions

NAME = "bel-run"
TRIAL_CONTEXT = 32
"""Positions of a context that only shows that the bundle can be opened."""


@click.command(context_settings=SETTINGS, options_metavar="--check-against MODEL.gguf [OPTIONS]")
@run_options
@click.option("--check-against", "source", type=PATH, required=True, metavar="MODEL.gguf", help="The bundle's source.")
@click.option("-f", "files", type=PATH, multiple=True, help="Prompts: a file, or every file of a folder.  May be repeated.")
@click.option("-p", "texts", type=Utf8Text(), multiple=True, help="A prompt.  May be repeated.  Without any: random tokens.")
@click.option("-n", "n_predict", type=click.IntRange(0), default=64, show_default=True, help="Tokens to generate for each.")
@json_option
def check_command(
    options: RunOptions, source: Path, files: tuple[Path, ...], texts: tuple[str, ...], n_predict: int, as_json: bool
) -> int:
    """Prove that BUNDLE computes what MODEL.gguf, its source, computes in stock llama.cpp.

    Stock llama.cpp runs the prompts first and generates greedily, past any end of text; the bundle reads the same tokens.
    Every choice of the router, every logit of every token (its bits) and every best next token is compared.  Exit status 4
    where anything differs.  The logits of the whole run are kept on disk meanwhile.

    \b
    Examples:
      bel-run model.bel --check-against model.gguf
      bel-run model.bel --check-against model.gguf -f prompts -n 64 --slots 16 --policy lru --json
    """
    from bel.formats.bundle import is_bundle, open_bundle
    from bel.formats.gguf_model import open_model
    from bel.runtime.check import CheckOptions, CheckPrompt, check, check_source
    from bel.runtime.engine import Engine
    from bel.runtime.prompts import read_prompts
    from bel.runtime.running import open_running

    if options.stock:
        raise UsageError("--stock and --check-against exclude each other: the check runs stock llama.cpp as well")
    if options.gpu is not None:
        raise UsageError("nothing can look into a run with --gpu: its callback is machine code", hint="Leave --gpu out")
    if options.path.is_file():
        raise UsageError("--check-against wants a bundle first, and this is a file", path=str(options.path))
    if is_bundle(source):
        raise UsageError("--check-against wants the GGUF that the bundle was made from, not a bundle", path=str(source))
    prompts = read_prompts(files, texts) if files or texts else ()
    bundle, model = open_bundle(options.path), open_model(source)
    check_source(bundle, model)
    # What options, bundle or machine refuse is refused here, and not behind stock's run, which may take an hour.
    with open_running(replace(options, n_ctx=options.n_ctx or TRIAL_CONTEXT), all_logits=True):
        pass
    answer: dict[str, Any] = {}
    progress = Progress(NAME, unit=TOKENS)
    try:
        found = check(
            Engine.open(options.engine),
            bundle,
            model,
            [CheckPrompt(prompt.name, prompt.text) for prompt in prompts],
            CheckOptions(n_predict, options.n_ctx, options.n_ubatch, options.n_ubatch, options.n_threads),
            lambda sizes, observer: _open(options, sizes, observer, answer),
            progress,
        )
    finally:
        progress.close()
    if as_json:
        print_json({**differences_json(found), **answer})
    else:
        print_table(_verdict(found), _rows(found, answer))
    return 0 if found.first is None else DamagedBundleError.exit_code


@contextlib.contextmanager
def _open(options: RunOptions, sizes: ContextOptions, observer: Observer, answer: dict[str, Any]) -> Iterator[BundleRun]:
    """The bundle by the command's options; `answer` gets what it had in slots and what it missed."""
    from bel.runtime.load_line import load_lines, slots_by_layer
    from bel.runtime.running import open_running

    with open_running(replace(options, n_ctx=sizes.n_ctx), observer, all_logits=True) as running:
        run = running.bundle
        assert run is not None, "only --stock runs without a bundle"
        for line in load_lines(running):
            say(NAME, line)
        yield run
        running.finish()
        answer["load"] = {
            "slots_by_layer": {str(layer): count for layer, count in slots_by_layer(run).items()},
            "policy": running.policy,
            "reader": run.pager.name,
        }
        phases = {"prompt": run.cache.counters.prompt, "decode": run.cache.counters.decode}
        answer["cache"] = {
            name: {"accesses": x.accesses, "hits": x.hits, "misses": x.missed, "read_bytes": x.read_bytes}
            for name, x in phases.items()
        }


def differences_json(found: Differences) -> dict[str, Any]:
    """The object of `--json`.  `max_logit_difference` is None where a logit is not a number."""
    return {
        "ok": found.first is None,
        "tokens_compared": found.n_tokens,
        "router_records_compared": found.n_router_records,
        "logits_compared": found.n_logits,
        "max_logit_difference": found.max_logit if math.isfinite(found.max_logit) else None,
        "first_mismatch": None if found.first is None else asdict(found.first),
    }


def _verdict(found: Differences) -> str:
    return "exact: every bit is stock llama.cpp's" if found.first is None else "NOT exact: the bundle differs from its source"


def _rows(found: Differences, answer: dict[str, Any]) -> list[tuple[str, str]]:
    slots = answer["load"]["slots_by_layer"].values()
    rows = [
        ("router records compared", f"{found.n_router_records:,}"),
        ("tokens compared", f"{found.n_tokens:,}"),
        ("logits compared", f"{found.n_logits:,}"),
        ("largest difference", f"{found.max_logit}"),
        ("slots per layer", f"{min(slots)} to {max(slots)}, policy {answer['load']['policy']}"),
    ]
    rows += [
        (f"experts of the {name}", f"{x['misses']:,} of {x['accesses']:,} had to be read")
        for name, x in answer["cache"].items()
    ]
    return rows if found.first is None else [*rows, ("first difference", _place(found.first))]


def _place(first: Mismatch) -> str:
    layer = "" if first.layer is None else f", layer {first.layer}"
    return f"{first.what} at position {first.position}{layer} of {first.prompt}: {first.found}, expected {first.expected}"


for _option in check_command.params:
    if isinstance(_option, click.Option) and _option.name in ("stock", "gpu", "vram"):  # refused with reasons of their own
        _option.hidden = True
