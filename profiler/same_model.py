"""Whether two files speak of one model: the name, the fingerprint and every layer must agree, not only the shapes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from bel.formats.errors import BadInputError, printable
from bel.formats.trace_header import TraceLayer


@dataclass(frozen=True, slots=True)
class Identity:
    """Of which model the file `path` speaks.  `arch` and the bytes of an expert may be unknown ("" and None)."""

    path: str
    model_name: str
    arch: str
    fingerprint: str
    layers: tuple[TraceLayer, ...]


def check_all_same(identities: list[Identity]) -> None:
    """Raises BadInputError for the first two that are not of one model."""
    for one, other in itertools.combinations(identities, 2):  # not only against the first: it may not know its architecture
        check_same_model(one, other)


def check_same_model(one: Identity, other: Identity) -> None:
    """Raises BadInputError, naming both, where the two are not of one model."""
    for what, mine, yours in (
        ("fingerprint", one.fingerprint, other.fingerprint),
        ("model", one.model_name, other.model_name),
        ("architecture", one.arch or other.arch, other.arch or one.arch),
    ):
        if mine != yours:
            raise _refusal(one, other, f"{what} '{printable(mine)}'", f"{what} '{printable(yours)}'")
    if [x.layer for x in one.layers] != [x.layer for x in other.layers]:
        raise _refusal(one, other, f"layers {_numbers(one)}", f"layers {_numbers(other)}")
    for a, b in zip(one.layers, other.layers, strict=True):
        where = f"in layer {a.layer}"
        if a.n_expert != b.n_expert:
            raise _refusal(one, other, f"{a.n_expert} experts {where}", f"{b.n_expert} experts {where}")
        if a.top_k != b.top_k:
            raise _refusal(one, other, f"top_k {a.top_k} {where}", f"top_k {b.top_k} {where}")
        if None not in (a.expert_bytes, b.expert_bytes) and a.expert_bytes != b.expert_bytes:
            raise _refusal(
                one, other, f"experts of {a.expert_bytes} bytes {where}", f"experts of {b.expert_bytes} bytes {where}"
            )


def merged_layers(identities: list[Identity]) -> tuple[TraceLayer, ...]:
    """The layers of files of one model, with the bytes of an expert from the first file that knows them."""
    rows = zip(*(i.layers for i in identities), strict=True)
    return tuple(replace(row[0], expert_bytes=next((x.expert_bytes for x in row if x.expert_bytes), None)) for row in rows)


def _numbers(identity: Identity) -> str:
    numbers = [x.layer for x in identity.layers]
    shown = ", ".join(map(str, numbers[:4]))
    return shown if len(numbers) <= 4 else f"{shown} .. {numbers[-1]} ({len(numbers)})"


def _refusal(one: Identity, other: Identity, found: str, expected: str) -> BadInputError:
    cause = f"this is not of the same model as {printable(one.path)}: that has {found}, this has {expected}"
    return BadInputError(cause, path=other.path, hint="Only profiles and traces of one model belong together")
