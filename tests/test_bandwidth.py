"""`bel-profile bandwidth`: figures that are the disk's, memory's and the CPU's, or a refusal."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import itertools
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import faults
import synth
from bel.formats.console import run_command
from bel.formats.costs import costs_json, load_costs
from bel.formats.errors import BadInputError, MachineError, UsageError
from bel.formats.gguf_model import open_model
from bel.formats.units import KIB, MIB
from bel.profiler import bandwidth
from bel.profiler.bandwidth import Effort, measure
from bel.profiler.bandwidth_cli import NAME, bandwidth_command
from bel.profiler.bandwidth_target import Experts, Slices, Target, find_target, read_slice
from bel.profiler.disk_speed import MAX_BLOCKS, check_counted, disk_read_bytes, measure_disk, random_blocks
from bel.profiler.expert_time import ExpertTime, expert_time, judge
from bel.profiler.machine import cpu_count, describe, file_system, load_warning, others_warning
from bel.profiler.memory_speed import MIN_RANGE_BYTES, copy_bytes_per_s, uncached_bytes
from bel.profiler.scratch_file import CHUNK_BYTES, scratch_file
from bel.repack.convert import convert
from bel.repack.layout import plan_layout
from bel.runtime.expert_product import ExpertProducts, Projection
from bel.runtime.llama_library import open_library

BLOCK = 128 * KIB
SMALL = Effort(seconds=0.02, file_bytes=16 * MIB, least_bytes=8 * MIB, write_seconds=1.0)
Q8_0 = gguf.GGMLQuantizationType.Q8_0
SCRATCH = ".bel-bandwidth.bel-tmp"


def has_direct_reads(folder: Path) -> bool:
    """Whether a plain direct read works here and is counted as one of a disk."""
    path = folder / "probe"
    path.write_bytes(os.urandom(64 * KIB))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            os.fsync(fd)
            before = disk_read_bytes()
            os.preadv(fd, [mmap.mmap(-1, 64 * KIB)], 0)
            after = disk_read_bytes()
        finally:
            os.close(fd)
    except OSError:
        return False
    finally:
        path.unlink()
    return before is not None and after is not None and after - before >= 64 * KIB


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder on a real disk."""
    if not has_direct_reads(tmp_path):
        pytest.skip("the folder for temporary files is not on a disk with direct reads that the kernel counts")
    return tmp_path


def random_file(path: Path, size_bytes: int) -> Path:
    with path.open("wb") as file:
        file.write(np.random.default_rng(0).bytes(size_bytes))
        os.fsync(file.fileno())
    return path


def bundle_of(path: Path, bundle: Path) -> Path:
    source = open_model(path)
    layout = plan_layout(source, "m", ple="keep", shard_bytes=2**40)
    convert(source, layout, bundle, force=False, check=True, progress=lambda *_: None)
    return bundle


def assert_alike(plain: Callable[[], float], ours: Callable[[], float]) -> None:
    """The best rates of two ways to do one thing are within a factor of 3.

    They are taken alternately, at least 5 times and up to 40: other work on the machine only ever lowers a rate, so the best
    ones meet as soon as each had a quiet moment, and never where a rate is counted wrongly.
    """
    rates: list[tuple[float, float]] = []
    while len(rates) < 40:
        rates.append((plain(), ours()))
        ratio = max(r for _, r in rates) / max(r for r, _ in rates)
        if len(rates) >= 5 and 1 / 3 < ratio < 3:
            return
    pytest.fail(f"ours / plain is {ratio:.2f}")


# The disk


