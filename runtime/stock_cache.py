"""llama.cpp's own expert cache: how many slots a size gives, which sizes are worth it, and what it says of itself.

Facts: src/llama-moe-cache.cpp of llama.cpp build 11549.  Layers whose expert tensors have the same types and shapes share one
list of slots and one LRU, over all of them: with fewer slots than a token picks experts, each expert is gone before the next
token asks for it, and the cache hits nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bel.formats.bundle import Bundle
from bel.formats.errors import MachineError
from bel.formats.experts import ExpertLayer
from bel.formats.gguf_model import GgufModel

MIB = 1 << 20
_COUNTS = re.compile(
    r"llama_moe_cache: ubatch +(<= 8|> 8): hits = (\d+), misses = (\d+), hit rate = \S+, uploaded = (\d+\.\d+) MiB"
)
_COPIES = re.compile(r"llama_moe_cache: large batches: (\d+) experts copied")
_SLOTS = re.compile(r"(\d+) layers, \S+: +(\d+) slots \(")
_REFUSED = re.compile(r"MoE cache (is disabled|budget is too small)")


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of one layout.  `part_bytes`: an expert's bytes in each tensor; `cycle`: experts that a token picks in all."""

    n_layers: int
    n_expert: int
    cycle: int
    part_bytes: tuple[int, ...]

    @property
    def host_bytes(self) -> int:
        """Bytes of all experts of all its layers."""
        return self.n_layers * self.n_expert * sum(self.part_bytes)

    @property
    def n_experts(self) -> int:
        """Experts of all its layers: more slots are not made."""
        return self.n_layers * self.n_expert

    def device_bytes(self, slots: int, alignment: int) -> int:
        """What `slots` slots take: one more is made, since a kernel may read past the last one."""
        return sum(-(-part * (slots + 1) // alignment) * alignment for part in self.part_bytes)


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """The groups of a model, and the alignment of tensors in the device's memory.  One device holds the whole cache."""

    groups: tuple[CacheGroup, ...]
    alignment: int

    @property
    def host_bytes(self) -> int:
        """Bytes of all experts."""
        return sum(group.host_bytes for group in self.groups)

    def slots(self, size_bytes: int) -> tuple[int, ...]:
        """The slots of each group that a cache of `size_bytes` has: the size is shared out by the bytes of the experts."""
        return tuple(self._slots(group, size_bytes * group.host_bytes // self.host_bytes) for group in self.groups)

    def size_for(self, wanted: Sequence[int]) -> int:
        """The smallest cache in which each group has at least the slots wanted of it, as far as it has experts."""
        return max(
            # One byte more: the library computes the shares with floating point.
            -(-group.device_bytes(min(count, group.n_experts), self.alignment) * self.host_bytes // group.host_bytes) + 1
            for group, count in zip(self.groups, wanted, strict=True)
        )

    def size_for_share(self, share: float) -> int:
        """The smallest cache for a share (0 to 1) of the experts of each group."""
        return self.size_for([int(share * group.n_experts) for group in self.groups])

    @property
    def cycle_bytes(self) -> int:
        """The smallest cache in which an expert can still be there when the next token picks it again."""
        return self.size_for([group.cycle for group in self.groups])

    def _slots(self, group: CacheGroup, budget_bytes: int) -> int:
        low, high = 0, group.n_experts
        while low < high:
            middle = (low + high + 1) // 2
            fits = group.device_bytes(middle, self.alignment) <= budget_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """A layer as llama.cpp looks at it.  `stacks`: type and shape of each of its expert tensors; `part_bytes`: an expert's in
    each.  `n_used` of None: a layer whose top-k is not known counts with all of its experts."""

    n_expert: int
    n_used: int | None
    stacks: tuple[tuple[int, tuple[int, ...]], ...]
    part_bytes: tuple[int, ...]


def gguf_layers(model: GgufModel, layers: Iterable[ExpertLayer]) -> list[CacheLayer]:
    """The layers of a GGUF; one that decoding never reaches is never loaded."""
    found = []
    for layer in (x for x in layers if not x.is_mtp):
        tensors = [model.tensors[part.tensor] for part in layer.parts]
        sizes = tuple(part.slice_bytes for part in layer.parts)
        found.append(CacheLayer(layer.n_expert, layer.n_used, tuple((t.type_id, t.ne) for t in tensors), sizes))
    return found


def bundle_layers(bundle: Bundle) -> list[CacheLayer]:
    """The layers of a bundle, in the manifest's order."""
    found = []
    for layer in (x for x in bundle.manifest.layers if not x.is_mtp):
        tensors = [bundle.manifest.tensors[part.tensor] for part in layer.parts]
        sizes = tuple(part.size_bytes for part in layer.parts)
        found.append(CacheLayer(layer.n_expert, layer.n_used, tuple((t.type_id, t.ne) for t in tensors), sizes))
    return found


def cache_sizes(layers: Sequence[CacheLayer], alignment: int) -> CacheSizes:
    """The groups that llama.cpp will make of a model's layers."""
    return CacheSizes(tuple(_group([layers[i] for i in members]) for members in _groups(layers)), alignment)


def group_slots(layers: Sequence[CacheLayer], counts: Sequence[int]) -> list[int]:
    """Slots of each group where layer i is to have `counts[i]`."""
    return [sum(counts[i] for i in members) for members in _groups(layers)]


def _groups(layers: Sequence[CacheLayer]) -> list[list[int]]:
    groups: dict[tuple[tuple[int, tuple[int, ...]], ...], list[int]] = {}
    for i, layer in enumerate(layers):
        groups.setdefault(layer.stacks, []).append(i)
    return list(groups.values())


def _group(layers: Sequence[CacheLayer]) -> CacheGroup:
    cycle = sum(layer.n_used or layer.n_expert for layer in layers)
    return CacheGroup(len(layers), layers[0].n_expert, cycle, layers[0].part_bytes)


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """What the cache did in one context.

    Hits, misses and bytes uploaded by graphs of up to 8 tokens, and (`batch_`) of 9 to 32; bytes as printed: rounded to 0.01
    MiB.  `copied`: experts that larger graphs, which only read the cache, found in it.
    """

    hits: int = 0
    misses: int = 0
    uploaded_bytes: int = 0
    batch_hits: int = 0
    batch_misses: int = 0
    batch_uploaded_bytes: int = 0
    copied: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Of graphs of up to 8 tokens; None where there was none."""
        total = self.hits + self.misses
        return self.hits / total if total else None


def read_counts(lines: Iterable[str]) -> CacheCounts:
    """The counts that llama.cpp logs when a context with a cache is freed; kinds of graphs that never came are not logged.

    Raises MachineError for a line of the cache that has another form.
    """
    found: dict[str, tuple[int, int, int]] = {}
    copied = 0
    for line in lines:
        if match := _COUNTS.search(line):
            found[match[1]] = int(match[2]), int(match[3]), round(float(match[4]) * MIB)
        elif match := _COPIES.search(line):
            copied = int(match[1])
        elif "llama_moe_cache:" in line and ("hits" in line or "copied" in line):
            raise MachineError("llama.cpp words the counts of its expert cache in another way", found=line.strip())
    small, large = found.get("<= 8", (0, 0, 0)), found.get("> 8", (0, 0, 0))
    return CacheCounts(*small, *large, copied)


def read_slots(lines: Iterable[str]) -> int:
    """All slots of the cache of a new context, by what llama.cpp logged while it made it.

    Raises MachineError where it made none, or left layers out: it only warns of both.
    """
    slots = 0
    for line in lines:
        if _REFUSED.search(line):
            raise MachineError(f"llama.cpp does not cache all layers: {line.strip()}")
        if match := _SLOTS.search(line):
            slots += int(match[2])
    if not slots:
        raise MachineError("llama.cpp made no expert cache, and does not say why")
    return slots
