"""The slots of a run count what the simulator says of the same choices, exactly; and a long run holds on to nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import counted
import soak
from bel.formats.bundle import open_bundle
from bel.formats.gguf_model import open_model
from bel.repack.convert import convert
from bel.repack.layout import plan_layout
from bel.runtime.bundle_model import SlotOptions
from bel.runtime.engine import Engine
from bel.runtime.policies import parse_policy

MODEL = Path(__file__).parent.parent / "examples" / "tiny-moe-q8_0.gguf"
PROMPTS = MODEL.parent / "prompts" / "code"
PROMPT_TOKENS, DECODE_TOKENS = 100, 120


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example model as a bundle."""
    source = open_model(MODEL)
    target = tmp_path_factory.mktemp("counts") / "tiny.bel"
    layout = plan_layout(source, "tiny", ple="auto", shard_bytes=45 * 10**9)
    convert(source, layout, target, force=False, check=False, progress=lambda *_: None)
    return target


@pytest.fixture(scope="module")
def tokens() -> tuple[counted.Tokens, counted.Tokens]:
    """A prompt and what follows it in the text."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(PROMPTS.iterdir()))
    with Engine.open().load(MODEL) as model:
        ids = model.tokenize(text)
    return ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS : PROMPT_TOKENS + DECODE_TOKENS]


@pytest.fixture(scope="module")
def seeded(bundle: Path, tokens: tuple[counted.Tokens, counted.Tokens], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trace of other work, of which static sets are made."""
    folder = tmp_path_factory.mktemp("seeded")
    reverse = (tokens[1][:50], tokens[1][::-1].copy())
    counted.run_counted(bundle, folder / "seed.trace", reverse, SlotOptions(parse_policy("lru")))
    return folder


@pytest.mark.parametrize(
    ("policy", "slots"),
    [
        *((policy, 12) for policy in ("static", "lru", "lfu-ghost", "lfu-decay:0.98", "repick:20", "arc", "s3fifo", "slru")),
        *((policy, 4) for policy in ("static", "lru", "lfu-decay:0.98", "repick:20")),
    ],
)
def test_a_run_counts_what_the_simulator_says(
    bundle: Path, seeded: Path, tokens: tuple[counted.Tokens, counted.Tokens], policy: str, slots: int
) -> None:
    """A policy that went another way in the run than in the simulator would make every plan a guess."""
    found = counted.compare(bundle, seeded, tokens, policy, slots)
    for phase, (run, simulated) in found.items():
        assert run == simulated, phase
    run, _ = found["decode"]
    assert 0 < run.hits < run.accesses  # else the test would hold for any cache
    assert (run.uploads > 0) == (policy == "repick:20")


def test_reading_ahead_changes_no_count(bundle: Path, seeded: Path, tokens: tuple[counted.Tokens, counted.Tokens]) -> None:
    """What was read ahead is a miss that came early, and no hit."""
    for run, simulated in counted.compare(bundle, seeded, tokens, "lru", 12, prefetch_bytes=1 << 20).values():
        assert run == simulated


def test_a_long_run_holds_on_to_nothing(bundle: Path) -> None:
    """300 tokens at the floor of slots, over a context that fills up: stock's tokens, no descriptor and no mapping more."""
    first_wrong, seen = soak.soak(bundle, MODEL, 300, policy="lfu-decay:0.98", threads=1, samples=10)
    assert first_wrong is None
    late = seen[len(seen) // 2 :]
    assert len({x.descriptors for x in late}) == 1
    # Each expert's pages become a mapping of their own the first time that they are moved.
    n_blobs = sum(x.n_expert for x in counted.trace_layers(open_bundle(bundle)))
    assert max(x.mappings for x in late) <= seen[0].mappings + n_blobs
    assert np.ptp([x.rss_bytes for x in late]) < 4 << 20
