"""What a GPU is measured with: held-out tokens, and what routers prefer on others of the same kind."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bel.runtime.context import ContextOptions
from bel.runtime.engine import Model
from bel.runtime.prompts import read_prompts
from bel.runtime.tensor import Tensor

Tokens = npt.NDArray[np.int32]
Orders = dict[int, list[int]]
"""Experts of each layer, most used first."""
WORKLOADS = ("code", "chat")
MERGED = "merged"
SEED = 0
GRAPH_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Work:
    """Held-out tokens of one kind: `prompt` (m,) and then `decoded` (n,), which are those that follow."""

    prompt: Tokens
    decoded: Tokens


class Counting:
    """An observer that counts what the routers pick: {layer: (n_expert,)}."""

    def __init__(self, n_expert: int) -> None:
        self.n_expert, self.counts = n_expert, dict[int, npt.NDArray[np.int64]]()

    def ask(self, tensor: Tensor) -> bool:
        """The routers' choices."""
        return tensor.raw_name.startswith(b"ffn_moe_topk-")

    def seen(self, tensor: Tensor) -> None:
        """Count one."""
        counts = self.counts.setdefault(int(tensor.name.rpartition("-")[2]), np.zeros(self.n_expert, np.int64))
        counts += np.bincount(tensor.array().ravel(), minlength=self.n_expert)


def orders_of(model: Model, texts: dict[str, Tokens], n_expert: int) -> dict[str, Orders]:
    """What each text uses most, and what all of them do together, each text with the same weight."""
    counted: dict[str, dict[int, npt.NDArray[np.int64]]] = {}
    for name, tokens in texts.items():
        counting = Counting(n_expert)
        with model.context(ContextOptions(len(tokens), GRAPH_TOKENS, GRAPH_TOKENS, 1), counting) as context:
            for start in range(0, len(tokens), GRAPH_TOKENS):
                context.decode(
                    tokens[start : start + GRAPH_TOKENS], all_logits=True
                )  # else the last layer sees one token alone
        counted[name] = counting.counts
    layers = next(iter(counted.values()))
    counted[MERGED] = {layer: sum(counts[layer] for counts in counted.values()) for layer in layers}  # type: ignore[misc]
    return {name: {n: np.argsort(-x, kind="stable").tolist() for n, x in counts.items()} for name, counts in counted.items()}


def texts_of(model: Model, folder: Path | None, count: int) -> dict[str, Tokens]:
    """(count,) tokens of each workload: of the texts of its folder, or drawn at random."""
    if folder is None:
        rng = np.random.default_rng(SEED)
        return {name: rng.integers(0, model.n_vocab, count).astype(np.int32) for name in WORKLOADS}
    found = {}
    for name in WORKLOADS:
        tokens = model.tokenize("\n".join(prompt.text for prompt in read_prompts([folder / name])))
        if len(tokens) < count:
            sys.exit(f"{folder / name} has {len(tokens)} tokens, {count} are needed")
        found[name] = tokens[:count]
    return found
