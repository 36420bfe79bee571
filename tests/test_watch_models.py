"""A file of a model that is written to while the model runs ends the run: never wrong text, a verdict or a trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import archs
import synth
from bel.formats.bundle import open_bundle
from bel.formats.errors import BadInputError, BelError, DamagedBundleError, MachineError
from bel.formats.gguf_model import open_model
from bel.formats.trace_calls import read_trace
from bel.profiler.record import record
from bel.runtime import context as context_module
from bel.runtime.bundle_model import SlotOptions, open_run
from bel.runtime.check import CheckOptions, CheckPrompt, check
from bel.runtime.context import Context, ContextOptions
from bel.runtime.engine import Engine, Model
from bel.runtime.file_watch import FileWatch, first_changed, watch_bundle, watch_gguf, watch_model
from bel.runtime.policies import parse_policy
from bel.runtime.pool_home import cpu_home
from bel.runtime.pool_model import open_pool
from bel.runtime.pool_options import PoolOptions
from bel.runtime.run_options import RunOptions
from bel.runtime.running import open_running
from recordings import EXAMPLE, record_request

SIZES = ContextOptions(64, 32, 32, 1)
FLOOR = 4
CHANGED = "changed while the model runs"


def zeros(path: Path) -> None:
    """As `dd conv=notrunc`: the same file, of the same size, with other bytes."""
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


def last_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


CHANGES: list[Callable[[Path], None]] = [zeros, last_bit, longer]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(EXAMPLE.read_bytes())
    return path


def repacked(source: Path, *options: str) -> Path:
    folder = source.with_suffix(".bel")
    command = [sys.executable, "-c", "from bel.repack.cli import main; main()", str(source), "-o", str(folder), *options]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def file_of(bundle: Path, what: str) -> Path:
    return next(bundle.glob(f"*{what}*"))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("what", ["dense.gguf", "experts.bin"])
@pytest.mark.parametrize("home", ["cache", "pool"])
def test_a_bundle(home: str, what: str, change: Callable[[Path], None], source: Path) -> None:
    """With every expert in a slot nothing is read from the experts file any more: it counts all the same."""
    bundle = repacked(source)
    engine, opened = Engine.open(), open_bundle(bundle)
    if home == "cache":
        run = open_run(engine, opened, SIZES, SlotOptions(parse_policy("lru"), slots=32))
    else:
        run = open_pool(engine, opened, SIZES, PoolOptions("upload", slots=32, is_native=False), cpu_home(engine))  # type: ignore[assignment]
    with run as running:
        running.context.decode([1, 2, 3])
        change(file_of(bundle, what))
        with pytest.raises(DamagedBundleError, match=CHANGED) as caught:
            running.context.decode([4])
        assert caught.value.path == str(file_of(bundle, what))
        assert running.context.n_past == 0


@pytest.mark.parametrize("change", CHANGES)
def test_a_gguf(change: Callable[[Path], None], source: Path) -> None:
    with Engine.open().load(source) as model, model.context(SIZES) as context:
        context.decode([1, 2, 3])
        change(source)
        with pytest.raises(BadInputError, match=CHANGED) as caught:
            context.decode([4])
        assert caught.value.path == str(source)


def split_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    class Split(synth.Gguf):
        def write(self, path: Path) -> Path:
            third = len(self.tensors) // 3
            files = synth.split(self, [third, third, len(self.tensors) - 2 * third])
            return next(iter([part.write(path.with_name(name)) for name, part in files.items()]))

    monkeypatch.setattr(archs, "Gguf", Split)
    return [header.path for header in open_model(archs.make_model("qwen3moe", folder / "model.gguf")).files]


@pytest.mark.parametrize("named", [0, 2])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_each_shard_of_a_split_set(number: int, named: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = split_model(tmp_path, monkeypatch)
    with Engine.open().load(shards[named]) as model, model.context(SIZES) as context:
        context.decode([1, 2, 3])
        last_bit(shards[number])
        with pytest.raises(BadInputError, match=CHANGED) as caught:
            context.decode([4])
        assert caught.value.path == str(shards[number])


def test_per_layer_embeddings_are_watched(tmp_path: Path) -> None:
    """A run of them is in test_exact; here, that a file of their own is not left out."""
    model = synth.moe(tensors=[*synth.moe_tensors(), synth.Tensor("per_layer_token_embd.weight", (32, 90))])
    bundle = open_bundle(repacked(model.write(tmp_path / "model.gguf"), "--ple", "split"))
    assert bundle.manifest.ple is not None
    with watch_bundle(bundle) as watch:
        last_bit(bundle.path(bundle.manifest.ple.name))
        with pytest.raises(DamagedBundleError, match=CHANGED):
            watch.check()


def test_a_change_while_it_is_loaded(source: Path) -> None:
    """Behind the scan of its headers, and before llama.cpp maps it."""
    engine = Engine.open()
    engine.on_loading = lambda: last_bit(source)
    try:
        with pytest.raises(BadInputError, match=CHANGED):
            engine.load(source)
    finally:
        engine.on_loading = None


def test_another_file_under_the_name_while_it_is_loaded(source: Path) -> None:
    """The headers that were looked at are not those that llama.cpp opened."""
    watch, model = watch_gguf(source)
    with watch:
        other = source.with_name("other")
        other.write_bytes(source.read_bytes())
        other.replace(source)
        watch.check()
        with pytest.raises(BadInputError, match=CHANGED):
            Engine.open().load_files([header.path for header in model.files], watch=watch)


def test_a_change_between_the_checksums_and_the_load(source: Path) -> None:
    """The watch of a command begins before anything is compared, and a run goes on with it."""
    bundle = open_bundle(repacked(source))
    with watch_bundle(bundle) as watch:
        last_bit(bundle.path(bundle.manifest.dense.name))
        options = SlotOptions(parse_policy("lru"), slots=FLOOR)
        with pytest.raises(DamagedBundleError, match=CHANGED), open_run(Engine.open(), bundle, SIZES, options, watch=watch):
            pass


def test_the_source_of_a_check(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = open_bundle(repacked(source))
    calls = 0

    def decode(context: Context, *arguments: object, **named: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            last_bit(source)
        real(context, *arguments, **named)  # type: ignore[arg-type]

    real = Context.decode
    monkeypatch.setattr(context_module.Context, "decode", decode)
    with pytest.raises(BadInputError, match=CHANGED):
        check(
            Engine.open(),
            bundle,
            open_model(source),
            [CheckPrompt("text", "def f(")],
            CheckOptions(n_predict=8, n_threads=1),
            lambda sizes, observer: open_run(
                Engine.open(), bundle, sizes, SlotOptions(parse_policy("lru"), slots=FLOOR), observer
            ),
        )
    assert calls == 3


_AT = """
import os, sys
from bel.runtime.context import Context
from bel.runtime.entry import main
real, calls = Context.decode, 0
def decode(*arguments, **named):
    global calls
    calls += 1
    if calls == {at}:
        with open({path!r}, "r+b") as file:
            {change}
    return real(*arguments, **named)
