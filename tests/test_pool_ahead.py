"""Experts that are brought ahead of their use: what is guessed, that a guess changes no bit, and that it fails cleanly."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import archs
from bel.formats.bundle import open_bundle
from bel.formats.errors import MachineError
from bel.runtime.backend_watch import BackendWatch
from bel.runtime.cache_rows import RESIDENT
from bel.runtime.engine import Engine
from bel.runtime.policies import parse_policy
from bel.runtime.pool_guess import GuessGraphs
from bel.runtime.pool_home import Home, cpu_home
from bel.runtime.pool_layers import layer_slots
from bel.runtime.pool_loading import load_pool
from bel.runtime.pool_looker import Looker
from bel.runtime.pool_options import PoolOptions
from bel.runtime.pool_room import HostRoom
from bel.runtime.pool_rows import AHEAD_STATUS
from bel.runtime.pool_step import ABSENT, AHEAD, LOAD, SPLIT, plan_call
from bel.runtime.slot_memory import SlotMemory
from exactness import repack
from pooled import SIZES, Pooled, largest_difference, pool_options, pooled, stock

TINY = Path(__file__).parent.parent / "examples" / "tiny-moe-q8_0.gguf"
LAYERS, EXPERTS, TOP_K = 6, 32, 4
MOST_TRIES = 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of the trained example model."""
    return repack(TINY, tmp_path_factory.mktemp("tiny") / "tiny.bel")


@pytest.mark.parametrize("mode", ["upload", "split"])
@pytest.mark.parametrize("n_ahead", [1, TOP_K, EXPERTS])
def test_what_came_ahead_is_what_was_chosen(mode: str, n_ahead: int, tiny: Path) -> None:
    """All logits of a prompt and of 64 tokens.  A busy machine may take every guess back, so it is tried again."""
    options = pool_options(tiny, mode, "lfu-decay:0.98", slots=8, n_ahead=n_ahead)
    for _ in range(MOST_TRIES):
        answer = pooled(tiny, options, 20, 64)
        assert largest_difference(answer.logits, stock(TINY, 20, 64)) == 0.0
        decode = answer.counters.decode
        if decode.in_time:
            break
    assert 0 < decode.in_time <= decode.missed
    assert decode.in_time * size(tiny) <= decode.ahead_bytes <= 64 * (LAYERS - 1) * min(n_ahead, TOP_K) * size(tiny)
    assert decode.moved_bytes == decode.in_time * size(tiny), "from the stage to the slots"


def size(bundle: Path) -> int:
    """Bytes of an expert's weights."""
    return sum(part.size_bytes for part in open_bundle(bundle).manifest.layers[0].parts)


def test_the_policy_knows_nothing_of_it(tiny: Path) -> None:
    """Hits, misses, and experts in slots are as without."""

    def run(n_ahead: int) -> Pooled:
        return pooled(tiny, pool_options(tiny, "upload", "lfu-decay:0.98", slots=8, n_ahead=n_ahead), 20, 64)

    without, ahead = run(0), run(2)
    assert without.counters.decode.ahead_bytes == without.counters.decode.in_time == 0
    assert without.counters.decode.missed == ahead.counters.decode.missed
    assert [x.in_slots for x in without.pool.slots] == [x.in_slots for x in ahead.pool.slots]


@pytest.mark.parametrize("options", [{"mode": "static"}, {"mode": "upload", "is_native": False}])
def test_where_nothing_is_brought_ahead(options: dict[str, object], tiny: Path) -> None:
    """Slots that never change have no use for it; the plain callback does not guess."""
    decode = pooled(tiny, pool_options(tiny, slots=8, n_ahead=4, **options), 1, 16).counters.decode  # type: ignore[arg-type]
    assert (decode.ahead_bytes, decode.in_time) == (0, 0)


def test_a_guess_is_the_next_layers_router_on_this_layers_input(tiny: Path) -> None:
    """As numpy computes it from the weights in the file; the input is made what the next layer's norm would make of it."""
    engine = Engine.open()
    home, library = cpu_home(engine), engine.library
    weights = {tensor.name: tensor.data for tensor in gguf.GGUFReader(TINY).tensors}
    room = HostRoom(home, 4 * EXPERTS)
    with load_pool(engine, open_bundle(tiny), SIZES, PoolOptions(slots=8), home) as loaded:
        guesses = GuessGraphs(library, home, loaded.graphs, room.address)
        assert [graph != 0 for graph in guesses.graphs] == [True] * (LAYERS - 1) + [False]
        for i in range(LAYERS - 1):
            router, here, there = (
                np.array(weights[name], np.float32)
                for name in (f"blk.{i + 1}.ffn_gate_inp.weight", f"blk.{i}.ffn_norm.weight", f"blk.{i + 1}.ffn_norm.weight")
            )
            values = np.random.default_rng(i).standard_normal(len(here)).astype(np.float32)
            data = home.abi.pointer(values.ctypes.data)
            home.abi.lib.ggml_backend_tensor_set(home.abi.pointer(guesses.inputs[i]), data, 0, values.nbytes)
            graph = home.abi.pointer(guesses.graphs[i])
            assert home.abi.lib.ggml_backend_graph_compute(home.abi.pointer(guesses.backend), graph) == 0
            found = np.frombuffer(home.abi.ffi.buffer(home.abi.pointer(room.address), 4 * EXPERTS), np.float32)
            np.testing.assert_allclose(found, router @ (values / here * there), rtol=1e-4, atol=1e-4)
        guesses.close()
        guesses.close()
    room.close()


