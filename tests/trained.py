"""The trained example model: where it is, what it is made of, its bundle, and a short run of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from exactness import repack

TINY = Path(__file__).parent.parent / "examples" / "tiny-moe-q8_0.gguf"
LAYERS, EXPERTS, TOP_K = 6, 32, 4
PROMPT = "def add(a, b):"
FEW = ("-p", PROMPT, "-n", "12", "--threads", "1", "--context", "128")


# A test module imports a helper's fixture as itself, `from trained import tiny as tiny`: it would pass for unused otherwise.
@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of the trained example model."""
    return repack(TINY, tmp_path_factory.mktemp("tiny") / "tiny.bel")
