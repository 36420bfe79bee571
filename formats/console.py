"""The frame round every command: exit codes, messages, progress and tables.  Only the `cli` modules import this one."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, TextIO, TypeVar, cast

import click

from bel.formats.address_space import needs_checked
from bel.formats.errors import BelError, InterruptedRun, MachineError, printable, printable_line
from bel.formats.signals import INTERRUPTS
from bel.formats.standard_streams import STDERR, STDOUT, StreamName, named, open_closed
from bel.formats.threads import no_blas_threads
from bel.formats.units import MIB

if TYPE_CHECKING:
    from rich.console import Console

CLOSED_PIPE = 128 + signal.SIGPIPE
"""The exit status when the reader of our output has gone: that of a program that the signal ended, as a shell shows it."""

F = TypeVar("F", bound=Callable[..., Any])
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
"""The context settings of every command."""

_EXTRAS = {
    "huggingface_hub": "hub",
    "yaml": "hub",
    "numpy": "llama",
    "numba": "profile",
    "matplotlib": "plot",
    "cffi": "llama",
    "xllamacpp": "llama",
}

_HINTS = {
    errno.ENOSPC: "No space is left; free some, or use -o on another disk",
    errno.EDQUOT: "The quota is used up; use -o on another disk",
    errno.EFBIG: "The file is larger than the file system or the process limit (ulimit -f) allows",
    errno.EACCES: "This user has no permission for it",
    errno.EPERM: "This user has no permission for it",
    errno.EROFS: "The file system is read-only; use -o for another place",
    errno.EMFILE: "Raise the limit (ulimit -n)",
    errno.ENFILE: "That is all programs of this machine together",
    errno.ENOTDIR: "Something else has the name of a folder; remove it yourself",
    errno.ELOOP: "Something else has the name of a folder; remove it yourself",
    errno.EIO: "The disk reports a read or write error; check it (dmesg, smartctl)",
    errno.ENOMEM: "There is too little memory, or the limit (ulimit -v) is too low",
    errno.ENAMETOOLONG: "The name is too long for this file system (a bundle's files are named after the source)",
}
_NAMELESS_HINTS = {errno.EAGAIN: "There are too many processes or threads, or the limit (ulimit -u) is too low"}


def run_command(command: click.Command, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run a click command and give its exit status.  Every error becomes one message on stderr, never a traceback.

    Without `arguments` it is this process's own command, and the last thing that the process does.
    """
    _open_streams()
    _show_warnings(name)
    no_blas_threads()
    with needs_checked(), INTERRUPTS.caught(is_last=arguments is None):
        try:
            return _told(command, name, list(sys.argv[1:] if arguments is None else arguments))
        except (KeyboardInterrupt, click.Abort):
            return _interrupted(name)
        except Exception:
            # Where it cuts the loading of a module short, C code makes another error of it, as Python's own of \N{...}.
            if not INTERRUPTS.was_raised:
                raise
            return _interrupted(name)


def _interrupted(name: str) -> int:
    with contextlib.suppress(KeyboardInterrupt):  # one more while stderr blocks
        what = "interrupted; the output is complete" if INTERRUPTS.is_done else "interrupted"
        _fail(name, what, InterruptedRun.exit_code)
    return InterruptedRun.exit_code


def _told(command: click.Command, name: str, arguments: list[str]) -> int:
    try:
        return _invoke(command, name, arguments)
    except BelError as error:
        return _fail(name, str(error), error.exit_code)
    except MemoryError:
        return _fail(name, "out of memory", MachineError.exit_code)
    except OSError as error:
        return _os_failed(name, error)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        hint = f"Install it with: pip install 'bel-toolkit[{_EXTRAS[error.name]}]'"
        return _fail(name, f"this command needs {error.name}, which is not installed. {hint}", MachineError.exit_code)
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        hint = "Raise the limit of processes (ulimit -u, or that of the container) or of memory (ulimit -v, -d)"
        return _fail(name, f"the machine refuses another thread. {hint}", MachineError.exit_code)


def _invoke(command: click.Command, name: str, arguments: list[str]) -> int:
    status = 0
    try:
        # Not `command.main`, which answers a broken pipe by itself, with a status that would say something else.
        with command.make_context(name, arguments) as context:
            answer = command.invoke(context)
            status = answer if isinstance(answer, int) else 0
    except click.exceptions.Exit as stop:
        status = stop.exit_code
    except click.ClickException as error:
        with contextlib.suppress(OSError):  # nobody to tell; the status tells
            error.show()
        _flush_or_drop(sys.stderr)
        status = error.exit_code
    sys.stdout.flush()
    return status


class Utf8Text(click.types.StringParamType):
    """A text, which is UTF-8 whatever the locale says: a prompt must not depend on it.  Bytes that are not stay surrogates."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The argument's bytes as they were typed, decoded anew."""
        return os.fsencode(super().convert(value, param, ctx)).decode("utf-8", "surrogateescape")


