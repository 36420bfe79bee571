"""The devices of an engine, and engines in a folder: what is there is named, and what is not there is said so."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bel.formats.errors import MachineError, UsageError
from bel.runtime import devices as listed
from bel.runtime import llama_library
from bel.runtime.devices import devices, find_gpu, free_device_bytes
from bel.runtime.engine import Engine
from bel.runtime.llama_library import FOLDER_LIBRARY, TESTED_XLLAMACPP, engine_choice, open_library

# A process of its own: two engines on one library would take each other's log.
RUN = """
import sys
from pathlib import Path
from bel.runtime.context import ContextOptions
from bel.runtime.engine import Engine
engine = Engine.open(sys.argv[1])
with engine.load(Path(sys.argv[2])) as model, model.context(ContextOptions(16, n_threads=1)) as context:
    context.decode([5, 6, 7])
    print(engine.name, context.logits.tobytes().hex()[:64])
"""


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.open("xllamacpp")


@pytest.fixture
def folder(tmp_path: Path, engine: Engine) -> Path:
    """A folder with a build of the tested llama.cpp."""
    (tmp_path / FOLDER_LIBRARY).symlink_to(engine.library.path)
    return tmp_path


# --- devices ----------------------------------------------------------------------------------------------------------


def test_the_wheel_computes_on_the_cpu(engine: Engine) -> None:
    """One device, whose memory is the machine's."""
    (cpu,) = devices(engine)
    assert (cpu.name, cpu.kind) == ("CPU", "CPU")
    assert cpu.description
    assert cpu.total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < cpu.free_bytes <= cpu.total_bytes
    assert 0 < free_device_bytes(engine, cpu) <= cpu.total_bytes


def test_its_buffer_types(engine: Engine) -> None:
    """The memory of a CPU is plain host memory, and there is no pinned one."""
    (cpu,) = devices(engine)
    kind = listed.buffer_type(engine, cpu)
    assert kind == listed.cpu_buffer_type(engine)
    assert listed.buffer_type_name(engine, kind) == "CPU"
    alignment = listed.alignment_bytes(engine, kind)
    assert alignment >= 16
    assert alignment & (alignment - 1) == 0
    assert listed.host_buffer_type(engine, cpu) is None


@pytest.mark.parametrize("number", [0, 1])
def test_without_a_gpu_it_says_what_there_is(engine: Engine, number: int) -> None:
    """A CPU is no GPU, whatever number is asked for; the next step is the page about engines."""
    with pytest.raises(MachineError, match="there is no GPU") as caught:
        find_gpu(engine, number)
    assert caught.value.exit_code == 5
    assert str(devices(engine)[0]) in str(caught.value)
    assert "docs/gpu.md" in str(caught.value)
    assert str(engine.library.path) in str(caught.value)


# --- engines in a folder ----------------------------------------------------------------------------------------------


def test_a_folder_is_an_engine(folder: Path, engine: Engine) -> None:
    """It is checked as the wheel's library is, and says its own version."""
    library = open_library.__wrapped__(str(folder))
    assert library.engine == "llama.cpp"
    assert library.build == "0.6.0-dev, ggml 0.26.0 (unknown)"
    assert library.context_params == engine.library.context_params
    assert library.path == folder / FOLDER_LIBRARY


def test_a_folder_may_be_given_relative_to_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's path is whole, so that later errors name a place."""
    monkeypatch.chdir(folder.parent)
    assert open_library.__wrapped__(folder.name).path == folder / FOLDER_LIBRARY


def test_it_computes_what_the_wheel_does(folder: Path, example: Path) -> None:
    """The same library under another name gives the same logits."""
    said = {}
    for name in ("xllamacpp", str(folder)):
        done = subprocess.run(
            [sys.executable, "-c", RUN, name, str(example)], capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        who, said[name] = done.stdout.split()
        assert who == ("xllamacpp" if name == "xllamacpp" else "llama.cpp")
    assert len(set(said.values())) == 1


def test_a_folder_without_a_library(tmp_path: Path) -> None:
    """A folder of something else."""
    with pytest.raises(MachineError, match=rf"has no {FOLDER_LIBRARY}.*docs/gpu.md.*{TESTED_XLLAMACPP}") as caught:
        open_library.__wrapped__(str(tmp_path))
    assert caught.value.exit_code == 5


def test_a_library_that_cannot_be_opened(tmp_path: Path) -> None:
    """Such as one whose CUDA is not installed here: what the loader says is told, and no more."""
    (tmp_path / FOLDER_LIBRARY).write_text("no library\n", encoding="ascii")
    with pytest.raises(MachineError, match=r"cannot be opened: .*\(?(invalid ELF header|file too short)\)?\. docs/gpu.md"):
        open_library.__wrapped__(str(tmp_path))


def test_a_library_of_another_kind(tmp_path: Path) -> None:
    """It opens, and exports nothing of llama.cpp."""
    found = importlib.util.find_spec("_cffi_backend")
    assert found is not None
    assert found.origin is not None
    (tmp_path / FOLDER_LIBRARY).symlink_to(found.origin)
    with pytest.raises(MachineError, match="exports no ggml_version"):
        open_library.__wrapped__(str(tmp_path))


def test_another_version_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The structs may be the same ones and the graphs not."""
    monkeypatch.setattr(llama_library, "_TESTED_VERSIONS", ("0.6.1", "0.26.0"))
    found = r"found llama.cpp 0\.6\.0-dev, ggml 0\.26\.0, expected llama.cpp 0\.6\.1, ggml 0\.26\.0\. docs/gpu.md"
    with pytest.raises(MachineError, match=found):
        open_library.__wrapped__(str(folder))


def test_what_is_an_engine(tmp_path: Path) -> None:
    """A name or a folder; a file is none, and no more is a name that was misspelt."""
    for text in (*llama_library.ENGINES, str(tmp_path)):
        assert engine_choice(text) == text
    file = tmp_path / FOLDER_LIBRARY
    file.touch()
    for text in (str(file), "xlamacpp", ""):
        with pytest.raises(UsageError, match="is not an engine; expected auto, xllamacpp, llama-cpp-python or a folder"):
            engine_choice(text)


def test_a_device_shows_itself(engine: Engine) -> None:
    """Names come from a driver, and are made fit for a terminal."""
    (cpu,) = devices(engine)
    odd = dataclasses.replace(cpu, description="a\x1b[31m")
    assert "\x1b" not in str(odd)
