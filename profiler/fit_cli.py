"""`bel-profile fit`: a table on a terminal, or JSON."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bel.formats.console import SETTINGS, json_option, print_json, print_table, say
from bel.formats.units import format_bytes, parse_bytes
from bel.profiler.kv_cache import CACHE_TYPES
from bel.runtime.run_options import DEFAULT_CONTEXT

if TYPE_CHECKING:
    from bel.profiler.fit import Fit

NAME = "bel-profile"
_CONTEXT_HELP = (
    f"Tokens of the context.  Default: 8192 (bel-run's own is {DEFAULT_CONTEXT}), or what the model was trained for if less."
)


@click.command("fit", context_settings=SETTINGS)
@click.argument("path", type=click.Path(path_type=Path), metavar="MODEL_OR_BUNDLE")
@click.option(
    "--vram", "vram_text", default="0", metavar="SIZE", help="Memory of the GPU (12G).  Without it: no GPU, slots in RAM."
)
@click.option("--ram", "ram_text", metavar="SIZE", help="Memory of the machine (16G).  Default: what this one has.")
@click.option("--context", type=click.IntRange(1, 2**31 - 1), help=_CONTEXT_HELP)
@click.option(
    "--kv",
    "cache_type",
    type=click.Choice(CACHE_TYPES, case_sensitive=False),
    default="f16",
    show_default=True,
    help="Type of the cache of keys and values.",
)
@click.option("--slots", type=click.IntRange(0), metavar="N", help="Slots in each layer.  Default: as many as fit.")
@click.option("--slots-bytes", "slots_text", metavar="SIZE", help="At most these bytes for all slots (8G).")
@json_option
def fit_command(
    path: Path,
    vram_text: str,
    ram_text: str | None,
    context: int | None,
    cache_type: str,
    slots: int | None,
    slots_text: str | None,
    as_json: bool,
) -> None:
    """Say what of a model fits in a GPU's memory and in RAM: dense weights, caches, and how many experts of each layer.

    The header is enough: it works before a download is complete (of a split set it needs the start of every shard).

    The exit status is 0 also where nothing fits: that is an answer.  --json has it in `fits`.

    \b
    Examples:
      bel-profile fit model.gguf --vram 12G --ram 32G
      bel-profile fit model.bel --ram 16G --context 32768 --kv q8_0
      bel-profile fit model.gguf --vram 24G --ram 64G --slots 40 --json
    """
    from bel.formats.bundle import is_bundle
    from bel.profiler.fit import Question, default_context, solve
    from bel.profiler.fit_json import fit_json
    from bel.profiler.fit_words import Run, advice, verdict
    from bel.profiler.footprint import read_footprint

    vram_bytes, ram_bytes = parse_bytes(vram_text), _ram_bytes(ram_text)
    model = read_footprint(path)
    question = Question(
        vram_bytes,
        ram_bytes,
        context or default_context(model),
        cache_type.lower(),
        slots,
        None if slots_text is None else parse_bytes(slots_text),
    )
    fit = solve(model, question)
    for note in fit.notes:
        say(NAME, f"{path}: {note}" if note in fit.model.notes else note)
    run = Run(str(path) if is_bundle(path) else None, limits_ram=ram_text is not None)
    words, next_steps = verdict(fit), advice(fit, run)
    if as_json:
        print_json(fit_json(fit, words, next_steps))
    else:
        _print(fit, words, next_steps)


def _ram_bytes(text: str | None) -> int:
    if text is not None:
        return parse_bytes(text)
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    say(NAME, f"no --ram: this machine's {format_bytes(found)} are taken")
    return found


def _print(fit: Fit, words: str, next_steps: list[str]) -> None:
    from bel.profiler.fit_words import expert_words, slot_words

    q, caches = fit.question, fit.caches
    rows = [("dense weights", format_bytes(fit.dense_bytes)), (f"KV cache ({q.cache_type})", format_bytes(caches.kv_bytes))]
    rest = caches.state_bytes + caches.padding_bytes
    rows += [("states, cache rounding", format_bytes(rest))] if rest else []
    rows += [
        ("compute buffer (estimate)", format_bytes(fit.compute_bytes)),
        ("margin left free", format_bytes(fit.margin_bytes)),
    ]
    rows += [("a layer's stage, for prompts", format_bytes(fit.stage_bytes))] if fit.stage_bytes else []
    rows += [("experts of one call", format_bytes(fit.call_bytes))] if fit.call_bytes else []
    slots = (
        f"{format_bytes(fit.slots_bytes)}: {slot_words(fit)} of {expert_words(fit)} experts in each of {len(fit.slots)} layers"
    )
    rows.append(("expert slots", slots))
    memory = "VRAM" if fit.is_gpu else "RAM"
    title = f"{fit.model.name}: {q.context} tokens of context in {format_bytes(fit.memory_bytes)} of {memory}"
    print_table(title, [*rows, ("left", format_bytes(fit.left_bytes))])
    elsewhere = [("experts in RAM", format_bytes(fit.in_ram_bytes))] if fit.is_gpu else []
    elsewhere.append(("experts on disk", format_bytes(fit.on_disk_bytes)))
    if fit.is_gpu:
        elsewhere.append(("token embeddings in RAM", format_bytes(fit.model.input_bytes)))
    if fit.model.ple_bytes:
        elsewhere.append(("per-layer embeddings (disk)", format_bytes(fit.model.ple_bytes)))
    print_table("Elsewhere", elsewhere)
    click.echo(words)
    for step in next_steps:
        click.echo(f"- {step}")
