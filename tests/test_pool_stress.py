"""Any course of decodes in a slot pool is exact, in a home whose copies are done as late as the pool's own events allow."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streams import Streams

import archs
import synth
from arch_parts import Shape
from bel.formats.bundle import open_bundle
from bel.formats.errors import MachineError
from bel.runtime import pool_model
from bel.runtime import pool_rows as at
from bel.runtime.context import Context, ContextOptions
from bel.runtime.engine import Engine
from bel.runtime.policies import parse_policy
from bel.runtime.pool_abi import PoolAbi
from bel.runtime.pool_home import cpu_home
from bel.runtime.pool_model import PoolRun, open_pool
from bel.runtime.pool_native import NativePool
from bel.runtime.tensor import Tensor
from exactness import repack
from pooled import SIZES, largest_difference, pool_options, pooled, stock

TINY = Path(__file__).parent.parent / "examples" / "tiny-moe-q8_0.gguf"
WAYS = (("upload", "lru"), ("upload", "lfu-decay:0.98"), ("split", "lfu-decay:0.98"), ("split", "lru"), ("static", "static"))
EXPERTS, STEPS, MOST_TRIES = 32, 14, 200


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of the trained example model."""
    return repack(TINY, tmp_path_factory.mktemp("tiny") / "tiny.bel")