Context.decode = decode
main()
"""
_ZEROS, _CUT = "file.write(bytes(os.fstat(file.fileno()).st_size))", "file.truncate(8192)"


def run(path: Path, *arguments: object, at: int = 5, change: str = _ZEROS) -> subprocess.CompletedProcess[str]:
    """`bel-run`, and `change` done to a file in front of a decode."""
    code = _AT.format(at=at, path=str(path), change=change)
    command = [sys.executable, "-c", code, *map(str, arguments), "--threads", "1", "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def assert_told(done: subprocess.CompletedProcess[str], status: int, path: Path) -> None:
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"bel-run: error: {path}: the file was {CHANGED}"), done.stderr
    assert done.stderr.count("error") == 1


@pytest.mark.parametrize(
    "mode", [["-p", "def f(", "-n", 20], ["--bench", "--prompt-tokens", 4, "-n", 8]], ids=["text", "bench"]
)
@pytest.mark.parametrize("is_stock", [False, True], ids=["bundle", "stock"])
def test_a_command_ends_without_an_answer(mode: list[object], is_stock: bool, source: Path) -> None:
    if is_stock:
        assert_told(run(source, source, "--stock", *mode), 3, source)
    else:
        bundle = repacked(source)
        assert_told(run(file_of(bundle, "dense"), bundle, "--slots", FLOOR, *mode), 4, file_of(bundle, "dense"))


@pytest.mark.parametrize("at", [3, 12], ids=["stock", "bundle"])
def test_a_check_ends_without_a_verdict(at: int, source: Path) -> None:
    """Stock's run is nine decodes, then the bundle's begins."""
    bundle = repacked(source)
    path = source if at < 10 else file_of(bundle, "dense")
    done = run(path, bundle, "--slots", FLOOR, "--check-against", source, "-p", "def f(", "-n", 8, at=at)
    assert_told(done, 3 if at < 10 else 4, path)


@pytest.mark.parametrize("is_stock", [False, True], ids=["bundle", "stock"])
def test_a_file_that_is_cut_short_is_named_though_the_system_kills(is_stock: bool, source: Path) -> None:
    """A page of a mapped file that is no more there is SIGBUS."""
    if is_stock:
        done, path, status = run(source, source, "--stock", "-p", "def f(", "-n", 20, change=_CUT), source, 3
    else:
        bundle = repacked(source)
        path, status = file_of(bundle, "dense"), 4
        done = run(path, bundle, "--slots", FLOOR, "-p", "def f(", "-n", 20, change=_CUT)
    assert_told(done, status, path)
    assert "llama.cpp crashed (SIGBUS)" in done.stderr


def test_an_unchanged_model_is_none_of_this(source: Path) -> None:
    """The same program, and a write to a file that is not the model's."""
    other = source.with_name("other")
    other.write_bytes(bytes(10))
    done = run(other, source, "--stock", "-p", "def f(", "-n", 20)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["tokens"]) == 20


