"""Which tensors are routed experts, and where each expert's slice lies.

Decided per layer by tensor name and shape, never from the metadata's counts, which may be arrays, stale or absent.
Source of the names: llama.cpp src/llama-arch.cpp (LLM_TENSOR_NAMES).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bel.formats.errors import BadInputError
from bel.formats.ggml_types import type_name
from bel.formats.gguf_model import GgufModel, SourceTensor

_STACK = re.compile(r"^blk\.(0|[1-9]\d{0,5})\.ffn_(gate|up|down|gate_up)_exps\.weight\Z", re.ASCII)
_OLD_EXPERT = re.compile(r"^blk\.\d+\.ffn_(?:gate|up|down)\.\d+\.weight\Z", re.ASCII)
_LIKE_EXPERTS = re.compile(r"(^|[._])exps(\.|$)")
ROLES = ("gate", "up", "gate_up", "down")
"""The parts of a blob, in the order in which they stand in it."""
_COMPLETE = ({"up", "down"}, {"gate", "up", "down"}, {"gate_up", "down"})


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One projection of a layer's experts: `tensor` is its index in the model's tensor table."""

    role: str
    tensor: int
    slice_bytes: int


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The routed experts of one block.  `n_used` (top-k) is None where the metadata do not give it.

    `is_mtp`: a multi-token-prediction block behind the trunk, which normal decoding never reaches.
    """

    layer: int
    n_expert: int
    n_used: int | None
    is_mtp: bool
    parts: tuple[ExpertPart, ...]


def find_experts(model: GgufModel) -> tuple[ExpertLayer, ...]:
    """The MoE layers of a model, by block number.

    Raises BadInputError where a layer is incomplete or contradicts itself, where the experts have the old one-tensor-an-expert
    names, and where there are none at all.
    """
    stacks: dict[int, dict[str, int]] = {}
    for index, tensor in enumerate(model.tensors):
        match = _STACK.match(tensor.name)
        if match:
            stacks.setdefault(int(match[1]), {})[match[2]] = index
        elif _OLD_EXPERT.match(tensor.name):
            raise BadInputError(
                "the experts are in the old per-expert layout of early Mixtral files (one tensor for each expert), which is "
                "unsupported: current llama.cpp does not load it either",
                path=str(model.files[tensor.source].path),
                tensor=tensor.name,
                hint="Convert the original model again with a current llama.cpp",
            )
    if not stacks:
        raise _no_experts(model)
    layers = max(stacks) + 1
    used = model.arch_integers("expert_used_count", layers)
    trunk = _trunk_layers(model)
    return tuple(
        _layer(model, layer, stacks[layer], used[layer] if used else None, trunk is not None and layer >= trunk)
        for layer in sorted(stacks)
    )


def warnings(model: GgufModel, layers: tuple[ExpertLayer, ...]) -> list[str]:
    """What a user should know about a model that is taken as it is: one sentence each."""
    said = []
    if model.arch is None:
        said.append("the header has no general.architecture: llama.cpp will not load this model")
    declared = model.first.integer(f"{model.arch}.expert_count")
    real = sorted({layer.n_expert for layer in layers})
    if declared is not None and real != [declared]:
        said.append(f"{model.arch}.expert_count is {declared}, but the layers hold {', '.join(map(str, real))} experts")
    if any(layer.n_used is None for layer in layers):
        said.append(f"the header has no {model.arch or 'ARCH'}.expert_used_count: bytes per token cannot be told")
    blocks, trunk = model.first.integer(f"{model.arch}.block_count"), _trunk_layers(model)
    if blocks is not None and trunk is not None:
        have = {int(m[1]) for t in model.tensors if (m := re.match(r"^blk\.(\d{1,6})\.", t.name, re.ASCII))}
        gone = [str(b) for b in range(trunk, min(blocks, trunk + 64)) if b not in have]
        if gone:
            said.append(
                f"nextn_predict_layers declares {blocks - trunk} MTP block(s) inside block_count {blocks}, but "
                f"blk.{', blk.'.join(gone)} has no tensors: a trunk-only file"
            )
    stacks = {part.tensor for layer in layers for part in layer.parts}
    for index in (i for i, t in enumerate(model.tensors) if t.size_is_guessed):
        tensor = model.tensors[index]
        said.append(
            f"tensor {tensor.name} has {type_name(tensor.type_id)}, which is not in the type table: its size is taken from the "
            "next offset, and only a llama.cpp that knows the type loads it"
            + (
                "; where padding follows the data the experts are cut wrongly (restore is right all the same)"
                if index in stacks
                else ""
            )
        )
    for index, tensor in enumerate(model.tensors):
        if index not in stacks and len(tensor.ne) > 2 and _LIKE_EXPERTS.search(tensor.name):
            said.append(
                f"tensor {tensor.name} is named like a stack of experts but is none that llama.cpp routes: it stays dense"
            )
    return said


def _trunk_layers(model: GgufModel) -> int | None:
    """block_count less nextn_predict_layers (llama-hparams.cpp `n_layer`); None where there is no block_count."""
    blocks = model.first.integer(f"{model.arch}.block_count")
    mtp = model.first.integer(f"{model.arch}.nextn_predict_layers") or 0
    return None if blocks is None or not 0 <= mtp <= blocks else blocks - mtp


def _no_experts(model: GgufModel) -> BadInputError:
    path = str(model.first.path)
    if "bel.bundle_version" in model.first.keys:
        return BadInputError(
            "this is the dense file of a bundle: it is already repacked, and its experts are in the bundle's experts file",
            path=path,
        )
    return BadInputError(
        f"no expert tensors (blk.N.ffn_*_exps.weight) of architecture {model.arch}: a dense model, nothing to repack",
        path=path,
    )


def _layer(model: GgufModel, layer: int, found: dict[str, int], n_used: int | None, is_mtp: bool) -> ExpertLayer:
    path = str(model.files[model.tensors[next(iter(found.values()))].source].path)
    if set(found) not in _COMPLETE:
        raise BadInputError(
            f"the experts of layer blk.{layer} are incomplete: {_what_is_wrong(layer, set(found))}",
            path=path,
            found=", ".join(sorted(f"blk.{layer}.ffn_{r}_exps.weight" for r in found)),
            expected="up and down (gate optional), or gate_up and down",
        )
    counts = {role: _expert_count(model, model.tensors[index]) for role, index in found.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"blk.{layer}.ffn_{r}_exps.weight has {n}" for r, n in counts.items())
        raise BadInputError(f"the stacks of layer blk.{layer} disagree on the number of experts: {listed}", path=path)
    n_expert = next(iter(counts.values()))
    if n_used is not None and not 1 <= n_used <= n_expert:
        raise BadInputError(
            f"{model.arch}.expert_used_count does not fit layer blk.{layer}",
            path=path,
            found=f"top-{n_used}",
            expected=f"1 to {n_expert}, the experts that the layer has",
        )
    parts = tuple(ExpertPart(r, found[r], _slice_bytes(model, found[r], n_expert)) for r in ROLES if r in found)
    return ExpertLayer(layer, n_expert, n_used, is_mtp, parts)


def _what_is_wrong(layer: int, have: set[str]) -> str:
    if "gate_up" in have and have & {"gate", "up"}:
        return f"blk.{layer}.ffn_gate_up_exps.weight stands beside ffn_gate_exps or ffn_up_exps"
    missing = {"down"} - have if "gate_up" in have else {"up", "down"} - have
    return "missing " + ", ".join(f"blk.{layer}.ffn_{r}_exps.weight" for r in sorted(missing))


def _expert_count(model: GgufModel, tensor: SourceTensor) -> int:
    """ne[2]; a stack of two dimensions is one expert, since llama.cpp's writer drops a trailing 1 (`ggml_n_dims`)."""
    n_dims = len(tensor.ne)
    if n_dims < 2 or (n_dims == 4 and tensor.ne[3] != 1) or 0 in tensor.ne:
        raise BadInputError(
            "a stack of experts must have three dimensions",
            path=str(model.files[tensor.source].path),
            tensor=tensor.name,
            found=list(tensor.ne),
        )
    return tensor.ne[2] if n_dims > 2 else 1


def _slice_bytes(model: GgufModel, index: int, n_expert: int) -> int:
    tensor = model.tensors[index]
    size, rest = divmod(tensor.size_bytes, n_expert)
    if rest or not size:
        raise BadInputError(
            f"the tensor has {type_name(tensor.type_id)} (id {tensor.type_id}), whose block size is not known, and its region "
            f"of {tensor.size_bytes} bytes does not divide by the {n_expert} experts",
            path=str(model.files[tensor.source].path),
            tensor=tensor.name,
        )
    return size
