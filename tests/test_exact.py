"""A bundle computes what its source computes in stock llama.cpp, to the last bit, whatever is resident; and a check that could
not fail would show nothing, so it is shown to fail."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archs
import synth
from arch_parts import Keys, Shape, Weights, named
from bel.formats.bundle import open_bundle
from bel.formats.errors import BadInputError, DamagedBundleError, MachineError
from bel.formats.gguf_model import open_model
from bel.profiler.record_worker import trace_layers
from bel.profiler.router import RouterObserver
from bel.runtime.bundle_model import SlotOptions, open_run
from bel.runtime.check import CheckPrompt, check_source
from bel.runtime.context import ContextOptions
from bel.runtime.engine import Engine
from bel.runtime.expert_cache import ExpertCache
from bel.runtime.pager import FIRST, REST, Load, Pager
from bel.runtime.policies import parse_policy
from exactness import Checked, checked, random_prompt, repack

EXAMPLES = Path(__file__).parent.parent / "examples"
TINY = EXAMPLES / "tiny-moe-q8_0.gguf"
LAYERS, EXPERTS, TOP_K = 6, 32, 4  # of the tiny model
CODE = CheckPrompt("code_07", (EXAMPLES / "prompts" / "code" / "code_07.txt").read_text(encoding="utf-8"))
CHAT = CheckPrompt("chat_03", (EXAMPLES / "prompts" / "chat" / "chat_03.txt").read_text(encoding="utf-8"))
WORD = CheckPrompt("word", "def")
POLICIES = ("static", "lru", "lfu-ghost", "lfu-decay:0.98", "repick:5")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of the trained example model."""
    return repack(TINY, tmp_path_factory.mktemp("tiny") / "tiny.bel")


# --- every policy, budget and reader on a trained router ------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [EXPERTS, EXPERTS // 2, EXPERTS // 4, TOP_K])
def test_every_policy_at_every_budget(policy: str, slots: int, tiny: Path) -> None:
    """All, half, a quarter of the experts and the floor of one token's: prompts of one token and of many."""
    answer = checked(TINY, tiny, [WORD, CODE], policy, slots=slots)
    answer.assert_exact()
    found, n_prompt = answer.found, answer.found.n_router_records // LAYERS - 16
    assert found.n_tokens == 16
    assert n_prompt > 100, "every token of the prompts was compared, and both prompts' eight"
    assert found.n_router_records % LAYERS == 0
    assert found.n_logits == (n_prompt + 16) * 4096
    if slots < EXPERTS:
        assert answer.phases[1].missed > 0, "experts were swapped while the tokens were compared"


@pytest.mark.parametrize("reader", ["threads", "buffered", "auto"])
@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 20])
def test_every_reader(reader: str, prefetch_bytes: int, tiny: Path) -> None:
    """The bytes are the same by whatever way they come, read ahead or not."""
    answer = checked(TINY, tiny, [CHAT, WORD], slots=TOP_K, reader=reader, prefetch_bytes=prefetch_bytes)
    answer.assert_exact()
    assert reader in (answer.reader, "auto")
    assert (answer.phases[0].prefetched_hits > 0) == (prefetch_bytes > 0)


def test_without_checksums(tiny: Path) -> None:
    """Checking changes no byte."""
    checked(TINY, tiny, [WORD], slots=TOP_K, checks=False).assert_exact()


@pytest.mark.parametrize("n_batch", [48, 512])
@pytest.mark.parametrize("policy", ["lru", "lfu-decay:0.98"])
def test_several_graphs(n_batch: int, policy: str, tiny: Path) -> None:
    """A prompt in ubatches of 24, as decodes of one graph or of many: the last ubatch is a short one."""
    answer = checked(TINY, tiny, [CODE, CHAT], policy, slots=TOP_K, options={"n_batch": n_batch, "n_ubatch": 24})
    answer.assert_exact()
    assert answer.phases[0].calls > 2 * LAYERS * 5, "each ubatch is a call of each layer"


@pytest.mark.parametrize("n_ubatch", [24, 512])
def test_as_a_generation_runs(n_ubatch: int, tiny: Path) -> None:
    """Without logits for the whole prompt the last layer computes, and serves, the last token alone."""
    options = {"all_logits": False, "n_ubatch": n_ubatch}
    answer = checked(TINY, tiny, [CODE, WORD], slots=TOP_K, options=options)
    answer.assert_exact()
    assert answer.found.n_logits == 2 * 9 * 4096


def test_more_threads(tiny: Path) -> None:
    """Two threads share the rows of a product, in the bundle as in stock."""
    checked(TINY, tiny, [WORD], slots=TOP_K, options={"n_threads": 2, "n_predict": 4}).assert_exact()


