"""Nothing that happens to a recording loses it: deaths of the library, kills, interrupts and bugs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bel.formats.errors import BadInputError, InterruptedRun, MachineError
from bel.formats.gguf_model import open_model
from bel.formats.trace_calls import read_trace
from bel.profiler.record import record
from bel.profiler.record_worker import FLUSH_TOKENS
from bel.profiler.recording import RecordRequest
from bel.runtime.prompts import Prompt
from recordings import CODE, EXAMPLE, assert_beginning, record_request, tokens_of

# Real deaths inside the callback, from the 200th token on: the library's own assertion, and a bad address.
_DEATHS = {
    "abort": ("import ctypes; ctypes.CDLL(LIBRARY).ggml_abort(b'ggml.c', 42, b'GGML_ASSERT(i01 < ne01) failed')", "SIGABRT"),
    "segfault": ("import ctypes; ctypes.string_at(8)", "SIGSEGV"),
    "kill": ("os.kill(os.getpid(), 9)", "SIGKILL"),
}
_DYING_WORKER = """
import os, sys
from bel.profiler import record_worker
from bel.profiler.router import RouterObserver
from bel.runtime.engine import Engine
from bel.runtime.sampling import Chooser
LIBRARY = str(Engine.open().library.path)
class Dying(RouterObserver):
    decodes = 0
    def take(self, n_tokens):
        Dying.decodes += 1
        return super().take(n_tokens)
    def seen(self, tensor):
        super().seen(tensor)
        if Dying.decodes == {at}:
            {death}
record_worker.RouterObserver = Dying
record_worker.main()
"""
_RUN = """
import sys
from bel.profiler.record import record
from bel.profiler.recording import RecordRequest
record(RecordRequest.from_json(sys.argv[1]), lambda done, total: print(done, flush=True))
"""


@contextlib.contextmanager
def _running(request: RecordRequest) -> Iterator[subprocess.Popen[str]]:
    """A recording in a process group of its own, which says its progress on stdout."""
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN, request.to_json()], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _follow(process: subprocess.Popen[str], at_least: int) -> int:
    """Wait until so many tokens are reported; how many were."""
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= at_least:
            return int(line)
    raise AssertionError("the recording ended before it was stopped")


@pytest.mark.parametrize("death", _DEATHS)
def test_the_death_of_the_library_leaves_the_trace(death: str, tmp_path: Path) -> None:
    """The error names the signal, the library's last words and the trace, which has all but the last block."""
    action, signal_name = _DEATHS[death]
    request = replace(record_request(tmp_path, n_predict=300), ignore_end=True)
    whole = replace(request, trace=tmp_path / "whole.trace", n_predict=220)
    record(whole)
    with pytest.raises(MachineError, match=signal_name) as caught:
        record(request, worker=(sys.executable, "-c", _DYING_WORKER.format(at=200, death=action)))
    assert str(request.trace) in str(caught.value)
    assert caught.value.exit_code == 5
    if death == "abort":
        assert "ggml.c:42: GGML_ASSERT(i01 < ne01) failed" in str(caught.value)
    assert_beginning(request.trace, whole.trace, at_least=len(tokens_of(CODE.text)) + 199 - FLUSH_TOKENS, is_torn=True)


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    """It ends before it has read its request, which is larger than a pipe holds."""
    request = record_request(tmp_path, prompts=(Prompt("long", "x" * 2**20),))
    with pytest.raises(MachineError, match=r"status 1.*nothing was recorded.*no numpy here"):
        record(request, worker=(sys.executable, "-c", "raise SystemExit('no numpy here')"))


def test_kill_9_of_the_whole_run(tmp_path: Path) -> None:
    """Both processes die at once, at no chosen place; at most the last block is lost."""
    request = replace(record_request(tmp_path, n_predict=400), ignore_end=True)
    whole = replace(request, trace=tmp_path / "whole.trace")
    record(whole)
    with _running(request) as process:
        done = _follow(process, at_least=len(tokens_of(CODE.text)) + FLUSH_TOKENS + 20)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert_beginning(request.trace, whole.trace, at_least=done - FLUSH_TOKENS, is_torn=True)


def test_the_worker_ends_in_order_when_the_command_is_gone(tmp_path: Path) -> None:
    """Kill -9 of the command alone: the worker notices, closes the trace, and does not live on."""
    request = replace(record_request(tmp_path, n_predict=440), ignore_end=True)
    whole = replace(request, trace=tmp_path / "whole.trace")
    record(whole)
    with _running(request) as process:
        done = _follow(process, at_least=len(tokens_of(CODE.text)) + 10)
        process.kill()
        process.wait()
        for _ in range(600):
            if not read_trace(request.trace).notes:
                break
            time.sleep(0.05)
    assert_beginning(request.trace, whole.trace, at_least=done, is_torn=False)


def test_an_interrupt_closes_the_trace(tmp_path: Path) -> None:
    """Ctrl-C, which in a terminal reaches both processes: all rows that were recorded are there, and the end mark."""
    request = replace(record_request(tmp_path, n_predict=400), ignore_end=True)
    whole = replace(request, trace=tmp_path / "whole.trace")
    record(whole)
    told: list[int] = []

    def interrupt(done: int, _total: int) -> None:
        told.append(done)
        if done > len(tokens_of(CODE.text)) and len(told) == len(set(told)):
            raise KeyboardInterrupt

    with pytest.raises(InterruptedRun, match=str(request.trace)) as caught:
        record(request, interrupt)
    assert caught.value.exit_code == 130
    assert_beginning(request.trace, whole.trace, at_least=told[0], is_torn=False)


def test_a_bug_of_the_observer_is_no_silent_half_trace(tmp_path: Path) -> None:
    """An exception inside the callback ends the recording with its own text; the trace ends before that token."""
    worker = _DYING_WORKER.format(at=200, death="raise ValueError('a bug in the observer')")
    request = replace(record_request(tmp_path, n_predict=300), ignore_end=True)
    whole = replace(request, trace=tmp_path / "whole.trace", n_predict=220)
    record(whole)
    with pytest.raises(RuntimeError, match="a bug in the observer"):
        record(request, worker=(sys.executable, "-c", worker))
    assert_beginning(request.trace, whole.trace, at_least=len(tokens_of(CODE.text)) + 199, is_torn=False)


def test_an_error_before_the_first_call_leaves_no_trace(tmp_path: Path) -> None:
    """A file without a single call would be taken for a recording."""
    worker = _DYING_WORKER.format(at=0, death="raise ValueError('at once')")
    request = record_request(tmp_path)
    with pytest.raises(RuntimeError, match="at once"):
        record(request, worker=(sys.executable, "-c", worker))
    assert list(tmp_path.iterdir()) == []


def test_logits_that_are_no_numbers_end_the_recording(tmp_path: Path) -> None:
    """A damaged model would be recorded as if it had chosen: token 0 for ever."""
    source = open_model(EXAMPLE)
    output = next(t for t in source.tensors if t.name in ("output.weight", "token_embd.weight"))
    data = bytearray(EXAMPLE.read_bytes())
    row = output.start_bytes + 900 * (output.size_bytes // output.ne[1])
    data[row : row + 2] = np.float16(np.nan).tobytes()  # the scale of the first block of token 900
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(data)
    with pytest.raises(BadInputError, match="logits are not finite"):
        record(replace(record_request(tmp_path), model=broken))