def plain_bytes_per_s(path: Path, seconds: float) -> float:
    """One direct read after the other with nothing of ours in between."""
    fd, buffer = os.open(path, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, BLOCK)
    try:
        order = np.random.default_rng(1).permutation(os.fstat(fd).st_size // BLOCK)
        begin, done = time.perf_counter(), 0
        for block in itertools.cycle(order):
            done += os.preadv(fd, [buffer], int(block) * BLOCK)
            if time.perf_counter() - begin > seconds:
                return done / (time.perf_counter() - begin)
    finally:
        os.close(fd)
    raise AssertionError("the order has no end")


def test_one_read_at_once_is_as_fast_as_a_plain_loop(disk: Path) -> None:
    path = random_file(disk / "data", 32 * MIB)
    assert_alike(
        lambda: plain_bytes_per_s(path, 0.05),
        lambda: measure_disk([path], BLOCK, shown=path, depths=(1,), seconds=0.05).best_bytes_per_s,
    )


def test_all_depths_are_measured_and_counted(disk: Path) -> None:
    paths = [random_file(disk / name, 5 * MIB) for name in ("a", "b")]
    speed = measure_disk(paths, BLOCK, shown=disk, seconds=0.02)
    assert [depth for depth, _ in speed.depths] == [1, 2, 4, 8, 16, 32]
    assert speed.best_bytes_per_s == max(rate for _, rate in speed.depths) > 0
    assert speed.counted_share is not None and speed.counted_share >= 0.95
    assert speed.reader != "buffered"


def test_a_depth_that_would_read_a_block_twice_at_once_is_left_out(disk: Path) -> None:
    path = random_file(disk / "data", 5 * BLOCK)
    assert [depth for depth, _ in measure_disk([path], BLOCK, shown=path, seconds=0).depths] == [1, 2]
    with pytest.raises(MachineError, match="no whole block"):
        measure_disk([path], 8 * BLOCK, shown=path, seconds=0)


def test_a_file_of_holes_is_not_a_disk(disk: Path) -> None:
    path = disk / "holes"
    with path.open("wb") as file:
        file.truncate(16 * MIB)
    with pytest.raises(MachineError, match=r"did not come from a disk.*found 0.0 %") as caught:
        measure_disk([path], BLOCK, shown=disk, depths=(1, 4), seconds=0.02)
    assert caught.value.path == str(disk)


def test_reads_of_the_page_cache_are_told_by_the_kernels_count(disk: Path) -> None:
    path = random_file(disk / "data", 4 * MIB)
    path.read_bytes()
    before = disk_read_bytes()
    asked = len(path.read_bytes())
    with pytest.raises(MachineError, match="page cache") as caught:
        check_counted(asked, before, disk_read_bytes(), path)
    assert caught.value.exit_code == 5
    assert check_counted(asked, 0, asked, path) == 1.0
    assert check_counted(asked, None, None, path) is None


def test_a_file_system_without_direct_reads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(MachineError, match=r"no direct reads.*page cache, not the disk") as caught:
        measure(find_target(tmp_path, BLOCK), n_threads=1, effort=SMALL)
    assert (caught.value.path, os.listdir(tmp_path)) == (str(tmp_path), [])


def test_a_very_long_file_is_sampled_in_all_its_parts() -> None:
    """Two files of a tebibyte, which are holes and are not read."""
    with tempfile.TemporaryFile() as one, tempfile.TemporaryFile() as other:
        paths = [Path(f"/proc/self/fd/{file.fileno()}") for file in (one, other)]
        for file in (one, other):
            file.truncate(2**40)
        blocks = random_blocks(paths, 4096, 0)
    assert len(blocks) == len(set(blocks)) == MAX_BLOCKS
    for file in (0, 1):
        offsets = np.array([at for number, at in blocks if number == file])
        assert not (offsets % 4096).any() and 0 <= offsets.min() < 2**34 and 2**40 - 2**34 < offsets.max() < 2**40
        assert 0.45 < len(offsets) / MAX_BLOCKS < 0.55


# The file that is made


def scratch(folder: Path, **changes: Any) -> Any:
    settings = {"size_bytes": 2 * CHUNK_BYTES, "least_bytes": CHUNK_BYTES, "seconds": 60.0, "check": lambda _: None}
    return scratch_file(folder, **{**settings, **changes})


def test_the_scratch_file_is_random_and_goes(tmp_path: Path) -> None:
    with scratch(tmp_path) as path:
        assert path.stat().st_size == 2 * CHUNK_BYTES
        data = path.read_bytes()
        assert data[:CHUNK_BYTES] != data[CHUNK_BYTES:]
        assert abs(np.bincount(np.frombuffer(data, np.uint8)[:MIB]) / MIB * 256 - 1).max() < 0.2
    assert os.listdir(tmp_path) == []


def test_the_scratch_file_stops_at_its_time_but_not_below_its_least_size(tmp_path: Path) -> None:
    with scratch(tmp_path, size_bytes=64 * CHUNK_BYTES, seconds=0.0) as path:
        assert path.stat().st_size == CHUNK_BYTES


@pytest.mark.parametrize("error", [KeyboardInterrupt, MachineError("no")])
def test_the_scratch_file_goes_after_an_error_in_the_check_and_in_use(tmp_path: Path, error: BaseException) -> None:
    def fail(_path: Path) -> None:
        raise error

    with pytest.raises((KeyboardInterrupt, MachineError)), scratch(tmp_path, check=fail):
        pytest.fail("the check was not asked")
    with pytest.raises((KeyboardInterrupt, MachineError)), scratch(tmp_path) as path:
        fail(path)
    assert os.listdir(tmp_path) == []


def test_a_scratch_file_larger_than_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="too little free space"), scratch(tmp_path, size_bytes=2**60, least_bytes=2**60):
        pytest.fail("there is no such disk")
    assert os.listdir(tmp_path) == []