def test_slots_that_differ_by_layer(tiny: Path) -> None:
    """As a plan gives them, with experts loaded before the first token."""
    slots = {layer: TOP_K + 5 * layer % 29 for layer in range(LAYERS)}
    wanted = {layer: range(EXPERTS - 1, -1, -1) for layer in range(LAYERS)}
    answer = checked(TINY, tiny, [CHAT], "lfu-decay:0.98", slots_by_layer=slots, wanted=wanted)
    answer.assert_exact()
    assert answer.loads


def test_a_recorder_sees_the_same(tiny: Path) -> None:
    """The recorder's observer inside a run from slots reads the ids and weights that it reads in stock llama.cpp."""
    layers, tokens = trace_layers(open_model(TINY)), np.arange(60, 100)
    sizes = ContextOptions(64, 64, 64, 1)
    calls = []
    for _ in range(2):
        observer = RouterObserver("qwen3moe", layers, weights=True)
        if not calls:
            with Engine.open().load(TINY) as model, model.context(sizes, observer) as context:
                context.decode(tokens, all_logits=True)
                calls.append(observer.take(len(tokens)))
        else:
            slots = SlotOptions(parse_policy("lru"), slots=TOP_K)
            with open_run(Engine.open(), open_bundle(tiny), sizes, slots, observer) as run:
                run.context.decode(tokens, all_logits=True)
                calls.append(observer.take(len(tokens)))
    assert len(calls[0]) == len(calls[1]) == LAYERS
    for stock, ours in zip(*calls, strict=True):
        assert stock.weights is not None and ours.weights is not None
        assert np.array_equal(stock.ids, ours.ids)
        assert np.array_equal(stock.weights.view(np.uint16), ours.weights.view(np.uint16))


# --- architectures, types, layouts ----------------------------------------------------------------------------------


