"""What happens to a run from outside while it runs: its files change, signals come, it is asked for more than there is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bel.formats.bundle import open_bundle
from bel.formats.errors import DamagedBundleError
from bel.formats.signals import signals_deferred
from bel.runtime.bundle_model import SlotOptions, open_run
from bel.runtime.context import ContextOptions
from bel.runtime.engine import Engine
from bel.runtime.file_watch import FileWatch
from bel.runtime.policies import parse_policy

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-moe-q8_0.gguf"
RUN = [sys.executable, "-c", "from bel.runtime.cli import main; main()"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults") / "tiny.bel"
    subprocess.run(
        [sys.executable, "-c", "from bel.repack.cli import main; main()", str(EXAMPLE), "-o", str(folder)],
        check=True,
        capture_output=True,
    )
    return folder


def copy_of(made: Path, folder: Path) -> Path:
    bundle = folder / "copy.bel"
    subprocess.run(["cp", "-r", str(made), str(bundle)], check=True)
    return bundle


def experts_of(bundle: Path) -> Path:
    return next(bundle.glob("*experts.bin"))


@pytest.mark.parametrize("change", ["one bit", "other blobs", "zeros"])
def test_blobs_that_change_after_they_were_checked_end_the_run(made: Path, tmp_path: Path, change: str) -> None:
    """Every expert is read again and again at the floor of slots; all of them were checked before the change."""
    folder = copy_of(made, tmp_path)
    path = experts_of(folder)
    options = SlotOptions(parse_policy("lru"), slots=4)
    tokens = np.random.default_rng(1).integers(0, 200, 60)
    with open_run(Engine.open(), open_bundle(folder), ContextOptions(256, 64, 64, 1), options) as run:
        run.context.decode(tokens)
        data = bytearray(path.read_bytes())
        if change == "one bit":
            data[len(data) // 2] ^= 1
        elif change == "other blobs":
            data[4096:] = data[4096 + 28672 :] + data[4096 : 4096 + 28672]
        else:
            data[4096:] = bytes(len(data) - 4096)
        with path.open("r+b") as file:
            file.write(data)
        with pytest.raises(DamagedBundleError, match="changed while the model runs"):
            for token in tokens:
                run.context.decode([int(token)])


def test_a_file_that_is_replaced_under_its_name_is_still_the_one_that_was_opened(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_bytes(b"old")
    other.write_bytes(b"newer")
    watch = FileWatch([path])
    watch.check()
    other.replace(path)
    watch.check()
    watch.close()
    watch.close()


def test_a_deferred_signal_is_handled_behind_the_block_by_the_handler_of_before() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: seen.append(number))
    try:
        with signals_deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            assert not seen
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("seconds", [0.5, 0.8, 1.1, 1.4, 1.7])
def test_an_interrupt_of_a_check_is_never_a_verdict(made: Path, seconds: float) -> None:
    """A signal that arrives while llama.cpp calls back must not cost a record and then count as a difference."""
    texts = [part for text in "abcdefgh" for part in ("-p", text)]
    command = [
        *RUN,
        str(made),
        "--slots",
        "8",
        "--threads",
        "1",
        "--json",
        "--check-against",
        str(EXAMPLE),
        "-n",
        "400",
        *texts,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT), said
    assert not out
    assert b"exact" not in said


def test_a_context_that_cannot_be_is_refused_with_one_that_can(made: Path) -> None:
    command = [*RUN, str(made), "-p", "x", "-n", "1", "--json", "--context"]
    done = subprocess.run([*command, str(2**31 - 1)], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "KV cache" in done.stderr
    assert int(done.stderr.split("--context ")[1].split()[0]) > 1 << 16
    done = subprocess.run([*command, str((1 << 16) + 1)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["tokens"]


@pytest.mark.parametrize(("slots", "is_said"), [(33, True), (32, False)])
def test_more_slots_than_experts_are_clamped_with_a_word(made: Path, slots: int, is_said: bool) -> None:
    command = [*RUN, str(made), "-p", "x", "-n", "1", "--threads", "1", "--json", "--slots", str(slots)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout)["load"]["slots_by_layer"].values()) == {32}
    assert (f"--slots {slots} is more than there are: clamped to the 32 experts of a layer" in done.stderr) == is_said


def test_the_default_context_is_not_more_than_the_model_was_trained_for(made: Path) -> None:
    done = subprocess.run([*RUN, str(made), "-p", "x", "-n", "1", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["load"]["n_ctx"] == 512


def test_what_is_loaded_before_the_first_token_is_not_counted_with_the_prompt(made: Path) -> None:
    wanted = {layer: range(32) for layer in range(6)}
    options = SlotOptions(parse_policy("static"), slots=32, wanted=wanted)
    with open_run(Engine.open(), open_bundle(made), ContextOptions(64, 64, 64, 1), options) as run:
        assert run.uploaded_bytes == 6 * 32 * 28672
        run.context.decode([1, 2, 3])
        prompt = run.cache.counters.prompt
        assert prompt.accesses == prompt.hits > 0
        assert (prompt.read_bytes, prompt.wait_ns, prompt.check_ns) == (0, 0, 0)
        assert prompt.callback_ns > 0