# Memory and CPU


def test_a_copy_is_as_fast_as_a_plain_one() -> None:
    size = 32 * MIB
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)

    def plain() -> float:
        begin = time.perf_counter()
        np.copyto(target, source)
        return size / (time.perf_counter() - begin)

    assert_alike(plain, lambda: copy_bytes_per_s(2 * size, 1, passes=3))


@given(cache=st.integers(1, 2**32), free=st.integers(0, 2**42))
def test_what_is_walked_over_is_more_than_the_cache_and_less_than_memory(cache: int, free: int) -> None:
    if free < 4 * MIN_RANGE_BYTES:
        with pytest.raises(MachineError, match="too little free memory"):
            uncached_bytes(cache, free)
        return
    size = uncached_bytes(cache, free)
    assert MIN_RANGE_BYTES <= size <= free // 4
    assert size >= 2 * cache or size == free // 4


def quantised(rows: int, columns: int, kind: gguf.GGMLQuantizationType, seed: int) -> Any:
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    return np.ascontiguousarray(gguf.quants.quantize(values, kind))


@pytest.mark.parametrize("kind", [Q8_0, gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.F16])
def test_products_are_those_of_the_chosen_experts(kind: gguf.GGMLQuantizationType) -> None:
    """Two projections in blobs with a stride and gaps, three experts in two stacks."""
    shapes = [(48, 64), (64, 96)]
    weights = [[[quantised(*s, kind, 100 * a + 10 * e + p) for p, s in enumerate(shapes)] for e in range(3)] for a in range(2)]
    sizes = [w.nbytes for w in weights[0][0]]
    places = [64, 64 + sizes[0] + 128]
    blobs = np.full((2, 3, 32 * KIB), 255, np.uint8)
    for a, e, p in itertools.product(range(2), range(3), range(2)):
        blobs[a, e, places[p] : places[p] + sizes[p]] = weights[a][e][p].view(np.uint8).ravel()
    parts = [Projection(int(kind), columns, rows, at) for (rows, columns), at in zip(shapes, places, strict=True)]
    assert [part.size_bytes for part in parts] == sizes
    with ExpertProducts(open_library(), blobs, parts, steps=2, n_threads=1) as products:
        for stack, chosen in [(1, [2, 0]), (0, [1, 1])]:
            products.compute(stack, chosen)
            for step, p in itertools.product(range(2), range(2)):
                exact = gguf.quants.dequantize(weights[stack][chosen[step]][p], kind) @ products.inputs[p]
                error = np.abs(products.outputs[step][p] - exact).max()
                assert error < 0.02 * np.abs(exact).max()  # the kernel rounds the input to 8 bits
        for wrong in [(2, [0, 0]), (0, [0, 3]), (0, [0]), (0, [-1, 0])]:
            with pytest.raises(ValueError, match="each of the blobs"):
                products.compute(*wrong)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (Projection(24, 64, 4, 0), "no CPU kernel for I8"),
        (Projection(153, 64, 4, 0), "type 153 has no known size"),
        (Projection(8, 33, 4, 0), "not whole Q8_0 blocks"),
    ],
)
def test_a_type_without_kernels_is_refused_and_not_jumped_into(part: Projection, said: str) -> None:
    with pytest.raises(MachineError, match=said):
        ExpertProducts(open_library(), np.zeros((1, 2, 4096), np.uint8), [part], steps=1, n_threads=1)


