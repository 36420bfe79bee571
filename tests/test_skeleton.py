"""The file that stands for the experts while llama.cpp loads: it declares them, holds nothing, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import archs
from bel.formats.bundle import Bundle, open_bundle
from bel.formats.errors import MachineError
from bel.formats.gguf_header import scan_header
from bel.formats.gguf_regions import tensor_regions
from bel.formats.manifest import EXPERTS
from bel.runtime import skeleton as skeleton_module
from bel.runtime.skeleton import disk_folder, make_skeleton
from exactness import repack

MIB = 1 << 20


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A model whose experts (48 MiB) are more than ten times the rest."""
    folder = tmp_path_factory.mktemp("skeleton")
    source = archs.make_model("qwen3moe", folder / "m.gguf", quant="f16", n_embd=256, n_ff_exp=512, n_expert=32, n_layer=2)
    made = open_bundle(repack(source, folder / "m.bel"))
    assert sum(x.size_bytes for x in made.manifest.layers) > 10 * made.manifest.dense.size_bytes
    return made


def test_it_declares_the_experts_and_takes_no_disk(bundle: Bundle) -> None:
    """As a file of a split set, as large as they are, with holes in their place; cut to nothing on demand."""
    expected = [(t.name, t.type_id, t.ne, t.size_bytes) for t in bundle.manifest.tensors if t.dest == EXPERTS]
    with make_skeleton(bundle.manifest, 1) as skeleton:
        header = scan_header(skeleton.path)
        found = [
            (t.name, t.type_id, t.ne, region.size_bytes)
            for t, region in zip(header.tensors, tensor_regions(header, need_data=True), strict=True)
        ]
        assert found == expected
        assert header.integer("split.no") == 1
        state = os.fstat(skeleton.fd)
        assert state.st_size > sum(row[3] for row in expected)
        assert state.st_blocks * 512 < 64 << 10
        skeleton.empty()
        assert os.fstat(skeleton.fd).st_size == 0
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(skeleton.fd)


# A process of its own: memory that others gave back would hide what a load takes.  "keep" leaves the file as it is.
_LOAD = """
import sys
from pathlib import Path
from bel.formats.bundle import open_bundle
from bel.formats.process import peak_rss_bytes, rss_bytes
from bel.runtime import skeleton
from bel.runtime.bundle_model import SlotOptions, open_run
from bel.runtime.context import ContextOptions
from bel.runtime.engine import Engine
from bel.runtime.policies import parse_policy
if sys.argv[2] == "keep":
    skeleton.Skeleton.empty = lambda self: None
engine, bundle = Engine.open(), open_bundle(Path(sys.argv[1]))
before = rss_bytes()
with open_run(engine, bundle, ContextOptions(32, 8, 8, 1), SlotOptions(parse_policy("lru"), slots=2)) as run:
    run.context.decode([1, 2, 3])
    print(peak_rss_bytes() - before, run.memory.total - run.memory.process)
"""


def grown_bytes(bundle: Bundle, mode: str) -> tuple[int, int]:
    """How much memory a load and a decode took at most, and how much the sum says."""
    done = subprocess.run([sys.executable, "-c", _LOAD, str(bundle.folder), mode], capture_output=True, text=True, check=True)
    grown, promised = map(int, done.stdout.split())
    return grown, promised


def test_a_load_takes_no_memory_for_the_experts(bundle: Bundle) -> None:
    """Without cutting the file, the mapping would fill each hole with a page of zeros: the test can tell."""
    experts = sum(x.size_bytes for x in bundle.manifest.layers)
    grown, promised = grown_bytes(bundle, "cut")
    assert grown < promised
    filled, _ = grown_bytes(bundle, "keep")
    assert filled > grown + 0.9 * experts


_WAIT = """
import sys, time
from pathlib import Path
from bel.formats.bundle import open_bundle
from bel.runtime.skeleton import make_skeleton
with make_skeleton(open_bundle(Path(sys.argv[1])).manifest, 1) as skeleton:
    print(skeleton.path.stat().st_size, skeleton.path.resolve(), flush=True)
    time.sleep(60)
"""


def test_nothing_is_left_on_disk_however_the_process_ends(bundle: Bundle, tmp_path: Path) -> None:
    """It has no name from the beginning: killed in the middle, there is nothing to clean up."""
    if skeleton_module._file_system_types().get(tmp_path.stat().st_dev) in skeleton_module._MEMORY_FILE_SYSTEMS:
        pytest.skip("temporary folders of tests are in memory here")
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", _WAIT, str(bundle.folder)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        size, _, place = process.stdout.readline().partition(" ")
        assert int(size) > 40 * MIB
        assert place.startswith(str(tmp_path.resolve())), "TMPDIR is where it is"
        assert list(tmp_path.iterdir()) == []
        process.send_signal(signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_memory_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the holes would be filled with memory while llama.cpp loads."""
    types = skeleton_module._file_system_types()
    in_memory = Path("/dev/shm")
    if not in_memory.is_dir() or types.get(in_memory.stat().st_dev) != "tmpfs" or not os.access(in_memory, os.W_OK):
        pytest.skip("no tmpfs that may be written to")
    monkeypatch.setenv("TMPDIR", str(in_memory))
    chosen = disk_folder()
    assert chosen != in_memory
    assert types.get(chosen.stat().st_dev) not in ("tmpfs", "ramfs")


def test_a_folder_on_a_disk_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TMPDIR before all others, if it is a folder and may be written to."""
    monkeypatch.setattr(skeleton_module, "_MEMORY_FILE_SYSTEMS", ())
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert disk_folder() == tmp_path
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    assert disk_folder() != tmp_path / "missing"


def test_a_machine_without_a_disk_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(skeleton_module, "_MEMORY_FILE_SYSTEMS", tuple(skeleton_module._file_system_types().values()))
    with pytest.raises(MachineError, match=r"no folder for temporary files is on a disk: tried .*Set TMPDIR") as caught:
        disk_folder()
    assert str(tmp_path) in str(caught.value)
