"""Cache policies by name: what a command line or a plan says, and what the compiled steps need of it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from bel.formats.errors import UsageError, printable

STATIC, LRU, RANDOM, LFU_FORGET, LFU_GHOST, LFU_DECAY, LFUDA, SLRU, ARC, S3FIFO, REPICK, BELADY = range(12)
"""Numbers of the policies in `CacheState.config`."""
_PLAIN = {
    "static": STATIC,
    "lru": LRU,
    "random": RANDOM,
    "lfu-forget": LFU_FORGET,
    "lfu-ghost": LFU_GHOST,
    "lfuda": LFUDA,
    "slru": SLRU,
    "arc": ARC,
    "s3fifo": S3FIFO,
}
POLICY_NAMES = "static, lru, lfu-forget, lfu-ghost, lfu-decay:R, lfuda, slru, arc, s3fifo, repick:N, random"
LFUDA_DECAY = 0.98
MAX_PERIOD_TOKENS = 10**9


@dataclass(frozen=True, slots=True)
class Policy:
    """A cache policy.  `decay` multiplies every count once a token (1: nothing is forgotten); `period_tokens` is repick's N."""

    name: str
    kind: int
    decay: float = 1.0
    period_tokens: int = 0


def parse_policy(name: str) -> Policy:
    """`lru`, `lfu-decay:0.98`, `repick:500` as a policy.  Raises UsageError for an unknown one or a wrong number."""
    if name in _PLAIN:
        return Policy(name, _PLAIN[name], decay=LFUDA_DECAY if name == "lfuda" else 1.0)
    base, _, number = name.partition(":")
    if base == "lfu-decay":
        return Policy(name, LFU_DECAY, decay=_decay(name, number))
    if base == "repick":
        return Policy(name, REPICK, period_tokens=_period(name, number))
    raise UsageError(f"the policy '{printable(name)}' is not known", hint=f"Policies: {POLICY_NAMES}")


def _decay(name: str, number: str) -> float:
    if re.fullmatch(r"\d{0,3}\.?\d{1,18}", number, re.ASCII) and 0 < float(number) <= 1 and math.isfinite(1 / float(number)):
        return float(number)
    raise UsageError(f"'{printable(name)}': R is not a number above 0 and up to 1", hint="Write lfu-decay:0.98")


def _period(name: str, number: str) -> int:
    if re.fullmatch(r"\d{1,10}", number, re.ASCII) and 1 <= int(number) <= MAX_PERIOD_TOKENS:
        return int(number)
    raise UsageError(f"'{printable(name)}': N is not a number of tokens from 1", hint="Write repick:500")