@given(data=st.data())
def test_the_cpu_computes_nothing_that_came_ahead(data: st.DataObject) -> None:
    """Of a split call's misses the marked ones get slots; of the others the share."""
    n_expert = data.draw(st.integers(2, 12))
    top_k = data.draw(st.integers(1, n_expert))
    layer = layer_slots(n_expert, data.draw(st.integers(top_k, n_expert)), top_k, parse_policy("lru"))
    share = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    layer.preload(random.permutation(n_expert)[: data.draw(st.integers(0, n_expert))].tolist())
    ids = random.permutation(n_expert)[:top_k].astype(np.uint16)
    missing = {int(x) for x in ids if not layer.cache.ints[RESIDENT, x]}
    marked = {x for x in range(n_expert) if random.random() < 0.5 and not layer.cache.ints[RESIDENT, x]}
    layer.table[AHEAD, list(marked)] = 1
    ask = layer.ask
    _, missed, loads, absent = plan_call(
        layer.cache.ints, layer.cache.reals, layer.table, ask, ids[None], layer.row, SPLIT, share
    )
    assert missed == len(missing) == loads + absent
    assert marked & missing <= set(ask[LOAD, :loads].tolist())
    assert not marked & set(ask[ABSENT, :absent].tolist())
    assert absent == len(missing - marked) - int(np.ceil(len(missing - marked) * share - 1e-9))


def test_a_guess_that_could_not_be_computed_is_an_error() -> None:
    """Else a device that fails would only be slow."""
    looker = Looker(cpu_home(Engine.open()), None, 0)
    looker.table[AHEAD_STATUS] = 2
    with pytest.raises(MachineError, match="could not compute a guess"):
        looker.check()
    looker.check()
    looker.close()


def test_the_stream_of_a_context_is_noted() -> None:
    """Each context has its own; whatever else is made while none is watched is not noted."""
    engine = Engine.open()
    home = cpu_home(engine)
    with engine.load(TINY) as model:
        noted = []
        for _ in range(2):
            watch = BackendWatch(home)
            with watch:
                context = model.context(SIZES)
            noted.append((watch.backend, context))
        assert noted[0][0] != noted[1][0]
        for _, context in noted:
            context.close()
    with BackendWatch(home) as nothing:
        pass
    with pytest.raises(MachineError, match="does not compute with one stream"):
        nothing.backend  # noqa: B018


def test_a_device_of_another_form_is_refused() -> None:
    """The functions of its struct must give what the library's own give: else another's place would be called."""
    home = cpu_home(Engine.open())

    class Library:
        def __getattr__(self, name: str) -> object:
            if name == "ggml_backend_dev_buffer_type":
                return lambda _device: home.abi.ffi.NULL
            return getattr(home.abi.lib, name)

    with pytest.raises(MachineError, match=r"another binary interface: device\.get_buffer_type"):
        BackendWatch(dataclasses.replace(home, abi=dataclasses.replace(home.abi, lib=Library())))


def test_rooms_for_biases_are_given_back_where_slots_find_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory that nobody closes is lost for as long as the process lives."""
    bundle = repack(archs.make_model("gpt-oss", tmp_path / "model.gguf", quant="f32"), tmp_path / "model.bel")
    engine = Engine.open()
    home = cpu_home(engine)
    rooms: list[HostRoom] = []
    made = HostRoom.__init__

    def make(self: HostRoom, home: Home, size_bytes: int) -> None:
        made(self, home, size_bytes)
        rooms.append(self)

    class Library:
        def __getattr__(self, name: str) -> object:
            return (
                (lambda *_: home.abi.ffi.NULL) if name.endswith("buft_alloc_buffer") and rooms else getattr(home.abi.lib, name)
            )

    with load_pool(engine, open_bundle(bundle), SIZES, PoolOptions(slots=2), home) as loaded:
        assert any(graph.biases for graph in loaded.graphs)
        monkeypatch.setattr(HostRoom, "__init__", make)
        with pytest.raises(MachineError, match="memory"):
            no_memory = dataclasses.replace(home, abi=dataclasses.replace(home.abi, lib=Library()))
            SlotMemory(no_memory, engine.library.ffi, loaded.graphs, loaded.counts, loaded.hosts)
    assert len(rooms) == 1, "the second one found no memory"
    assert all(room._buffer is None for room in rooms)
