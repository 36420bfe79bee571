"""Which tensors are routed experts: the rules, layer by layer, and the names that only look like it."""

from __future__ import annotations

from pathlib import Path

import pytest

import synth
from bel.formats.experts import ExpertLayer, find_experts, warnings
from bel.formats.gguf_model import GgufModel, open_model
from bel.repack.convert import convert
from bel.repack.layout import plan_layout
from refused import refusal
from synth import ARRAY, F32, I32, STRING, U32, Gguf, Tensor, expert_stacks, key

ARCH = key("general.architecture", STRING, "x")
Q4_0, Q6_K, BF16, UNKNOWN = 2, 14, 30, 153


def arch(*entries: bytes) -> list[bytes]:
    return [ARCH, *entries]


def opened(tmp_path: Path, tensors: list[Tensor], entries: list[bytes] | None = None) -> GgufModel:
    model = Gguf(arch() if entries is None else entries, tensors)
    return open_model(model.write(tmp_path / "m.gguf"))


def found(tmp_path: Path, tensors: list[Tensor], entries: list[bytes] | None = None) -> tuple[ExpertLayer, ...]:
    return find_experts(opened(tmp_path, tensors, entries))


def cause(tmp_path: Path, tensors: list[Tensor], entries: list[bytes] | None = None) -> str:
    model = opened(tmp_path, tensors, entries)
    error = refusal(lambda: find_experts(model))
    assert error.path == str(tmp_path / "m.gguf")
    assert error.exit_code == 3
    return str(error).removeprefix(f"{error.path}: ")


def stack(role: str, ne: tuple[int, ...] = (32, 64, 4), type_id: int = synth.Q8_0, layer: int = 0) -> Tensor:
    return Tensor(f"blk.{layer}.ffn_{role}_exps.weight", ne, type_id)


def test_gate_up_and_down(tmp_path: Path) -> None:
    layers = found(tmp_path, synth.moe_tensors(), synth.moe_entries())
    assert [(x.layer, x.n_expert, x.n_used, x.is_mtp) for x in layers] == [(0, 4, 2, False), (1, 4, 2, False)]
    assert [(p.role, p.tensor, p.slice_bytes) for p in layers[1].parts] == [
        ("gate", 8, 2176),
        ("up", 9, 2176),
        ("down", 10, 2176),
    ]


def test_fused_gate_up(tmp_path: Path) -> None:
    (layer,) = found(tmp_path, [stack("down", (64, 32, 4)), stack("gate_up", (32, 128, 4))])
    assert [(p.role, p.tensor, p.slice_bytes) for p in layer.parts] == [("gate_up", 1, 4352), ("down", 0, 2176)]


def test_no_gate(tmp_path: Path) -> None:
    (layer,) = found(tmp_path, [stack("down", (64, 32, 4)), stack("up")])
    assert [p.role for p in layer.parts] == ["up", "down"]


@pytest.mark.parametrize("ne", [(32, 64), (32, 64, 1), (32, 64, 1, 1)])
def test_one_expert(ne: tuple[int, ...], tmp_path: Path) -> None:
    """Writers drop a trailing 1."""
    (layer,) = found(tmp_path, [stack("up", ne), stack("down", (64, 32))])
    assert (layer.n_expert, [p.slice_bytes for p in layer.parts]) == (1, [2176, 2176])


def test_four_dimensions_with_a_last_one(tmp_path: Path) -> None:
    (layer,) = found(tmp_path, [stack("up", (32, 64, 4, 1)), stack("down", (64, 32, 4))])
    assert layer.n_expert == 4


@pytest.mark.parametrize("ne", [(2048,), (), (32, 8, 4, 2), (32, 0, 4), (0, 64, 4), (32, 64, 0)])
def test_a_stack_of_another_shape(ne: tuple[int, ...], tmp_path: Path) -> None:
    up = Tensor("blk.0.ffn_up_exps.weight", ne, F32)
    text = cause(tmp_path, [up, stack("down", (64, 32, 4))])
    assert text == f"tensor {up.name}: a stack of experts must have three dimensions; found {list(ne)}"


