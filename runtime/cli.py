"""`bel-run`: generate text from a bundle in the memory that there is."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bel.formats.console import SETTINGS, Utf8Text, json_option, print_json, print_table, run_command, say
from bel.formats.errors import BadInputError, InterruptedRun, UsageError
from bel.formats.process import major_faults, peak_rss_bytes
from bel.runtime.compiled import stay_plain
from bel.runtime.options_cli import PATH, run_options
from bel.runtime.prompts import read_prompt

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from bel.runtime.generate import Generation
    from bel.runtime.run_options import RunOptions
    from bel.runtime.run_report import RunReport
    from bel.runtime.running import Running

NAME = "bel-run"
_MODES = {"--bench": "bel.runtime.bench_cli:bench_command", "--check-against": "bel.runtime.check_cli:check_command"}
"""Options that make another command of this one, as `module:command`: it is loaded then, and gets all arguments as given."""


class _ByMode(click.Command):
    """The command itself, or the one that an option of `_MODES` stands for: `bel-run BUNDLE --bench`."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        names = args[: args.index("--")] if "--" in args else args
        mode = next((m for m in _MODES if any(a == m or a.startswith(f"{m}=") for a in names)), None)
        if mode is None:
            return super().make_context(info_name, args, parent, **extra)
        module, _, name = _MODES[mode].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        asks_help = any(a in ("-h", "--help") for a in names)  # which would be taken for the option's value
        return command.make_context(info_name, ["--help"] if asks_help else args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)


