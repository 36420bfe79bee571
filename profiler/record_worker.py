"""The process that runs the model and writes the trace: `python -m bel.profiler.record_worker EVENTS_FD`.

It is a process of its own because llama.cpp ends the process that it is in when one of its assertions fails.  The request
comes as JSON on stdin; one JSON object a line goes out on the events descriptor; what the library says goes to stderr.
SIGINT, SIGTERM and SIGHUP stop the recording behind the token that is being computed, and close the trace in order.
"""

from __future__ import annotations

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
from typing import Any

import numpy as np
import numpy.typing as npt

from bel.formats.bundle import is_bundle
from bel.formats.errors import BadInputError, BelError, UsageError
from bel.formats.experts import find_experts
from bel.formats.fingerprint import fingerprint
from bel.formats.gguf_model import GgufModel, open_model
from bel.formats.trace import DECODE, PROMPT, TraceWriter
from bel.formats.trace_header import TraceHeader, TraceLayer
from bel.profiler.recording import PromptResult, RecordRequest, RecordResult, error_to_json
from bel.profiler.router import Call, RouterObserver
from bel.runtime.context import Context, ContextOptions
from bel.runtime.engine import Engine, Model
from bel.runtime.sampling import Chooser

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

    def __init__(self, context: Context, observer: RouterObserver, trace: TraceWriter) -> None:
        self._context, self._observer, self._trace = context, observer, trace
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
    source = open_model(request.model)
    layers = trace_layers(source)
    engine = Engine.open(request.engine)
    engine.log_fd = sys.stderr.fileno()  # what the library says must be readable after it has ended this process
    with engine.load(request.model) as model:
        events.progress(0, 1)
        prompts = [model.tokenize(prompt.text) for prompt in request.prompts]
        options = _context_options(request, model, [len(tokens) for tokens in prompts])
        observer = RouterObserver(source.arch or "", layers, weights=request.weights, times=request.times)
        header = _header(request, source, layers, engine, options)
        with (
            model.context(options, observer) as context,
            TraceWriter(request.trace, header, replace=request.replace) as trace,
        ):
            recorder = Recorder(context, observer, trace)
            try:
                results = tuple(_run(request, model, context, recorder, prompts, events))
            except BaseException:
                recorder.append()
                if not recorder.n_ubatches:  # a file without a single call would be taken for a recording
                    request.trace.unlink()
                raise
    return RecordResult(engine.name, engine.build, results, recorder.prompt_seconds, recorder.decode_seconds)


def _run(
    request: RecordRequest,
    model: Model,
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
            token = _next(request, model, chooser, context.logits[-1])
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


def _next(request: RecordRequest, model: Model, chooser: Chooser, logits: npt.NDArray[np.float32]) -> int | None:
    """The next token, or None where the text ends.  With `ignore_end` the best token that does not end it."""
    token = chooser.pick(logits)
    if not model.is_end(token):
        return token
    if not request.ignore_end:
        return None
    banned = logits.copy()
    while model.is_end(token):
        banned[token] = -np.inf
        token = chooser.pick(banned)
    return token


def trace_layers(source: GgufModel) -> tuple[TraceLayer, ...]:
    """The layers that decoding routes in.  Raises BadInputError for a model without experts, or without a top-k."""
    found = [layer for layer in find_experts(source) if not layer.is_mtp]
    rows = []
    for layer in found:
        if layer.n_used is None:
            raise BadInputError(f"the header has no {source.arch}.expert_used_count", path=str(source.first.path))
        rows.append(TraceLayer(layer.layer, layer.n_expert, layer.n_used, sum(part.slice_bytes for part in layer.parts)))
    if not rows:
        raise BadInputError("all layers with experts are MTP blocks, which decoding never reaches", path=str(source.first.path))
    return tuple(rows)


def _check(request: RecordRequest) -> None:
    if is_bundle(request.model):
        raise UsageError("a bundle cannot be recorded yet", path=str(request.model), hint="Name the GGUF that it was made from")
    counts = (request.n_ubatch, *(n for n in (request.n_ctx, request.n_threads) if n is not None))
    if request.n_predict < 0 or min(counts) < 1 or not 0 <= request.temperature < float("inf"):
        raise UsageError("a number of tokens or threads is below 1, or the temperature is below 0")
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


def _header(
    request: RecordRequest, source: GgufModel, layers: tuple[TraceLayer, ...], engine: Engine, options: ContextOptions
) -> TraceHeader:
    sampling: dict[str, Any] = {"temperature": request.temperature, "n_predict": request.n_predict}
    if request.temperature:
        sampling["seed"] = request.seed
    sampling |= {"n_ubatch": options.n_ubatch, "n_ctx": options.n_ctx, "ignore_end": request.ignore_end}
    return TraceHeader(
        model_name=source.first.text("general.name") or source.first.path.stem,
        arch=source.arch or "",
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