def test_counts_differ_by_layer_and_layers_have_gaps(tmp_path: Path) -> None:
    """Leading dense, interleaved, pruned."""
    tensors = [Tensor("blk.0.ffn_up.weight", (32, 64)), *expert_stacks(1, 8), *expert_stacks(3, 5), *expert_stacks(12, 1)]
    layers = found(tmp_path, tensors, arch(key("x.expert_count", U32, 8)))
    assert [(x.layer, x.n_expert, x.n_used) for x in layers] == [(1, 8, None), (3, 5, None), (12, 1, None)]


def test_layers_come_by_number_not_by_place(tmp_path: Path) -> None:
    tensors = [*expert_stacks(10, 2), *expert_stacks(9, 2), *reversed(expert_stacks(2, 2))]
    layers = found(tmp_path, tensors)
    assert [x.layer for x in layers] == [2, 9, 10]
    assert [p.tensor for p in layers[0].parts] == [8, 7, 6]


def test_types_differ_by_layer_and_part(tmp_path: Path) -> None:
    tensors = [
        stack("gate", (256, 4, 3), Q4_0),
        stack("up", (256, 4, 3), BF16),
        stack("down", (256, 4, 3), Q6_K),
        stack("up", (32, 1, 3), F32, layer=1),
        stack("down", (64, 1, 3), layer=1),
    ]
    layers = found(tmp_path, tensors)
    assert [[p.slice_bytes for p in x.parts] for x in layers] == [[576, 2048, 840], [128, 68]]


DENSE_NAMES = [
    "blk.0.ffn_norm_exps.weight",
    "blk.0.ffn_gate_shexp.weight",
    "blk.0.ffn_up_shexp.weight",
    "blk.0.ffn_down_shexp.weight",
    "blk.0.exp_probs_b",
    "blk.0.exp_probs_b.bias",
    "blk.0.ffn_gate_inp.weight",
    "blk.0.ffn_gate_inp_shexp.weight",
    "blk.0.ffn_gate_tid2eid.weight",
    "blk.0.ffn_gate_chexps.weight",
    "blk.0.ffn_up_chexps.weight",
    "blk.0.ffn_down_chexps.weight",
    "v.blk.0.ffn_up_exps.weight",
    "v.blk.0.ffn_down_exps.weight",
    "blk.0.ffn_gate_exps.bias",
    "blk.0.ffn_down_exps.scale",
    "blk.0.ffn_up_exps.input_scale",
    "blk.0.ffn_up_exps",
    "blk.0.ffn_up_exps.weight.1",
    "Blk.0.ffn_up_exps.weight",
    "blk.-1.ffn_up_exps.weight",
    "blk..ffn_up_exps.weight",
    "blk.\u0661.ffn_up_exps.weight",  # a digit, but not an ASCII one
    " blk.0.ffn_up_exps.weight",
    "blk.0.ffn_up.weight",
]


def test_names_that_are_no_experts_stay_dense(tmp_path: Path) -> None:
    dense = [Tensor(name, (32, 64, 4)) for name in DENSE_NAMES]
    model = opened(tmp_path, [*dense, *expert_stacks(0, 4)])
    (layer,) = find_experts(model)
    assert [model.tensors[p.tensor].name for p in layer.parts] == [t.name for t in expert_stacks(0, 4)]
    layout = plan_layout(model, "m", ple="auto", shard_bytes=2**63)
    assert [t.name for t in layout.dense.tensors] == DENSE_NAMES


def test_names_that_are_no_experts_make_no_moe_model(tmp_path: Path) -> None:
    text = cause(tmp_path, [Tensor(name, (32, 64, 4)) for name in DENSE_NAMES])
    assert text == "no expert tensors (blk.N.ffn_*_exps.weight) of architecture x: a dense model, nothing to repack"


