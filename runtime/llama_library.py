"""Finding llama.cpp: the shared object inside the wheel of xllamacpp, that of llama-cpp-python, or a folder with a build."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bel.formats.errors import MachineError, UsageError, printable
from bel.runtime.llama_abi import HOW_TO_INSTALL, declarations
from bel.runtime.llama_abi_gpu import open_gpu_abi
from bel.runtime.llama_check import check_abi

TESTED_XLLAMACPP = "2026.10.11549"
"""The version that pyproject.toml pins.  Its last number is the llama.cpp build; the library itself does not tell."""
ENGINES = ("auto", "xllamacpp", "llama-cpp-python")
"""The engines that have a name; any other is a folder with `FOLDER_LIBRARY` and the libraries that it needs."""
FOLDER_LIBRARY = "libllama.so"
_FOLDER_ENGINE = "llama.cpp"
_TESTED_VERSIONS = ("0.6.0-dev", "0.26.0")
"""What a library of the build that TESTED_XLLAMACPP names says of itself: llama_version() and ggml_version()."""
_HOW_TO_BUILD = f"docs/gpu.md says how to build it from the source of xllamacpp {TESTED_XLLAMACPP}"
_MISSING = "Install it: pip install 'bel-toolkit[llama]'"


@dataclass(frozen=True, slots=True)
class LlamaLibrary:
    """An opened and checked llama.cpp.

    `engine` is the package that it came with (`llama.cpp` for a folder), `build` what tells it from other builds of it,
    `context_params` the struct that it takes as `llama_context_params`.  `ffi` and `lib` are cffi's.
    """

    engine: str
    build: str
    path: Path
    context_params: str
    ffi: Any
    lib: Any


def engine_choice(text: str) -> str:
    """`text` where it names an engine: one of `ENGINES`, or a folder.  Raises UsageError for anything else."""
    if text not in ENGINES and not (text and Path(text).is_dir()):
        raise UsageError(
            f"'{printable(text)}' is not an engine", expected=f"{', '.join(ENGINES)} or a folder with {FOLDER_LIBRARY}"
        )
    return text


@cache
def open_library(engine: str = "auto") -> LlamaLibrary:
    """Find, open and check llama.cpp.  `auto` takes xllamacpp where it is installed, else llama-cpp-python.

    Raises MachineError where none is installed, where it cannot be opened, and where its binary interface is another one;
    UsageError for an engine that is neither in `ENGINES` nor a folder.
    """
    name, path, build = _find(engine_choice(engine))
    is_folder = name == _FOLDER_ENGINE
    try:
        ffi = declarations()
    except ModuleNotFoundError as error:
        raise MachineError(f"the package {error.name}, which opens llama.cpp, is not installed", hint=_MISSING) from None
    try:
        # Symbols of the libraries that it depends on are found through it too (dlsym searches them breadth-first).
        lib = ffi.dlopen(str(path))
    except OSError as error:
        hint = _HOW_TO_BUILD if is_folder else HOW_TO_INSTALL
        cause = str(error).split(".  Additionally", 1)[0]  # what cffi adds about a search that was none
        raise MachineError(f"llama.cpp cannot be opened: {cause}", path=str(path), hint=hint) from None
    layout = check_abi(ffi, lib, str(path))
    if is_folder:
        build = _check_folder_build(path)
    if name != "xllamacpp":  # whose library says "unknown"
        build += f" ({ffi.string(lib.ggml_commit()).decode()})"
    return LlamaLibrary(name, build, path, layout, ffi, lib)


def _find(engine: str) -> tuple[str, Path, str]:
    finders: dict[str, Callable[[], tuple[Path, str] | None]] = {
        "xllamacpp": _find_xllamacpp,
        "llama-cpp-python": _find_llama_cpp_python,
    }
    if engine not in ENGINES:
        return _FOLDER_ENGINE, _find_in_folder(Path(engine)), ""
    wanted = list(finders) if engine == "auto" else [engine]
    for name in wanted:
        found = finders[name]()
        if found is not None:
            return name, *found
    what = "llama.cpp is not installed" if engine == "auto" else f"the engine {engine} is not installed"
    raise MachineError(what, hint=_MISSING if engine != "llama-cpp-python" else "Install it: pip install llama-cpp-python")


def _find_xllamacpp() -> tuple[Path, str] | None:
    folder = _package_folder("xllamacpp")
    path = next(iter(sorted(folder.glob("xllamacpp*.so"))), None) if folder else None
    if path is None:
        return None
    version = importlib.metadata.version("xllamacpp")
    if version != TESTED_XLLAMACPP:
        raise MachineError(
            "this version of xllamacpp was never tested with this toolkit",
            path=str(path),
            found=version,
            expected=TESTED_XLLAMACPP,
            hint=HOW_TO_INSTALL,
        )
    return path, version.rsplit(".", 1)[-1]


def _find_llama_cpp_python() -> tuple[Path, str] | None:
    folder = _package_folder("llama_cpp")
    path = folder / "lib" / "libllama.so" if folder else None
    if path is None or not path.is_file():
        return None
    return path, importlib.metadata.version("llama_cpp_python")


def _find_in_folder(folder: Path) -> Path:
    path = folder.absolute() / FOLDER_LIBRARY
    if not path.is_file():
        raise MachineError(f"this folder has no {FOLDER_LIBRARY}", path=str(folder), hint=_HOW_TO_BUILD)
    return path


def _check_folder_build(path: Path) -> str:
    """What the library says of its version, which must be the tested one; and its backends are there.

    A build that keeps backends in files of their own has none before they are loaded (ggml-backend-reg.cpp).
    """
    abi = open_gpu_abi(str(path))
    said = tuple(abi.text(version()) for version in (abi.lib.llama_version, abi.lib.ggml_version))
    if said != _TESTED_VERSIONS:
        raise MachineError(
            "this llama.cpp was never tested with this toolkit",
            path=str(path),
            found="llama.cpp {}, ggml {}".format(*said),
            expected="llama.cpp {}, ggml {}".format(*_TESTED_VERSIONS),
            hint=_HOW_TO_BUILD,
        )
    if not abi.lib.ggml_backend_dev_count():
        abi.lib.ggml_backend_load_all_from_path(os.fsencode(path.parent))
    if not abi.lib.ggml_backend_dev_count():
        raise MachineError("this llama.cpp has no backend, not even for the CPU", path=str(path), hint=_HOW_TO_BUILD)
    return "{}, ggml {}".format(*said)


def _package_folder(package: str) -> Path | None:
    """The folder of a package, found without importing it: an import would run its own set-up of llama.cpp."""
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None
