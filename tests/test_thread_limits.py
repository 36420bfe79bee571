"""Where the limit of processes leaves no thread: one line that says so and status 5, or the work done without."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bel.formats.threads import no_blas_threads
from faults import HANG_SECONDS
from readable import random_files, reader_of
from run_answers import model
from traced import calls_of, write

__all__ = ["model"]

SCRIPTS = Path(sys.executable).parent
RIGHTS = "-all,+dac_override,+dac_read_search"
PROBE = "import threading; threading.Thread(target=int).start()"
_USERS = itertools.count(30000 + os.getpid() % 20000)

Limited = Callable[..., "subprocess.CompletedProcess[str]"]


def _limited(processes: int, folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, as a user who has no processes yet and may have `processes`, but reads all that root may.

    The command names files of the folder by their names alone: access(2) counts the user and not what else he may.
    """
    folder.chmod(0o777)
    rights = [f"--{kind}={RIGHTS}" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
    user = ["setpriv", f"--reuid={next(_USERS)}", "--clear-groups", *rights]
    shell = ["bash", "-c", f'ulimit -u {processes}; exec "$@"', "bash"]
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    return subprocess.run(
        [*user, *shell, *map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Limited:
    folder = tmp_path_factory.mktemp("probe")
    try:
        probes = [_limited(processes, folder, sys.executable, "-c", PROBE) for processes in (1, 2)]
    except FileNotFoundError as error:
        pytest.skip(f"this machine has no {error.filename}")
    if "can't start new thread" not in probes[0].stderr or probes[1].returncode:
        pytest.skip(f"another user, whom a limit of processes holds, cannot be had here: {probes[0].stderr[-200:]}")
    return _limited


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("limits") / "t.trace", calls_of(1, 20))


def run(limited: Limited, model: Path, processes: int) -> subprocess.CompletedProcess[str]:
    options = ("--threads", 1, "-n", 4, "--slots", 16, "-p", "x")
    return limited(processes, model.parent, SCRIPTS / "bel-run", model.name, *options)


def assert_says_the_limit(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 5, done
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "error:" in done.stderr
    assert "limit of processes (ulimit -u" in done.stderr


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")  # so that it is put back, whatever the test does
    yield monkeypatch


def test_the_environment_may_ask_for_blas_threads(unset: pytest.MonkeyPatch) -> None:
    no_blas_threads()
    assert os.environ["OPENBLAS_NUM_THREADS"] == "7"
    unset.delenv("OPENBLAS_NUM_THREADS")
    no_blas_threads()
    assert os.environ["OPENBLAS_NUM_THREADS"] == "1"


@pytest.mark.parametrize("command", ["simulate --policy lru --fraction 0.5", "summarize -o o.json"])
def test_a_command_that_needs_numpy_is_not_interrupted_by_it(limited: Limited, trace: Path, command: str) -> None:
    name, *options = command.split()
    assert_says_the_limit(limited(1, trace.parent, SCRIPTS / "bel-profile", name, trace.name, *options))


def test_a_verification(limited: Limited, model: Path) -> None:
    assert_says_the_limit(limited(1, model.parent, SCRIPTS / "bel-repack", "verify", model.name))


def test_a_run_without_a_thread_to_read(limited: Limited, model: Path) -> None:
    assert_says_the_limit(run(limited, model, 2))


def test_a_run_needs_one_thread_besides_its_two_processes(limited: Limited, model: Path) -> None:
    few, many = run(limited, model, 3), run(limited, model, 200)
    assert (few.returncode, few.stdout) == (0, many.stdout), few.stderr
    assert "reader io_uring" in few.stderr or "reader io_uring" not in many.stderr


def test_no_number_of_processes_ends_a_run_in_words_of_a_library(limited: Limited, model: Path) -> None:
    """OpenMP ends the process where it gets fewer threads than it was told to take."""
    statuses = []
    for processes in range(2, 10):
        options = ("--threads", 3, "-n", 2, "--slots", 16, "-p", "x")
        done = limited(processes, model.parent, SCRIPTS / "bel-run", model.name, *options)
        statuses.append(done.returncode)
        if done.returncode:
            assert_says_the_limit(done)
    assert set(statuses) == {0, 5}
    assert statuses == sorted(statuses, reverse=True)


def test_an_io_uring_without_a_thread_of_the_kernel(limited: Limited, tmp_path: Path) -> None:
    files = random_files(tmp_path)
    with reader_of(files, "io_uring"):
        pass  # skips where there is none
    code = """
import sys
from pathlib import Path
from bel.formats.errors import BelError
from bel.runtime.readers import open_reader
for kind in ("io_uring", "auto"):
    try:
        open_reader([Path(sys.argv[1])], kind=kind)
    except BelError as error:
        print(type(error).__name__, error)
"""
    asked, best = limited(1, tmp_path, sys.executable, "-c", code, files[0]).stdout.splitlines()
    assert asked.startswith("MachineError the reader io_uring was asked for and cannot be had: an io_uring gets no thread")
    assert "ulimit -u" in asked
    assert best.startswith("MachineError no more threads can be started")
    assert "ulimit -u" in best
