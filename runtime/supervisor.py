"""A command in two processes: a child does all, and this one waits to say what ended it.

llama.cpp ends the process that it is in when one of its assertions fails, and so does the system where a mapped file was cut
short or memory ran out; nothing in that process can say so.  The child is forked before anything is loaded, so the one that
waits holds next to no memory of its own.  Both have the same terminal and streams.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import NoReturn

from bel.runtime.black_box import BlackBox, use_black_box

_PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AWAITED = (*_PASSED, signal.SIGTSTP, signal.SIGCONT, signal.SIGCHLD)
_PR_SET_PDEATHSIG = 1  # prctl(2)
_REFUSED = 5  # `MachineError.exit_code`, whose module is not loaded here


def supervised(name: str, work: Callable[[], None]) -> None:
    """Run `work` in a child, and end this process as the child ends: with its status, or with a message on what killed it.

    Only the child returns, where `work` does.  To be called before there is a thread.
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
        _end(name, _wait(child), box)
    _die_with(parent)
    os.environ["GGML_NO_BACKTRACE"] = "1"  # else a debugger would print pages in front of the message
    use_black_box(box)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        work()
    except KeyboardInterrupt:  # before `work` had seen to it
        _say(f"{name}: error: interrupted\n")
        os._exit(128 + signal.SIGINT)


def _die_with(parent: int) -> None:
    """Let the end of the parent be that of this process: whoever kills a command means the work too."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it went before that was said
        os._exit(128 + signal.SIGKILL)


def _wait(child: int) -> int:
    """Pass signals on until the child has ended; its status as of `waitpid`."""
    while True:
        got = signal.sigwaitinfo(_AWAITED)
        if got.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status
        elif got.si_signo == signal.SIGCONT:
            os.kill(child, signal.SIGCONT)
        # A terminal sends its signals to both.  What a process sends may be for this one alone.
        elif got.si_code <= 0:
            os.kill(child, got.si_signo)
        if got.si_signo == signal.SIGTSTP:
            _stop()


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
    newline = "\n" if os.isatty(1) and os.isatty(2) else ""  # text may have ended in the middle of a line
    _say(f"{newline}{name}: error: {printable_line(str(error))}\n")
    os._exit(error.exit_code)


def _die_by(number: int) -> NoReturn:
    """Whoever waits for this process shall see the signal."""
    with contextlib.suppress(OSError):  # those that nothing can change need no change
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the first process of a container lives on


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody is left to hear it
        os.write(2, text.encode("utf-8", "replace"))