@dataclasses.dataclass(slots=True)
class Made:
    """The pools that are made, newest last; and what makes streams for them."""

    patch: pytest.MonkeyPatch
    natives: list[NativePool] = dataclasses.field(default_factory=list)

    def streams(self, seed: int, haste: float, spite: float) -> Streams:
        return Streams(Engine.open(), seed, haste, spite).patch(self.patch)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Notes pools."""
    noting = Made(monkeypatch)

    class Noted(NativePool):
        def __init__(self, *arguments: Any, **fields: Any) -> None:
            super().__init__(*arguments, **fields)
            noting.natives.append(self)

    monkeypatch.setattr(pool_model, "NativePool", Noted)
    return noting


@dataclasses.dataclass(slots=True)
class Course:
    """The same decodes in a pool and in stock."""

    run: PoolRun
    native: NativePool
    reference: Context
    random: np.random.Generator

    def decode(self, count: int, all_logits: bool = False) -> None:
        both = self.run.context, self.reference
        if both[0].n_past + count > both[0].n_ctx:
            self.clear()
        tokens = self.random.integers(0, self.reference.model.n_vocab, count)
        for context in both:
            context.decode(tokens, all_logits=all_logits)
        assert largest_difference(both[0].logits, both[1].logits) == 0.0

    def clear(self) -> None:
        for context in (self.run.context, self.reference):
            context.clear()

    def fail(self, layer: int, count: int) -> None:
        """A decode that ends in the middle: a layer chooses as many experts as the pool does not expect."""
        if self.run.context.n_past + count > self.run.context.n_ctx:
            self.clear()
        layers: Any = self.native._layers
        layers[layer, at.TOP_K] += 1
        try:
            with pytest.raises(MachineError, match="in a form that the slot pool does not know"):
                self.run.context.decode(self.random.integers(0, self.reference.model.n_vocab, count), all_logits=True)
        finally:
            layers[layer, at.TOP_K] -= 1
        self.clear()

    def step(self) -> None:
        what, sizes = self.random.integers(0, 12), [1, 2, 7, 24, 41, 65, 130]
        if what < 3:
            self.decode(int(self.random.choice(sizes)), bool(self.random.integers(0, 2)))
        elif what < 8:
            for _ in range(self.random.integers(1, 9)):
                self.decode(1)
        elif what == 8:
            self.clear()
        elif what == 9:
            self.fail(int(self.random.integers(0, len(self.run.pool.counts))), int(self.random.choice([1, 1, 41, 130])))
        elif self.run.can_change:
            mode, policy = WAYS[self.random.integers(0, len(WAYS))]
            self.run.use(mode, parse_policy(policy))


def play(source: Path, bundle: Path, seed: int, made: Made, *, reads_ahead: bool = False, has_events: bool = True) -> None:
    """A course that the seed draws."""
    random = np.random.default_rng(seed)
    haste, spite = (float(random.choice(x)) for x in ([0.0, 0.2, 0.7], [0.0, 0.5, 1.0]))
    streams = made.streams(seed, haste, spite)
    streams.has_events = has_events
    manifest = open_bundle(bundle).manifest
    top_k, n_expert = manifest.layers[-1].n_used or 1, manifest.layers[-1].n_expert
    mode, policy = WAYS[random.integers(0, len(WAYS))]
    sizes = ContextOptions(256, 256, int(random.choice([1, 24, 40, 64, 256])), 1)
    options = pool_options(
        bundle,
        mode,
        policy,
        slots=int(random.choice([top_k, top_k + 1, n_expert // 2, n_expert - 1, n_expert])),
        n_ahead=int(random.choice([1, 2, 16])),
        share=float(random.choice([0.0, 0.5, 1.0])),
        spin_us=int(random.choice([0, 50, 1000])),
    )
    home = dataclasses.replace(streams.home, reads_ahead=reads_ahead)
    with (
        Engine.open().load(source) as model,
        model.context(sizes) as reference,
        open_pool(Engine.open(), open_bundle(bundle), sizes, options, home) as run,
    ):
        course = Course(run, made.natives[-1], reference, random)
        for _ in range(STEPS):
            course.step()
    assert not streams.errors


@pytest.mark.parametrize("seed", range(9))
def test_any_course_is_exact(seed: int, tiny: Path, made: Made) -> None:
    """Prompts, tokens, new sequences, other ways and decodes that fail, in any order."""
    play(TINY, tiny, seed, made)


@pytest.mark.parametrize("seed", range(4))
def test_any_course_without_events(seed: int, tiny: Path, made: Made) -> None:
    """Streams that cannot wait for each other, as of CUDA without copies between peers: the host waits in their place."""
    play(TINY, tiny, seed, made, has_events=False)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("arch", ["gpt-oss", "deepseek2", "llama"])
def test_any_course_of_other_graphs(arch: str, seed: int, tmp_path: Path, made: Made) -> None:
    """With biases of experts; with blocks that have none; as many experts of a token as slots."""
    source = archs.make_model(arch, tmp_path / "model.gguf", seed=seed)
    play(source, repack(source, tmp_path / "model.bel"), seed, made)


@pytest.mark.parametrize("n_layer", [1, 2])
def test_any_course_of_few_layers(n_layer: int, tmp_path: Path, made: Made) -> None:
    """The only layer is the last one, of which a prompt computes one token."""
    source = archs.make_model("qwen3moe", tmp_path / "model.gguf", n_layer=n_layer)
    bundle = repack(source, tmp_path / "model.bel")
    for seed in range(4):
        play(source, bundle, seed, made)


@pytest.mark.parametrize("reads_ahead", [True, False])
def test_any_course_of_layers_that_differ(
    reads_ahead: bool, tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts of other sizes have other places on the stage, which are others' too; or a stage of their own."""
    make = archs._tensor

    def tensor(name: str, ne: tuple[int, ...], seed: int, expert_type: int, s: Shape) -> synth.Tensor:
        return make(name, ne, seed, archs.type_id("q8_0") if name.startswith("blk.1.ffn_down_exps") else expert_type, s)

    monkeypatch.setattr(archs, "_tensor", tensor)
    source = archs.make_model("qwen3moe", tmp_path / "model.gguf", quant="q4_0", n_layer=4)
    bundle = repack(source, tmp_path / "model.bel")
    for seed in range(4):
        play(source, bundle, seed, made, reads_ahead=reads_ahead)


