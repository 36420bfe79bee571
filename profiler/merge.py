"""Merging profiles of one model: their workloads stay apart, each with its weight."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bel.formats.errors import BadInputError
from bel.formats.profile import Profile, Workload, weighted
from bel.profiler.inputs import read_profile
from bel.profiler.same_model import Identity, check_all_same, merged_layers


@dataclass(frozen=True, slots=True)
class Merge:
    """A merged profile, and what is to be said about its inputs."""

    profile: Profile
    notes: tuple[str, ...]


def merge(paths: list[Path], weighting: str) -> Merge:
    """One profile with the workloads of all; merged profiles merge again, to the same as all at once.

    A workload without tokens is left out, and noted.  Two workloads of one name stay apart under two names.  Raises
    BadInputError where a profile is not valid or of another model, and where no workload has tokens.
    """
    profiles = [(path, read_profile(path)) for path in paths]
    identities = [Identity(str(path), p.model_name, p.arch, p.fingerprint, p.layers) for path, p in profiles]
    check_all_same(identities)
    notes: list[str] = []
    kept: dict[str, Workload] = {}
    for path, profile in profiles:
        for work in profile.workloads:
            if not work.tokens:
                notes.append(f"{path}: workload {work.name} has no tokens and is left out")
                continue
            name = _free_name(work.name, kept)
            if name != work.name:
                notes.append(f"{path}: there is a workload {work.name} already; this one is called {name}")
            kept[name] = replace(work, name=name)
    if not kept:
        raise BadInputError("no profile has any tokens: there is nothing to merge", path=str(paths[0]))
    first = profiles[0][1]
    merged = Profile(
        model_name=first.model_name,
        arch=next((p.arch for _, p in profiles if p.arch), ""),
        fingerprint=first.fingerprint,
        layers=merged_layers(identities),
        weighting=weighting,
        workloads=weighted(tuple(kept.values()), weighting),
    )
    return Merge(merged, tuple(notes))


def _free_name(name: str, taken: dict[str, Workload]) -> str:
    number = 2
    free = name
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free