def test_blobs_of_another_form_are_a_bug_of_the_caller() -> None:
    part = Projection(8, 64, 60, 0)
    with pytest.raises(ValueError, match="behind its blob"):
        ExpertProducts(open_library(), np.zeros((1, 1, 4000), np.uint8), [part], steps=1, n_threads=1)
    with pytest.raises(ValueError, match="contiguous"):
        ExpertProducts(open_library(), np.zeros((1, 8192), np.uint8), [part], steps=1, n_threads=1)


def experts_in(path: Path, rows: int) -> Experts:
    """A layer of 16 experts with one projection of rows x 512."""
    weights = np.stack([quantised(rows, 512, Q8_0, e).view(np.uint8).ravel() for e in range(16)])
    path.write_bytes(weights.tobytes())
    size = weights.shape[1]
    return Experts(0, 16, (Slices("up", int(Q8_0), 512, rows, path, 0, size, size),), 4, 4 * size)


def test_a_larger_expert_takes_longer(tmp_path: Path) -> None:
    def seconds(rows: int) -> float:
        experts = experts_in(tmp_path / f"{rows}", rows)
        return expert_time(open_library(), experts, range_bytes=32 * MIB, n_threads=1, seconds=0.1).seconds

    assert seconds(2048) / seconds(128) > 4  # 16 on an idle machine; a busy one interrupts the longer more


def test_threads_that_wait_for_each_other_are_not_the_time_of_an_expert(tmp_path: Path) -> None:
    """Two threads on one busy CPU: 0.0087 ms, then 20.3 ms, then 0.0094 ms were measured one after the other."""
    assert judge([20e-3, 9e-6, 20.3e-3], 10e-6, 2).seconds == 9e-6
    assert "0.02" in judge([20e-3, 9e-6, 20.3e-3], 10e-6, 2).note
    always = judge([20e-3, 20.3e-3], 10e-6, 2)
    assert (always.seconds, always.n_threads) == (10e-6, 1) and "with 2 threads" in always.note
    assert judge([5e-6, 6e-6], 10e-6, 2) == ExpertTime(5e-6, 2, "")
    experts = experts_in(tmp_path / "x", 128)
    one, many = (
        expert_time(open_library(), experts, range_bytes=8 * MIB, n_threads=n, seconds=0.1).seconds
        for n in (1, 4 * cpu_count())
    )
    assert many / one < 50


def test_weights_that_do_not_fit_their_dimensions_are_not_multiplied(tmp_path: Path) -> None:
    experts = experts_in(tmp_path / "weights", 128)
    lie = dataclasses.replace(experts, slices=(dataclasses.replace(experts.slices[0], rows=129),))
    with pytest.raises(BadInputError, match="do not fit their dimensions"):
        expert_time(open_library(), lie, range_bytes=MIB, n_threads=1, seconds=0.0)


def test_a_slice_behind_the_end_of_its_file_is_named(tmp_path: Path) -> None:
    experts = experts_in(tmp_path / "weights", 128)
    os.truncate(tmp_path / "weights", 16 * experts.slices[0].size_bytes - 1)
    assert len(read_slice(experts.slices[0], 14)) == experts.slices[0].size_bytes
    with pytest.raises(BadInputError, match=r"weights: the file ends inside an expert \(at byte"):
        read_slice(experts.slices[0], 15)


# The machine


