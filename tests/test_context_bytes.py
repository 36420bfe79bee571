"""Caches and buffers of a context: what llama.cpp itself says when it allocates them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import archs
from bel.formats.errors import UsageError
from bel.formats.gguf_model import open_model
from bel.formats.units import MIB
from bel.profiler.compute_buffer import compute_bytes
from bel.profiler.kv_cache import cache_bytes
from bel.runtime.engine import Engine, Model
from refused import refusal


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """llama.cpp, with its whole log kept."""
    engine = Engine.open()
    monkeypatch.setattr(engine, "log", deque())
    yield engine


def _allocated(engine: Engine, model: Model, n_ctx: int, cache_type: int) -> str | None:
    """The log of a context that is made and freed, with a cache of a type; None where llama.cpp refuses."""
    ffi, lib = engine.library.ffi, engine.library.lib
    params = ffi.new("struct any_params *", lib.llama_context_default_params())
    fields = ffi.cast(f"struct {engine.library.context_params} *", params)
    fields.n_ctx, fields.n_batch, fields.n_ubatch = n_ctx, 512, 512
    fields.n_threads = fields.n_threads_batch = 1
    fields.type_k = fields.type_v = cache_type
    fields.swa_full = False
    engine.log.clear()
    pointer = lib.llama_init_from_model(model._pointer, params[0])
    if pointer == ffi.NULL:
        return None
    lib.llama_free(pointer)
    return "\n".join(line for _, line in engine.log)


def _logged(log: str, what: str) -> list[float]:
    """The figures of a buffer's lines, in MiB to two decimals."""
    return [float(x) for x in re.findall(rf"{what} buffer size = +([\d.]+) MiB", log)]


def _agrees(found_bytes: int, logged: Sequence[float]) -> bool:
    return abs(found_bytes / MIB - sum(logged)) <= 0.00501 * len(logged)


@pytest.mark.parametrize("n_embd", [64, 128])
@pytest.mark.parametrize("arch", sorted(archs.ARCHS))
def test_caches_and_buffer_are_what_llama_cpp_allocates(engine: Engine, tmp_path: Path, arch: str, n_embd: int) -> None:
    """Heads of 16 elements (q8_0 is refused by both) and of 32."""
    path = archs.make_model(arch, tmp_path / "m.gguf", n_embd=n_embd)
    model = open_model(path)
    with engine.load(path) as loaded:
        for context in (256, 512, 4096):
            for name, type_id in (("f16", 1), ("q8_0", 8), ("q4_0", 2)):
                log = _allocated(engine, loaded, context, type_id)
                if log is None:
                    refusal(lambda c=context, n=name: cache_bytes(model, c, n), UsageError)  # type: ignore[misc]
                    continue
                found = cache_bytes(model, context, name)
                assert _agrees(found.kv_bytes, _logged(log, "KV")), (context, name)
                assert _agrees(found.state_bytes, _logged(log, "(?:RS|state)")), (context, name)
                if name == "f16":
                    assert 0.75 <= compute_bytes(model, context) / MIB / _logged(log, "compute")[-1] <= 1.65


@pytest.mark.parametrize("context", [512, 2048, 8192, 32768])
def test_compute_buffer_of_a_trained_model(engine: Engine, example: Path, context: int) -> None:
    with engine.load(example) as loaded:
        log = _allocated(engine, loaded, context, 1)
    assert log is not None
    assert 1.0 <= compute_bytes(open_model(example), context) / MIB / _logged(log, "compute")[-1] <= 1.15
