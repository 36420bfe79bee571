"""Host memory that does not hold all experts: slots for some of each layer, a few blobs' room for reads, and the disk."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from bel.formats.bundle import Bundle
from bel.formats.errors import BelError
from bel.formats.experts_file import PAGE_BYTES, LayerLayout
from bel.formats.units import align_up
from bel.runtime.pager import FIRST, REST, Load, Pager
from bel.runtime.pool_home import Home
from bel.runtime.pool_hosts import HostExperts, PartRoom, bundle_pager

MIN_READS = 8
"""So many blobs are read at once, or a token's top-k: enough to keep a disk busy."""


def read_count(layers: Sequence[LayerLayout]) -> int:
    """Blobs that are read at once."""
    return max([MIN_READS, *(min(layer.n_used or 1, layer.n_expert) for layer in layers)])


def bounce_bytes(layers: Sequence[LayerLayout]) -> int:
    """Bytes of the room for reads: one batch arrives while the one before it is copied to the home."""
    return 2 * read_count(layers) * max(layer.stride_bytes for layer in layers)


def tier_bytes(layers: Sequence[LayerLayout], counts: Sequence[int]) -> int:
    """Bytes of host memory for so many experts of each layer, and for reads."""
    return sum(_slots_bytes(layers, counts)) + PAGE_BYTES + bounce_bytes(layers)


def _slots_bytes(layers: Sequence[LayerLayout], counts: Sequence[int]) -> list[int]:
    return [align_up(x.stride_bytes * count, PAGE_BYTES) for x, count in zip(layers, counts, strict=True)]


@dataclass(frozen=True, slots=True)
class Reading:
    """Blobs of layer i on their way."""

    i: int
    loads: tuple[Load, ...]
    tags: tuple[int, ...]


class TierHosts(HostExperts):
    """Room for `counts[i]` experts of layer i of a bundle's layers at `places`, and for reads.

    Who moves experts says where they `stand`; one that stands nowhere is read when its address is asked for.  Close it.
    """

    def __init__(
        self,
        home: Home,
        bundle: Bundle,
        places: Sequence[int],
        counts: Sequence[int],
        *,
        reader: str = "auto",
        checks: bool = True,
    ) -> None:
        layers = [bundle.manifest.layers[place] for place in places]
        self.n_reads, self.bounce_bytes = read_count(layers), bounce_bytes(layers)
        sizes = _slots_bytes(layers, counts)
        super().__init__(home, layers, sum(sizes) + self.bounce_bytes)
        self._bases = [self.address + sum(sizes[:i]) for i in range(len(sizes))]
        self.parts = [
            [PartRoom(base + part.offset_bytes, layer.stride_bytes) for part in layer.parts]
            for base, layer in zip(self._bases, layers, strict=True)
        ]
        self.counts, self._places = tuple(counts), places
        self._rooms_at = self.address + sum(sizes)
        self._blob_bytes = max(layer.stride_bytes for layer in layers)
        self._standing: dict[tuple[int, int], int] = {}
        self._asked = 0
        self._open = contextlib.ExitStack()
        try:
            self.pager: Pager = self._open.enter_context(bundle_pager(bundle, reader, checks))
        except BaseException:
            super().close()
            raise

    def slot(self, i: int, ram_slot: int) -> int:
        """Address of a slot of layer i."""
        return self._bases[i] + ram_slot * self.layers[i].stride_bytes

    def bounce(self, number: int) -> int:
        """Address of one of the 2 * `n_reads` blobs' room for reads."""
        return self._rooms_at + number * self._blob_bytes

    def stand(self, i: int, expert: int, address: int) -> None:
        """From now on the expert's address is this one."""
        self._standing[i, expert] = address

    def forget(self) -> None:
        """No expert stands anywhere."""
        self._standing.clear()

    def addresses(self, i: int, expert: int) -> list[int]:
        """Where an expert's parts stand.  One that stands nowhere is read, and stays until as many more as there is room for
        were."""
        address = self._standing.get((i, expert))
        if address is None:
            address = self.bounce(self._asked % (2 * self.n_reads))
            self._asked += 1
            self.finish(self.start(i, [(expert, address)]))
        return [address + part.offset_bytes for part in self.layers[i].parts]

    def start(self, i: int, reads: Sequence[tuple[int, int]]) -> Reading:
        """Begin to read experts of layer i, each (expert, address), all at once."""
        place = self._places[i]
        loads = tuple(Load(place, expert, address) for expert, address in reads)
        halves = (FIRST, REST) if self.pager.has_rest(place) else (FIRST,)
        return Reading(i, loads, tuple(self.pager.start(loads, half) for half in halves))

    def wait(self, reading: Reading) -> None:
        """Wait until they have arrived.  Raises the error of a read that failed, naming its expert."""
        for tag in reading.tags:
            try:
                self.pager.finish(tag)
            except BelError as error:
                raise _named(error, self.layers[reading.i]) from error

    def check(self, reading: Reading) -> None:
        """Compare the checksums of what is there for the first time.  Raises DamagedBundleError, naming the expert."""
        for half in (FIRST, REST)[: len(reading.tags)]:
            self.pager.check(reading.loads, half)

    def finish(self, reading: Reading) -> None:
        """Wait and compare."""
        self.wait(reading)
        self.check(reading)

    def close(self) -> None:
        """Wait for what is on its way, close the files, give the memory back.  A second call does nothing."""
        self._open.close()
        super().close()


def _named(error: BelError, layer: LayerLayout) -> BelError:
    """The error of a read with the expert whose blob it is."""
    if error.offset_bytes is None or not 0 <= error.offset_bytes - layer.offset_bytes < layer.size_bytes:
        return error
    expert = (error.offset_bytes - layer.offset_bytes) // layer.stride_bytes
    return type(error)(
        f"expert {expert} of layer {layer.layer} cannot be read: {error.cause}",
        path=error.path,
        tensor=error.tensor,
        offset_bytes=error.offset_bytes,
        found=error.found,
        expected=error.expected,
        hint=error.hint,
    )