def test_a_load_of_half_the_cpus_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = cpu_count()
    monkeypatch.setattr(os, "getloadavg", lambda: (0.49 * cpus, 99.0, 99.0))
    assert load_warning() is None
    monkeypatch.setattr(os, "getloadavg", lambda: (0.51 * cpus, 0.0, 0.0))
    assert "the machine is busy" in str(load_warning())
    assert others_warning(0.09 * (os.cpu_count() or 1)) is None
    assert "other programs kept" in str(others_warning(0.11 * (os.cpu_count() or 1)))


def test_file_systems_are_told_by_their_mount_points(tmp_path: Path) -> None:
    assert (file_system(Path("/proc/self")), file_system(Path("/sys/kernel"))) == ("proc", "sysfs")
    shown = subprocess.run(["findmnt", "-n", "-o", "FSTYPE", "-T", tmp_path], capture_output=True, text=True, check=True)
    assert file_system(tmp_path) == shown.stdout.strip()


def test_the_machine_is_described_without_its_name_and_paths(tmp_path: Path) -> None:
    words = describe(tmp_path, "threads", 2)
    assert file_system(tmp_path) in words and os.uname().release in words
    assert socket.gethostname() not in words.split() and str(tmp_path) not in words


# What is measured


def test_a_bundle_and_its_source_have_the_same_experts(tmp_path: Path) -> None:
    bundle = bundle_of(synth.moe().write(tmp_path / "m.gguf"), tmp_path / "m.bel")
    ours, source = find_target(bundle, None), find_target(tmp_path / "m.gguf", None)
    assert ours.experts is not None and source.experts is not None
    assert (ours.experts.layer, ours.experts.n_expert, ours.experts.experts_per_token) == (0, 4, 4)
    for one, other in zip(ours.experts.slices, source.experts.slices, strict=True):
        assert (one.role, one.type_id, one.columns, one.rows) == (other.role, other.type_id, other.columns, other.rows)
        assert [read_slice(one, e) for e in range(4)] == [read_slice(other, e) for e in range(4)]
    assert len({read_slice(s, e) for s in ours.experts.slices for e in range(4)}) == 12
    assert source.experts.bytes_per_token == 2 * 2 * sum(s.size_bytes for s in source.experts.slices)
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert ours.block_bytes == manifest["layers"]["0"]["stride"]
    assert ours.experts.bytes_per_token == 2 * 2 * ours.block_bytes
    assert ours.files == (bundle / "m-experts.bin",)
    assert find_target(bundle, 8192).block_bytes == 8192


def test_folders_files_and_nothing(tmp_path: Path) -> None:
    target = find_target(tmp_path, None)
    assert (target.files, target.block_bytes, target.experts) == ((), 2592 * KIB, None)
    (tmp_path / "costs.json").write_text("{}")
    with pytest.raises(BadInputError, match=r"costs.json: this file is no GGUF; expected a bundle, a GGUF or a folder"):
        find_target(tmp_path / "costs.json", 4096)
    for wrong in (0, 4095, 5000, 2**30 + 4096):
        with pytest.raises(UsageError, match="multiple of 4096"):
            find_target(tmp_path, wrong)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInputError, match="neither a folder nor a file"):
        find_target(tmp_path / "pipe", None)


def test_a_large_file_is_read_itself_and_a_small_one_is_not(disk: Path) -> None:
    path = random_file(disk / "data", 10 * MIB)
    target = Target(path, disk, (path,), BLOCK, None)
    big = measure(target, n_threads=1, effort=SMALL)
    assert not [note for note in big.notes if "a larger file" in note]
    os.truncate(path, 4 * MIB)
    small = measure(target, n_threads=1, effort=SMALL)
    assert [note for note in small.notes if "has 4.00 MiB only" in note]
    assert [name.name for name in disk.iterdir()] == ["data"]
    assert big.costs.cpu_expert_seconds is small.costs.cpu_expert_seconds is None
    assert [note for note in big.notes if "no model was named" in note]


