"""The cache policies once more, slow and plain, with lists and dicts: what the compiled ones are tested against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Rows = Sequence[Sequence[int]]
DECAYING = ("lfu-decay", "lfuda")


@dataclass
class ModelStep:
    """What a call asks: the fields of `cache_state.Step`, with the items themselves."""

    own: list[int]
    missed: list[int]
    victims: list[int]
    cut: list[int]
    uploads: list[int]


@dataclass
class ModelCache:
    """A cache of `policy`; all uses of an item weigh the same, and old ones are worth `decay` less with every token."""

    policy: str
    sizes: Sequence[int]
    capacity: int
    decay: float = 1.0
    period: int = 0
    keep_whole: bool = False
    random_state: int = 2  # seed 1
    resident: set[int] = field(default_factory=set)
    stamp: dict[int, int] = field(default_factory=dict)
    count: dict[int, float] = field(default_factory=dict)
    weight: float = 1.0
    rank: dict[int, float] = field(default_factory=dict)  # priority at the last entry
    lists: list[list[int]] = field(default_factory=lambda: [[], [], [], []])  # the oldest first
    bag: list[int] = field(default_factory=list)
    tokens: int = 0
    picked: int = 0
    clock: int = 0
    before: int = 0  # when preloaded items were used, the later ones the longer ago
    age: float = 0.0
    target: float = 0.0

    def size(self, items: Sequence[int] | set[int]) -> int:
        return sum(self.sizes[i] for i in items)

    def preload(self, items: Sequence[int]) -> list[int]:
        loaded = []
        for item in items:
            if item in self.resident or self.size(self.resident) + self.sizes[item] > self.capacity:
                continue
            loaded.append(item)
            self.resident.add(item)
            self.before -= 1
            self.stamp[item] = self.before
            self.rank[item] = 0.0
            if self.policy in ("slru", "arc", "s3fifo"):
                self.lists[0].insert(0, item)
            self.bag.append(item)
        return loaded

    def call(self, rows: Rows, *, ticks: bool = True) -> ModelStep:
        uploads, swapped = self._repick() if self.policy == "repick" else ([], [])
        own: list[int] = []
        missed: list[int] = []
        for row in rows:
            if ticks:
                self.tokens += 1
                self.weight /= self.decay
            for item in row:
                is_first = item not in own
                if is_first:
                    own.append(item)
                    if item not in self.resident:
                        missed.append(item)
                    elif self.policy == "random":
                        self._unbag(item)
                self.clock += 1
                self.stamp[item] = self.clock
                self._use(item, is_first)
        if self.policy in ("static", "repick"):
            return ModelStep(own, missed, swapped, self._pass(missed), uploads)
        self.resident |= set(own)
        victims = self._evict(set(own))
        for item in own:
            self._enter(item)
        cut = [] if self.keep_whole else self._evict(set())
        return ModelStep(own, missed, victims, cut, uploads)

    def _pass(self, missed: list[int]) -> list[int]:
        cut = []
        for item in missed:
            if self.policy == "repick" and self.size(self.resident) + self.sizes[item] <= self.capacity:
                self.resident.add(item)
            else:
                cut.append(item)
        return cut

    def _use(self, item: int, is_first: bool) -> None:
        if self.policy in (*DECAYING, "repick"):
            self.count[item] = self.count.get(item, 0) + self.weight
        elif self.policy in ("lfu-forget", "lfu-ghost") and is_first:
            self.count[item] = self.count.get(item, 0) + 1
        elif self.policy == "slru":
            self._use_slru(item, is_first)
        elif self.policy == "arc":
            self._use_arc(item, is_first)
        elif self.policy == "s3fifo":
            self._use_s3fifo(item, is_first)

    def _where(self, item: int) -> int:
        return next((i for i, x in enumerate(self.lists) if item in x), -1)

    def _move(self, item: int, to: int) -> None:
        at = self._where(item)
        if at >= 0:
            self.lists[at].remove(item)
        self.lists[to].append(item)

    def _use_slru(self, item: int, is_first: bool) -> None:
        probation, protected = 0, 1
        at = self._where(item)
        if at < 0:
            self._move(item, probation)
        elif not is_first:
            self._move(item, at)
        else:
            self._move(item, protected)
            while self.size(self.lists[protected]) > 0.8 * self.capacity:
                self._move(self.lists[protected][0], probation)

    def _use_arc(self, item: int, is_first: bool) -> None:
        at = self._where(item)
        if not is_first:
            self._move(item, at)
            return
        b1, b2 = self.size(self.lists[2]), self.size(self.lists[3])
        if at == 2:
            self.target = min(float(self.capacity), self.target + self.sizes[item] * max(1.0, b2 / b1))
        elif at == 3:
            self.target = max(0.0, self.target - self.sizes[item] * max(1.0, b1 / b2))
        self._move(item, 0 if at < 0 else 1)

    def _use_s3fifo(self, item: int, is_first: bool) -> None:
        at = self._where(item)
        if at < 0:
            self._move(item, 0)
            self.count[item] = 0
        elif at == 2:
            self._move(item, 1)
            self.count[item] = 0
        elif is_first:
            self.count[item] = min(3, self.count.get(item, 0) + 1)

    def _evict(self, spared: set[int]) -> list[int]:
        victims = []
        while self.size(self.resident) > self.capacity:
            item = self._victim(spared)
            if item is None:
                break
            self.resident.remove(item)
            victims.append(item)
        return victims

    def _victim(self, spared: set[int]) -> int | None:
        if self.policy in ("slru", "arc", "s3fifo"):
            return {"slru": self._victim_slru, "arc": self._victim_arc, "s3fifo": self._victim_s3fifo}[self.policy](spared)
        free = self.resident - spared
        if not free:
            return None
        if self.policy == "random":
            self.random_state = self.random_state * 48271 % (2**31 - 1)
            item = self.bag[self.random_state % len(self.bag)]
            self._unbag(item)
            return item
        worth = {i: 0.0 if self.policy == "lru" else self.rank[i] for i in free}
        item = min(free, key=lambda i: (worth[i], self.stamp[i]))
        if self.policy == "lfuda":
            self.age = self.rank[item]
        elif self.policy == "lfu-forget":
            self.count[item] = 0
        return item

    def _unbag(self, item: int) -> None:
        last = self.bag.pop()
        if last != item:
            self.bag[self.bag.index(item)] = last

    def _oldest(self, which: int, spared: set[int]) -> int | None:
        return next((i for i in self.lists[which] if i not in spared), None)

    def _victim_slru(self, spared: set[int]) -> int | None:
        for which in (0, 1):
            item = self._oldest(which, spared)
            if item is not None:
                self.lists[which].remove(item)
                return item
        return None

    def _victim_arc(self, spared: set[int]) -> int | None:
        t1, _, b1, b2 = self.lists
        first = 0 if self.size(t1) > self.target else 1
        for which in (first, 1 - first):
            item = self._oldest(which, spared)
            if item is not None:
                self._move(item, which + 2)
                while b1 and self.size(t1) + self.size(b1) > self.capacity:
                    b1.pop(0)
                while b2 and sum(map(self.size, self.lists)) > 2 * self.capacity:
                    b2.pop(0)
                return item
        return None

    def _victim_s3fifo(self, spared: set[int]) -> int | None:
        small, main, ghost, _ = self.lists
        while True:
            item = self._oldest(0, spared) if self.size(small) > 0.1 * self.capacity else None
            item = self._oldest(1, spared) if item is None else item
            item = self._oldest(0, spared) if item is None else item
            if item is None:
                return None
            if item in small and self.count.get(item, 0) > 1:
                self._move(item, 1)
                self.count[item] = 0
            elif item in small:
                self._move(item, 2)
                while ghost and self.size(ghost) > (1 - 0.1) * self.capacity:
                    ghost.pop(0)
                return item
            elif self.count[item] == 0:
                main.remove(item)
                return item
            else:
                self.count[item] -= 1
                self._move(item, 1)

    def _enter(self, item: int) -> None:
        if self.policy == "random":
            self.bag.append(item)
        elif self.policy == "lfuda":
            self.rank[item] = self.age + self.count[item] / self.weight
        else:
            self.rank[item] = self.count.get(item, 0)

    def _repick(self) -> tuple[list[int], list[int]]:
        uploads: list[int] = []
        victims: list[int] = []
        if self.tokens - self.picked < self.period:
            return uploads, victims
        self.picked = self.tokens
        used = {i: self.count.get(i, 0) for i in range(len(self.sizes))}
        order = sorted(used, key=lambda i: (used[i], self.stamp.get(i, 0), i))
        members = [i for i in order if i in self.resident]
        for best in [i for i in reversed(order) if i not in self.resident]:
            for member in members:
                if used[best] <= 1.25 * used[member]:
                    break
                if self.size(self.resident) - self.sizes[member] + self.sizes[best] <= self.capacity:
                    members.remove(member)
                    self.resident = (self.resident - {member}) | {best}
                    uploads.append(best)
                    victims.append(member)
                    break
        self.count = {i: c * 0.5 for i, c in self.count.items()}
        return uploads, victims
