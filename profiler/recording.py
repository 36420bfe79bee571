"""What a recording is asked to do, and what it did: the values that cross between the command and its worker process."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bel.formats.errors import BelError
from bel.runtime.prompts import Prompt

DEFAULT_UBATCH = 512  # llama.cpp's own


@dataclass(frozen=True, slots=True)
class RecordRequest:
    """One run: `model` (a GGUF or a bundle), the prompts, and `trace`, the file to write.

    `n_predict` tokens are generated behind each prompt, fewer where the model ends its text; with `ignore_end` it may not.
    `temperature` 0 is greedy; above it, tokens are drawn with `seed`.  `n_ctx` is the context in tokens: without it, what
    the longest prompt needs, up to the model's trained context.  `n_ubatch` is how many prompt tokens are one ubatch.
    `replace` lets an existing trace be overwritten.  `weights` and `times` add those columns, times not for a bundle.
    Of a bundle `slots` experts of each layer are in memory, or as many as fit into `ram_bytes`; without either, into what
    is free.
    """

    model: Path
    trace: Path
    prompts: tuple[Prompt, ...]
    n_predict: int = 500
    workload: str = ""
    weights: bool = False
    times: bool = False
    engine: str = "auto"
    n_ctx: int | None = None
    n_ubatch: int = DEFAULT_UBATCH
    n_threads: int | None = None
    temperature: float = 0.0
    seed: int = 0
    ignore_end: bool = False
    replace: bool = False
    slots: int | None = None
    ram_bytes: int | None = None

    def to_json(self) -> str:
        """One line of ASCII JSON; any path survives."""
        body = dataclasses.asdict(self)
        return json.dumps(body | {"model": os.fspath(self.model), "trace": os.fspath(self.trace)})

    @staticmethod
    def from_json(text: str) -> RecordRequest:
        """What `to_json` wrote."""
        body: dict[str, Any] = json.loads(text)
        prompts = tuple(Prompt(**row) for row in body.pop("prompts"))
        return RecordRequest(**body | {"model": Path(body["model"]), "trace": Path(body["trace"]), "prompts": prompts})


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One prompt's rows.  `ended`: the model ended its text before `n_predict` tokens."""

    name: str
    prompt_tokens: int
    decode_tokens: int
    ended: bool


@dataclass(frozen=True, slots=True)
class PhaseCounts:
    """Accesses of one phase, as `simulate` counts them: distinct experts of each call."""

    accesses: int
    hits: int
    misses: int


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """What the cache of a bundle's experts did in a recording, from empty: by that policy, with so many slots of each layer."""

    policy: str
    slots_by_layer: dict[str, int]
    prompt: PhaseCounts
    decode: PhaseCounts

    @staticmethod
    def from_json(body: dict[str, Any]) -> CacheCounts:
        """What `dataclasses.asdict` gave."""
        return CacheCounts(**body | {phase: PhaseCounts(**body[phase]) for phase in ("prompt", "decode")})


@dataclass(frozen=True, slots=True)
class RecordResult:
    """A finished recording.  `prompt_seconds` and `decode_seconds` include what recording costs: they are no speeds.

    `cache` is None for a GGUF, which llama.cpp holds whole.
    """

    engine: str
    engine_build: str
    prompts: tuple[PromptResult, ...]
    prompt_seconds: float
    decode_seconds: float
    cache: CacheCounts | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(p.prompt_tokens for p in self.prompts)

    @property
    def decode_tokens(self) -> int:
        """Generated tokens of all prompts."""
        return sum(p.decode_tokens for p in self.prompts)

    @staticmethod
    def from_json(body: dict[str, Any]) -> RecordResult:
        """What `dataclasses.asdict` gave."""
        prompts = tuple(PromptResult(**row) for row in body["prompts"])
        cache = None if body["cache"] is None else CacheCounts.from_json(body["cache"])
        return RecordResult(**body | {"prompts": prompts, "cache": cache})


def error_to_json(error: BelError) -> dict[str, Any]:
    """An error as plain values."""
    values = {"found": error.found, "expected": error.expected}
    texts = {name: None if value is None else str(value) for name, value in values.items()}
    place = {"path": error.path, "tensor": error.tensor, "offset_bytes": error.offset_bytes, "hint": error.hint}
    return {"exit_code": error.exit_code, "cause": error.cause, **texts, **place}


def error_from_json(body: dict[str, Any]) -> BelError:
    """The error again, as the class in `errors.py` that has its exit code."""
    code = body.pop("exit_code")
    kinds = {kind.exit_code: kind for kind in BelError.__subclasses__()}
    return kinds.get(code, BelError)(**body)