@pytest.fixture
def no_llama(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The packages that bring llama.cpp are not installed."""
    real = importlib.util.find_spec
    hidden = ("xllamacpp", "llama_cpp")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in hidden else real(name, *rest))
    open_library.cache_clear()
    yield
    open_library.cache_clear()


@pytest.mark.usefixtures("no_llama")
def test_without_llama_cpp_the_other_figures_stand(disk: Path) -> None:
    bundle = bundle_of(synth.moe().write(disk / "m.gguf"), disk / "m.bel")
    measured = measure(find_target(bundle, None), n_threads=1, effort=SMALL)
    assert measured.costs.cpu_expert_seconds is None
    assert [n for n in measured.notes if "expert on the CPU was not measured" in n and "bel-toolkit[llama]" in n]
    assert measured.costs.memory_bytes_per_s > 0


# The command


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str], disk: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """The command with short measurements, in an empty folder."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = run_command(bandwidth_command, NAME, [str(a) for a in arguments])
        return status, *capsys.readouterr()

    monkeypatch.chdir(disk)
    monkeypatch.setattr(bandwidth, "Effort", lambda: SMALL)
    return run


def test_a_bundle_gives_a_file_a_table_and_an_object(ran: Callable[..., tuple[int, str, str]], example: Path) -> None:
    bundle = bundle_of(example, Path("tiny.bel"))
    status, out, err = ran(bundle, "--threads", 1, "--json")
    assert status == 0, err
    costs = load_costs(Path("costs.json"))
    assert json.loads(out) == costs_json(costs) == json.loads(Path("costs.json").read_text())
    assert costs.cpu_expert_seconds is not None and costs.h2d_bytes_per_s is costs.layer_seconds is None
    assert costs.block_bytes == find_target(bundle, None).block_bytes
    assert "1 thread" in costs.machine
    status, out, err = ran(bundle, "--threads", 1)
    assert status == 0, err
    assert all(words in out for words in ("wrote costs.json", "disk, 1 at once", "memory copy", "on the CPU", "all from disk"))
    assert sorted(os.listdir()) == ["costs.json", "tiny.bel"]


def test_an_output_of_another_kind_needs_force(ran: Callable[..., tuple[int, str, str]]) -> None:
    Path("costs.json").write_text("my notes")
    status, _, err = ran(".", "--block", "128k")
    assert (status, "--force" in err, Path("costs.json").read_text()) == (2, True, "my notes")
    assert ran(".", "--block", "128k", "--force", "--threads", 1)[0] == 0
    assert load_costs(Path("costs.json")).block_bytes == BLOCK
    assert ran("costs.json", "--force")[0] == 2  # it is the input too


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["nowhere"], 3), ([".", "--block", "5000"], 2), ([".", "--block", "big"], 2), ([".", "-o", "no/costs.json"], 2), ([], 2)],
)
def test_what_cannot_be_done_is_said_and_nothing_is_left(
    ran: Callable[..., tuple[int, str, str]], arguments: list[str], expected: int
) -> None:
    status, out, err = ran(*arguments)
    assert (status, out, os.listdir()) == (expected, "", [])
    assert err and "Traceback" not in err


def test_memory_is_refused_as_a_disk(ran: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """On tmpfs, which takes O_DIRECT since Linux 6.6 and refuses it before."""
    shared = Path("/dev/shm")
    if not shared.is_dir() or file_system(shared) != "tmpfs" or not os.access(shared, os.W_OK):
        pytest.skip("there is no tmpfs to write to")
    folder = shared / f"bel-test-{os.getpid()}"
    folder.mkdir()
    try:
        status, out, err = ran(folder, "--block", "128k")
        assert (status, out, os.listdir(folder), os.listdir(tmp_path)) == (5, "", [], [])
        assert f"error: {folder}: " in err and ("page cache" in err)
    finally:
        folder.rmdir()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(disk: Path, number: signal.Signals) -> None:
    code = (
        "import sys; from bel.formats.console import run_command; from bel.profiler.bandwidth_cli import bandwidth_command;"
        "sys.exit(run_command(bandwidth_command, 'bel-profile', ['.', '--block', '128k']))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], cwd=disk, stderr=subprocess.PIPE, text=True)
    assert faults.wait_until((disk / SCRATCH / "random.bin").exists, child)
    child.send_signal(number)
    _, err = child.communicate(timeout=faults.HANG_SECONDS)
    assert (child.returncode, os.listdir(disk)) == (130, []), err
    assert "Traceback" not in err
