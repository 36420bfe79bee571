"""Finding llama.cpp: the shared object inside the wheel of xllamacpp, or that of llama-cpp-python."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bel.formats.errors import MachineError, UsageError
from bel.runtime.llama_abi import HOW_TO_INSTALL, check_abi, declarations

TESTED_XLLAMACPP = "2026.10.11549"
"""The version that pyproject.toml pins.  Its last number is the llama.cpp build; the library itself does not tell."""
ENGINES = ("auto", "xllamacpp", "llama-cpp-python")
_MISSING = "Install it: pip install 'bel-toolkit[llama]'"


@dataclass(frozen=True, slots=True)
class LlamaLibrary:
    """An opened and checked llama.cpp.

    `engine` is the package that it came with, `build` what tells it from other builds of that package, `context_params`
    the struct that it takes as `llama_context_params`.  `ffi` and `lib` are cffi's.
    """

    engine: str
    build: str
    path: Path
    context_params: str
    ffi: Any
    lib: Any


@cache
def open_library(engine: str = "auto") -> LlamaLibrary:
    """Find, open and check llama.cpp.  `auto` takes xllamacpp where it is installed, else llama-cpp-python.

    Raises MachineError where none is installed, where it cannot be opened, and where its binary interface is another one;
    UsageError for an engine that is not in `ENGINES`.
    """
    if engine not in ENGINES:
        raise UsageError(f"'{engine}' is not an engine", expected=" or ".join(ENGINES))
    name, path, build = _find(engine)
    try:
        ffi = declarations()
    except ModuleNotFoundError as error:
        raise MachineError(f"the package {error.name}, which opens llama.cpp, is not installed", hint=_MISSING) from None
    try:
        lib = ffi.dlopen(str(path))
    except OSError as error:
        raise MachineError(f"llama.cpp cannot be opened: {error}", path=str(path), hint=HOW_TO_INSTALL) from None
    layout = check_abi(ffi, lib, str(path))
    if name != "xllamacpp":  # whose library says "unknown"
        build += f" ({ffi.string(lib.ggml_commit()).decode()})"
    return LlamaLibrary(name, build, path, layout, ffi, lib)


def _find(engine: str) -> tuple[str, Path, str]:
    finders: dict[str, Callable[[], tuple[Path, str] | None]] = {
        "xllamacpp": _find_xllamacpp,
        "llama-cpp-python": _find_llama_cpp_python,
    }
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


def _package_folder(package: str) -> Path | None:
    """The folder of a package, found without importing it: an import would run its own set-up of llama.cpp."""
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None
