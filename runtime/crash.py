"""What to say of a process that llama.cpp, or the system, ended."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterable

from bel.formats.errors import BelError, MachineError, printable
from bel.runtime.file_watch import FileState, file_changed, first_changed

LAST_LINES, LAST_CHARS = 4, 290  # of the library's output in a message
CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS)
_KILLED: dict[int, str] = {
    signal.SIGKILL: "by hand or because memory ran out",
    signal.SIGXCPU: "its time on the processor is used up (ulimit -t)",
}
_CLOCK_SECONDS = 0.1
"""The limit is looked at by the tick of a clock, and what was used is counted otherwise."""
_HINTS: dict[int, str] = {
    signal.SIGBUS: ". A part of a mapped file could not be read: it was cut short, or the disk fails (dmesg)"
}


def is_told(number: int) -> bool:
    """Whether a death by this signal has something to be told; by any other somebody wanted it."""
    return number in CRASHES or number in _KILLED


def crash_error(
    number: int,
    files: Iterable[FileState],
    kind: type[BelError],
    words: str,
    *,
    what: str,
    path: str | None,
    left: str = "",
) -> BelError:
    """The error for a death by signal `number`.

    `files` are those of the model as they were before, `kind` the class of error where one was changed: then that is why.
    `words`: what the library said; `what` names what died; `path` is the model; `left` is what is left of the work.
    """
    changed = first_changed(files)
    if changed is not None:
        return file_changed(changed, kind, f", and llama.cpp crashed ({_name(number)}){left}")
    if number in _KILLED:
        why = _KILLED[signal.SIGXCPU if number == signal.SIGKILL and _is_time_over() else number]
        return MachineError(f"{what} was killed ({_name(number)}), {why}{left}", path=path)
    death = f"llama.cpp crashed ({_name(number)}) while it loaded or ran the model"
    return MachineError(f"{death}{left}{_HINTS.get(number, '')}{last_words(words)}", path=path)


def _is_time_over() -> bool:
    """Whether a child that has ended had all the time that it may have: at the hard limit the system kills (setrlimit(2))."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return hard != resource.RLIM_INFINITY and used.ru_utime + used.ru_stime >= hard - _CLOCK_SECONDS


def last_words(text: str) -> str:
    """The end of what was said, as the end of a message; nothing where nothing was said."""
    lines = [line for line in text.splitlines() if line.strip()]
    words = "; ".join(lines[-LAST_LINES:])[-LAST_CHARS:]
    return f". It said last: {printable(words)}" if words else ""


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"
