"""Experts in host memory, from which the slots are filled and missing experts computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bel.formats.bundle import Bundle
from bel.formats.experts_file import LayerLayout
from bel.runtime.pager import Pager
from bel.runtime.pool_home import Home
from bel.runtime.pool_room import HostRoom
from bel.runtime.readers import open_reader


@dataclass(frozen=True, slots=True)
class PartRoom:
    """A projection of all experts of a layer: that of number n begins at `base + n * stride_bytes`."""

    base: int
    stride_bytes: int


class HostExperts(HostRoom):
    """Memory for experts of `layers` that the home copies from fast.

    `parts[i][p]` is where projection p of layer i stands, in the order of the layer's blobs; expert e is number e
    there.
    """

    def __init__(self, home: Home, layers: Sequence[LayerLayout], size_bytes: int) -> None:
        super().__init__(home, size_bytes)
        self.layers = tuple(layers)
        self.parts: list[list[PartRoom]] = []

    def addresses(self, i: int, expert: int) -> list[int]:
        """Where each part of an expert of layer i stands in this process."""
        return [part.base + expert * part.stride_bytes for part in self.parts[i]]


@contextlib.contextmanager
def bundle_pager(bundle: Bundle, kind: str, checks: bool) -> Iterator[Pager]:
    """A pager of a bundle's files, which the model watches; nothing is on its way any more once it is left."""
    paths = [bundle.path(row.name) for row in bundle.manifest.experts]
    pager = Pager(bundle, open_reader(paths, kind=kind), checks=checks)
    try:
        yield pager
    except BaseException:
        pager.abandon()
        raise
    finally:
        pager.close()
