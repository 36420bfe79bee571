"""The process that runs the model and writes the trace: `python -m bel.profiler.record_worker EVENTS_FD`.

It is a process of its own because llama.cpp ends the process that it is in when one of its assertions fails.  The request
comes as JSON on stdin; one JSON object a line goes out on the events descriptor; what the library says goes to stderr.
SIGINT, SIGTERM and SIGHUP stop the recording behind the token that is being computed, and close the trace in order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bel.formats.errors import BadInputError, BelError, UsageError
from bel.formats.fingerprint import fingerprint
from bel.formats.trace import DECODE, PROMPT, TraceWriter
from bel.formats.trace_header import TraceHeader, TraceLayer
from bel.profiler.record_source import Source, architecture, model_name, open_source, run_source, trace_layers
from bel.profiler.recording import CacheCounts, PhaseCounts, PromptResult, RecordRequest, RecordResult, error_to_json
from bel.profiler.router import Call, RouterObserver
from bel.runtime.compiled import stay_plain
from bel.runtime.context import Context, ContextOptions
from bel.runtime.counters import Counters
from bel.runtime.engine import Engine, Model
from bel.runtime.file_watch import FileWatch, file_changed, watch_model
from bel.runtime.generate import next_token
from bel.runtime.sampling import Chooser

if TYPE_CHECKING:
    from bel.runtime.bundle_model import BundleRun

APPEND_UBATCHES = 16
"""What was taken is given to the trace for so many ubatches at once: right behind a decode, which has pushed everything out of
the processor's caches, the same lines take ten times as long."""
FLUSH_TOKENS = 128
"""A block is written at least this often while decoding, counted in tokens and not in seconds: a trace is a function of its
inputs.  128 tokens cost a second or more on a model worth recording, a block some milliseconds."""
PROGRESS_SECONDS = 0.1


class Stopped(Exception):  # noqa: N818 - an order, not a failure
    """The recording was told to stop."""


