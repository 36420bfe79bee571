"""A model is loaded with experts that have no memory, and nothing is left behind of how that was done."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cffi import FFI

import pooled
from bel.formats.bundle import open_bundle
from bel.formats.errors import MachineError
from bel.formats.manifest import EXPERTS
from bel.runtime import pool_abi
from bel.runtime.bundle_model import load_bundle
from bel.runtime.context import ContextOptions
from bel.runtime.engine import Engine, Model
from bel.runtime.file_watch import watch_bundle
from bel.runtime.pool_abi import USAGE_WEIGHTS, PoolAbi, check_buffer, check_type, open_pool_abi
from bel.runtime.pool_home import Home, cpu_home
from bel.runtime.slot_buffer import CLAIMED_BYTES, SlotType
from bel.runtime.tensor import Tensor
from exactness import repack

TINY = Path(__file__).parent.parent / "examples" / "tiny-moe-q8_0.gguf"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repack(TINY, tmp_path_factory.mktemp("tiny") / "tiny.bel")


@pytest.fixture
def home() -> Home:
    return cpu_home(Engine.open())


@pytest.fixture
def loaded(tiny: Path, home: Home) -> Iterator[Model]:
    bundle = open_bundle(tiny)
    names = "|".join(re.escape(row.name) for row in bundle.manifest.tensors if row.dest == EXPERTS)
    with watch_bundle(bundle) as watch:
        with SlotType(home) as kind:
            model = load_bundle(Engine.open(), bundle, watch, buffer_types=[(f"^({names})$", kind.pointer)])
            opened = model.__enter__()
        yield opened
        model.__exit__(None, None, None)


class Weights:
    """Sees the weights of all products of one graph, and points those of experts at `scratch` before they are read."""

    def __init__(self, model: Model, scratch: int) -> None:
        self._ffi, self._scratch = model.engine.library.ffi, scratch
        self.experts: dict[str, tuple[Any, int]] = {}
        """Each with the address of its data as the loader left it."""
        self.others: dict[str, Any] = {}

    def ask(self, tensor: Tensor) -> bool:
        weight = tensor.src(0)
        if weight is None or tensor.op not in ("MUL_MAT", "MUL_MAT_ID"):
            return False
        raw = self._ffi.cast("struct ggml_tensor *", weight.identity)
        if tensor.op == "MUL_MAT":
            self.others[weight.name] = raw
        else:
            self.experts[weight.name] = (raw, weight.address)
            raw.data = self._ffi.cast("void *", self._scratch)
        return False

    def seen(self, tensor: Tensor) -> None:
        raise AssertionError(tensor.name)


def test_experts_have_no_memory_and_the_rest_has(loaded: Model, home: Home, tiny: Path) -> None:
    """What is left in the model is a few bytes a tensor, of the home's own type, that can be written to again."""
    abi, ffi = home.abi, loaded.engine.library.ffi
    layers = open_bundle(tiny).manifest.layers
    room = np.zeros(max(x.n_expert * part.size_bytes for x in layers for part in x.parts) + 4096, np.uint8)
    found = Weights(loaded, room.ctypes.data)
    with loaded.context(ContextOptions(32, 32, 32, 1), found) as context:
        context.decode([1])
    assert len(found.experts) == 3 * len(layers)
    for raw, data in found.experts.values():
        raw.data = ffi.cast("void *", data)
        text, back = abi.ffi.new("char[]", b"fifteen letters"), abi.ffi.new("char[]", 16)
        abi.lib.ggml_backend_tensor_set(raw, text, 0, 16)
        abi.lib.ggml_backend_tensor_get(raw, back, 0, 16)
        assert abi.ffi.string(back) == b"fifteen letters"
    (buffer,) = {raw.buffer for raw, _ in found.experts.values()}
    view = abi.ffi.cast("struct buffer *", buffer)
    assert view.type == home.kind
    assert view.usage == USAGE_WEIGHTS, "else the scheduler would not give the products to the home"
    assert view.size <= 2 * CLAIMED_BYTES * len(found.experts) < room.size
    assert found.others
    assert buffer not in {raw.buffer for raw in found.others.values()}, "dense weights are where they always are"


@pytest.mark.parametrize(
    ("swapped", "message"),
    [
        (("void * device;", "void * is_host;"), "buffer_type.device"),
        (("void * get_name;", "void * alloc_buffer_n;"), "buffer_type.get_name"),
        (("void * type;", "void * set_tensor;"), "buffer.type"),
        (("size_t size;", "void * free_buffer;"), "buffer.size"),
    ],
)
def test_another_struct_is_refused(home: Home, swapped: tuple[str, str], message: str) -> None:
    """The private structs of ggml are compared with what its public functions say: here two fields have changed places."""
    one, other = swapped
    kinds, buffers = pool_abi._STRUCTS.split("struct buffer {")
    parts = [
        part.replace(one, "@").replace(other, one).replace("@", other) if one in part else part for part in (kinds, buffers)
    ]
    ffi = FFI()
    ffi.cdef("struct buffer {".join(parts) + pool_abi._FUNCTIONS)
    abi = PoolAbi(ffi, ffi.dlopen(home.abi.path), home.abi.path)
    kind = abi.lib.ggml_backend_cpu_buffer_type()
    buffer = abi.lib.ggml_backend_buft_alloc_buffer(kind, 64)
    try:
        with pytest.raises(MachineError, match=f"another binary interface: {re.escape(message)} differs"):
            check_type(abi, kind)
            check_buffer(abi, buffer, kind)
    finally:
        abi.lib.ggml_backend_buffer_free(buffer)


def test_no_memory_in_the_home(tiny: Path, home: Home) -> None:
    """The home's refusal is what is reported, and the loader's failure only its consequence."""
    abi = home.abi
    poor = abi.ffi.new("struct buffer_type *", abi.ffi.cast("struct buffer_type *", home.kind)[0])
    refuse = abi.ffi.callback("alloc_function", lambda _type, _size: abi.ffi.NULL)
    poor.alloc_buffer, poor.alloc_buffer_n = abi.ffi.cast("void *", refuse), abi.ffi.NULL
    broke = dataclasses.replace(home, name="GPU7", kind=abi.ffi.cast("void *", poor))
    with pytest.raises(MachineError, match=r"GPU7 has no .* memory"):
        pooled.pooled(tiny, pooled.pool_options(tiny, "upload", slots=4), 1, 1, home=broke)
    pooled.pooled(tiny, pooled.pool_options(tiny, "upload", slots=4), 1, 1)


def test_the_interface_is_checked_once() -> None:
    library = Engine.open().library
    assert open_pool_abi(library) is open_pool_abi(library)