def check_model(source: Path, bundle: Path, n_used: int, n_expert: int, lengths: Sequence[int] = (40,)) -> list[Checked]:
    """At the floor and with half of the experts."""
    prompts = [random_prompt(n, archs.N_VOCAB, seed=n) for n in lengths]
    answers = []
    for policy, slots in (("lru", n_used), ("lfu-decay:0.98", n_expert // 2)):
        answer = checked(source, bundle, prompts, policy, slots=slots)
        answer.assert_exact()
        assert answer.found.n_tokens == 8 * len(lengths)
        assert answer.loads, "nothing was resident at first"
        answers.append(answer)
    return answers


@pytest.mark.parametrize("arch", archs.ARCHS)
def test_architectures(arch: str, tmp_path: Path) -> None:
    """With biases, shared experts, no gate, gate and up merged, dense and MTP blocks, two calls a layer, hashed choices."""
    kind = archs.ARCHS[arch]
    source = archs.make_model(arch, tmp_path / "model.gguf")
    answers = check_model(source, repack(source, tmp_path / "model.bel"), kind.shape.n_used, kind.shape.n_expert)
    records = len(kind.moe_layers(kind.shape)) * kind.calls * 48
    assert [answer.found.n_router_records for answer in answers] == [records, records]


QUANTS = (
    "f16",
    "bf16",
    "q4_0",
    "q4_1",
    "q5_0",
    "q8_0",
    "mxfp4",
    "iq4_nl",
    "iq4_xs",
    "iq3_s",
    "q2_k",
    "q3_k",
    "q4_k",
    "q5_k",
    "q6_k",
)


@pytest.mark.parametrize("quant", QUANTS)
def test_types(quant: str, tmp_path: Path) -> None:
    """K-quants and IQ types take other kernels from 8 rows of an expert on: a prompt of 300 tokens has 75, one of 12 has 3,
    and a decode has one.  No ubatch is split, so the kernels are stock's."""
    source = archs.make_model("qwen3moe", tmp_path / "model.gguf", quant=quant, n_embd=256, n_ff_exp=256, n_layer=2)
    check_model(source, repack(source, tmp_path / "model.bel"), 2, 8, (1, 12, 300))


def test_split_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's stacks lie in several files of the source, and the bundle does not care."""

    class Split(synth.Gguf):
        def write(self, path: Path) -> Path:
            third = len(self.tensors) // 3
            files = synth.split(self, [third, third, len(self.tensors) - 2 * third])
            return next(iter([part.write(path.with_name(name)) for name, part in files.items()]))

    monkeypatch.setattr(archs, "Gguf", Split)
    source = archs.make_model("qwen3moe", tmp_path / "model.gguf")
    assert len(open_model(source).files) == 3
    check_model(source, repack(source, tmp_path / "model.bel"), 2, 8)


def variant(
    monkeypatch: pytest.MonkeyPatch, arch: str, *, keys: Keys, block: Callable[[int, Shape], Weights], ends: Weights
) -> None:
    """Give an architecture more keys and tensors."""
    kind = archs.ARCHS[arch]
    changed = dataclasses.replace(
        kind,
        keys=lambda s: kind.keys(s) | keys,
        block=lambda i, s: kind.block(i, s) + block(i, s),
        ends=lambda s: kind.ends(s) + ends,
    )
    monkeypatch.setitem(archs.ARCHS, arch, changed)


def test_a_shard_of_per_layer_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is a file of its own in the bundle, of which llama.cpp reads rows."""
    n, width, layers = 64, 32, 3
    variant(
        monkeypatch,
        "gemma4",
        keys={"embedding_length_per_layer_input": width},
        block=lambda i, _s: named(i, inp_gate=(n, width), proj=(width, n), post_norm=(n,)),
        ends=[
            ("per_layer_token_embd.weight", (width * layers, archs.N_VOCAB)),
            ("per_layer_model_proj.weight", (n, width * layers)),
            ("per_layer_proj_norm.weight", (width,)),
        ],
    )
    source = archs.make_model("gemma4", tmp_path / "model.gguf")
    bundle = repack(source, tmp_path / "model.bel", "--ple", "split")
    assert open_bundle(bundle).manifest.ple is not None
    check_model(source, bundle, 2, 8)


def test_top_k_that_differs_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`expert_used_count` may be an array; so the floor is a layer's own."""
    used = [1, 1, 1, 1, 1, 4]  # of which layers 2 and 5 have experts
    variant(monkeypatch, "nemotron_h_moe", keys={"expert_used_count": used}, block=lambda _i, _s: [], ends=[])
    source = archs.make_model("nemotron_h_moe", tmp_path / "model.gguf")
    bundle = repack(source, tmp_path / "model.bel")
    assert [layer.n_used for layer in open_bundle(bundle).manifest.layers] == [1, 4]
    check_model(source, bundle, 4, 8)
    checked(source, bundle, [random_prompt(40, archs.N_VOCAB)], slots_by_layer={2: 1, 5: 4}).assert_exact()


def test_types_that_differ_by_layer_and_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `llama-quantize` mixes them: blobs of different sizes, whose pages are not to be mixed up."""
    mixed = {"blk.0.ffn_down": "q8_0", "blk.1.ffn_gate": "f16", "blk.2.ffn_up": "f32"}
    make = archs._tensor

    def tensor(name: str, ne: tuple[int, ...], seed: int, expert_type: int, s: Shape) -> synth.Tensor:
        kind = next((q for prefix, q in mixed.items() if name.startswith(f"{prefix}_exps")), None)
        return make(name, ne, seed, expert_type if kind is None else archs.type_id(kind), s)

    monkeypatch.setattr(archs, "_tensor", tensor)
    source = archs.make_model("qwen3moe", tmp_path / "model.gguf", quant="q4_0")
    bundle = repack(source, tmp_path / "model.bel")
    assert len({layer.stride_bytes for layer in open_bundle(bundle).manifest.layers}) > 1
    check_model(source, bundle, 2, 8)


# --- the check can fail ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 40, 300])
def test_a_load_that_is_skipped_is_found(number: int, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One expert of thousands was never read: its place holds zeros, or another one's bytes."""
    start, count = Pager.start, 0

    def skipping(self: Pager, loads: Sequence[Load], half: int) -> int:
        nonlocal count
        before, count = count, count + len(loads)
        return start(self, [x for i, x in enumerate(loads, before + 1) if i != number], half)

    monkeypatch.setattr(Pager, "start", skipping)
    answer = checked(TINY, tiny, [WORD, CHAT], slots=TOP_K, checks=False, prefetch_bytes=0)
    assert_wrong(answer)
    assert count > 300


def test_a_load_that_comes_late_is_found(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that says that an expert is resident when it is not."""
    serve, calls = ExpertCache.serve, 0

    def forgetting(self: ExpertCache, place: int, ids: Any, **how: Any) -> None:
        nonlocal calls
        calls += 1
        if calls != 2 * LAYERS + 3:
            serve(self, place, ids, **how)

    monkeypatch.setattr(ExpertCache, "serve", forgetting)
    answer = checked(TINY, tiny, [random_prompt(1, 4096)], slots=TOP_K)
    assert_wrong(answer)
    first = answer.found.first
    assert first is not None
    assert first.position == 2
    assert first.layer is None or first.layer > 2, "not before a layer that computes with what was missing"


def test_bytes_of_another_expert_are_found(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksums find them first; without those the comparison does."""
    read = Pager._read

    def wrong(self: Pager, load: Load, half: int) -> Any:
        other = (load.expert + 1) % EXPERTS
        return read(self, dataclasses.replace(load, expert=other) if (load.place, load.expert) == (4, 9) else load, half)

    monkeypatch.setattr(Pager, "_read", wrong)
    assert_wrong(checked(TINY, tiny, [CHAT], slots=EXPERTS, checks=False))
    with pytest.raises(DamagedBundleError, match="expert 9 of layer 4"):
        checked(TINY, tiny, [CHAT], slots=EXPERTS)


@pytest.mark.parametrize("half", [FIRST, REST])
def test_after_a_failed_read_nothing_is_computed(half: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy has taken the expert for resident, and its bytes never came: a second try must not use what is there."""
    source = archs.make_model("qwen3moe", tmp_path / "model.gguf", n_embd=256, n_ff_exp=256)  # a down part worth a read
    bundle = repack(source, tmp_path / "model.bel")
    start, finish, lost = Pager.start, Pager.finish, []

    def losing(self: Pager, loads: Sequence[Load], which: int) -> int:
        is_lost = which == half and loads[0].place == 1 and not lost
        tag = start(self, loads[is_lost:], which)
        lost.extend([tag] * is_lost)
        return tag

    def failing(self: Pager, tag: int) -> None:
        finish(self, tag)
        if tag in lost:
            raise OSError(errno.EIO, "Input/output error", "experts.bin")

    monkeypatch.setattr(Pager, "start", losing)
    monkeypatch.setattr(Pager, "finish", failing)
    slots = SlotOptions(parse_policy("lru"), slots=8, checks=False)
    with open_run(Engine.open(), open_bundle(bundle), ContextOptions(64, 64, 64, 1), slots) as run:
        with pytest.raises(OSError, match="Input/output error"):
            run.context.decode([1])
        for _ in range(2):
            with pytest.raises(MachineError, match=r"cannot be trusted\. Load the bundle anew"):
                run.context.decode([1])


def assert_wrong(answer: Checked) -> None:
    """A difference was found, and everything behind it was compared all the same."""
    assert answer.found.first is not None
    assert answer.found.max_logit > 0
    assert answer.found.n_tokens % 8 == 0
    assert answer.found.n_tokens > 0


def test_a_model_without_numbers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of NaN would be equal, and mean nothing."""
    values = archs._values
    monkeypatch.setattr(
        archs, "_values", lambda name, ne, r: values(name, ne, r) * (np.nan if name == "output_norm.weight" else 1)
    )
    source = archs.make_model("qwen3moe", tmp_path / "model.gguf")
    with pytest.raises(BadInputError, match="own logits are not numbers"):
        checked(source, repack(source, tmp_path / "model.bel"), [random_prompt(4, archs.N_VOCAB)], slots=2)


# --- which source ---------------------------------------------------------------------------------------------------


def test_another_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    """One of the same architecture; and one of the same shape and size, trained otherwise."""
    other = archs.make_model("qwen3moe", tmp_path / "model.gguf")
    with pytest.raises(BadInputError, match=r"not the model that the bundle was made from.*tiny-moe-q8_0\.gguf"):
        check_source(open_bundle(tiny), open_model(other))
    bundle = open_bundle(repack(other, tmp_path / "model.bel"))
    check_source(bundle, open_model(other))
    twin = archs.make_model("qwen3moe", tmp_path / "twin.gguf", seed=1)
    assert twin.stat().st_size == other.stat().st_size
    with pytest.raises(BadInputError, match="not the model that the bundle was made from"):
        check_source(bundle, open_model(twin))


@pytest.mark.parametrize("tensor", ["output_norm.weight", "blk.1.ffn_up_exps.weight"])
def test_a_damaged_bundle_is_no_other_model(tensor: str, tmp_path: Path) -> None:
    """A bit that flipped in the first page of a tensor changes the fingerprint; the source tells which of the two it is."""
    source = archs.make_model("qwen3moe", tmp_path / "model.gguf")
    bundle = open_bundle(repack(source, tmp_path / "model.bel"))
    manifest = bundle.manifest
    number = [row.name for row in manifest.tensors].index(tensor)
    if "exps" in tensor:
        layer = manifest.layers[1]
        part = next(part for part in layer.parts if part.tensor == number)
        path, offset = bundle.path(manifest.experts[layer.shard].name), layer.part_offset(0, part)
    else:
        path, offset = bundle.path(manifest.dense.name), manifest.tensors[number].dest_offset_bytes
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedBundleError, match="its weights are not the model's any more"):
        check_source(bundle, open_model(source))
