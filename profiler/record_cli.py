"""`bel-profile record`: prompts in, a trace and its profile out."""

from __future__ import annotations

import contextlib
import importlib.util
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bel.formats.console import SETTINGS, TOKENS, Progress, Utf8Text, json_option
from bel.formats.errors import InterruptedRun, UsageError
from bel.formats.profile_json import encode_profile
from bel.formats.staging import replace_file
from bel.formats.units import parse_bytes
from bel.profiler.output import check_output, file_identity, is_same_output
from bel.profiler.profile_cli import NAME, force_option, report_profile, say_all, workload_label

if TYPE_CHECKING:
    from bel.profiler.recording import RecordResult
    from bel.runtime.prompts import Prompt

_PATH = click.Path(path_type=Path)


def _engine(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    from bel.runtime.llama_library import engine_choice

    return engine_choice(value)


@click.command("record", context_settings=SETTINGS)
@click.argument("model", type=_PATH)
@click.option("-f", "files", type=_PATH, multiple=True, help="A prompt in a file, or a folder with one in each file.")
@click.option("-p", "texts", type=Utf8Text(), multiple=True, help="A prompt.")
@click.option("-n", "n_predict", type=click.IntRange(0), default=500, show_default=True, help="Tokens to generate a prompt.")
@click.option("--workload", help="The label of the work.  Default: the output's name.")
@click.option("--weights", is_flag=True, help="Record the router's weights too.")
@click.option("--timing", is_flag=True, help="Record the time of each layer too: of a GGUF.")
@click.option(
    "--engine",
    default="auto",
    show_default=True,
    metavar="NAME|FOLDER",
    callback=_engine,
    help="Which llama.cpp: auto, xllamacpp, llama-cpp-python, or a folder with a build of it.",
)
@click.option("--context", "n_ctx", type=click.IntRange(1), help="Context in tokens.  Default: what the prompts need.")
@click.option("--ubatch", "n_ubatch", type=click.IntRange(1), default=512, show_default=True, help="Prompt tokens at once.")
@click.option("--threads", "n_threads", type=click.IntRange(1), help="Threads of llama.cpp.")
@click.option("--temp", "temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed above temperature 0.")
@click.option("--slots", type=click.IntRange(1), metavar="N", help="Of a bundle: slots for experts in every layer.")
@click.option(
    "--ram",
    metavar="SIZE",
    help="Of a bundle: memory for the process that runs it, as many slots as fit.  Default: what is free now.",
)
@click.option("--ignore-eos", is_flag=True, help="Go on behind the end of a text: each prompt gives all -n tokens.")
@click.option("-o", "output", type=_PATH, required=True, help="The profile to write.")
@click.option("--trace", "trace", type=_PATH, help="The trace to write.  Default: the output's name with .trace.")
@force_option
@json_option
def record_command(
    model: Path,
    files: tuple[Path, ...],
    texts: tuple[str, ...],
    n_predict: int,
    workload: str | None,
    weights: bool,
    timing: bool,
    engine: str,
    n_ctx: int | None,
    n_ubatch: int,
    n_threads: int | None,
    temperature: float,
    seed: int,
    slots: int | None,
    ram: str | None,
    ignore_eos: bool,
    output: Path,
    trace: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Run prompts through MODEL and record every choice of its router: a trace, and the profile of it.

    MODEL is a GGUF, or a bundle, which may be bigger than memory: both choose the same experts.  The trace grows while the
    model runs.  Ctrl-C, or a crash, leaves a valid one.  With --json, `cache` counts what a bundle's slots hit and missed:
    `simulate` of the trace, with that policy and those slots, counts the same.

    \b
    Examples:
      bel-profile record model.gguf -f prompts/code --workload code -o code.json
      bel-profile record model.bel -f prompts/code --ram 8G -o code.json
      bel-profile record model.gguf -p "Write a poem" -n 100 -o poem.json --trace poem.trace
    """
    from bel.profiler.record import record as run
    from bel.profiler.recording import RecordRequest

    _need("cffi", "numpy", "numba")
    label = workload_label(workload, output)
    trace = trace or output.with_suffix(".trace")
    if is_same_output(trace, output):
        raise UsageError("the trace and the profile have one name", path=str(output), hint="Use -o NAME.json")
    prompts = [prompt for path in files for prompt in ([path] if not path.is_dir() else path.iterdir())]
    check_output(output, [model, *prompts], force=force)
    check_output(trace, [model, *prompts], force=force, replaces="")
    request = RecordRequest(
        model=model,
        trace=trace,
        prompts=_prompts(files, texts),
        n_predict=n_predict,
        workload=label,
        weights=weights,
        times=timing,
        engine=engine,
        n_ctx=n_ctx,
        n_ubatch=n_ubatch,
        n_threads=n_threads,
        temperature=temperature,
        seed=seed,
        ignore_end=ignore_eos,
        replace=force,
        slots=slots,
        ram_bytes=None if ram is None else parse_bytes(ram),
    )
    with _told_what_is_left(trace, output):
        progress = Progress(NAME, unit=TOKENS)
        try:
            result = run(request, lambda done, total: progress("record", done, total))
        finally:
            progress.close()
        from bel.profiler.summarize import summarize as summarize_traces  # its compiler takes memory that the model may need

        summary = summarize_traces([trace])
        say_all([*_notes(slots, result), *summary.notes])
        replace_file(output, encode_profile(summary.profile))
    report_profile(f"wrote {trace} and {output}", output, summary.profile, as_json=as_json, extra=_recorded(result, trace))


def _prompts(files: Sequence[Path], texts: Sequence[str]) -> tuple[Prompt, ...]:
    """As `read_prompts`; a file may also be a pipe, which a shell makes of `-f <(command)`."""
    from bel.runtime.prompts import read_prompt, read_prompts

    if not files:
        return read_prompts((), texts)
    found = list(read_prompts((), texts)) if texts else []
    for path in files:
        found += [read_prompt(None, path, sys.stdin.buffer)] if path.is_fifo() else read_prompts([path])
    return tuple(found)


@contextlib.contextmanager
def _told_what_is_left(trace: Path, output: Path) -> Iterator[None]:
    """Say of an interrupt, wherever it arrives, which files are there: the next run would be refused for them."""
    before = file_identity(trace), file_identity(output)
    try:
        yield
    except KeyboardInterrupt:
        raise _interrupted(trace, output, before) from None


def _interrupted(trace: Path, output: Path, before: tuple[object, object]) -> InterruptedRun:
    if file_identity(trace) in (None, before[0]):
        return InterruptedRun("interrupted; nothing was recorded")
    if file_identity(output) not in (None, before[1]):
        return InterruptedRun(f"interrupted behind all of it: {trace} and {output} are written")
    again = shlex.join(["bel-profile", "summarize", str(trace), "-o", str(output)])
    return InterruptedRun(f"interrupted; what was recorded until then is in {trace}", hint=f"Its profile is made by: {again}")


def _notes(slots: int | None, result: RecordResult) -> list[str]:
    from bel.runtime.slot_budget import clamp_notes

    return [] if result.cache is None else clamp_notes(slots, max(result.cache.slots_by_layer.values()))


def _recorded(result: RecordResult, trace: Path) -> dict[str, Any]:
    return {
        "trace": str(trace),
        "engine": {"name": result.engine, "build": result.engine_build},
        "prompts": [
            {"name": p.name, "prompt_tokens": p.prompt_tokens, "decode_tokens": p.decode_tokens, "ended": p.ended}
            for p in result.prompts
        ],
        "cache": None if result.cache is None else asdict(result.cache),
    }


def _need(*modules: str) -> None:
    """Raise ModuleNotFoundError for what the worker would lack, or the summary at the end of a long recording."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(name=name)