@pytest.mark.parametrize("n_next", [1, 65])
@pytest.mark.parametrize("slots", [12, EXPERTS - 1])
@pytest.mark.parametrize(("haste", "spite"), [(0.0, 0.0), (0.0, 1.0), (0.7, 0.0)])
def test_a_stage_that_was_begun_in_vain(n_next: int, slots: int, haste: float, spite: float, tiny: Path, made: Made) -> None:
    """A prompt fails when a layer's experts are on their way to the stage: they must not come to lie over what is brought
    there next, ahead of its use or for the first layer of another prompt."""
    streams = made.streams(0, haste, spite)
    with (
        Engine.open().load(TINY) as model,
        model.context(SIZES) as reference,
        open_pool(Engine.open(), open_bundle(tiny), SIZES, pool_options(tiny, "upload", slots=slots), streams.home) as run,
    ):
        course = Course(run, made.natives[-1], reference, np.random.default_rng(n_next))
        streams.before = made.natives[-1]._looker.rest  # every guess is in time
        for _ in range(24):
            streams.spite = 0.0  # else nothing is left of it
            course.fail(2, 65)
            streams.spite = spite
            course.decode(n_next)
            for _ in range(4):
                course.decode(1)
    assert not streams.errors


@pytest.mark.parametrize("n_prompt", [65, 129, 192])
def test_a_prompt_leaves_nothing_behind(n_prompt: int, tiny: Path, made: Made) -> None:
    """Its last layer computes the last token alone, or none in all graphs but the last one."""
    streams = made.streams(0, 0.0, 0.0)
    sizes = ContextOptions(512, 512, 64, 1)
    with open_pool(
        Engine.open(), open_bundle(tiny), sizes, pool_options(tiny, "upload", slots=EXPERTS - 1, n_ahead=0), streams.home
    ) as run:
        for token in range(20):
            run.context.clear()
            run.context.decode([token] * n_prompt)
            assert streams.n_waiting == 0


def test_memory_goes_once_nothing_is_copied_there(tiny: Path, made: Made) -> None:
    """A prompt that fails leaves copies behind that nobody waits for."""
    streams = made.streams(0, 0.0, 0.0)
    with (
        Engine.open().load(TINY) as model,
        model.context(SIZES) as reference,
        open_pool(Engine.open(), open_bundle(tiny), SIZES, pool_options(tiny, "upload", slots=8), streams.home) as run,
    ):
        Course(run, made.natives[-1], reference, np.random.default_rng(0)).fail(2, 65)
        assert streams.n_waiting > 0
    assert not streams.errors


@pytest.mark.parametrize("mode", ["split", "static"])
def test_what_is_still_brought_when_a_prompt_comes(mode: str, tiny: Path, made: Made) -> None:
    """Guesses that were wrong have nobody who waits for them, and stay on their way to the stage; also where from now on none
    are made, in slots that never change."""
    streams = made.streams(0, 0.0, 0.0)
    with (
        Engine.open().load(TINY) as model,
        model.context(SIZES) as reference,
        open_pool(
            Engine.open(), open_bundle(tiny), SIZES, pool_options(tiny, "split", slots=8, share=1.0), streams.home
        ) as run,
    ):
        course = Course(run, made.natives[-1], reference, np.random.default_rng(0))
        for _ in range(MOST_TRIES):  # a busy machine may take every guess back
            course.decode(1)
            if streams.n_waiting:
                break
        assert streams.n_waiting > 0
        if mode == "static":
            run.use("static", parse_policy("static"))
        course.clear()
        streams.spite = 1.0
        course.decode(65, all_logits=True)


