"""A command in two processes: a child does all, and this one waits to say what ended it.

llama.cpp ends the process that it is in when one of its assertions fails, and so does the system where a mapped file was cut
short or memory ran out; nothing in that process can say so.  The child is forked before anything is loaded, so the one that
waits holds next to no memory of its own.  Both have the same terminal and streams.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import NoReturn

from bel.formats.entry import INTERRUPTED
from bel.formats.signals import REPEAT_SECONDS, STOPPING
from bel.runtime.black_box import BlackBox, use_black_box

_AWAITED = (*STOPPING, signal.SIGTSTP, signal.SIGCONT, signal.SIGCHLD)
_PR_SET_PDEATHSIG = 1  # prctl(2)
_REFUSED = 5  # `MachineError.exit_code`, whose module is not loaded here
_PATIENCE = 3
"""So many stopping signals, no two within REPEAT_SECONDS, kill a child that lives on: native code that hangs heeds none."""


def supervised(name: str, work: Callable[[], None]) -> None:
    """Run `work` in a child, and end this process as the child ends: with its status, or with a message on what killed it.

    Only the child returns, where `work` does.  To be called before there is a thread, and under `guard`.
    """
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it was ignored the system would forget the child's status
    try:
        box = BlackBox()
        child = os.fork()
    except OSError as error:
        hint = "There are too many processes, or too little memory, or a limit is too low (ulimit -u, -v)"
        _say(f"{name}: error: the machine refuses: {error.strerror}. {hint}\n")
        os._exit(_REFUSED)
    if child:
        status, is_killed = _wait(child)
        if is_killed and os.WIFSIGNALED(status):
            _say(f"{_newline()}{name}: error: interrupted; it did not end by itself and was killed\n")
            os._exit(INTERRUPTED)
        _end(name, status, box)
    _die_with(parent)
    os.environ["GGML_NO_BACKTRACE"] = "1"  # else a debugger would print pages in front of the message
    use_black_box(box)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    work()


def _die_with(parent: int) -> None:
    """Let the end of the parent be that of this process: whoever kills a command means the work too."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it went before that was said
        os._exit(128 + signal.SIGKILL)


def _wait(child: int) -> tuple[int, bool]:
    """Pass signals on until the child has ended; its status as of `waitpid`, and whether it was killed from here."""
    stops = _Stops()
    while True:
        got = signal.sigwaitinfo(_AWAITED)
        if got.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status, stops.number >= _PATIENCE
        elif got.si_signo in STOPPING and stops.count() >= _PATIENCE:
            os.kill(child, signal.SIGKILL)
        elif got.si_signo == signal.SIGCONT:
            os.kill(child, signal.SIGCONT)
        # A terminal sends its signals to both.  What a process sends may be for this one alone.
        elif got.si_code <= 0:
            os.kill(child, got.si_signo)
        if got.si_signo == signal.SIGTSTP:
            _stop()


class _Stops:
    """Counts stopping signals; repeats of one, as two copies of one Ctrl-C, are one."""

    def __init__(self) -> None:
        self.number = 0
        self._last = 0.0

    def count(self) -> int:
        """Another one came: how many there were."""
        now = time.monotonic()
        if not self.number or now >= self._last + REPEAT_SECONDS:
            self.number, self._last = self.number + 1, now
        return self.number


def _stop() -> None:
    """Stop, as by Ctrl-Z, until this process is continued."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTSTP])
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTSTP])


def _end(name: str, status: int, box: BlackBox) -> NoReturn:
    """End as the child did."""
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    from bel.formats.errors import BadInputError, DamagedBundleError, printable_line
    from bel.runtime.crash import crash_error, is_told

    number = os.WTERMSIG(status)
    if not is_told(number):
        _die_by(number)
    kind = DamagedBundleError if box.is_bundle else BadInputError
    error = crash_error(number, box.files, kind, box.words, what=name, path=box.model)
    _say(f"{_newline()}{name}: error: {printable_line(str(error))}\n")
    os._exit(error.exit_code)


def _die_by(number: int) -> NoReturn:
    """Whoever waits for this process shall see the signal."""
    with contextlib.suppress(OSError):  # those that nothing can change need no change
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the first process of a container lives on


def _newline() -> str:
    """A terminal's text may have ended in the middle of a line."""
    return "\n" if os.isatty(1) and os.isatty(2) else ""


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody is left to hear it
        os.write(2, text.encode("utf-8", "replace"))