class Events:
    """The line to the command: progress goes out, and the wish to stop comes in, as a signal or as a command that is gone."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._last = 0.0
        self._is_stopped = False

    def stop(self, _number: int, _frame: FrameType | None) -> None:
        """Signal handler.  It only takes note: an exception out of nowhere could cut the closing of the trace short."""
        self._is_stopped = True

    def send(self, kind: str, body: object) -> None:
        """One event.  Raises Stopped where nobody listens any more."""
        line = memoryview(json.dumps({"event": kind, "body": body}).encode() + b"\n")
        try:
            while line:
                line = line[os.write(self._fd, line) :]
        except BrokenPipeError:
            raise Stopped from None

    def progress(self, done_tokens: int, total_tokens: int) -> None:
        """How far the run is, not more often than anyone could read.  Raises Stopped where the run is to end here."""
        if self._is_stopped:
            raise Stopped
        now = time.monotonic()
        if now - self._last >= PROGRESS_SECONDS:
            self._last = now
            self.send("progress", [done_tokens, total_tokens])


class Recorder:
    """Runs prompts through a context and appends what the observer saw to a trace."""

    def __init__(
        self, context: Context, observer: RouterObserver, trace: TraceWriter, counters: Counters | None = None
    ) -> None:
        self._context, self._observer, self._trace = context, observer, trace
        self._counters = counters
        self._taken: list[tuple[int, int, int, int, list[Call]]] = []
        self.n_ubatches = 0
        self.prompt_seconds = self.decode_seconds = 0.0

    def prompt(self, tokens: npt.NDArray[np.int32]) -> Iterator[int]:
        """Record a prompt from its first position on; yields how many tokens each ubatch had."""
        self._context.clear()
        step = self._context.n_batch
        for start in range(0, len(tokens), step):
            self.prompt_seconds += self._step(tokens[start : start + step], PROMPT)
            yield len(tokens[start : start + step])
        self.flush()

    def decode(self, token: int) -> None:
        """Record one generated token."""
        self.decode_seconds += self._step(np.array([token]), DECODE)

    def _step(self, tokens: npt.NDArray[Any], phase: int) -> float:
        if self._counters is not None:
            self._counters.now = self._counters.decode if phase == DECODE else self._counters.prompt
        start, began = self._context.n_past, time.perf_counter()
        # Without logits on every token the last layer would route the last token only.
        self._context.decode(tokens, all_logits=True)
        self._taken.append((phase, self.n_ubatches, start, len(tokens), self._observer.take(len(tokens))))
        self.n_ubatches += 1
        if len(self._taken) >= APPEND_UBATCHES:
            self.append()
        return time.perf_counter() - began

    def append(self) -> None:
        """Give the trace what was taken."""
        taken, self._taken = self._taken, []
        for phase, ubatch, start, count, calls in taken:
            for call in calls:
                self._trace.append(
                    phase=phase,
                    ubatch=ubatch,
                    layer=call.layer,
                    tokens=np.arange(start, start + count),
                    ids=call.ids,
                    weights=call.weights,
                    time_ns=call.time_ns,
                )

    def flush(self) -> None:
        """Make all that was recorded so far durable."""
        self.append()
        self._trace.flush()


def record(request: RecordRequest, events: Events) -> RecordResult:
    """Do all that a request asks for, in this process.  Raises what goes wrong; the trace is closed in order then too."""
    _check(request)
    with watch_model(request.model) as watch:
        events.send("files", watch.states)
        return _record(request, events, watch)


def _record(request: RecordRequest, events: Events, watch: FileWatch) -> RecordResult:
    """`watch` has been there since before anything of the model was read."""
    source = open_source(request)
    layers = trace_layers(source)
    engine = Engine.open(request.engine)
    engine.log_fd = sys.stderr.fileno()  # what the library says must be readable after it has ended this process
    observer = RouterObserver(architecture(source), layers, weights=request.weights, times=request.times)
    prompts: list[npt.NDArray[np.int32]] = []

    def sizes(model: Model) -> ContextOptions:
        events.progress(0, 1)
        prompts.extend(model.tokenize(prompt.text) for prompt in request.prompts)
        return _context_options(request, model, [len(tokens) for tokens in prompts])

    with (
        run_source(source, request, engine, sizes, observer) as run,
        _open_trace(request, _header(request, source, layers, run.context), watch) as trace,
    ):
        recorder = Recorder(run.context, observer, trace, None if run.bundle is None else run.bundle.cache.counters)
        try:
            results = tuple(_run(request, run.context, recorder, prompts, events))
        except BaseException:
            recorder.append()
            if not recorder.n_ubatches:  # a file without a single call would be taken for a recording
                request.trace.unlink()
            raise
        cache = None if run.bundle is None else _cache_counts(run.bundle)
    return RecordResult(engine.name, engine.build, results, recorder.prompt_seconds, recorder.decode_seconds, cache)


@contextlib.contextmanager
def _open_trace(request: RecordRequest, header: TraceHeader, watch: FileWatch) -> Iterator[TraceWriter]:
    """A trace that is closed in order however the block ends, but for one: a changed file of the model leaves it without its
    end mark, so that it never counts as complete."""
    trace = TraceWriter(request.trace, header, replace=request.replace)
    try:
        yield trace
    finally:
        changed = watch.changed()
        if changed is not None:
            trace.flush()
            raise file_changed(changed, watch.kind, _left(request))
        trace.close()


def _left(request: RecordRequest) -> str:
    return f"; what was recorded until then is in {request.trace}" if request.trace.exists() else "; nothing was recorded"


def _cache_counts(run: BundleRun) -> CacheCounts:
    # Not above: see `record_source._run_bundle`.
    from bel.runtime.load_line import slots_by_layer
    from bel.runtime.run_options import DEFAULT_POLICY

    counters = run.cache.counters
    prompt, decode = (PhaseCounts(x.accesses, x.hits, x.missed) for x in (counters.prompt, counters.decode))
    return CacheCounts(DEFAULT_POLICY, {str(layer): n for layer, n in slots_by_layer(run).items()}, prompt, decode)


def _run(
    request: RecordRequest,
    context: Context,
    recorder: Recorder,
    prompts: list[npt.NDArray[np.int32]],
    events: Events,
) -> Iterator[PromptResult]:
    done, total = 0, sum(len(tokens) + request.n_predict for tokens in prompts)
    chooser = Chooser(request.temperature, request.seed)
    for prompt, tokens in zip(request.prompts, prompts, strict=True):
        for count in recorder.prompt(tokens):
            done += count
            events.progress(done, total)
        made = 0
        while made < request.n_predict:
            token = next_token(context.model, chooser, context.logits[-1], ignore_end=request.ignore_end)
            if token is None:
                break
            recorder.decode(token)
            made, done = made + 1, done + 1
            events.progress(done, total)
            if made % FLUSH_TOKENS == 0:
                recorder.flush()
        recorder.flush()
        done += request.n_predict - made
        yield PromptResult(prompt.name, len(tokens), made, made < request.n_predict)


def _check(request: RecordRequest) -> None:
    counts = (request.n_ubatch, *(n for n in (request.n_ctx, request.n_threads, request.slots) if n is not None))
    if request.n_predict < 0 or min(counts) < 1 or not 0 <= request.temperature < float("inf"):
        raise UsageError("a number of tokens, threads or slots is below 1, or the temperature is below 0")
    if request.slots is not None and request.ram_bytes is not None:
        raise UsageError("--slots and --ram exclude each other: each says how many slots there are", hint="Give one of them")
    if os.path.lexists(request.trace) and not request.replace:  # found out before a large model is loaded
        raise UsageError("the trace exists already", path=str(request.trace), hint="Use --force to replace it")


def _context_options(request: RecordRequest, model: Model, lengths: list[int]) -> ContextOptions:
    """The sizes of the context.  Raises UsageError where a prompt and what is generated behind it do not fit."""
    empty = [prompt.name for prompt, length in zip(request.prompts, lengths, strict=True) if length == 0]
    if empty:
        raise BadInputError("the model's tokenizer makes no token of the prompt", path=empty[0])
    longest = max(lengths)
    need = longest + request.n_predict
    n_ctx = request.n_ctx or min(need, model.n_ctx_train or need)
    if need > n_ctx:
        what = "the context given" if request.n_ctx else "the context that the model was trained for"
        raise UsageError(
            f"the context would fill up: the longest prompt, {request.prompts[lengths.index(longest)].name}, has {longest} "
            f"tokens, and {request.n_predict} are to be generated",
            found=f"{need} tokens",
            expected=f"at most {n_ctx}, {what}",
            hint=f"Use -n {n_ctx - longest} or less, or a larger --context" if longest < n_ctx else "Shorten the prompt",
        )
    n_ubatch = min(request.n_ubatch, n_ctx)
    return ContextOptions(n_ctx, n_ubatch, n_ubatch, request.n_threads)


def _header(request: RecordRequest, source: Source, layers: tuple[TraceLayer, ...], context: Context) -> TraceHeader:
    sampling: dict[str, Any] = {"temperature": request.temperature, "n_predict": request.n_predict}
    if request.temperature:
        sampling["seed"] = request.seed
    options, engine = context.options, context.model.engine
    sampling |= {"n_ubatch": options.n_ubatch, "n_ctx": options.n_ctx, "ignore_end": request.ignore_end}
    return TraceHeader(
        model_name=model_name(source),
        arch=architecture(source),
        fingerprint=fingerprint(source),
        layers=layers,
        workload=request.workload,
        prompts=tuple(prompt.digest for prompt in request.prompts),
        engine=engine.name,
        engine_build=engine.build,
        sampling=sampling,
        has_weights=request.weights,
        has_times=request.times,
    )


def main() -> int:
    """The worker's process.  The last event tells how it ended; the exit status is 0 unless the library ended it."""
    stay_plain()
    events = Events(int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays in force
            signal.signal(number, events.stop)
    try:
        kind, body = _outcome(RecordRequest.from_json(sys.stdin.read()), events)
        events.send(kind, body)
    except Stopped:
        sys.stderr.write("the command is gone; the trace is closed\n")
    return 0


def _outcome(request: RecordRequest, events: Events) -> tuple[str, object]:
    try:
        return "done", dataclasses.asdict(record(request, events))
    except Stopped:
        return "stopped", None
    except BelError as error:
        return "error", error_to_json(error)
    except MemoryError:
        return "os_error", [errno.ENOMEM, None]
    except OSError as error:
        return "os_error", [error.errno, None if error.filename is None else os.fsdecode(error.filename)]
    except Exception:
        return "bug", traceback.format_exc()


if __name__ == "__main__":
    # Without tearing the interpreter down: threads of the library may still run, and its destructors have crashed at exit.
    status = main()
    sys.stderr.flush()
    os._exit(status)
