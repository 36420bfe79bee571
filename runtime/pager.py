"""Bringing blobs of a bundle into memory: reads, and the proof that they brought the right bytes."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from bel.formats.bundle import Bundle, read_index
from bel.formats.digest import DIGEST_BYTES
from bel.formats.errors import DamagedBundleError, MachineError
from bel.formats.experts_file import PAGE_BYTES, LayerLayout
from bel.formats.units import align_up
from bel.runtime.file_watch import FileWatch
from bel.runtime.readers import Reader
from bel.runtime.reads import Read


@dataclass(frozen=True, slots=True)
class Load:
    """A blob to be brought to an address: expert `expert` of the layer at `place` in the bundle's order."""

    place: int
    expert: int
    address: int


FIRST, REST = 0, 1
"""A blob arrives in two halves: what the first products of an expert read (gate and up), and the rest (down)."""
MIN_REST_BYTES = 128 << 10
"""A smaller rest comes with the first half: a read of its own would cost more than it hides."""


class Pager:
    """Reads blobs through a reader whose files are the bundle's experts files in order.

    With `checks` the checksums of each blob are compared on its first load.  Later loads come from the same open file, and
    `watch` sees whether it was written to since.
    """

    def __init__(self, bundle: Bundle, reader: Reader, *, watch: FileWatch | None = None, checks: bool = True) -> None:
        self._bundle, self._reader, self._watch = bundle, reader, watch
        self.layers: tuple[LayerLayout, ...] = bundle.manifest.layers
        self._first_bytes = [_first_half_bytes(layer) for layer in self.layers]
        self._is_checked = [[bytearray(layer.n_expert) for layer in self.layers] for _ in (FIRST, REST)] if checks else None
        self._index = read_index(bundle) if checks else None
        self._first_digest = _first_digests(self.layers)
        self._tag = 0
        self._under_way: set[int] = set()
        self._is_sound = True
        """Whether all that the reads were for is in memory: not so once one was cut short by an error."""

    @property
    def name(self) -> str:
        """How it reads."""
        return self._reader.name

    @property
    def why(self) -> str:
        """Why it reads no better way; empty where there is none."""
        return self._reader.why

    def has_rest(self, place: int) -> bool:
        """Whether blobs of a layer come in two halves."""
        return self._first_bytes[place] < self.layers[place].stride_bytes

    def start(self, loads: Sequence[Load], half: int) -> int:
        """Begin to read one half of blobs, all at once; the tag is for `finish`."""
        self._tag += 1
        self._reader.submit([self._read(load, half) for load in loads], self._tag)
        self._under_way.add(self._tag)
        return self._tag

    def _read(self, load: Load, half: int) -> Read:
        layer, first = self.layers[load.place], self._first_bytes[load.place]
        begin, end = (0, first) if half == FIRST else (first, layer.stride_bytes)
        offset = layer.offset_bytes + load.expert * layer.stride_bytes
        return Read(layer.shard, offset + begin, end - begin, load.address + begin)

    def finish(self, tag: int) -> None:
        """Wait until all that was started under `tag` has arrived.

        Raises the error of a read that failed, DamagedBundleError where the file was changed since the run began.
        """
        self._under_way.discard(tag)
        self._reader.wait(tag)
        if self._watch is not None:
            self._watch.check()

    def abandon(self) -> None:
        """After an error: wait until nothing is under way.  What else fails is nothing new to whoever hears of the first."""
        while self._under_way:
            with contextlib.suppress(Exception):
                self.finish(self._under_way.pop())

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Whatever fails in here leaves nothing on its way, and no trust in what is in memory.

        Raises MachineError for everything that comes after that.
        """
        if not self._is_sound:
            raise MachineError(
                "a read of experts failed before, so those in memory cannot be trusted", hint="Load the bundle anew"
            )
        self._is_sound = False
        try:
            yield
        except Exception:
            self.abandon()
            raise
        self._is_sound = True

    def check(self, loads: Iterable[Load], half: int) -> None:
        """Compare the checksums of halves that arrived.  Raises DamagedBundleError, naming layer, expert and part."""
        if self._is_checked is None or self._index is None:
            return
        for load in loads:
            is_checked = self._is_checked[half][load.place]
            if not is_checked[load.expert]:
                self._check(load, half, self._index)
                is_checked[load.expert] = 1

    def _check(self, load: Load, half: int, index: memoryview) -> None:
        """The parts that end in this half."""
        layer, first = self.layers[load.place], self._first_bytes[load.place]
        digests = self._first_digest[load.place] + load.expert * len(layer.parts)
        view = memoryview((ctypes.c_char * layer.stride_bytes).from_address(load.address)).cast("B")
        for number, part in enumerate(layer.parts):
            end = part.offset_bytes + part.size_bytes
            if (half == FIRST) != (end <= first):
                continue
            expected = index[(digests + number) * DIGEST_BYTES : (digests + number + 1) * DIGEST_BYTES]
            found = blake3(view[part.offset_bytes : end]).digest()
            if found != expected:
                raise DamagedBundleError(
                    f"the checksum of expert {load.expert} of layer {layer.layer} ({part.role}) does not match",
                    path=str(self.path(layer)),
                    found=found.hex()[:16],
                    expected=expected.hex()[:16],
                    hint="Run `bel-repack verify` on the bundle",
                )

    def path(self, layer: LayerLayout) -> Path:
        """The file that holds a layer's blobs."""
        return self._bundle.path(self._bundle.manifest.experts[layer.shard].name)

    def close(self) -> None:
        """Wait for what is on its way, and close the files."""
        self._reader.close()


def _first_half_bytes(layer: LayerLayout) -> int:
    """Where the second half of a blob begins: at the first page that holds nothing but its last part."""
    last = layer.parts[-1]
    begin = align_up(last.offset_bytes, PAGE_BYTES)
    is_worth = last.role == "down" and layer.stride_bytes - begin >= MIN_REST_BYTES
    return begin if is_worth else layer.stride_bytes


def _first_digests(layers: Sequence[LayerLayout]) -> list[int]:
    """Place of each layer's first digest in the index."""
    at, places = 0, []
    for layer in layers:
        places.append(at)
        at += layer.n_expert * len(layer.parts)
    return places
