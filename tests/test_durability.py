"""Whatever stops a run, and whenever: no half output under its name, nothing beside it, the inputs as they were."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import faults
import synth
from bel.formats.console import Progress
from bel.formats.errors import BadInputError, UsageError
from bel.formats.gguf_model import open_model
from bel.repack.convert import convert
from bel.repack.layout import plan_layout
from faults import Outcome, in_child, real, run_cli, tree

KILL, INT, TERM = signal.SIGKILL, signal.SIGINT, signal.SIGTERM


def ple_model(seed: int = 0) -> synth.Gguf:
    """A model that gives every kind of file of a bundle: dense, PLE, experts, kept bytes in a gap and in the tail."""
    table = synth.Tensor("per_layer_token_embd.weight", (64, 8), synth.Q8_0, gap_bytes=64)
    return synth.moe(tensors=[table, *synth.moe_tensors()], seed=seed, pad_byte=7, tail=b"tail")


def write_set(folder: Path, seed: int = 0) -> Path:
    """A split set of two files in a folder; the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, shard in synth.split(ple_model(seed), [6, 7]).items():
        shard.write(folder / name)
    return folder / "model-00001-of-00002.gguf"


def big_model(folder: Path, mib: int = 96) -> Path:
    """A model that takes long enough to be caught at work."""
    experts = mib * 2**20 // (3 * 2 * 1114112)
    block = random.Random(1).randbytes(1114112)
    stacks = [
        synth.Tensor(f"blk.{layer}.ffn_{role}_exps.weight", (1024, 1024, experts), synth.Q8_0, block * experts)
        for layer in range(2)
        for role in ("gate", "up", "down")
    ]
    folder.mkdir(parents=True, exist_ok=True)
    return synth.Gguf(synth.moe_entries(experts=experts), stacks).write(folder / "big.gguf")


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return big_model(tmp_path_factory.mktemp("big"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_set(tmp_path / "in")


@pytest.fixture
def reference(tmp_path: Path, source: Path) -> dict[str, tuple[str, int]]:
    """The files that an undisturbed run makes."""
    assert run_cli(source, "-o", tmp_path / "reference.bel").status == 0
    made = tree(tmp_path / "reference.bel")
    shutil.rmtree(tmp_path / "reference.bel")
    return made


def assert_refused(outcome: Outcome, status: int, *words: object) -> None:
    """One clear message and the right status: no traceback, nothing on stdout."""
    assert outcome.status == status, outcome
    assert "Traceback" not in outcome.stderr, outcome.stderr
    assert outcome.stdout == "", outcome.stdout
    told = outcome.stderr.removeprefix("\n")  # click ends the line of a terminal's ^C
    assert told.startswith("bel-repack: error: "), outcome.stderr
    assert told.count("\n") == 1, outcome.stderr
    for word in words:
        assert str(word) in outcome.stderr, (word, outcome)


def only_cleaning_failed(outcome: Outcome) -> bool:
    """Whether a run was complete before the fault, which then cost nothing but the removal of the temporary folder."""
    return outcome.status == 0 and "could not be removed" in outcome.stderr and "the next run" in outcome.stderr


# Errors of single calls


@pytest.mark.parametrize(("code", "step"), [(errno.EIO, 1), (errno.ENOSPC, 3)])
def test_an_error_of_any_call_leaves_nothing_behind(tmp_path: Path, source: Path, code: int, step: int) -> None:
    before = tree(tmp_path, times=True)
    struck = 0
    for outcome in faults.every_call(source, "-o", tmp_path / "out.bel", act=faults.raises(code), step=step):
        assert_refused(outcome, 5, os.strerror(code))
        assert tree(tmp_path, times=True) == before, outcome
        struck += step
    assert struck > 60, "most calls of a conversion are reached"
    assert run_cli("verify", tmp_path / "out.bel").status == 0, "the run in which no fault struck"


def test_an_error_of_any_call_names_the_file_that_it_happened_to(tmp_path: Path, source: Path) -> None:
    nameless = [
        (outcome.hit, outcome.path, outcome.stderr)
        for outcome in faults.every_call(source, "-o", tmp_path / "out.bel", act=faults.raises(errno.EIO))
        if str(outcome.path) not in outcome.stderr and outcome.hit not in ("fstat", "posix_fadvise")
    ]
    assert nameless == []


def test_an_error_of_any_call_of_a_forced_run_keeps_a_whole_bundle(tmp_path: Path, source: Path) -> None:
    old = write_set(tmp_path / "old", seed=1)
    assert run_cli(old, "-o", tmp_path / "out.bel").status == 0
    before, torn = tree(tmp_path), []
    for outcome in faults.every_call(source, "-o", tmp_path / "out.bel", "--force", act=faults.raises(errno.EIO), step=2):
        if only_cleaning_failed(outcome):
            assert run_cli("verify", tmp_path / "out.bel", "--source", source).status == 0
            assert run_cli(old, "-o", tmp_path / "out.bel", "--force").status == 0, "the next run cleans up"
            assert tree(tmp_path) == before
            continue
        assert_refused(outcome, 5)
        if tree(tmp_path) != before:
            torn.append(outcome)
            shutil.rmtree(tmp_path / "out.bel")
            assert run_cli(old, "-o", tmp_path / "out.bel").status == 0
    assert torn == [], "the old bundle is there after every error"


@pytest.mark.parametrize(("code", "step"), [(errno.EIO, 1), (errno.ENOSPC, 3)])
def test_an_error_of_any_call_of_a_restore_leaves_nothing_behind(tmp_path: Path, source: Path, code: int, step: int) -> None:
    bundle = tmp_path / "m.bel"
    assert run_cli(source, "-o", bundle).status == 0
    before = tree(tmp_path, times=True)
    struck = 0
    for outcome in faults.every_call("restore", bundle, "-o", tmp_path / "back", act=faults.raises(code), step=step):
        if only_cleaning_failed(outcome):
            assert {k: v for k, v in tree(tmp_path / "back").items() if "bel-tmp" not in k} == tree(source.parent)
            shutil.rmtree(tmp_path / "back")
            continue
        assert_refused(outcome, 5, os.strerror(code))
        assert tree(tmp_path, times=True) == before, outcome
        struck += step
    assert struck > 30, "most calls of a restore are reached"
    assert tree(tmp_path / "back") == tree(source.parent)


def test_an_error_of_any_call_of_a_forced_restore_keeps_every_old_file(tmp_path: Path, source: Path) -> None:
    bundle, back = tmp_path / "m.bel", tmp_path / "back"
    assert run_cli(source, "-o", bundle).status == 0
    back.mkdir()
    for path in source.parent.iterdir():
        (back / path.name).write_text("what was here before")
    before = tree(back)
    for outcome in faults.every_call("restore", bundle, "-o", back, "--force", act=faults.raises(errno.EIO), step=2):
        if only_cleaning_failed(outcome):
            assert {k: v for k, v in tree(back).items() if "bel-tmp" not in k} == tree(source.parent)
            for path in source.parent.iterdir():
                (back / path.name).write_text("what was here before")
            shutil.rmtree(back / ".bel-restore.bel-tmp")
            continue
        assert_refused(outcome, 5)
        assert tree(back) == before, outcome


def test_an_error_of_any_call_of_verify_is_no_verdict_on_the_bundle(tmp_path: Path, source: Path) -> None:
    bundle = tmp_path / "m.bel"
    assert run_cli(source, "-o", bundle).status == 0
    for outcome in faults.every_call("verify", bundle, "--source", source, act=faults.raises(errno.EIO)):
        assert_refused(outcome, 5)
        assert "damaged" not in outcome.stderr


def test_short_reads_and_writes_change_nothing(
    tmp_path: Path, source: Path, reference: dict[str, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, pread, pwrite, write = os.preadv, os.pread, os.pwrite, os.write
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:701]], at))
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 701), at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:499], at))
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:97]))
    assert run_cli(source, "-o", tmp_path / "out.bel").status == 0
    assert tree(tmp_path / "out.bel") == reference
    assert run_cli("restore", tmp_path / "out.bel", "-o", tmp_path / "back").status == 0
    assert tree(tmp_path / "back") == tree(source.parent)


