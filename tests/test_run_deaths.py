"""Whatever ends the process that llama.cpp is in, `bel-run` ends with one line and its own status; and signals reach it."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bel.formats import signals
from bel.formats.errors import BadInputError, DamagedBundleError, MachineError
from bel.formats.signals import REPEAT_SECONDS
from bel.runtime import black_box, stopping
from bel.runtime.black_box import WORDS_BYTES, BlackBox
from bel.runtime.crash import CRASHES, crash_error, is_told
from bel.runtime.file_watch import FileState, FileWatch
from recordings import EXAMPLE

COMMAND = str(Path(sys.executable).parent / "bel-run")
STOCK = [str(EXAMPLE), "--stock", "--threads", "1"]
ENDLESS = [*STOCK, "-p", "def f(", "-n", "100000", "--ignore-eos", "--context", "100000"]
WAIT_SECONDS = 60.0

_AT_DECODE = """
import ctypes, os, signal, sys
from bel.runtime.context import Context
from bel.runtime.engine import Engine
from bel.runtime.entry import main
real, calls = Context.decode, 0
def decode(*arguments, **named):
    global calls
    calls += 1
    if calls == 3:
        {death}
    return real(*arguments, **named)
Context.decode = decode
main()
"""
_ABORT = "ctypes.CDLL(str(Engine.open().library.path)).ggml_abort(b'ggml.c', 42, b'GGML_ASSERT(i01 < ne01) failed')"


def dying(death: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`bel-run`, with something done in front of its third decode."""
    command = [sys.executable, "-c", _AT_DECODE.format(death=death), *(arguments or [*STOCK, "-p", "x", "-n", "9", "--json"])]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deaths") / "tiny.bel"
    command = [sys.executable, "-c", "from bel.repack.cli import main; main()", str(EXAMPLE), "-o", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def errors_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What is said behind the lines on the load."""
    lines = [line for line in done.stderr.splitlines() if "stock llama.cpp: the whole" not in line and " layers, " not in line]
    return [line for line in lines if not line.startswith("bel-run: memory ")]


@pytest.mark.parametrize(
    ("death", "words"),
    [
        (_ABORT, ["llama.cpp crashed (SIGABRT)", "It said last: ", "ggml.c:42: GGML_ASSERT(i01 < ne01) failed"]),
        ("ctypes.string_at(8)", ["llama.cpp crashed (SIGSEGV)"]),
        ("os.kill(os.getpid(), signal.SIGBUS)", ["llama.cpp crashed (SIGBUS)", "the disk fails"]),
        ("os.kill(os.getpid(), signal.SIGKILL)", ["bel-run was killed (SIGKILL)", "memory ran out"]),
    ],
    ids=["abort", "segfault", "bus", "kill"],
)
def test_a_death_is_one_line(death: str, words: list[str]) -> None:
    done = dying(death)
    assert (done.returncode, done.stdout) == (5, "")
    (line,) = errors_of(done)
    assert line.startswith("bel-run: error: ")
    assert str(EXAMPLE) in line
    for word in words:
        assert word in line


@pytest.mark.parametrize("mode", [["-p", "x", "-n", "9"], ["--bench", "--prompt-tokens", "4"], ["-p", "x", "--check-against"]])
def test_in_every_mode(mode: list[str], bundle: Path) -> None:
    arguments = [*mode, str(EXAMPLE)] if mode[-1] == "--check-against" else mode
    done = dying(_ABORT, str(bundle), "--slots", "4", "--threads", "1", "--json", *arguments)
    assert (done.returncode, done.stdout) == (5, "")
    assert "llama.cpp crashed (SIGABRT)" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("key", [b"qwen3moe.expert_count", b"qwen3moe.expert_used_count"])
def test_a_header_that_llama_cpp_does_not_survive(key: bytes, tmp_path: Path) -> None:
    """The last byte of a key is another one: each is another assertion."""
    data = EXAMPLE.read_bytes()
    assert data.count(key) == 1
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(data.replace(key, key[:-1] + b"~"))
    done = subprocess.run(
        [COMMAND, str(broken), "--stock", "-p", "a", "-n", "1"],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout) == (5, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"bel-run: error: {broken}: llama.cpp crashed (SIGABRT)")
    assert "GGML_ASSERT" in line


def test_a_signal_that_somebody_meant_is_the_commands_own_end() -> None:
    done = dying("signal.signal(signal.SIGUSR1, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGUSR1)")
    assert done.returncode == -signal.SIGUSR1
    assert errors_of(done) == []


@pytest.mark.parametrize(("arguments", "status"), [(["--nonsense"], 2), (["no-such.bel", "-p", "x"], 3), (["--version"], 0)])
def test_the_status_is_the_childs(arguments: list[str], status: int) -> None:
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert done.returncode == status


def test_streams_are_the_childs() -> None:
    done = subprocess.run(
        [COMMAND, *STOCK, "-n", "4"], input="def add(a, b):", capture_output=True, text=True, timeout=WAIT_SECONDS, check=True
    )
    assert done.stdout
    assert "stock llama.cpp" in done.stderr


@contextlib.contextmanager
def running() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`bel-run` in a process group of its own that has begun to write, and the process that computes."""
    process = subprocess.Popen([COMMAND, *ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0)
    try:
        assert process.stdout is not None
        assert len(process.stdout.read(30)) == 30
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
        yield process, int(child)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def state_of(pid: int) -> str:
    """Its letter in proc(5); Z also for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("is_group", [False, True], ids=["command", "group"])
def test_a_signal_ends_the_text_in_order(is_group: bool, number: signal.Signals) -> None:
    """Sent to the group, as a terminal and `timeout` do, it reaches the one that computes twice."""
    with running() as (process, _):
        if is_group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        _, said = process.communicate(timeout=WAIT_SECONDS)
        assert process.returncode == 130
        assert said.decode().splitlines()[-1].startswith("bel-run: interrupted behind ")


_IN_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


def test_ctrl_c_of_a_terminal() -> None:
    """The terminal itself sends the signal to both processes."""
    leader, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _IN_TERMINAL, COMMAND, *ENDLESS],
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    os.close(terminal)
    try:
        assert os.read(leader, 1)
        os.write(leader, b"\x03")
        reader = threading.Thread(target=_drain, args=[leader])  # else the text would fill the terminal's buffer
        reader.start()
        _, said = process.communicate(timeout=WAIT_SECONDS)
        reader.join()
        assert process.returncode == 130
        assert said.decode().splitlines()[-1].startswith("bel-run: interrupted behind ")
    finally:
        process.kill()
        process.communicate()
        os.close(leader)


def _drain(fd: int) -> None:
    with contextlib.suppress(OSError):  # EIO: nobody has the terminal any more
        while os.read(fd, 4096):
            pass


@pytest.mark.parametrize("is_group", [False, True], ids=["command", "group"])
def test_ctrl_z_stops_both_and_both_go_on(is_group: bool) -> None:
    """And the parent is seen to have stopped, by whoever waits for it, as by a shell."""
    with running() as (process, child):
        send = os.killpg if is_group else os.kill
        for _ in range(2):
            send(process.pid, signal.SIGTSTP)
            wait_for(lambda: state_of(process.pid) == "T" and state_of(child) == "T")
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WSTOPSIG(status) == signal.SIGTSTP
            send(process.pid, signal.SIGCONT)
            wait_for(lambda: state_of(process.pid) != "T" and state_of(child) != "T")
        assert process.stdout is not None
        assert len(process.stdout.read(200)) == 200


def test_the_work_does_not_outlive_the_command() -> None:
    with running() as (process, child):
        process.kill()
        process.wait(WAIT_SECONDS)
        wait_for(lambda: state_of(child) == "Z")


def test_the_one_that_waits_is_small() -> None:
    """It has loaded none of what it waits for, and holds a small part of the memory."""
    with running() as (process, child):
        assert "xllamacpp" in Path(f"/proc/{child}/maps").read_text(encoding="utf-8")
        maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
        assert not [name for name in ("xllamacpp", "numpy", "_cffi") if name in maps]
        rss = [int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) for pid in (process.pid, child)]
        assert rss[0] < rss[1] / 3


def test_a_machine_that_refuses_another_process() -> None:
    code = "import os, errno\ndef fork(): raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))\nos.fork = fork\n"
    command = [sys.executable, "-c", f"{code}from bel.runtime.entry import main; main()", *STOCK, "-p", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr.startswith("bel-run: error: the machine refuses: Resource temporarily unavailable. ")


def test_a_repeat_of_the_first_signal_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.monotonic() + 10 * REPEAT_SECONDS]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stopping, "INTERRUPTS", signals.Interrupts())
    request = stopping.StopRequest()
    request.note(signal.SIGINT, None)
    assert request()
    now[0] += REPEAT_SECONDS * 0.9
    request.note(signal.SIGTERM, None)
    now[0] += REPEAT_SECONDS * 0.2
    with pytest.raises(KeyboardInterrupt):
        request.note(signal.SIGINT, None)


_HANGS = "lock = ctypes.create_string_buffer(64); [ctypes.CDLL(None).pthread_mutex_lock(lock) for _ in range(2)]"
"""A mutex that is locked twice: no signal that is handled ends the wait."""


@contextlib.contextmanager
def hanging() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`bel-run` in a process group of its own, with a child that hangs in native code, and that child."""
    death = f"print('hangs', flush=True); {_HANGS}"
    command = [sys.executable, "-c", _AT_DECODE.format(death=death), *STOCK, "-p", "x", "-n", "9", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
        yield process, int(child)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("is_group", [False, True], ids=["command", "group"])
def test_a_child_that_hangs_is_killed_at_the_third_signal(is_group: bool) -> None:
    send = os.killpg if is_group else os.kill
    with hanging() as (process, child):
        for _ in range(2):
            for _ in range(3):  # repeats of one, which count as one
                send(process.pid, signal.SIGINT)
                time.sleep(0.02)
            time.sleep(REPEAT_SECONDS)
            assert state_of(child) != "Z"
            assert process.poll() is None
        send(process.pid, signal.SIGTERM)
        _, said = process.communicate(timeout=WAIT_SECONDS)
        assert process.returncode == 130
        assert said.splitlines()[-1] == "bel-run: error: interrupted; it did not end by itself and was killed"
        assert said.count("interrupted") == 1
        assert state_of(child) == "Z"


@given(st.lists(st.binary(max_size=3000), max_size=6))
def test_a_black_box_has_the_last_words(said: list[bytes]) -> None:
    box = BlackBox()
    for text in said:
        box.say(text)
    assert box.words == b"".join(said)[-WORDS_BYTES:].decode("utf-8", "replace")


_STATES = st.lists(st.builds(FileState, st.text(max_size=20), *[st.integers(0, 2**64 - 1)] * 4), max_size=5)


@given(_STATES, _STATES, st.booleans())
def test_a_black_box_has_the_last_models_files(before: list[FileState], states: list[FileState], is_bundle: bool) -> None:
    box = BlackBox()
    assert (box.files, box.model) == ([], None)
    box.keep_files(before, is_bundle=not is_bundle)
    box.keep_files(states, is_bundle=is_bundle)
    box.say(b"x")
    assert (box.files, box.is_bundle) == (states, is_bundle)


def test_a_black_box_keeps_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(black_box, "ROOM_BYTES", WORDS_BYTES + 1000)
    box, states = BlackBox(), [FileState(f"{i:0100d}", 0, 0, 0, 0) for i in range(100)]
    box.keep_files(states, is_bundle=True)
    assert 0 < len(box.files) < 10
    assert box.files == states[: len(box.files)]


@pytest.mark.parametrize("number", [n for n in signal.valid_signals() if n not in (signal.SIGSTOP, signal.SIGCONT)])
def test_every_signal_has_a_name_and_an_error(number: int, tmp_path: Path) -> None:
    """Where a file of the model was changed that is the reason, whatever the death."""
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with FileWatch([path]) as watch:
        states = list(watch.states)
    error = crash_error(number, states, DamagedBundleError, "last\n", what="it", path="m")
    assert isinstance(error, MachineError)
    assert is_told(number) or number not in CRASHES
    path.write_bytes(b"longer")
    for kind in (DamagedBundleError, BadInputError):
        changed = crash_error(number, states, kind, "last\n", what="it", path="m")
        assert (type(changed), changed.path) == (kind, str(path))
