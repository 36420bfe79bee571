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
from typing import IO, Any

from bel.formats.bundle import is_bundle
from bel.formats.errors import BadInputError, DamagedBundleError, InterruptedRun, MachineError
from bel.profiler.output import file_identity
from bel.profiler.recording import RecordRequest, RecordResult, error_from_json
from bel.runtime.crash import crash_error, last_words
from bel.runtime.file_watch import FileState

# -P: a folder called bel in the current folder must not be imported instead of this package.
WORKER = (sys.executable, "-P", "-m", "bel.profiler.record_worker")
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
    MachineError, with the library's last lines, where llama.cpp crashed or was killed; DamagedBundleError (BadInputError for a
    GGUF) where a file of the model was changed; and whatever BelError or OSError ended the worker.
    """
    before = file_identity(request.trace)
    read_fd, write_fd = os.pipe()
    files: list[FileState] = []
    with tempfile.TemporaryFile() as said, os.fdopen(read_fd, "rb") as events:
        environment = os.environ | {"GGML_NO_BACKTRACE": "1"}  # its debugger would take seconds and push the message away
        command = [*worker, str(write_fd)]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=said, stderr=said, pass_fds=[write_fd], env=environment
            )
        finally:
            os.close(write_fd)
        (kind, body), interrupted = _listen(process, request, events, files, on_progress)
        said.seek(0)
        words = said.read().decode("utf-8", "replace")
    left = "; nothing was recorded"
    if file_identity(request.trace) not in (None, before):
        left = f"; what was recorded until then is in {request.trace}"
    if kind == "done":
        return RecordResult.from_json(body)
    if kind == "stopped" or (interrupted and kind in ("", "progress")):
        raise InterruptedRun(f"interrupted{left}")
    _raise_told(kind, body)
    path, status = str(request.model), process.returncode
    if status >= 0:
        cause = f"the recording worker ended without a word (status {status}){left}{last_words(words)}"
        raise MachineError(cause, path=path)
    changed = DamagedBundleError if is_bundle(request.model) else BadInputError
    raise crash_error(-status, files, changed, words, what="the recording", path=path, left=left)


def _listen(
    process: subprocess.Popen[bytes],
    request: RecordRequest,
    events: IO[bytes],
    files: list[FileState],
    on_progress: Callable[[int, int], None],
) -> tuple[tuple[str, Any], bool]:
    """Follow the worker to its end; its last event, and whether this process was interrupted meanwhile.  `files` gets those
    of the model."""
    last: tuple[str, Any] = ("", None)
    interrupted, is_asked = False, False
    while True:
        try:
            if not is_asked:
                is_asked = True
                _ask(process, request)
            for line in iter(lambda: events.readline(_MAX_LINE_BYTES), b""):
                last = _event(line)
                if last[0] == "files":
                    files.extend(FileState(*row) for row in last[1])
                    last = ("", None)
                elif last[0] == "progress":
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