@pytest.mark.parametrize("name", ["blk.0.ffn_up_exps.weight\n", "blk.00.ffn_up_exps.weight"])
def test_a_second_spelling_of_a_stack(name: str, tmp_path: Path) -> None:
    """llama.cpp asks for `blk.0.ffn_up_exps.weight` alone; the other must not take its place in the blobs."""
    model = opened(tmp_path, [*expert_stacks(0, 4), Tensor(name, (32, 64, 4))])
    (layer,) = find_experts(model)
    assert [p.tensor for p in layer.parts] == [0, 1, 2]


@pytest.mark.parametrize(
    ("roles", "wrong"),
    [
        (["up"], "missing blk.7.ffn_down_exps.weight"),
        (["down"], "missing blk.7.ffn_up_exps.weight"),
        (["gate"], "missing blk.7.ffn_down_exps.weight, blk.7.ffn_up_exps.weight"),
        (["gate", "up"], "missing blk.7.ffn_down_exps.weight"),
        (["gate", "down"], "missing blk.7.ffn_up_exps.weight"),
        (["gate_up"], "missing blk.7.ffn_down_exps.weight"),
        (["gate_up", "up", "down"], "blk.7.ffn_gate_up_exps.weight stands beside ffn_gate_exps or ffn_up_exps"),
        (["gate_up", "gate", "down"], "blk.7.ffn_gate_up_exps.weight stands beside ffn_gate_exps or ffn_up_exps"),
    ],
)
def test_an_incomplete_layer(roles: list[str], wrong: str, tmp_path: Path) -> None:
    text = cause(tmp_path, [*expert_stacks(0, 2), *(stack(role, layer=7) for role in roles)])
    have = ", ".join(sorted(f"blk.7.ffn_{role}_exps.weight" for role in roles))
    assert text == (
        f"the experts of layer blk.7 are incomplete: {wrong}; found {have}, "
        "expected up and down (gate optional), or gate_up and down"
    )


def test_stacks_that_disagree(tmp_path: Path) -> None:
    text = cause(tmp_path, [stack("up"), stack("down", (64, 32, 5))])
    assert text == (
        "the stacks of layer blk.0 disagree on the number of experts: blk.0.ffn_up_exps.weight has 4, "
        "blk.0.ffn_down_exps.weight has 5"
    )


def test_the_old_mixtral_layout(tmp_path: Path) -> None:
    text = cause(tmp_path, [Tensor(f"blk.0.ffn_{r}.{e}.weight", (32, 64)) for e in range(2) for r in ("gate", "up", "down")])
    assert text == (
        "tensor blk.0.ffn_gate.0.weight: the experts are in the old per-expert layout of early Mixtral files (one tensor for "
        "each expert), which is unsupported: current llama.cpp does not load it either. Convert the original model again with "
        "a current llama.cpp"
    )


def test_a_dense_model(tmp_path: Path) -> None:
    text = cause(tmp_path, [Tensor("blk.0.ffn_up.weight", (32, 64))], arch(key("x.expert_count", U32, 8)))
    assert text == "no expert tensors (blk.N.ffn_*_exps.weight) of architecture x: a dense model, nothing to repack"


def test_the_dense_file_of_a_bundle(tmp_path: Path) -> None:
    source = open_model(synth.moe().write(tmp_path / "m.gguf"))
    layout = plan_layout(source, "m", ple="auto", shard_bytes=2**63)
    convert(source, layout, tmp_path / "m.bel", force=False, check=False, progress=lambda *_: None)
    dense = tmp_path / "m.bel" / "m-dense.gguf"
    error = refusal(lambda: find_experts(open_model(dense)))
    assert error.path == str(dense)
    assert error.cause == (
        "this is the dense file of a bundle: it is already repacked, and its experts are in the bundle's experts file"
    )


