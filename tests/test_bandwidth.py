"""What `bel-profile bandwidth` measures, and how it describes the machine."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import synth
from bel.formats.errors import BadInputError, UsageError
from bel.formats.units import KIB, MIB
from bel.profiler.bandwidth import measure
from bel.profiler.bandwidth_target import Target, find_target, read_slice
from bel.profiler.machine import cpu_count, describe, file_system, load_warning, others_warning
from bel.runtime.llama_library import open_library
from measured import BLOCK, SMALL, bundle_of, random_file
from measured import disk as disk

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