def json_option(command: F) -> F:
    """The `--json` that every command takes."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")(command)


def _open_streams() -> None:
    open_closed()
    if sys.stdout is None or sys.stdout is sys.__stdout__:  # else it was replaced on purpose
        sys.stdout = named(sys.stdout, 1, STDOUT)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = named(sys.stderr, 2, STDERR)


def _os_failed(name: str, error: OSError) -> int:
    """The message of an OSError: errors on files carry the file's name, those on streams the stream's."""
    what = error.strerror or str(error)
    if isinstance(error.filename, StreamName):
        if isinstance(error, BrokenPipeError):
            for stream in (sys.stdout, sys.stderr):  # the reader of our output has gone: nobody is left to be told
                _flush_or_drop(stream)
            return CLOSED_PIPE
        return _fail(name, f"{error.filename}: {what}", MachineError.exit_code)
    place = "the machine refuses" if error.filename is None else os.fsdecode(error.filename)
    hint = (_HINTS if error.filename is not None else _HINTS | _NAMELESS_HINTS).get(error.errno or 0)
    return _fail(name, f"{place}: {what}" + (f". {hint}" if hint else ""), MachineError.exit_code)


class _SayWarnings(logging.Handler):
    """What a library module logs becomes a line on stderr like any other of ours."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.WARNING)
        self.command = name

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        say(self.command, f"warning: {record.getMessage()}")


def _show_warnings(name: str) -> None:
    logger = logging.getLogger("bel")
    logger.handlers = [_SayWarnings(name)]
    logger.propagate = False


def _to_null(stream: TextIO) -> None:
    """Send a stream that fails to the null device, so that its buffer does not fail again at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def _flush_or_drop(stream: TextIO) -> None:
    try:
        stream.flush()
    except OSError:
        _to_null(stream)


def _fail(name: str, message: str, status: int) -> int:
    _flush_or_drop(sys.stdout)
    try:
        sys.stderr.write(f"{name}: error: {printable_line(message)}\n")
        sys.stderr.flush()
    except OSError:
        _to_null(sys.stderr)
    return status


@contextlib.contextmanager
def all_or_nothing() -> Iterator[None]:
    """Say of an interrupted block, which cleans up behind itself, that it did."""
    try:
        yield
    except KeyboardInterrupt:
        if INTERRUPTS.is_done:
            raise
        raise InterruptedRun("interrupted; nothing was left behind") from None


def say(name: str, message: str) -> None:
    """One line on stderr: a warning, or what is being done."""
    click.echo(f"{name}: {printable_line(message)}", err=True)


def print_json(answer: dict[str, Any]) -> None:
    """One JSON object on stdout.  NaN is a bug of ours and raises."""
    click.echo(json.dumps(answer, allow_nan=False))


class _Unpadded:
    """A stream that leaves out the spaces that rich fills lines up with."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write whole lines."""
        return self._stream.write("\n".join(line.rstrip(" ") for line in text.split("\n")))


def rich_console(*, err: bool = False, width: int | None = None) -> Console:
    """A console of rich's that leaves a broken pipe to `run_command`: rich would exit, with a misleading status."""
    from rich.console import Console

    class Lines(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE), STDERR if err else STDOUT)

    stream = sys.stderr if err else sys.stdout
    return Lines(file=stream if stream.isatty() else cast(IO[str], _Unpadded(stream)), highlight=False, width=width)


def print_table(title: str, rows: list[tuple[str, str]], *, err: bool = False) -> None:
    """A title and two columns.  Values are never wrapped or cut: paths and digests are there to be copied."""
    from rich.text import Text

    console = rich_console(err=err)
    width = max((len(key) for key, _ in rows), default=0) + 2
    console.print(Text(printable(title), style="bold"), soft_wrap=True)
    for key, value in rows:
        shown = "  " + printable_line(key).ljust(width)
        console.print(Text.assemble((shown, "bold cyan"), printable_line(value)), soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Unit:
    """What progress counts: its short name, how many of it make one of the name that plain lines use, and that name."""

    short: str
    factor: float
    shown: str
    rate_factor: float
    rate_shown: str


BYTES = Unit("B", MIB, "MiB", 1e6, "MB/s")
TOKENS = Unit("tok", 1, "tokens", 1, "tokens/s")


class Progress:
    """Progress of one command on stderr: a bar on a terminal, a plain line now and then elsewhere, nothing when quick."""

    PLAIN_SECONDS = 5.0
    QUIET_SECONDS = 0.5

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic, *, unit: Unit = BYTES) -> None:
        self._name, self._clock, self._unit = name, clock, unit
        self._bar: Any = None
        self._phase = ""
        self._began = self._last = 0.0
        self._is_terminal = sys.stderr.isatty()

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Say how far a phase has come; `total` may fall while it runs."""
        now = self._clock()
        if phase != self._phase:
            self.close()
            self._phase, self._began, self._last = phase, now, now
        if self._is_terminal:
            self._draw(done, total, now)
        elif now - self._last >= self.PLAIN_SECONDS:
            self._last, unit = now, self._unit
            rate = done / max(now - self._began, 1e-9)
            click.echo(
                f"{self._name}: {phase} {100 * done // max(total, 1)} % of {total / unit.factor:.0f} {unit.shown}, "
                f"{rate / unit.rate_factor:.0f} {unit.rate_shown}, {(total - done) / max(rate, 1e-9):.0f} s left",
                err=True,
            )

    def _draw(self, done: int, total: int, now: float) -> None:
        if self._bar is None:
            if now - self._began < self.QUIET_SECONDS:
                return
            from tqdm import tqdm

            # A terminal may not know its own size; tqdm then shows nothing at all.
            known = os.get_terminal_size(sys.stderr.fileno()).columns > 0
            columns, rows = (None, None) if known else (80, 24)
            unit, scale = self._unit.short, self._unit is BYTES
            self._bar = tqdm(
                total=total,
                desc=self._phase,
                unit=unit,
                unit_scale=scale,
                file=sys.stderr,
                leave=False,
                ncols=columns,
                nrows=rows,
            )
            self._bar.start_t -= now - self._began  # the rate counts from the start of the phase, not of the bar
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
