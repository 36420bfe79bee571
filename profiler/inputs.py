"""Profiles and costs as commands read them: a file of another kind is called by what it is, and sizes are sizes of a slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bel.formats.bundle import is_bundle
from bel.formats.costs import Costs, load_costs
from bel.formats.errors import BadInputError
from bel.formats.experts_file import PAGE_BYTES
from bel.formats.gguf_header import MAGIC as GGUF_MAGIC
from bel.formats.profile import Profile
from bel.formats.profile_json import load_profile
from bel.formats.trace_header import TraceLayer
from bel.formats.trace_layout import MAGIC
from bel.formats.units import align_up, format_bytes

FAR_RATIO = 2
"""Reads of this many times the size have another rate: the costs are then of another model."""
_KINDS = ((MAGIC, "a trace"), (GGUF_MAGIC, "a GGUF"))


def read_profile(path: Path) -> Profile:
    """The profile in a file.  Raises BadInputError."""
    _check_kind(path, "a profile", "`bel-profile summarize` makes a profile of a trace")
    return load_profile(path)


def read_costs(path: Path) -> Costs:
    """The costs in a file.  Raises BadInputError."""
    _check_kind(path, "a costs file", "`bel-profile bandwidth DIR` makes one")
    return load_costs(path)


def _check_kind(path: Path, wanted: str, hint: str) -> None:
    found = "a bundle" if is_bundle(path) else None
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(max(len(magic) for magic, _ in _KINDS))
        found = next((kind for magic, kind in _KINDS if head.startswith(magic)), None)
    if found:
        raise BadInputError(f"this is {found}, not {wanted}", path=str(path), hint=hint)


def block_note(costs: Costs, sizes: Sequence[int]) -> str:
    """What to say where the reads that were measured are far from all of these expert sizes in bytes; "" else."""
    block = costs.block_bytes
    if not sizes or any(size <= FAR_RATIO * block and block <= FAR_RATIO * size for size in sizes):
        return ""
    return (
        f"the costs are of reads of {format_bytes(block)}, and an expert has {format_bytes(max(sizes))}: times may be far off. "
        "`bel-profile bandwidth MODEL` measures reads of its experts"
    )


def page_sized(layers: Sequence[TraceLayer]) -> tuple[TraceLayer, ...]:
    """The layers with the bytes that an expert takes in a bundle at least: whole pages of 4096 bytes.

    It may take more, since each of its parts is aligned too (`formats/SPEC.md`, "Experts file"); a trace does not say.
    """
    sizes = [None if x.expert_bytes is None else align_up(x.expert_bytes, PAGE_BYTES) for x in layers]
    return tuple(replace(x, expert_bytes=size) for x, size in zip(layers, sizes, strict=True))
