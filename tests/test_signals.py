"""Kills and interrupts at any moment of a run: no half output under its name, and the next run is clean."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import faults
from faults import Outcome, in_child, real, run_cli, tree
from repack_runs import assert_refused, big_model, write_set
from repack_runs import reference as reference
from repack_runs import source as source

KILL, INT, TERM = signal.SIGKILL, signal.SIGINT, signal.SIGTERM


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return big_model(tmp_path_factory.mktemp("big"))


def test_a_kill_at_any_call_leaves_no_final_name_and_the_next_run_is_clean(
    tmp_path: Path, source: Path, reference: dict[str, tuple[str, int]]
) -> None:
    inputs, struck, out = tree(source.parent, times=True), 0, tmp_path / "out.bel"
    for outcome in faults.every_call(source, "-o", out, act=faults.sends(KILL), step=3):
        assert outcome.status == -KILL
        assert tree(source.parent, times=True) == inputs
        if out.exists():
            assert tree(out) == reference, "the name stands for a whole bundle, or it is not there"
            shutil.rmtree(out)
        second = run_cli(source, "-o", out)
        assert second.status == 0, second
        assert tree(out) == reference
        assert {p.name for p in tmp_path.iterdir()} == {"in", "out.bel"}
        shutil.rmtree(out)
        struck += 1
    assert struck > 20, "most calls of a conversion are reached"


def test_a_kill_at_any_call_of_a_forced_run_leaves_one_whole_bundle(
    tmp_path: Path, source: Path, reference: dict[str, tuple[str, int]]
) -> None:
    out = tmp_path / "out.bel"
    assert run_cli(write_set(tmp_path / "old", seed=1), "-o", out).status == 0
    old = tree(out)
    for outcome in faults.every_call(source, "-o", out, "--force", act=faults.sends(KILL), step=5):
        assert outcome.status == -KILL
        assert tree(out) in (old, reference)
    assert tree(out) == reference, "the run that was not killed"
    assert {p.name for p in tmp_path.iterdir()} == {"in", "old", "out.bel"}


def test_a_kill_at_any_call_of_a_restore_leaves_no_half_file(tmp_path: Path, source: Path) -> None:
    bundle, back, original = tmp_path / "m.bel", tmp_path / "back", tree(source.parent)
    assert run_cli(source, "-o", bundle).status == 0
    for outcome in faults.every_call("restore", bundle, "-o", back, act=faults.sends(KILL), step=3):
        assert outcome.status == -KILL
        for name, what in tree(back).items() if back.exists() else []:
            assert what == original.get(name) or name.startswith(".bel-restore.bel-tmp"), name
        again = run_cli("restore", bundle, "-o", back, "--force")
        assert again.status == 0, again
        assert tree(back) == original
        shutil.rmtree(back)


@pytest.mark.parametrize("number", [INT, TERM, signal.SIGHUP])
def test_a_signal_after_any_call_leaves_nothing_behind(tmp_path: Path, source: Path, number: signal.Signals) -> None:
    before, wrong = tree(tmp_path, times=True), []
    for outcome in faults.every_call(
        source, "-o", tmp_path / "out.bel", act=faults.sends(number), after=True, step=1 if number == INT else 7
    ):
        assert "Traceback" not in outcome.stderr, outcome.stderr
        if outcome.status == 0:  # too late: all was done
            assert run_cli("verify", tmp_path / "out.bel", "--source", source).status == 0
            shutil.rmtree(tmp_path / "out.bel")
            continue
        assert outcome.status == 130, outcome
        if tree(tmp_path, times=True) != before:
            wrong.append((outcome, sorted(p.name for p in tmp_path.iterdir())))
            for path in tmp_path.iterdir():
                if path.name != "in":
                    shutil.rmtree(path)
    assert wrong == [], "the message says that nothing was left behind"


def test_a_signal_after_any_call_of_a_restore_leaves_nothing_behind(tmp_path: Path, source: Path) -> None:
    bundle, back = tmp_path / "m.bel", tmp_path / "back"
    assert run_cli(source, "-o", bundle).status == 0
    before, wrong = tree(tmp_path, times=True), []
    for outcome in faults.every_call("restore", bundle, "-o", back, act=faults.sends(INT), after=True):
        assert "Traceback" not in outcome.stderr, outcome.stderr
        if outcome.status == 0:  # too late: all was done
            assert tree(back) == tree(source.parent)
            shutil.rmtree(back)
            continue
        assert outcome.status == 130, outcome
        if tree(tmp_path, times=True) != before:
            wrong.append((outcome, sorted(tree(back))))
            shutil.rmtree(back)
    assert wrong == [], "the message says that nothing was left behind"


def test_a_second_ctrl_c_does_not_stop_the_cleaning(tmp_path: Path, source: Path) -> None:
    def prepare() -> None:
        rmtree = shutil.rmtree

        def impatient(path: Path) -> None:
            os.kill(os.getpid(), INT)
            rmtree(path)

        shutil.rmtree = impatient  # type: ignore[assignment]

    before = tree(tmp_path)
    outcome = in_child(source, "-o", tmp_path / "out.bel", fault=faults.NthCall(40, faults.sends(INT)), prepare=prepare)
    assert outcome.hit is not None
    assert outcome.status == 130
    assert tree(tmp_path) == before


def test_a_signal_cannot_tear_the_final_rename_while_another_thread_runs(tmp_path: Path, source: Path) -> None:
    """A progress bar brings a thread of its own (tqdm's monitor), which may be the one that takes the signal."""

    def prepare() -> None:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        rename = os.rename

        def interrupted(old: Path, new: Path) -> None:
            rename(old, new)
            os.kill(os.getpid(), INT)
            sum(range(10_000))  # bytecodes, between which Python looks for signals

        os.rename = interrupted  # type: ignore[assignment]

    outcome = in_child(source, "-o", tmp_path / "out.bel", prepare=prepare)
    made = (tmp_path / "out.bel").exists()
    assert (outcome.status, made) in ((130, False), (0, True)), "what the status says is what happened"


def caught_at_work(begun: Callable[[], bool], number: signal.Signals, *args: str | Path) -> Outcome:
    """The installed command, sent a signal at a moment that is seen from outside."""
    for _ in range(5):
        process = faults.start(*args)
        if faults.wait_until(begun, process):
            process.send_signal(number)
        outcome = faults.finish(process)
        if outcome.status != 0:
            return outcome
        shutil.rmtree(args[args.index("-o") + 1])
    pytest.fail("the command was done before the signal each time")


@pytest.mark.parametrize("number", [INT, TERM])
@pytest.mark.parametrize("phase", ["big-experts.bin", "manifest.json"])
def test_the_installed_command_is_interrupted_cleanly(tmp_path: Path, big: Path, number: signal.Signals, phase: str) -> None:
    out, began = tmp_path / "out.bel", tree(big.parent, times=True)
    staged = tmp_path / ".out.bel.bel-tmp" / phase
    outcome = caught_at_work(staged.exists, number, big, "-o", out)
    assert_refused(outcome, 130, "interrupted")
    assert list(tmp_path.iterdir()) == []
    assert tree(big.parent, times=True) == began


@pytest.mark.parametrize("phase", ["big-experts.bin", "manifest.json"])
def test_the_installed_command_is_killed_and_run_again(tmp_path: Path, big: Path, phase: str) -> None:
    out, began = tmp_path / "out.bel", tree(big.parent, times=True)
    staged = tmp_path / ".out.bel.bel-tmp" / phase
    outcome = caught_at_work(staged.exists, KILL, big, "-o", out)
    assert outcome.status == -KILL
    assert [p.name for p in tmp_path.iterdir()] == [".out.bel.bel-tmp"], "no final name"
    assert tree(big.parent, times=True) == began
    assert real(big, "-o", out).status == 0
    assert [p.name for p in tmp_path.iterdir()] == ["out.bel"]


def test_the_installed_command_is_interrupted_and_killed_while_it_restores(tmp_path: Path, big: Path) -> None:
    bundle, back = tmp_path / "m.bel", tmp_path / "back"
    assert real(big, "-o", bundle, "--no-verify").status == 0
    staged = back / ".bel-restore.bel-tmp" / "big.gguf"
    outcome = caught_at_work(staged.exists, INT, "restore", bundle, "-o", back)
    assert_refused(outcome, 130, "interrupted")
    assert not back.exists()
    outcome = caught_at_work(staged.exists, KILL, "restore", bundle, "-o", back)
    assert [p.name for p in back.iterdir()] == [".bel-restore.bel-tmp"]
    assert real("restore", bundle, "-o", back).status == 0
    assert tree(back) == tree(big.parent)