@pytest.mark.parametrize("has_events", [True, False])
def test_what_is_kept_is_copied_before_the_stage_is_written_anew(has_events: bool, tiny: Path, made: Made) -> None:
    """The graph's own stream copies experts that came ahead to their slots; meanwhile the next layer's are brought there."""
    streams = made.streams(0, 0.0, 1.0)
    streams.has_events = has_events
    options = pool_options(tiny, "upload", slots=8, n_ahead=EXPERTS)
    with (
        Engine.open().load(TINY) as model,
        model.context(SIZES) as reference,
        open_pool(Engine.open(), open_bundle(tiny), SIZES, options, streams.home) as run,
    ):
        streams.before = made.natives[-1]._looker.rest  # every guess is in time
        course = Course(run, made.natives[-1], reference, np.random.default_rng(0))
        for _ in range(40):
            course.decode(1)
        assert run.pool.counters.prompt.in_time > 0
        streams.before = lambda: None
    assert not streams.errors


def test_a_request_that_nobody_was_woken_for(tiny: Path, made: Made) -> None:
    """The thread may fall asleep just when a request is made; the next one wakes it, but behind a decode that failed there is
    none, and who waits for it to rest would wait for ever."""
    options = pool_options(tiny, "upload", slots=8, spin_us=0)
    with open_pool(Engine.open(), open_bundle(tiny), SIZES, options, cpu_home(Engine.open())) as run:
        run.context.decode([1])
        looker = made.natives[-1]._looker
        while not looker.table[at.IS_ASLEEP]:
            time.sleep(0.001)
        looker.table[at.FOR_LAYER] = 1
        looker.table[at.STATE] += at.N_STATES - looker.table[at.STATE] % at.N_STATES + at.REQUESTED
        resting = threading.Thread(target=looker.rest, daemon=True)
        resting.start()
        resting.join(20)
        is_hanging = resting.is_alive()
        os.eventfd_write(int(looker.table[at.AHEAD_FD]), 1)
        resting.join()
    assert not is_hanging


def test_host_memory_that_the_device_does_not_reach(tiny: Path, made: Made) -> None:
    """Where the driver pins none, a GPU's kernels would fail at it: then ids are fetched, and nothing is guessed."""
    home = cpu_home(Engine.open())
    kind = home.abi.ffi.cast("struct buffer_type *", home.kind)[0]
    other = home.abi.ffi.new("struct buffer_type *", kind)

    class Library:
        def __getattr__(self, name: str) -> Any:
            return getattr(home.abi.lib, name)

        def ggml_backend_buft_alloc_buffer(self, _kind: Any, size: int) -> Any:
            return home.abi.lib.ggml_backend_buft_alloc_buffer(home.kind, size)

    class Abi(PoolAbi):
        def function(self, name: str) -> int:
            return home.abi.function(name)

    abi = Abi(home.abi.ffi, Library(), home.abi.path)
    unpinned = dataclasses.replace(home, abi=abi, host_kind=home.abi.ffi.cast("void *", other))
    answer = pooled(tiny, pool_options(tiny, "upload", slots=8), 20, 20, home=unpinned)
    assert largest_difference(answer.logits, stock(TINY, 20, 20)) == 0.0
    assert made.natives[-1].root[at.PICKED] == 0
    assert answer.counters.decode.ahead_bytes == 0 < answer.counters.decode.uploaded_bytes


def test_a_decode_that_is_interrupted_leaves_an_empty_context() -> None:
    """llama.cpp has its tokens already: those of the next decode would not fit behind what the context knows."""

    class Interrupting:
        def ask(self, _tensor: Tensor) -> bool:
            if is_armed:
                is_armed.clear()
                signal.raise_signal(signal.SIGINT)
            return False

        def seen(self, _tensor: Tensor) -> None:
            raise AssertionError

    is_armed: list[bool] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs this may ignore it
    try:
        with Engine.open().load(TINY) as model, model.context(SIZES, Interrupting()) as context:
            context.decode([1, 2, 3])
            is_armed.append(True)
            with pytest.raises(KeyboardInterrupt):
                context.decode([4])
            assert context.n_past == 0
            context.decode([1, 2, 3])
            first = context.logits.copy()
            context.clear()
            context.decode([1, 2, 3])
            assert np.array_equal(context.logits, first)
    finally:
        signal.signal(signal.SIGINT, before)
