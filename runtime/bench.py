"""How fast a model reads a prompt and decodes: the same given tokens for every engine, policy and budget, never generated ones.

A pass clears the context, runs a prompt, and then decodes token by token.  The first one is cold: the model's files were
dropped from the page cache before they were opened, and the slots are empty but for what was preloaded.  The second one is
warm: the slots hold what the first one left.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bel.formats.bundle import check_sizes, is_bundle, open_bundle
from bel.formats.errors import InterruptedRun, UsageError
from bel.formats.gguf_model import open_model
from bel.formats.process import major_faults, peak_rss_bytes
from bel.runtime.bench_reads import seconds_alone
from bel.runtime.counters import Counters, PhaseCounters
from bel.runtime.engine import Model
from bel.runtime.machine_load import OtherLoad
from bel.runtime.memory_group import MemoryGroup, memory_group
from bel.runtime.run_options import RunOptions
from bel.runtime.running import Running, open_running

Tokens = npt.NDArray[np.int64]
COLD, WARM = "cold", "warm"


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What is measured: `prompt_tokens` (one at least) and then `decode_tokens` (two at least, for a half) of `text`.

    Without a text they are drawn from the vocabulary by `seed`; fewer decode tokens are the first of more.  `is_warm`: with a
    second pass.  The context of `options` is made large enough where none is asked for.
    """

    options: RunOptions
    text: str | None = None
    prompt_tokens: int = 256
    decode_tokens: int = 64
    seed: int = 1
    is_warm: bool = True


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass.  `token_seconds` and `token_faults` (n,) are of each decoded token: wall time, and major page faults.

    `prompt` and `decode` count the slots; None for stock.  `alone_seconds`: what the reads of decoding take with nothing
    computed meanwhile; None without reads.
    """

    name: str
    prompt_tokens: int
    prompt_seconds: float
    prompt_faults: int
    token_seconds: npt.NDArray[np.float64]
    token_faults: Tokens
    prompt: PhaseCounters | None
    decode: PhaseCounters | None
    alone_seconds: float | None


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What was measured.  `decoded` (n,) are the ids of the decoded tokens.

    `other_cores`: how many cores others kept busy while the passes ran; `load_average` is that of the minute before.
    """

    passes: tuple[Pass, ...]
    decoded: Tokens
    load_seconds: float
    n_threads: int
    load_average: float
    other_cores: float
    peak_rss_bytes: int
    group: MemoryGroup | None


@dataclass(frozen=True, slots=True)
class Ready:
    """A loaded model and the tokens that it is measured with: comes before the passes, so that it can be told."""

    running: Running
    prompt: Tokens
    decoded: Tokens


def bench(request: BenchRequest, is_stopped: Callable[[], bool] = lambda: False) -> Iterator[Ready | Pass | BenchResult]:
    """Measure: yields the loaded model, then each pass as it ends, then the whole.  `is_stopped` is asked between decodes.

    Raises UsageError for numbers that do not do and a text that is too short, InterruptedRun where it was stopped, and all that
    loading and decoding raise.
    """
    if request.prompt_tokens < 1 or request.decode_tokens < 2:
        raise UsageError("a measurement takes a prompt of one token or more, and decodes two or more")
    load_average = os.getloadavg()[0]
    drop_from_cache(model_files(request.options.path))
    began = time.perf_counter()
    with open_running(_with_context(request)) as running:
        load_seconds = time.perf_counter() - began
        prompt, decoded = tokens_of(request, running.model)
        running.choose(prompt.astype(np.int32))
        yield Ready(running, prompt, decoded)
        others = OtherLoad()
        passes = []
        for name in (COLD, WARM) if request.is_warm else (COLD,):
            passes.append(_run(name, running, prompt, decoded, is_stopped))
            yield passes[-1]
        yield BenchResult(
            passes=tuple(passes),
            decoded=decoded,
            load_seconds=load_seconds,
            n_threads=request.options.n_threads or len(os.sched_getaffinity(0)),
            load_average=load_average,
            other_cores=others.cores(),
            peak_rss_bytes=peak_rss_bytes(),
            group=memory_group(),
        )


def model_files(path: Path) -> list[Path]:
    """The files of a bundle, or of a GGUF with all of its shards.  Raises what opening them raises, before any is touched."""
    if not is_bundle(path):
        return [header.path for header in open_model(path).files]
    bundle = open_bundle(path)
    check_sizes(bundle)
    return [bundle.path(name) for name, _ in bundle.manifest.files]


def drop_from_cache(paths: list[Path]) -> None:
    """Ask the kernel to forget the pages of files; those that are dirty, or mapped by somebody else, stay."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def tokens_of(request: BenchRequest, model: Model) -> tuple[Tokens, Tokens]:
    """The tokens of the prompt (n,) and those to be decoded (m,).  Raises UsageError where the text has fewer."""
    count = request.prompt_tokens + request.decode_tokens
    if request.text is None:
        tokens = np.random.default_rng(request.seed).integers(0, model.n_vocab, count)
    else:
        tokens = model.tokenize(request.text).astype(np.int64)
    if len(tokens) < count:
        raise UsageError(
            "the text is too short",
            found=f"{len(tokens)} tokens",
            expected=f"{count}: a prompt of {request.prompt_tokens}, and {request.decode_tokens} to decode",
            hint="Give a longer text with -f, or fewer tokens with --prompt-tokens and -n",
        )
    return tokens[: request.prompt_tokens], tokens[request.prompt_tokens : count]


def _with_context(request: BenchRequest) -> RunOptions:
    need = request.prompt_tokens + request.decode_tokens
    if request.options.n_ctx is not None and request.options.n_ctx < need:
        raise UsageError("the context is too small", found=request.options.n_ctx, expected=f"{need} tokens or more")
    return replace(request.options, n_ctx=request.options.n_ctx or need)


def _run(name: str, running: Running, prompt: Tokens, decoded: Tokens, is_stopped: Callable[[], bool]) -> Pass:
    context, run = running.context, running.bundle
    context.clear()
    if run is not None:
        run.cache.counters = Counters()
    if running.gpu is not None:
        running.gpu.reset_counters()
    faults, began = major_faults(), time.perf_counter()
    for start in range(0, len(prompt), context.n_batch):
        _check(is_stopped)
        context.decode(prompt[start : start + context.n_batch])
    prompt_seconds, prompt_faults = time.perf_counter() - began, major_faults() - faults
    running.begin_decode()
    seconds, token_faults, missed = np.zeros(len(decoded)), np.zeros(len(decoded), np.int64), np.zeros(len(decoded), np.int64)
    counted = PhaseCounters() if run is None else run.cache.counters.decode
    for number, token in enumerate(decoded):
        _check(is_stopped)
        faults, before, began = major_faults(), counted.missed + counted.uploads, time.perf_counter()
        context.decode([int(token)])
        seconds[number] = time.perf_counter() - began
        token_faults[number] = major_faults() - faults
        missed[number] = counted.missed + counted.uploads - before
    return Pass(
        name=name,
        prompt_tokens=len(prompt),
        prompt_seconds=prompt_seconds,
        prompt_faults=prompt_faults,
        token_seconds=seconds,
        token_faults=token_faults,
        prompt=None if run is None else run.cache.counters.prompt,
        decode=None if run is None else counted,
        alone_seconds=None if run is None or not missed.any() else seconds_alone(run, missed),
    )


def _check(is_stopped: Callable[[], bool]) -> None:
    if is_stopped():
        raise InterruptedRun("interrupted before all was measured")