@pytest.mark.parametrize("nth", range(1, 12))
def test_a_disk_that_writes_other_bytes_is_found_before_the_bundle_gets_its_name(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    pwrite, count = os.pwrite, 0

    def flips(fd: int, data: memoryview, at: int) -> int:
        nonlocal count
        count += 1
        if count != nth:
            return pwrite(fd, data, at)
        wrong = bytearray(data)
        wrong[len(wrong) // 2] ^= 1
        return pwrite(fd, wrong, at)

    before = tree(tmp_path)
    monkeypatch.setattr(os, "pwrite", flips)
    outcome = run_cli(source, "-o", tmp_path / "out.bel")
    assert_refused(outcome, 4, "does not read back as it was written", ".out.bel.bel-tmp")
    assert tree(tmp_path) == before


# Signals


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


# Full, read-only and limited machines


def test_a_disk_too_small_is_refused_before_the_first_byte(tmp_path: Path, big: Path) -> None:
    with faults.mounted(tmp_path / "disk", "-o", "size=32m") as disk:
        outcome = run_cli(big, "-o", disk / "out.bel")
        assert_refused(outcome, 5, "no space", disk, "bytes)")
        assert list(disk.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with faults.mounted(tmp_path / "disk", "-o", "size=32m") as disk:
        monkeypatch.setattr("bel.repack.convert.check_space", lambda *_: None)  # as if another process took the space after it
        outcome = run_cli(big, "-o", disk / "out.bel")
        assert_refused(outcome, 5, "No space left on device", "big-experts.bin", "use -o on another disk")
        assert list(disk.iterdir()) == []


def test_a_restore_onto_a_disk_too_small(tmp_path: Path, big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_cli(big, "-o", tmp_path / "m.bel", "--no-verify").status == 0
    with faults.mounted(tmp_path / "disk", "-o", "size=32m") as disk:
        assert_refused(run_cli("restore", tmp_path / "m.bel", "-o", disk), 5, "no space", disk)
        assert list(disk.iterdir()) == []
        monkeypatch.setattr("bel.repack.restore.check_space", lambda *_: None)
        outcome = run_cli("restore", tmp_path / "m.bel", "-o", disk / "back")
        assert_refused(outcome, 5, "No space left on device", "big.gguf")
        assert list(disk.iterdir()) == []


def test_a_bundle_that_just_fits_is_made(tmp_path: Path, source: Path) -> None:
    """The check before the first byte must not refuse what would fit: it knows sizes to a page or so a file."""
    assert run_cli(source, "-o", tmp_path / "m.bel").status == 0
    need = sum(-(-p.stat().st_size // 4096) * 4096 for p in (tmp_path / "m.bel").rglob("*") if p.is_file())
    with faults.mounted(tmp_path / "disk", "-o", f"size={need + 2 * 2**20}") as disk:
        assert run_cli(source, "-o", disk / "m.bel").status == 0


def test_a_file_size_limit(tmp_path: Path, big: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))

    assert_refused(real(big, "-o", tmp_path / "out.bel", preexec_fn=limit), 5, "big-experts.bin", "ulimit -f")
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_target(tmp_path: Path, source: Path) -> None:
    assert run_cli(source, "-o", tmp_path / "m.bel").status == 0
    with faults.mounted(tmp_path / "disk", "-o", "ro") as disk:
        for args in ((source, "-o", disk / "out.bel"), ("restore", tmp_path / "m.bel", "-o", disk)):
            assert_refused(run_cli(*args), 5, "Read-only file system", disk, "use -o")


def test_a_read_only_source_is_enough(tmp_path: Path) -> None:
    """Nothing is written beside a source, and none of its times change: a model may lie on a read-only share."""
    with faults.mounted(tmp_path / "share", "-o", "size=4m") as share:
        source = write_set(share)
        assert run_cli(source, "-o", tmp_path / "kept.bel").status == 0
        os.system(f"mount -o remount,ro {share}")
        assert_refused(run_cli(source), 5, "Read-only file system", share)
        assert run_cli(source, "-o", tmp_path / "m.bel").status == 0
        assert run_cli("verify", tmp_path / "m.bel", "--source", source).status == 0
        assert tree(tmp_path / "m.bel") == tree(tmp_path / "kept.bel")


def round_trip_under_a_descriptor_limit(folder: Path, descriptors: int, shard_size: str) -> int:
    """Convert, verify and restore a set of 40 files; how many experts files that made."""
    tensors = [t for layer in range(40) for t in synth.expert_stacks(layer, 2)]
    model = synth.Gguf(synth.moe_entries(layers=40, experts=2), tensors)
    (folder / "in").mkdir()
    for name, shard in synth.split(model, [3] * 40).items():
        shard.write(folder / "in" / name)
    first, bundle = folder / "in" / "model-00001-of-00040.gguf", folder / "m.bel"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    for args in (
        (first, "-o", bundle, "--shard-size", shard_size),
        ("verify", bundle, "--source", first),
        ("restore", bundle, "-o", folder / "back"),
    ):
        done = real(*args, preexec_fn=limit)
        assert done.status == 0, done
    assert tree(folder / "back") == tree(folder / "in")
    return len(list(bundle.glob("*-experts*.bin")))


@pytest.mark.parametrize("descriptors", [16, 24])
def test_many_source_files_under_a_small_descriptor_limit(tmp_path: Path, descriptors: int) -> None:
    assert round_trip_under_a_descriptor_limit(tmp_path, descriptors, "45GB") == 1


def test_many_experts_files_under_a_small_descriptor_limit(tmp_path: Path) -> None:
    assert round_trip_under_a_descriptor_limit(tmp_path, 24, "21000") == 40


@pytest.mark.parametrize("descriptors", [6, 7, 8, 9])
def test_too_few_descriptors_are_said(tmp_path: Path, source: Path, descriptors: int) -> None:
    before = tree(tmp_path)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    outcome = real(source, "-o", tmp_path / "out.bel", preexec_fn=limit)
    if outcome.status:
        assert_refused(outcome, 5, "ulimit -n")
        assert tree(tmp_path) == before


@pytest.mark.parametrize("mib", [60, 90, 110, 130, 170, 260])
def test_little_memory_is_an_error_and_no_traceback(tmp_path: Path, big: Path, mib: int) -> None:
    """Below what the interpreter itself needs nothing of ours runs yet; from there on it is success or status 5."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (mib * 2**20, mib * 2**20))

    outcome = real(big, "-o", tmp_path / "out.bel", "--no-verify", preexec_fn=limit)
    assert "Traceback" not in outcome.stderr, outcome.stderr
    if outcome.status:
        assert_refused(outcome, 5)
        assert list(tmp_path.iterdir()) == []


# Outputs that exist


def test_two_runs_for_one_output(tmp_path: Path, big: Path) -> None:
    out = tmp_path / "out.bel"
    first = faults.start(big, "-o", out)
    try:
        assert faults.wait_until((tmp_path / ".out.bel.bel-tmp" / "big-experts.bin").exists, first)
        first.send_signal(signal.SIGSTOP)
        second = run_cli(big, "-o", out)
        third = run_cli(big, "-o", out, "--force")
    finally:
        first.send_signal(signal.SIGCONT)
    for refused in (second, third):
        assert_refused(refused, 5, "another run is writing this output", ".out.bel.bel-tmp", "Wait")
    assert faults.finish(first).status == 0
    assert run_cli("verify", out).status == 0


def test_two_restores_into_one_folder(tmp_path: Path, big: Path) -> None:
    bundle, back = tmp_path / "m.bel", tmp_path / "back"
    assert run_cli(big, "-o", bundle, "--no-verify").status == 0
    first = faults.start("restore", bundle, "-o", back)
    try:
        assert faults.wait_until((back / ".bel-restore.bel-tmp" / "big.gguf").exists, first)
        first.send_signal(signal.SIGSTOP)
        second = run_cli("restore", bundle, "-o", back)
    finally:
        first.send_signal(signal.SIGCONT)
    assert_refused(second, 5, "another run", back)
    assert faults.finish(first).status == 0
    assert tree(back) == tree(big.parent)


def test_a_stale_temporary_folder_is_replaced_and_links_in_it_are_not_followed(
    tmp_path: Path, source: Path, reference: dict[str, tuple[str, int]]
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep me")
    stale = tmp_path / ".out.bel.bel-tmp"
    (stale / "source").mkdir(parents=True)
    (stale / "source" / "old.hdr.zst").write_text("stale")
    (stale / "manifest.json").symlink_to(precious / "file")
    (stale / "folder").symlink_to(precious, target_is_directory=True)
    assert run_cli(source, "-o", tmp_path / "out.bel").status == 0
    assert tree(tmp_path / "out.bel") == reference
    assert not stale.exists()
    assert (precious / "file").read_text() == "keep me"


@pytest.mark.parametrize("make", ["file", "link"])
def test_a_temporary_name_that_is_something_else_is_refused(tmp_path: Path, source: Path, make: str) -> None:
    precious, taken = tmp_path / "precious", tmp_path / ".out.bel.bel-tmp"
    precious.mkdir()
    (precious / "file").write_text("keep me")
    if make == "link":
        taken.symlink_to(precious, target_is_directory=True)
    else:
        taken.write_text("keep me")
    before = tree(tmp_path)
    assert_refused(run_cli(source, "-o", tmp_path / "out.bel"), 5, taken)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "files",
    [
        {"thesis.txt": "years of work"},
        {"manifest.json": '{"name": "a web application"}', "thesis.txt": "years of work"},
        {"other-dense.gguf": "a model of another kind", "thesis.txt": "years of work"},
    ],
    ids=["no manifest", "a foreign manifest.json", "a file called -dense.gguf"],
)
def test_force_never_deletes_a_folder_that_is_not_a_bundle(tmp_path: Path, source: Path, files: dict[str, str]) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    before = tree(tmp_path)
    assert_refused(run_cli(source, "-o", folder, "--force"), 2, folder, "not a bundle")
    assert tree(tmp_path) == before


def test_force_spares_a_folder_that_appears_during_the_run(tmp_path: Path, source: Path) -> None:
    model = open_model(source)
    folder = tmp_path / "out.bel"

    def someone_else(_phase: str, _done: int, _total: int) -> None:
        if not folder.exists():
            folder.mkdir()
            (folder / "thesis.txt").write_text("years of work")

    layout = plan_layout(model, "model", ple="auto", shard_bytes=2**40)
    with pytest.raises(UsageError):
        convert(model, layout, folder, force=True, check=True, progress=someone_else)
    assert (folder / "thesis.txt").read_text() == "years of work"


def test_an_output_that_appears_during_the_run_is_not_replaced(tmp_path: Path, source: Path) -> None:
    model, folder = open_model(source), tmp_path / "out.bel"
    layout = plan_layout(model, "model", ple="auto", shard_bytes=2**40)
    with pytest.raises(UsageError, match="exists already"):
        convert(model, layout, folder, force=False, check=True, progress=lambda *_: folder.mkdir(exist_ok=True))
    assert {p.name for p in tmp_path.iterdir()} == {"in", "out.bel"}
    assert list(folder.iterdir()) == []


def test_force_replaces_a_damaged_bundle(tmp_path: Path, source: Path, reference: dict[str, tuple[str, int]]) -> None:
    out = tmp_path / "out.bel"
    assert run_cli(source, "-o", out).status == 0
    (out / "manifest.json").write_text("{")
    assert_refused(run_cli(source, "-o", out), 2, out, "--force")
    assert run_cli(source, "-o", out, "--force").status == 0
    assert tree(out) == reference


def test_force_replaces_a_link_and_not_what_it_points_to(tmp_path: Path, source: Path) -> None:
    assert run_cli(source, "-o", tmp_path / "kept.bel").status == 0
    kept = tree(tmp_path / "kept.bel", times=True)
    (tmp_path / "out.bel").symlink_to(tmp_path / "kept.bel", target_is_directory=True)
    assert_refused(run_cli(source, "-o", tmp_path / "out.bel"), 2, "exists already")
    assert run_cli(source, "-o", tmp_path / "out.bel", "--force").status == 0
    assert not (tmp_path / "out.bel").is_symlink()
    assert tree(tmp_path / "kept.bel", times=True) == kept


def outputs_that_touch_an_input(folder: Path, source: Path) -> dict[str, Path]:
    (folder / "link-to-model").symlink_to(source)
    (folder / "link-to-folder").symlink_to(source.parent, target_is_directory=True)
    (folder / "outer").symlink_to(folder, target_is_directory=True)
    return {
        "the input": source,
        "another shard": source.with_name("model-00002-of-00002.gguf"),
        "the folder of the input": source.parent,
        "a link to the input": folder / "link-to-model",
        "a link to its folder": folder / "link-to-folder",
        "the input through a link": folder / "link-to-folder" / source.name,
        "its folder through a link": folder / "outer" / source.parent.name,
        "a folder further up": folder,
    }


@pytest.mark.parametrize(
    "which",
    [
        "the input",
        "another shard",
        "the folder of the input",
        "a link to the input",
        "a link to its folder",
        "the input through a link",
        "its folder through a link",
        "a folder further up",
    ],
)
@pytest.mark.parametrize("through_link", [False, True])
def test_an_output_that_is_or_contains_an_input(tmp_path: Path, which: str, through_link: bool) -> None:
    source = write_set(tmp_path / "work" / "in")
    output = outputs_that_touch_an_input(tmp_path / "work", source)[which]
    named = tmp_path / "work" / "link-to-folder" / source.name if through_link else source
    before = tree(tmp_path, times=True)
    assert_refused(run_cli(named, "-o", output, "--force"), 2, output, "input")
    assert tree(tmp_path, times=True) == before


def test_an_output_that_is_a_hard_link_of_the_input_costs_nothing(tmp_path: Path, source: Path) -> None:
    twin = tmp_path / "twin.gguf"
    os.link(source, twin)
    before = tree(source.parent, times=True)
    assert run_cli(source, "-o", twin, "--force").status in (0, 2)
    assert tree(source.parent, times=True) == before


# Sources that change


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 100)
        file.write(b"x")


@pytest.mark.parametrize("change", [_append, _truncate, _overwrite, os.utime], ids=["append", "truncate", "overwrite", "touch"])
def test_a_source_that_changes_while_it_is_read(tmp_path: Path, big: Path, change: Callable[[Path], None]) -> None:
    source = tmp_path / "in" / "big.gguf"
    source.parent.mkdir()
    shutil.copyfile(big, source)
    os.utime(source, (1, 1))
    model, changed = open_model(source), threading.Event()

    def meanwhile(phase: str, done: int, _total: int) -> None:
        if phase == "repack" and done > 16 * 2**20 and not changed.is_set():
            change(source)
            changed.set()

    layout = plan_layout(model, "big", ple="auto", shard_bytes=2**40)
    with pytest.raises(BadInputError, match=r"big\.gguf: the file (changed|became shorter) while it was read") as caught:
        convert(model, layout, tmp_path / "out.bel", force=False, check=True, progress=meanwhile)
    assert caught.value.exit_code == 3
    assert changed.is_set()
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("change", [_append, _truncate])
def test_a_source_that_changed_since_its_header_was_read(tmp_path: Path, source: Path, change: Callable[[Path], None]) -> None:
    model = open_model(source)
    change(source)
    layout = plan_layout(model, "model", ple="auto", shard_bytes=2**40)
    with pytest.raises(BadInputError, match="while it was read"):
        convert(model, layout, tmp_path / "out.bel", force=False, check=True, progress=lambda *_: None)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_another_model_under_the_same_name_since_its_header_was_read(tmp_path: Path) -> None:
    path = synth.moe(seed=1).write(tmp_path / "m.gguf")
    model = open_model(path)
    entries = [
        *synth.moe_entries()[:-1],
        synth.key("tokenizer.ggml.tokens", synth.ARRAY, (synth.STRING, [f"u{i}" for i in range(8)])),
    ]
    synth.moe(entries=entries, seed=2).write(path)
    assert path.stat().st_size == model.first.file_bytes
    layout = plan_layout(model, "m", ple="auto", shard_bytes=2**40)
    with pytest.raises(BadInputError, match="changed while it was read"):
        convert(model, layout, tmp_path / "out.bel", force=False, check=True, progress=lambda *_: None)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


# What durable means


def test_every_file_and_folder_is_flushed_before_the_final_name_appears(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, rename, flushed = os.fsync, os.rename, []

    def noted_fsync(fd: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def noted_rename(old: Path, new: Path) -> None:
        staged = {str(p) for p in Path(old).rglob("*")} | {str(old)}
        assert staged <= set(flushed), "a crash after the rename would leave empty files under the final name"
        flushed.clear()
        rename(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    assert run_cli(source, "-o", tmp_path / "out.bel").status == 0
    assert flushed == [str(tmp_path)], "the new name itself is flushed"


def test_restored_files_and_their_folders_are_flushed(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_cli(source, "-o", tmp_path / "m.bel").status == 0
    fsync, flushed = os.fsync, set()

    def noted_fsync(fd: int) -> None:
        flushed.add(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    assert run_cli("restore", tmp_path / "m.bel", "-o", tmp_path / "back").status == 0
    staged = {str(tmp_path / "back" / ".bel-restore.bel-tmp" / p.name) for p in source.parent.iterdir()}
    assert staged | {str(tmp_path / "back")} <= flushed
    assert str(tmp_path) in flushed, "a new folder's own name is lost in a crash unless its parent is flushed"


def test_a_descriptor_is_never_left_open(tmp_path: Path, source: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert run_cli(source, "-o", tmp_path / "out.bel").status == 0
    assert run_cli("verify", tmp_path / "out.bel", "--source", source).status == 0
    assert run_cli("verify", tmp_path / "out.bel", "--quick").status == 0
    assert run_cli("restore", tmp_path / "out.bel", "-o", tmp_path / "back").status == 0
    assert run_cli(source, "-o", tmp_path / "out.bel").status == 2
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_failing_hash_thread_ends_the_run(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that fails must not leave the others waiting for it."""

    class Failing:
        def update(self, _data: object) -> None:
            raise MemoryError

        def hexdigest(self) -> str:
            return ""

    monkeypatch.setattr("bel.repack.stream.hashlib", type("hashlib", (), {"sha256": Failing}))
    monkeypatch.setattr("bel.repack.stream.CHUNK_BYTES", 1024)  # so that the file is many of them
    monkeypatch.setattr(faults, "HANG_SECONDS", 3.0)
    before = tree(tmp_path)
    outcome = in_child(source, "-o", tmp_path / "out.bel")
    assert_refused(outcome, 5, "memory")
    assert tree(tmp_path) == before


def test_progress_says_where_it_is(tmp_path: Path, source: Path) -> None:
    """Each phase counts up to its total and never beyond; a run that is watched is the same as one that is not."""
    model, seen = open_model(source), []
    layout = plan_layout(model, "model", ple="auto", shard_bytes=2**40)
    convert(model, layout, tmp_path / "out.bel", force=False, check=True, progress=lambda *row: seen.append(row))
    assert {phase for phase, _, _ in seen} == {"repack", "verify"}
    assert all(0 < done <= total for _, done, total in seen)
    assert [done == total for phase, done, total in seen if phase == "repack"][-1]
    assert [done == total for phase, done, total in seen if phase == "verify"][-1]
    Progress("x").close()