def unknown(size: int, ne: tuple[int, ...] = (32, 64, 4), role: str = "up") -> Tensor:
    return Tensor(f"blk.0.ffn_{role}_exps.weight", ne, UNKNOWN, bytes(range(256)) * (size // 256) + bytes(size % 256))


def test_an_unknown_type_whose_region_divides(tmp_path: Path) -> None:
    (layer,) = found(tmp_path, [unknown(4 * 96), stack("down", (64, 32, 4))])
    assert [p.slice_bytes for p in layer.parts] == [96, 2176]
    (layer,) = found(tmp_path, [stack("down", (64, 32, 4)), unknown(4 * 96)])
    assert [p.slice_bytes for p in layer.parts] == [96, 2176]


@pytest.mark.parametrize("last", [False, True])
def test_an_unknown_type_whose_region_does_not_divide(last: bool, tmp_path: Path) -> None:
    tensors = [unknown(160, (32, 64, 3)), stack("down", (64, 32, 3))]
    text = cause(tmp_path, tensors[::-1] if last else tensors)
    assert text == (
        "tensor blk.0.ffn_up_exps.weight: the tensor has type 153 (id 153), whose block size is not known, and its region of "
        "160 bytes does not divide by the 3 experts"
    )


def test_an_unknown_type_with_no_bytes_at_all(tmp_path: Path) -> None:
    assert "its region of 0 bytes does not divide" in cause(tmp_path, [unknown(0), stack("down", (64, 32, 4))])


def test_an_unknown_type_in_last_place_before_a_tail(tmp_path: Path) -> None:
    model = Gguf(arch(), [stack("down", (64, 32, 4)), unknown(4 * 96)], tail=b"tail!")
    path = model.write(tmp_path / "m.gguf")
    assert "its region of 389 bytes does not divide by the 4 experts" in refusal(lambda: find_experts(open_model(path))).cause


def used(value: object, type_id: int = U32) -> list[bytes]:
    return arch(key("x.expert_used_count", type_id, value))


@pytest.mark.parametrize("type_id", [0, 1, 2, 3, 4, 5, 10, 11])
def test_top_k_of_any_integer_type(type_id: int, tmp_path: Path) -> None:
    layers = found(tmp_path, [*expert_stacks(0, 4), *expert_stacks(2, 3)], used(3, type_id))
    assert [x.n_used for x in layers] == [3, 3]


def test_top_k_by_layer(tmp_path: Path) -> None:
    layers = found(tmp_path, [*expert_stacks(1, 4), *expert_stacks(2, 3)], used((I32, [0, 4, 1, 9]), ARRAY))
    assert [x.n_used for x in layers] == [4, 1]


@pytest.mark.parametrize(
    ("value", "type_id", "layer", "top", "most"),
    [
        (5, U32, 0, 5, 4),
        (4, U32, 1, 4, 3),
        (0, U32, 0, 0, 4),
        (-1, I32, 0, -1, 4),
        (2**64 - 1, synth.U64, 0, 2**64 - 1, 4),
        ((U32, [2, 0]), ARRAY, 1, 0, 3),
        ((U32, [2, 4]), ARRAY, 1, 4, 3),
    ],
)
def test_top_k_that_does_not_fit(value: object, type_id: int, layer: int, top: int, most: int, tmp_path: Path) -> None:
    text = cause(tmp_path, [*expert_stacks(0, 4), *expert_stacks(1, 3)], used(value, type_id))
    assert text == (
        f"x.expert_used_count does not fit layer blk.{layer}; found top-{top}, "
        f"expected 1 to {most}, the experts that the layer has"
    )


def test_top_k_array_that_is_too_short(tmp_path: Path) -> None:
    text = cause(tmp_path, [*expert_stacks(0, 4), *expert_stacks(2, 4)], used((U32, [2, 2]), ARRAY))
    assert text == "x.expert_used_count is an array that does not reach every layer; found 2 entries, expected 3"


@pytest.mark.parametrize(
    ("value", "type_id"),
    [("2", STRING), (2.0, 6), (1, synth.BOOL), ((6, [2.0]), ARRAY), ((STRING, ["2"]), ARRAY), ((synth.BOOL, [1]), ARRAY)],
)
def test_top_k_that_is_no_integer(value: object, type_id: int, tmp_path: Path) -> None:
    text = cause(tmp_path, expert_stacks(0, 4), used(value, type_id))
    assert text == "x.expert_used_count is neither an integer nor an array of integers"


def mtp(blocks: int, nextn: int) -> list[bytes]:
    return arch(
        key("x.block_count", U32, blocks), key("x.nextn_predict_layers", U32, nextn), key("x.expert_used_count", U32, 1)
    )


def test_mtp_blocks(tmp_path: Path) -> None:
    model = opened(tmp_path, [*expert_stacks(0, 2), *expert_stacks(1, 2), *expert_stacks(2, 2)], mtp(3, 2))
    layers = find_experts(model)
    assert [x.is_mtp for x in layers] == [False, True, True]
    assert warnings(model, layers) == []


@pytest.mark.parametrize("entries", [arch(), arch(key("x.block_count", U32, 2)), mtp(2, 3)])
def test_no_mtp_without_sound_counts(entries: list[bytes], tmp_path: Path) -> None:
    assert [x.is_mtp for x in found(tmp_path, [*expert_stacks(0, 2), *expert_stacks(1, 2)], entries)] == [False, False]


def test_warnings(tmp_path: Path) -> None:
    quiet = opened(tmp_path, synth.moe_tensors(), synth.moe_entries())
    assert warnings(quiet, find_experts(quiet)) == []
    tensors = [*expert_stacks(0, 4), *expert_stacks(1, 3), Tensor("odd", (1,), UNKNOWN, b"1234")]
    entries = arch(key("x.expert_count", U32, 8), key("x.block_count", U32, 4), key("x.nextn_predict_layers", U32, 2))
    model = opened(tmp_path, tensors, entries)
    assert warnings(model, find_experts(model)) == [
        "x.expert_count is 8, but the layers hold 3, 4 experts",
        "the header has no x.expert_used_count: bytes per token cannot be told",
        "nextn_predict_layers declares 2 MTP block(s) inside block_count 4, but blk.2, blk.3 has no tensors: a trunk-only file",
        "tensor odd has type 153, which is not in the type table: its size is taken from the next offset, and only a llama.cpp "
        "that knows the type loads it",
    ]
    nameless = opened(tmp_path, expert_stacks(0, 4), [])
    assert warnings(nameless, find_experts(nameless))[0] == (
        "the header has no general.architecture: llama.cpp will not load this model"
    )


@pytest.mark.parametrize("entry", [b"", key("general.architecture", U32, 7)])
def test_a_model_without_an_architecture(entry: bytes, tmp_path: Path) -> None:
    model = opened(tmp_path, expert_stacks(0, 4), [entry] if entry else [])
    assert model.arch is None
    assert find_experts(model)[0].n_expert == 4


def test_stacks_in_different_shards(tmp_path: Path) -> None:
    model = Gguf(arch(), expert_stacks(0, 4))
    for name, shard in synth.split(model, [1, 1, 1]).items():
        shard.write(tmp_path / name)
    whole = open_model(tmp_path / "model-00003-of-00003.gguf")
    (layer,) = find_experts(whole)
    assert [whole.tensors[p.tensor].source for p in layer.parts] == [0, 1, 2]


def test_an_enormous_layer_number_costs_nothing(tmp_path: Path) -> None:
    (layer,) = found(tmp_path, expert_stacks(999_999, 2), used(1))
    assert (layer.layer, layer.n_used) == (999_999, 1)
