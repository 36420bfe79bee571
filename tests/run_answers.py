"""`bel-run` on the converted example, in this process or as one of its own: its streams, its status, its JSON object."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bel.formats.console import run_command
from bel.repack.cli import main_group as repack
from bel.runtime.cli import NAME, main_command
from faults import HANG_SECONDS
from recordings import EXAMPLE

COMMAND = Path(sys.executable).with_name(NAME)
PROMPT = "def add(a, b):\n    return"
ONE_THREAD = ("--threads", "1", "--context", "512")
FLOOR = "4"  # the example's top-k


@dataclass(frozen=True)
class Ended:
    status: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        assert self.status == 0, self.stderr
        return json.loads(self.stdout)


Run = Callable[..., Ended]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, converted.  Do not change it."""
    bundle = tmp_path_factory.mktemp("run") / "tiny.bel"
    assert run_command(repack, "bel-repack", [str(EXAMPLE), "-o", str(bundle)]) == 0
    return bundle


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """A bundle to be damaged."""
    subprocess.run(["cp", "-r", model, tmp_path / "copy.bel"], check=True)
    return tmp_path / "copy.bel"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process, with one thread."""

    def run(*arguments: object) -> Ended:
        capsys.readouterr()
        handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            status = run_command(main_command, NAME, [*ONE_THREAD, *map(str, arguments)])
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return Ended(status, *capsys.readouterr())

    return run


def process(*arguments: object, **settings: Any) -> subprocess.Popen[bytes]:
    """The installed command as a process of its own."""
    pipe = subprocess.PIPE
    return subprocess.Popen([COMMAND, *ONE_THREAD, *map(str, arguments)], stdout=pipe, stderr=pipe, **settings)


def ended(started: subprocess.Popen[bytes], data: bytes | None = None) -> Ended:
    out, err = started.communicate(data, timeout=HANG_SECONDS)
    assert b"Traceback" not in err
    return Ended(started.returncode, out.decode(), err.decode())


@pytest.fixture(scope="module")
def stock() -> Any:
    """What stock llama.cpp answers to the prompt: the JSON object."""
    return ended(process(EXAMPLE, "--stock", "-p", PROMPT, "-n", 24, "--json")).json
