"""Guessing the next layer's experts: from the running model's own tensors, and worth its reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bel.formats.bundle import open_bundle
from bel.runtime.bundle_model import SlotOptions, open_run
from bel.runtime.context import ContextOptions
from bel.runtime.engine import Engine
from bel.runtime.next_experts import NextExperts
from bel.runtime.policies import parse_policy
from bel.runtime.tensor import Tensor
from exactness import checked, random_prompt, repack

ROOT = Path(__file__).parent.parent
TINY = ROOT / "examples" / "tiny-moe-q8_0.gguf"
TEXT = (ROOT / "examples" / "prompts" / "code" / "code_01.txt").read_text(encoding="utf-8")
LAYERS, N_EXPERT, TOP_K, N_EMBD = 6, 32, 4, 128


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example model as a bundle."""
    return repack(TINY, tmp_path_factory.mktemp("next") / "tiny.bel")


class Watching:
    """Copies what the guess is made from while it is there, and keeps each layer's choice and the guess for the next."""

    def __init__(self) -> None:
        self.next = NextExperts()
        self.inputs: dict[int, np.ndarray] = {}
        self.weights: dict[str, np.ndarray] = {}
        self.chosen: list[dict[int, set[int]]] = [{}]
        self.guessed: list[dict[int, list[int]]] = [{}]

    def ask(self, tensor: Tensor) -> bool:
        return tensor.raw_name.startswith((b"ffn_moe_topk-", b"ffn_moe_logits-"))

    def seen(self, tensor: Tensor) -> None:
        kind, _, layer = tensor.name.partition("-")
        place = int(layer)
        if kind == "ffn_moe_logits":
            gate, source = tensor.src(0), tensor.src(1)
            assert gate is not None
            assert source is not None
            norm = source.src(1)
            assert norm is not None
            self.inputs[place] = source.array(2)[0].copy()
            self.weights |= {f"gate{place}": gate.array(2).copy(), f"norm{place}": norm.array(1).copy()}
            return
        ids = tensor.array(2)
        if len(ids) != 1:
            return
        self.chosen[-1][place] = set(ids[0].tolist())
        self.next.see(tensor, place)
        if place + 1 < LAYERS:
            self.guessed[-1][place + 1] = list(self.next.guess(place + 1, TOP_K))

    def end_token(self) -> None:
        self.chosen.append({})
        self.guessed.append({})


@pytest.fixture(scope="module")
def watched(tiny: Path) -> Watching:
    """Sixty tokens of the text, one by one."""
    watching = Watching()
    slots = SlotOptions(parse_policy("lru"), slots=N_EXPERT)
    with open_run(Engine.open(), open_bundle(tiny), ContextOptions(128, 64, 64, 1), slots, watching) as run:
        for token in run.model.tokenize(TEXT)[:60]:
            run.context.decode([int(token)])
            watching.end_token()
    return watching


def test_a_guess_is_the_next_router_on_this_input(watched: Watching) -> None:
    """Of the last token, recomputed from copies: the input with this layer's norm taken out and the next one's put in."""
    guessed = watched.guessed[-2]
    assert set(guessed) == set(range(1, LAYERS))
    for place in range(1, LAYERS):
        before = watched.inputs[place - 1] / watched.weights[f"norm{place - 1}"]
        scores = watched.weights[f"gate{place}"] @ (before * watched.weights[f"norm{place}"])
        assert watched.weights[f"gate{place}"].shape == (N_EXPERT, N_EMBD)
        best = np.sort(scores)[-TOP_K:]
        assert np.allclose(np.sort(scores[guessed[place]]), best, rtol=1e-4, atol=1e-5)


def test_nothing_is_guessed_of_a_router_that_was_not_met(watched: Watching) -> None:
    """The first token knows only the layers behind it."""
    assert all(guess == [] for guess in watched.guessed[0].values())
    assert NextExperts().guess(1, TOP_K) == ()


def test_guesses_are_much_better_than_chance(watched: Watching) -> None:
    """By chance one in eight of the choices would be right."""
    pairs = [(g[place], c[place]) for g, c in zip(watched.guessed[1:], watched.chosen[1:], strict=True) for place in g]
    right = sum(len(chosen & set(guess)) for guess, chosen in pairs) / (TOP_K * len(pairs))
    assert right > 3 * TOP_K / N_EXPERT


def test_decoding_reads_ahead_and_stays_exact(tiny: Path) -> None:
    """At the floor of slots most reads are guesses; the result is stock's to the bit."""
    answer = checked(TINY, tiny, [random_prompt(3, 4096)], slots=TOP_K, prefetch_bytes=1 << 20)
    assert (answer.found.first, answer.found.max_logit) == (None, 0.0)
    assert answer.phases[1].prefetched_hits > 0
    assert answer.phases[1].wasted > 0
