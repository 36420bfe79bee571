"""What a command asks of a run.  Light, so that `--help` needs no engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_POLICY = "lfu-decay:0.98"
DEFAULT_CONTEXT = 4096
DEFAULT_UBATCH = 512
AUTO = "auto"
CACHE = "cache"
"""llama.cpp's own cache of experts, fed from a bundle, or with `stock` from a GGUF."""
POOL_WAYS = (AUTO, "upload", "split", "static", CACHE)
"""Ways to use a GPU with a bundle; `auto` tries the others."""
STOCK_WAYS = {"all": "gpu", "cpu-moe": "cpu", CACHE: "cache"}
"""Stock llama.cpp's ways to use a GPU, and where its experts are then."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """A model and how to run it.  `path`: a bundle, or with `stock` a GGUF.

    At most one of `plan`, `slots` and `ram_bytes`; without any, `ram_bytes` is what the machine has free.  `n_ctx` of None is
    the default, but not more than the model was trained for.  `gpu` is one of the ways to use a GPU, `gpu_number` which one
    it is, `vram_bytes` what may be taken of its memory.  `prefetches`: the next layer is read ahead in the prompt.
    """

    path: Path
    stock: bool = False
    plan: Path | None = None
    slots: int | None = None
    ram_bytes: int | None = None
    policy: str = DEFAULT_POLICY
    n_ctx: int | None = None
    n_ubatch: int = DEFAULT_UBATCH
    n_threads: int | None = None
    reader: str = "auto"
    checks: bool = True
    prefetches: bool = True
    engine: str = "auto"
    gpu: str | None = None
    gpu_number: int = 0
    vram_bytes: int | None = None