@click.command(cls=_ByMode, context_settings=SETTINGS)
@run_options
@click.option("-p", "text", type=Utf8Text(), help="The prompt.")
@click.option("-f", "file", type=PATH, help="The prompt in a file; - is standard input, as without -p and -f.")
@click.option("-n", "n_predict", type=click.IntRange(0), default=128, show_default=True, help="Tokens to generate at most.")
@click.option("--temp", "temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=1, show_default=True, help="Seed above temperature 0.")
@click.option("--chat", is_flag=True, help="The prompt is a message: put it into the model's chat template.")
@click.option("--ignore-eos", is_flag=True, help="Go on behind the end of a text.")
@click.option("--stats", is_flag=True, help="Show speed, hits, reads and memory on stderr at the end.")
@json_option
@click.option("--bench", is_flag=True, expose_value=False, help="Measure speed instead: see `bel-run --bench --help`.")
@click.option(
    "--check-against",
    metavar="MODEL.gguf",
    expose_value=False,
    help="Compare with stock llama.cpp instead: see `bel-run --check-against --help`.",
)
@click.version_option(package_name="bel-toolkit", prog_name=NAME)
def main_command(
    options: RunOptions,
    text: str | None,
    file: Path | None,
    n_predict: int,
    temperature: float,
    seed: int,
    chat: bool,
    ignore_eos: bool,
    stats: bool,
    as_json: bool,
) -> int:
    """Generate text from BUNDLE, a model that may be bigger than memory.  The words are those of stock llama.cpp.

    Text goes to stdout as it is made; how the model was loaded, and the statistics, go to stderr.  Ctrl-C stops after the token
    at hand.

    \b
    Examples:
      bel-run model.bel -p "def add(a, b):" -n 64
      bel-run model.bel --chat -p "Why is the sky blue?" --ram 8G --stats
      bel-run model.bel -f prompt.txt --plan plan.json --temp 0.7
      bel-run model.gguf --stock -p "def add(a, b):"     plain llama.cpp
      bel-run model.bel --bench                          how fast it is
      bel-run model.bel --check-against model.gguf       that it is exact
    """
    from bel.runtime.generate import Generation
    from bel.runtime.load_line import load_lines
    from bel.runtime.run_report import report_json, report_rows
    from bel.runtime.running import open_running
    from bel.runtime.sampling import Chooser
    from bel.runtime.stopping import stop_requests

    if not temperature < float("inf"):
        raise UsageError("--temp is not a finite number")
    with os.fdopen(0, "rb", closefd=False) as stdin:
        prompt = read_prompt(text, file, stdin)
    with open_running(options) as running:
        tokens = _prompt_tokens(running, prompt.text, prompt.name, chat)
        running.choose(tokens)
        for line in load_lines(running):
            say(NAME, line)
        with stop_requests() as is_stopped:
            generation = Generation(
                running.context,
                Chooser(temperature, seed),
                n_positions=running.n_positions,
                ignore_end=ignore_eos,
                is_stopped=is_stopped,
            )
            report = _generate(running, generation, tokens, n_predict, shows=not as_json)
        running.finish()
        if as_json:
            print_json(report_json(report, running))
        if stats:
            click.echo(err=True)  # on a terminal the text may have ended in the middle of a line
            print_table("statistics", report_rows(report, running), err=True)
        return _say_end(report, running)


def _prompt_tokens(running: Running, text: str, name: str, chat: bool) -> npt.NDArray[np.int32]:
    model = running.model
    if not model.has_tokenizer:
        raise BadInputError(
            "the model has no tokenizer, so it cannot read a prompt",
            path=str(model.path),
            hint="Its speed can be measured all the same: --bench",
        )
    tokens = model.tokenize(model.chat_prompt([("user", text)]) if chat else text)
    if not len(tokens):
        raise BadInputError("the model's tokenizer makes no token of the prompt", path=name)
    return tokens


def _generate(
    running: Running, generation: Generation, prompt: npt.NDArray[np.int32], n_predict: int, *, shows: bool
) -> RunReport:
    """Compute, and show the text as it comes."""
    from bel.runtime.generate import TextStream
    from bel.runtime.run_report import RunReport

    stream = TextStream(running.model, int(prompt[-1]))
    tokens: list[int] = []
    pieces: list[str] = []
    generation.prompt(prompt)
    running.begin_decode()
    faults = major_faults()
    with _stdout(pieces, shows=shows) as show:
        for token in generation.tokens(n_predict):
            tokens.append(token)
            show(stream.push(token))
        faults = major_faults() - faults
        show(stream.finish())
    return RunReport("".join(pieces), tokens, generation.ended, generation.speed, faults, peak_rss_bytes())


@contextlib.contextmanager
def _stdout(pieces: list[str], *, shows: bool) -> Iterator[Callable[[str], None]]:
    """Takes pieces of text: keeps them, and shows them at once.  On a terminal a line is ended behind the last one."""
    if shows and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # whatever the locale says: text is UTF-8

    def show(piece: str) -> None:
        pieces.append(piece)
        if shows and piece:
            sys.stdout.write(piece)
            sys.stdout.flush()

    try:
        yield show
    finally:
        if shows and sys.stdout.isatty():
            click.echo()


def _say_end(report: RunReport, running: Running) -> int:
    from bel.runtime.generate import CONTEXT_FULL, INTERRUPTED

    if report.ended == CONTEXT_FULL:
        trained = running.n_positions == running.model.n_ctx_train
        why = "all that the model was trained for" if trained else "--context gives more"
        say(NAME, f"the context is full ({running.n_positions} positions, {why}): the text ends here")
    if report.ended == INTERRUPTED:
        say(NAME, f"interrupted behind {len(report.tokens)} tokens")
        return InterruptedRun.exit_code
    return 0


def main() -> None:
    """Entry point."""
    names = sys.argv[1:]
    if not any(a == "--gpu" or a.startswith("--gpu=") for a in names):  # whose callback is compiled
        stay_plain()
    status = run_command(main_command, NAME)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):  # said already, where anyone could hear it
                stream.flush()
    # Without tearing the interpreter down: threads of the library may still run, and its destructors have crashed at exit.
    os._exit(status)


__all__ = ["main", "main_command"]

if __name__ == "__main__":
    main()
