"""The slot pool over a host memory that does not hold all experts: what stock llama.cpp computes, to the last bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archs
from bel.formats.bundle import open_bundle
from bel.runtime.context import ContextOptions
from bel.runtime.engine import Engine
from bel.runtime.pool_home import cpu_home
from bel.runtime.pool_model import open_pool
from bel.runtime.pool_tiers import TierMover
from bel.runtime.tier_layers import HOST_TIERS
from exactness import repack
from pooled import largest_difference, pooled, stock
from tiered import POLICIES, options, tier_of
from trained import EXPERTS, LAYERS, TINY, TOP_K
from trained import tiny as tiny


@pytest.mark.parametrize("host_tier", HOST_TIERS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [TOP_K, EXPERTS // 4])
@pytest.mark.parametrize("host_slots", [0, EXPERTS // 4, EXPERTS * 3 // 4])
@pytest.mark.parametrize("n_prompt", [1, 300])
def test_every_tier_is_exact(n_prompt: int, host_slots: int, slots: int, policy: str, host_tier: str, tiny: Path) -> None:
    """All logits of the prompt and of 64 tokens."""
    answer = pooled(tiny, options(slots, policy, host_slots=host_slots, host_tier=host_tier), n_prompt, 64)
    assert largest_difference(answer.logits, stock(TINY, n_prompt, 64)) == 0.0
    decode, tiers = answer.counters.decode, tier_of(answer).counters.decode
    assert decode.accesses == 64 * LAYERS * TOP_K
    assert tiers.from_ram + tiers.from_nvme == decode.missed > 0
    assert (tiers.from_ram > 0) == (host_slots > 0), "experts came from where the test says while the tokens were compared"
    assert (tiers.from_nvme > 0) == (slots + host_slots < EXPERTS or host_tier == "inclusive" or n_prompt == 1)
    assert (tiers.demoted > 0) == (host_slots > 0 and host_tier == "exclusive")
    assert answer.pool.is_pinned is False


@pytest.mark.parametrize("arch", ["gpt-oss", "deepseek2", "granitemoe"])
@pytest.mark.parametrize("host_tier", HOST_TIERS)
def test_architectures(arch: str, host_tier: str, tmp_path: Path) -> None:
    """With biases of experts, shared experts and dense blocks, scaled weights."""
    source = archs.make_model(arch, tmp_path / "model.gguf", quant="q4_k", n_embd=256, n_ff_exp=256)
    bundle = repack(source, tmp_path / "model.bel")
    n_used = archs.ARCHS[arch].shape.n_used
    for n_prompt, n_decode in ((1, 64), (300, 8)):
        asked = options(n_used, "lfu-decay:0.98", host_slots=n_used + 1, host_tier=host_tier)
        answer = pooled(bundle, asked, n_prompt, n_decode)
        assert largest_difference(answer.logits, stock(source, n_prompt, n_decode)) == 0.0
        counts = tier_of(answer).counters
        assert counts.prompt.from_nvme > 0
        assert counts.decode.from_ram > 0


def test_sequences_and_ubatches_with_the_owners_checked(tiny: Path) -> None:
    """Prompts in several graphs, from what the sequence before left; every expert is in its place behind each decode."""
    sizes = ContextOptions(512, 64, 64, 1)
    engine, random = Engine.open(), np.random.default_rng(1)
    tokens = random.integers(0, 4096, 200)
    with engine.load(TINY) as model, model.context(sizes) as context:
        expected = [x for _ in range(2) for x in decoded(context, tokens)]
    for host_tier in HOST_TIERS:
        asked = options(6, "lfu-decay:0.98", host_slots=9, host_tier=host_tier)
        with open_pool(engine, open_bundle(tiny), sizes, asked, cpu_home(engine)) as run:
            found = []
            for _ in range(2):
                for logits in decoded(run.context, tokens):
                    found.append(logits)
                    for layer in tier_of(run).layers:
                        layer.check()
        assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


def decoded(context: Any, tokens: np.ndarray[Any, Any]) -> Any:
    """A prompt of 150 tokens in three ubatches, of which the last token's logits are wanted, and the rest one by one."""
    context.clear()
    for start in range(0, 150, 64):
        context.decode(tokens[start : min(start + 64, 150)])
        yield context.logits.copy()
    for token in tokens[150:]:
        context.decode([token])
        yield context.logits.copy()


def test_a_demotion_that_copies_nothing_is_found(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory is believed to hold an expert that never came: here another one's bytes are where it should be."""
    monkeypatch.setattr(TierMover, "_demote", lambda *_: None)
    answer = pooled(tiny, options(TOP_K, host_slots=8), 30, 64)
    assert not np.array_equal(answer.logits, stock(TINY, 30, 64))


WITHOUT_NUMBA = """
import dataclasses, sys
sys.modules["numba"] = None
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from pooled import largest_difference, pooled, stock
from bel.runtime.policies import parse_policy
from bel.runtime.pool_options import PoolOptions
tiny, source = Path(sys.argv[2]), Path(sys.argv[3])
for host_tier in ("exclusive", "inclusive"):
    options = PoolOptions(policy=parse_policy("lfu-decay:0.98"), slots=6, host_slots=9, host_tier=host_tier)
    answer = pooled(tiny, options, 20, 8)
    assert largest_difference(answer.logits, stock(source, 20, 8)) == 0.0
    counts = answer.pool.tier.counters.decode
    print(counts.from_ram, counts.from_nvme, counts.demoted)
"""


def test_without_a_compiler(tiny: Path) -> None:
    """The same source as plain Python moves the same experts."""
    command = [sys.executable, "-c", WITHOUT_NUMBA, str(Path(__file__).parent), str(tiny), str(TINY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for host_tier, line in zip(HOST_TIERS, done.stdout.splitlines(), strict=True):
        answer = pooled(tiny, options(6, "lfu-decay:0.98", host_slots=9, host_tier=host_tier), 20, 8)
        counts = tier_of(answer).counters.decode
        assert line == f"{counts.from_ram} {counts.from_nvme} {counts.demoted}"
