"""The options that all ways to run a model share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from bel.formats.console import F
from bel.formats.errors import UsageError, printable
from bel.formats.units import parse_bytes
from bel.runtime.llama_library import engine_choice
from bel.runtime.policies import POLICY_NAMES
from bel.runtime.readers import KINDS
from bel.runtime.run_options import (
    AUTO,
    DEFAULT_CONTEXT,
    DEFAULT_POLICY,
    DEFAULT_UBATCH,
    POOL_WAYS,
    STOCK_WAYS,
    RunOptions,
)

PATH = click.Path(path_type=Path)
GPU_WAYS = tuple(dict.fromkeys((*POOL_WAYS, *STOCK_WAYS)))


def _size(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    return None if value is None else parse_bytes(value)


def _gpu(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    if value is None or value in GPU_WAYS or (value.isascii() and value.isdigit() and len(value) < 4):
        return value
    raise UsageError(
        f"'{printable(value)}' is no way to use a GPU",
        expected=f"{', '.join(GPU_WAYS)}, or a GPU's number below 1000",
        hint="What stands behind --gpu is its way: write --gpu auto in front of other arguments",
    )


_OPTIONS = (
    click.argument("model", type=PATH, metavar="BUNDLE"),
    click.option("--plan", type=PATH, help="Slots and preloading by a plan of `bel-profile plan`."),
    click.option("--slots", type=click.IntRange(1), metavar="N", help="Slots in every layer."),
    click.option(
        "--ram",
        callback=_size,
        metavar="SIZE",
        help="Memory for the whole process: as many slots as fit.  Default, without --plan and --slots: what is free now.  "
        "With --gpu: host memory, and experts for which there is none are read from disk.",
    ),
    click.option("--policy", default=DEFAULT_POLICY, show_default=True, help=f"Which experts stay: {POLICY_NAMES}."),
    click.option(
        "--context",
        type=click.IntRange(1, 2**31 - 1),
        help=f"Positions of the context.  Default: {DEFAULT_CONTEXT}, at most what the model was trained for.",
    ),
    click.option(
        "--ubatch",
        type=click.IntRange(1, 2**31 - 1),
        default=DEFAULT_UBATCH,
        show_default=True,
        help="Prompt tokens at once.  More is faster and needs more memory.",
    ),
    click.option("--threads", type=click.IntRange(1, 1024), help="Threads of llama.cpp.  Default: the CPUs of this process."),
    click.option(
        "--reader", type=click.Choice(["auto", *KINDS]), default="auto", show_default=True, help="How experts are read."
    ),
    click.option("--no-checksums", is_flag=True, help="Do not compare the checksum of an expert when it is first read."),
    click.option(
        "--no-prefetch",
        is_flag=True,
        help="Read nothing ahead for the next layer: neither in a prompt nor, by guess, while decoding.",
    ),
    click.option("--stock", is_flag=True, help="Run a GGUF as llama.cpp does: the baseline."),
    click.option(
        "--engine",
        default="auto",
        show_default=True,
        metavar="NAME|FOLDER",
        callback=lambda _context, _parameter, value: engine_choice(value),
        help="Which llama.cpp: auto, xllamacpp, llama-cpp-python, or a folder with a build of it (docs/gpu.md).",
    ),
    click.option(
        "--gpu",
        is_flag=False,
        flag_value=AUTO,
        callback=_gpu,
        metavar="[WAY|N]",
        help="Experts on a GPU, needs --engine: auto (or the number of a GPU), upload, split, static or cache; with --stock "
        "all, cpu-moe or cache (docs/gpu.md).",
    ),
    click.option(
        "--vram",
        callback=_size,
        metavar="SIZE",
        help="With --gpu: of the GPU's memory, everything included.  Default: what is free there.",
    ),
)


def run_options(command: F) -> F:
    """Declare the options; the command gets them as its first argument, a `RunOptions`."""

    @functools.wraps(command)
    def with_options(**given: Any) -> Any:
        return command(_gathered(given), **given)

    wrapped: Callable[..., Any] = with_options
    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]


def _gathered(given: dict[str, Any]) -> RunOptions:
    """Take the shared options out of all that were given."""
    gpu, vram_bytes = given.pop("gpu"), given.pop("vram")
    number = int(gpu) if gpu is not None and gpu.isdigit() else 0
    if vram_bytes is not None and gpu is None:
        raise UsageError("--vram is the memory of a GPU, and --gpu is not given")
    return RunOptions(
        path=given.pop("model"),
        stock=given.pop("stock"),
        plan=given.pop("plan"),
        slots=given.pop("slots"),
        ram_bytes=given.pop("ram"),
        policy=given.pop("policy"),
        n_ctx=given.pop("context"),
        n_ubatch=given.pop("ubatch"),
        n_threads=given.pop("threads"),
        reader=given.pop("reader"),
        checks=not given.pop("no_checksums"),
        prefetches=not given.pop("no_prefetch"),
        engine=given.pop("engine"),
        gpu=AUTO if gpu is not None and gpu.isdigit() else gpu,
        gpu_number=number,
        vram_bytes=vram_bytes,
    )
