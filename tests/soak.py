"""Many tokens at the smallest number of slots: what the process holds on to, and that the text is stock llama.cpp's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bel.formats.bundle import open_bundle
from bel.formats.process import rss_bytes
from bel.runtime.bundle_model import SlotOptions, open_run
from bel.runtime.context import Context, ContextOptions
from bel.runtime.engine import Engine
from bel.runtime.policies import parse_policy

N_CTX = 256
PROMPT_TOKENS = 8
SEED = 5


@dataclass(frozen=True, slots=True)
class Held:
    """What the process holds at a moment: memory, open descriptors, and mappings."""

    rss_bytes: int
    descriptors: int
    mappings: int


def held() -> Held:
    """Now."""
    maps = Path("/proc/self/maps").read_bytes().count(b"\n")
    return Held(rss_bytes(), len(os.listdir("/proc/self/fd")), maps)


def chosen_tokens(context: Context, count: int) -> Iterator[int]:
    """`count` greedy tokens; whenever the context is full a new sequence begins with a prompt drawn by the seed."""
    rng = np.random.default_rng(SEED)
    for number in range(count):
        if number % (N_CTX - PROMPT_TOKENS) == 0:
            context.clear()
            context.decode(rng.integers(0, context.model.n_vocab, PROMPT_TOKENS))
        token = int(np.argmax(context.logits[-1]))
        yield token
        if context.n_past < context.n_ctx:
            context.decode([token])


def stock_tokens(model: Path, count: int, threads: int) -> npt.NDArray[np.int32]:
    """(count,) tokens of stock llama.cpp."""
    options = ContextOptions(N_CTX, PROMPT_TOKENS, PROMPT_TOKENS, threads)
    with Engine.open().load(model) as loaded, loaded.context(options) as context:
        return np.fromiter(chosen_tokens(context, count), np.int32, count)


def soak(
    folder: Path, model: Path, count: int, *, policy: str, threads: int, samples: int = 20
) -> tuple[int | None, list[Held]]:
    """Decode `count` tokens at the floor of slots.

    Gives the first token that differs from stock's (None where none does), and `samples` looks at the process, evenly spread.
    """
    expected = stock_tokens(model, count, threads)
    bundle = open_bundle(folder)
    floor = max(layer.n_used or 1 for layer in bundle.manifest.layers)
    options = ContextOptions(N_CTX, PROMPT_TOKENS, PROMPT_TOKENS, threads)
    seen: list[Held] = []
    first_wrong = None
    with open_run(Engine.open(), bundle, options, SlotOptions(parse_policy(policy), slots=floor)) as run:
        for number, token in enumerate(chosen_tokens(run.context, count)):
            if first_wrong is None and token != expected[number]:
                first_wrong = number
            if (number + 1) % (count // samples) == 0:
                seen.append(held())
    return first_wrong, seen
