"""Recording what the router of a model does: the side that starts the worker, listens, and survives its death."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from bel.formats.errors import InterruptedRun, MachineError, printable
from bel.profiler.recording import RecordRequest, RecordResult, error_from_json

# -P: a folder called bel in the current folder must not be imported instead of this package.
WORKER = (sys.executable, "-P", "-m", "bel.profiler.record_worker")
LAST_WORDS, LAST_WORDS_CHARS = 4, 290  # lines and characters of the library's output in a message
_MAX_LINE_BYTES = 1 << 20


def record(
    request: RecordRequest,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    *,
    worker: Sequence[str] = WORKER,
) -> RecordResult:
    """Record into `request.trace`, which grows while the run goes on, and report what was done.

    `on_progress(done, total)` gets tokens.  The model runs in a process of its own, so whatever happens there the trace
    holds all but the last block (`record_worker.FLUSH_TOKENS`).

    Raises InterruptedRun after KeyboardInterrupt, once the worker has closed the trace (a second interrupt kills it);
    MachineError, with the library's last lines, where llama.cpp crashed or was killed; and whatever BelError or OSError
    ended the worker.
    """
    before = _identity(request.trace)
    read_fd, write_fd = os.pipe()
    with tempfile.TemporaryFile() as said, os.fdopen(read_fd, "rb") as events:
        environment = os.environ | {"GGML_NO_BACKTRACE": "1"}  # its debugger would take seconds and push the message away
        command = [*worker, str(write_fd)]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=said, stderr=said, pass_fds=[write_fd], env=environment
            )
        finally:
            os.close(write_fd)
        (kind, body), interrupted = _listen(process, request, events, on_progress)
        words = _last_words(said)
    left = "; nothing was recorded"
    if _identity(request.trace) not in (None, before):
        left = f"; what was recorded until then is in {request.trace}"
    if kind == "done":
        return RecordResult.from_json(body)
    if kind == "stopped" or (interrupted and kind in ("", "progress")):
        raise InterruptedRun(f"interrupted{left}")
    _raise_told(kind, body)
    raise MachineError(f"{_death(process.returncode)}{left}{words}", path=str(request.model))


def _listen(
    process: subprocess.Popen[bytes], request: RecordRequest, events: IO[bytes], on_progress: Callable[[int, int], None]
) -> tuple[tuple[str, Any], bool]:
    """Follow the worker to its end; its last event, and whether this process was interrupted meanwhile."""
    last: tuple[str, Any] = ("", None)
    interrupted, is_asked = False, False
    while True:
        try:
            if not is_asked:
                is_asked = True
                _ask(process, request)
            for line in iter(lambda: events.readline(_MAX_LINE_BYTES), b""):
                last = _event(line)
                if last[0] == "progress":
                    on_progress(*last[1])
            process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGKILL if interrupted else signal.SIGTERM)
            interrupted = True
        except BaseException:  # of `on_progress`; the worker must not go on without us
            process.terminate()
            process.wait()
            raise
        else:
            return last, interrupted


def _ask(process: subprocess.Popen[bytes], request: RecordRequest) -> None:
    assert process.stdin is not None, "it was started with a pipe"
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # it died at once: its last words tell why
        stdin.write(request.to_json().encode())


def _event(line: bytes) -> tuple[str, Any]:
    body = json.loads(line)
    return body["event"], body["body"]


def _raise_told(kind: str, body: Any) -> None:
    """Raise the error that the worker sent before it ended, if it sent one."""
    if kind == "error":
        raise error_from_json(body)
    if kind == "os_error":
        number, name = body
        raise OSError(number, os.strerror(number), name)
    if kind == "bug":
        raise RuntimeError(f"the recording worker failed:\n{body}")


def _death(status: int) -> str:
    if status == -signal.SIGKILL:
        return "the recording was killed (SIGKILL), by hand or because memory ran out"
    if status < 0:
        return f"llama.cpp crashed ({signal.Signals(-status).name}) while it ran the model"
    return f"the recording worker ended without a word (status {status})"


def _last_words(said: IO[bytes]) -> str:
    said.seek(0)
    lines = [line for line in said.read().decode("utf-8", "replace").splitlines() if line.strip()]
    words = "; ".join(lines[-LAST_WORDS:])[-LAST_WORDS_CHARS:]
    return f". It said last: {printable(words)}" if words else ""


def _identity(path: Path) -> tuple[int, ...] | None:
    """What tells a file from another one that had its name before; None where there is none."""
    try:
        state = path.stat()
    except OSError:
        return None
    return (state.st_ino, state.st_size, state.st_mtime_ns)
