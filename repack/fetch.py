"""Fetching a published bundle: the manifest first, then the files that it names, all of them verified."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bel.formats.atomic import fsync_folder
from bel.formats.bundle import Bundle, open_bundle, size_problem
from bel.formats.errors import BadInputError, DamagedBundleError, UsageError, printable
from bel.formats.json_file import MAX_JSON_BYTES
from bel.formats.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest
from bel.formats.signals import INTERRUPTS, signals_held
from bel.repack.card import CARD_NAME
from bel.repack.folder_lock import locked_folder
from bel.repack.hub import Hub, Snapshot
from bel.repack.own_files import foreign_leftovers, is_generated
from bel.repack.target import check_leftover, check_space, resolve_target
from bel.repack.upload_plan import LICENSE_NAMES, PLAN_NAME, PROFILE_NAME, SUMS_NAME
from bel.repack.verify import verify_bundle

CACHE_NAME = ".cache"  # where the hub's client keeps what it needs to go on
EXTRAS = (CARD_NAME, SUMS_NAME, PROFILE_NAME, PLAN_NAME, *LICENSE_NAMES)
SHOWN_PROBLEMS = 5
Report = Callable[[str, int, int], None]
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fetched:
    """What was fetched: the commit (40 hex digits), names and sizes, and the content digest of the whole model."""

    commit: str
    files: tuple[tuple[str, int], ...]
    content_digest: str


def fetch(hub: Hub, repo_id: str, target: Path, *, revision: str | None, dense_only: bool, progress: Report) -> Fetched:
    """Download a bundle to `target`, which must not exist, or hold a part of this very bundle (`dense_only` made it).

    Raises BadInputError for a repository that is no bundle, DamagedBundleError where it lacks a file or a file is not what
    the manifest says; the wrong files are removed, the others stay, so that the next run fetches only those again.
    """
    target = resolve_target(target)
    if not target.parent.is_dir():
        raise UsageError("the folder that should hold the output does not exist", path=str(target.parent))
    found = hub.snapshot(repo_id, revision)
    if MANIFEST_NAME not in found.files:
        raise BadInputError(
            f"{repo_id} is no bundle: it has no {MANIFEST_NAME} (its upload may not have ended)",
            hint="Ask its owner to run `bel-repack publish` again",
        )
    work = _place(target)
    with locked_folder(work):
        bundle = _fetch_manifest(hub, found, work, in_place=work == target)
        wanted = _wanted(bundle.manifest, dense_only)
        extras = [name for name in EXTRAS if name in found.files and not _is_users(found, work / name, in_place=work == target)]
        _check_remote(found, wanted, extras)
        check_space(work, sum(size for name, size in wanted.items() if not bundle.path(name).exists()))
        hub.download(found, [*wanted, *extras], work)
        _verify(bundle, wanted, progress)
        _check_extras(found, extras, work)
        _settle(work, target, {MANIFEST_NAME, *dict(bundle.manifest.files), *extras})
    rows = [(name, (target / name).stat().st_size) for name in [*wanted, MANIFEST_NAME, *extras]]
    return Fetched(found.commit, tuple(rows), bundle.manifest.content_digest)


def _place(target: Path) -> Path:
    """Where to work: beside the target until all is verified; in it where it holds a part of a bundle already."""
    if not os.path.lexists(target):
        return _temporary(target)
    if not target.is_dir() or not (target / MANIFEST_NAME).is_file():
        raise UsageError("the output exists already", path=str(target), hint="Give another place with -o")
    bundle = open_bundle(target)
    if all(size_problem(bundle.path(name), size) is None for name, size in bundle.manifest.files):
        raise UsageError(
            "the output exists already, with all files of a bundle",
            path=str(target),
            hint="`bel-repack verify` says whether they are sound; to fetch anew remove it, or give another place with -o",
        )
    return target


def _temporary(target: Path) -> Path:
    """The folder to download into, as an earlier run left it, or new."""
    staging = target.with_name(f".{target.name}.bel-fetch")
    check_leftover(staging, foreign_leftovers(staging, also=(CACHE_NAME, *EXTRAS)))
    staging.mkdir(exist_ok=True)
    return staging


def _is_users(found: Snapshot, path: Path, *, in_place: bool) -> bool:
    """Whether a profile, plan, card .. that stands in a part of a bundle is not what the hub has: it is kept, and said so."""
    if not in_place or not os.path.lexists(path) or is_generated(path):
        return False
    if path.is_file() and found.files[path.name].holds(path.read_bytes()):
        return False
    _LOG.warning("%s is not what the hub has, and stays as it is; it was not fetched", printable(str(path)))
    return True


def _fetch_manifest(hub: Hub, found: Snapshot, work: Path, *, in_place: bool) -> Bundle:
    """The bundle with its manifest.  A part of another bundle is refused, never mixed with this one."""
    size = found.files[MANIFEST_NAME].size_bytes or 0
    if size > MAX_MANIFEST_BYTES:
        raise BadInputError(f"{MANIFEST_NAME} of {found.repo_id} is too large to be one", found=size)
    if not in_place:
        hub.download(found, [MANIFEST_NAME], work)
        return _open_fetched(work)
    look = _temporary(work)
    try:
        hub.download(found, [MANIFEST_NAME], look)
        theirs, ours = _open_fetched(look), open_bundle(work)
        if (look / MANIFEST_NAME).read_bytes() != (work / MANIFEST_NAME).read_bytes():
            raise UsageError(
                "the output exists and is a part of another bundle",
                path=str(work),
                found=f"content digest {ours.manifest.content_digest}",
                expected=theirs.manifest.content_digest,
                hint="Give another place with -o",
            )
        return ours
    finally:
        shutil.rmtree(look)


def _open_fetched(folder: Path) -> Bundle:
    """The bundle of a manifest that was fetched; a damaged one is removed, or the next run would take it for fetched."""
    try:
        return open_bundle(folder)
    except DamagedBundleError:
        (folder / MANIFEST_NAME).unlink()
        raise


def _wanted(manifest: Manifest, dense_only: bool) -> dict[str, int]:
    """Names and sizes of the files to fetch, the manifest aside."""
    if not dense_only:
        return dict(manifest.files)
    return {manifest.dense.name: manifest.dense.size_bytes} | {s.header_file: s.header_file_bytes for s in manifest.sources}


def _check_remote(found: Snapshot, wanted: dict[str, int], extras: list[str]) -> None:
    """Raise DamagedBundleError, before anything large moves, where the repository cannot give the bundle."""
    for name, size in wanted.items():
        there = found.files.get(name)
        if there is None:
            raise DamagedBundleError(f"the repository lacks {printable(name)}, which its manifest names", path=found.repo_id)
        if there.size_bytes not in (None, size):
            raise DamagedBundleError(
                f"{printable(name)} has the wrong size in the repository",
                path=found.repo_id,
                found=f"{there.size_bytes} bytes",
                expected=f"{size}",
            )
    for name in extras:
        if (found.files[name].size_bytes or 0) > MAX_JSON_BYTES:
            raise BadInputError(f"{name} is larger than it can be", path=found.repo_id, found=found.files[name].size_bytes)


def _verify(bundle: Bundle, wanted: dict[str, int], progress: Report) -> None:
    """Compare every byte that is there with the manifest's digests; files that are wrong are removed, and named if wanted.

    One that is not wanted now is of an earlier run: right, it saves the next one its download; wrong, the bundle has changed.
    """
    absent = {n: size for n, size in bundle.manifest.files if n not in wanted and not bundle.path(n).exists()}
    report = verify_bundle(bundle, quick=False, progress=progress)
    expected = {str(size_problem(bundle.path(name), size)) for name, size in absent.items()}
    problems = [problem for problem in report.problems if problem not in expected]
    wrong = [name for name, _ in bundle.manifest.files if any(_is_of(bundle, name, p) for p in problems)]
    for name in wrong:
        bundle.path(name).unlink(missing_ok=True)
    stale = [name for name in wrong if name not in wanted]
    problems = [problem for problem in problems if not any(_is_of(bundle, name, problem) for name in stale)]
    if not problems:
        return
    again = ", ".join(printable(name) for name in wrong if name in wanted) or "what is missing"
    raise DamagedBundleError(
        f"what was fetched is not what was published: {'; '.join(problems[:SHOWN_PROBLEMS])}"
        + (f"; and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""),
        hint=f"Run the same command again: it fetches {again} once more",
    )


def _is_of(bundle: Bundle, name: str, problem: str) -> bool:
    return problem.startswith(f"{printable(str(bundle.path(name)))}: ")


def _check_extras(found: Snapshot, names: list[str], work: Path) -> None:
    """The card, the sums, the profile and the plan stand in no manifest: they are compared with what the hub lists."""
    for name in names:
        path = work / name
        if not found.files[name].holds(path.read_bytes()):
            path.unlink()
            raise DamagedBundleError(
                f"{name} came other than the hub lists it", path=str(path), hint="Run the same command again"
            )


def _settle(work: Path, target: Path, keep: set[str]) -> None:
    """Drop the client's notes and what an earlier run left of another bundle, and give the bundle its name."""
    notes = work / CACHE_NAME / "huggingface"
    if notes.is_dir():
        shutil.rmtree(notes)
        if not os.listdir(notes.parent):  # it may hold what is the user's own
            notes.parent.rmdir()
    if work != target:
        for path in [p for p in work.rglob("*") if not p.is_dir() and p.relative_to(work).as_posix() not in keep]:
            path.unlink()
    with signals_held():
        if work != target:
            os.rename(work, target)
        fsync_folder(target)
        fsync_folder(target.parent)
        INTERRUPTS.done()