_CHANGING_WORKER = """
import os
from bel.profiler import record_worker
from bel.runtime.context import Context
real, calls = Context.decode, 0
def decode(*arguments, **named):
    global calls
    calls += 1
    if calls == 100:
        with open({path!r}, "r+b") as file:
            {change}
    return real(*arguments, **named)
Context.decode = decode
record_worker.main()
"""


@pytest.mark.parametrize("change", [_ZEROS, _CUT], ids=["zeros", "cut"])
@pytest.mark.parametrize("is_bundle", [True, False], ids=["bundle", "gguf"])
def test_a_recording_never_counts_as_complete(is_bundle: bool, change: str, source: Path, tmp_path: Path) -> None:
    model = repacked(source) if is_bundle else source
    path = file_of(model, "dense") if is_bundle else source
    slots = FLOOR if is_bundle else None
    request = replace(record_request(tmp_path, n_predict=300), model=model, slots=slots, ignore_end=True)
    kind: type[BelError] = DamagedBundleError if is_bundle else BadInputError
    with pytest.raises(kind, match=CHANGED) as caught:
        record(request, worker=(sys.executable, "-c", _CHANGING_WORKER.format(path=str(path), change=change)))
    assert caught.value.path == str(path)
    assert ("SIGBUS" in str(caught.value)) == (change == _CUT)
    assert not request.trace.exists() or read_trace(request.trace).notes


def test_a_recording_of_a_model_that_changes_at_once_is_none(source: Path, tmp_path: Path) -> None:
    request = replace(record_request(tmp_path), model=source)
    worker = _CHANGING_WORKER.format(path=str(source), change=_ZEROS).replace("calls == 100", "calls == 1")
    with pytest.raises(BadInputError, match=CHANGED):
        record(request, worker=(sys.executable, "-c", worker))
    assert not request.trace.exists()


def test_what_changed_is_known_by_its_name_and_what_has_gone_is_not(tmp_path: Path) -> None:
    kept, gone, written = (tmp_path / name for name in ("kept", "gone", "written"))
    for path in (kept, gone, written):
        path.write_bytes(b"old")
    with FileWatch([kept, gone, written]) as watch:
        assert first_changed(watch.states) is None
        gone.unlink()
        gone.write_bytes(b"another")
        assert first_changed(watch.states) is None
        longer(written)
        assert first_changed(watch.states) == str(written)
        assert watch.changed() == str(written)


def test_a_watch_holds_no_file_behind_its_end(source: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    engine, before = Engine.open(), descriptors()
    model: Model
    with engine.load(source) as model:
        assert descriptors() > before
        assert [Path(state.path) for state in model.watch.states] == [source]
    watch_model(source).close()
    with pytest.raises(DamagedBundleError, match="missing"):
        bundle = repacked(source)
        file_of(bundle, "experts.bin").unlink()
        watch_model(bundle)
    assert descriptors() == before


def test_whatever_goes_wrong_with_a_changed_model_is_told_as_that(source: Path) -> None:
    """Weights of zeros may show as something else first: logits that are no numbers, an expert that cannot exist."""
    options = RunOptions(repacked(source), slots=FLOOR, n_threads=1)
    with pytest.raises(MachineError, match="something else"), open_running(options):
        raise MachineError("something else")
    with pytest.raises(DamagedBundleError, match=CHANGED), open_running(options):
        last_bit(file_of(options.path, "dense"))
        raise MachineError("something else")
