"""Running a command of ours where the machine fails: at the n-th system call, by signal, by limit, or on a full disk."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bel.formats.console import run_command
from bel.repack.cli import NAME, main_group

HANG_SECONDS = 60.0
"""When a child is given up: far beyond what any of these small runs takes, so only a hang reaches it."""
COMMAND = Path(sys.executable).with_name(NAME)

_OS_CALLS = (
    "open",
    "mkdir",
    "ftruncate",
    "pwrite",
    "write",
    "pread",
    "preadv",
    "fsync",
    "rename",
    "replace",
    "lseek",
    "fstat",
    "statvfs",
    "posix_fadvise",
)


@dataclass
class NthCall:
    """`act` runs at the n-th system call of interest (1 is the first), before or after it.

    `hit` says which call it was, and `path` the file that it was for; `act` gets the path too where the call has one.
    """

    at: int
    act: Callable[[str | None], None]
    after: bool = False
    count: int = 0
    hit: str | None = None
    path: str | None = None

    def install(self) -> None:
        """Wrap the calls, for the rest of this process's life."""
        lock = threading.Lock()
        for module, name in [(os, name) for name in _OS_CALLS] + [(fcntl, "flock")]:
            setattr(module, name, self._wrapped(name, getattr(module, name), lock))

    def _wrapped(self, name: str, real: Callable[..., Any], lock: threading.Lock) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            with lock:
                self.count += 1
                fires = self.count == self.at
            if not fires:
                return real(*args, **named)
            self.hit, self.path = name, _path_of(args[0])
            told = None if isinstance(args[0], int) else self.path
            if not self.after:
                self.act(told)
                return real(*args, **named)
            value = real(*args, **named)
            self.act(told)
            return value

        return call


def _path_of(target: object) -> str:
    return os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Outcome:
    """How a command ended.  `hit` and `path` tell the call at which a fault struck, `calls` how many there were."""

    status: int
    stdout: str
    stderr: str
    hit: str | None = None
    path: str | None = None
    calls: int = 0


def answer(outcome: Outcome) -> dict[str, Any]:
    """The object that a command with --json printed when it was done."""
    assert outcome.status == 0, outcome
    value = json.loads(outcome.stdout)
    assert isinstance(value, dict)
    return value


def refused(outcome: Outcome, status: int, message: str) -> None:
    """The refusal is on stderr, without traceback and without anything on stdout."""
    assert outcome.status == status, outcome
    assert outcome.stdout == ""
    assert re.search(message, outcome.stderr), outcome.stderr
    assert "Traceback" not in outcome.stderr


def raises(code: int) -> Callable[[str | None], None]:
    """An act that fails with this errno: with the file's name from a call on a path, without from one on a descriptor."""

    def act(path: str | None) -> None:
        raise OSError(code, os.strerror(code)) if path is None else OSError(code, os.strerror(code), path)

    return act


def sends(number: signal.Signals) -> Callable[[str | None], None]:
    """An act that sends this signal to the process that runs it."""
    return lambda _path: os.kill(os.getpid(), number)


def run_cli(*args: str | Path) -> Outcome:
    """The command in this process, with everything that surrounds it in a real one but the interpreter's start."""
    out, err = io.StringIO(), io.StringIO()
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = run_command(main_group, NAME, [str(a) for a in args])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Outcome(status, out.getvalue(), err.getvalue())


def in_child(*args: str | Path, fault: NthCall | None = None, prepare: Callable[[], None] = lambda: None) -> Outcome:
    """The command in a forked process, which may be killed.  `prepare` runs in it first (limits, patches)."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        write = os.write
        answer = pickle.dumps(_child(args, fault, prepare))
        write(writer, answer)
        os._exit(0)
    os.close(writer)
    data, ended = b"", time.monotonic() + HANG_SECONDS
    while select.select([reader], [], [], max(0.0, ended - time.monotonic()))[0]:
        part = os.read(reader, 65536)
        if not part:
            break
        data += part
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    if not data and time.monotonic() >= ended:
        pytest.fail(f"{NAME} {' '.join(map(str, args))} hung (fault at call {fault.at if fault else None})")
    if not data:
        return Outcome(os.waitstatus_to_exitcode(status), "", "")
    outcome: Outcome = pickle.loads(data)
    return outcome


def _child(args: tuple[str | Path, ...], fault: NthCall | None, prepare: Callable[[], None]) -> Outcome:
    out, err, status = io.StringIO(), io.StringIO(), 1
    try:
        prepare()
        if fault:
            fault.install()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = run_command(main_group, NAME, [str(a) for a in args])
    except BaseException:  # what a user would see as a traceback
        err.write(traceback.format_exc())
    told = (fault.hit, fault.path, fault.count) if fault else (None, None, 0)
    return Outcome(status, out.getvalue(), err.getvalue(), *told)


def every_call(*args: str | Path, act: Callable[[str | None], None], after: bool = False, step: int = 1) -> Iterator[Outcome]:
    """One outcome for a fault at each call (or each `step`-th), until a run ends before the fault is reached."""
    at = 1
    while True:
        outcome = in_child(*args, fault=NthCall(at, act, after))
        if outcome.hit is None and outcome.status != -signal.SIGKILL:
            return
        yield outcome
        at += step


def start(*args: str | Path, **settings: Any) -> subprocess.Popen[str]:
    """The installed command as a process of its own."""
    return subprocess.Popen(
        [COMMAND, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="surrogateescape",
        **settings,
    )


def finish(process: subprocess.Popen[str]) -> Outcome:
    """Wait for a started command."""
    out, err = process.communicate(timeout=HANG_SECONDS)
    return Outcome(process.returncode, out, err)


def real(*args: str | Path, **settings: Any) -> Outcome:
    """Run the installed command to its end."""
    return finish(start(*args, **settings))


def wait_until(seen: Callable[[], bool], process: subprocess.Popen[str]) -> bool:
    """Wait for something that a running command does; False where it ended first."""
    ended = time.monotonic() + HANG_SECONDS
    while time.monotonic() < ended:
        if seen():
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.0005)
    process.kill()
    pytest.fail("what the test waits for never came")


def tree(folder: Path, *, times: bool = False) -> dict[str, tuple[str, int]]:
    """Every file and folder below a folder: its SHA-256 (or what else it is), and its mtime where asked for."""
    found = {}
    for path in sorted(folder.rglob("*")):
        what = "link" if path.is_symlink() else "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = (what, path.lstat().st_mtime_ns if times and not path.is_dir() else 0)
    return found


@contextlib.contextmanager
def mounted(folder: Path, *options: str, kind: str = "tmpfs", source: str = "tmpfs") -> Iterator[Path]:
    """A file system of its own at `folder`; the test is skipped where mounting is not permitted."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", kind, *options, source, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
