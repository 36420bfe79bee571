"""Publishing a bundle: everything is checked and planned before a byte leaves, and the manifest goes last."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bel.formats.bundle import Bundle, check_sizes, read_file
from bel.formats.errors import BadInputError, DamagedBundleError, MachineError, UsageError, printable
from bel.formats.fingerprint import fingerprint
from bel.formats.gguf_header import scan_header
from bel.formats.manifest import MANIFEST_NAME
from bel.formats.plan import Plan
from bel.formats.plan_json import load_plan
from bel.formats.profile import Profile
from bel.formats.profile_json import load_profile
from bel.repack.card import CARD_NAME, Origin, complete, compose, origin_of_metadata, read_card
from bel.repack.card_section import section
from bel.repack.hub import Hub, Snapshot, check_repo_id, validate_card
from bel.repack.stream import CHUNK_BYTES
from bel.repack.upload_plan import (
    LICENSE_NAMES,
    PLAN_NAME,
    PROFILE_NAME,
    SUMS_NAME,
    UploadFile,
    UploadPlan,
    check_private,
    plan_upload,
    sums_bytes,
    sums_line,
)
from bel.repack.verify import verify_bundle

MAX_CARD_BYTES = 4 << 20
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Publication:
    """A bundle that is ready to go: what is uploaded, the card, and the small files that are not data, by name."""

    bundle: Bundle
    repo_id: str
    plan: UploadPlan
    front: dict[str, Any]
    card: bytes
    extras: dict[str, bytes]


def prepare(
    bundle: Bundle, repo_id: str, given: Origin, *, profile: Path | None, plan: Path | None, quick: bool, progress: Report
) -> Publication:
    """Check a bundle and plan its upload; nothing is sent or written.

    Every byte is verified; with `quick` a sample, for a look at the plan alone.  `profile` and `plan` are files that go
    with it (None: those in its folder, if any).  Raises UsageError for what options mend, BadInputError for a card, profile
    or plan that cannot go, DamagedBundleError for a bundle that does not verify.
    """
    check_repo_id(repo_id)
    check_sizes(bundle)
    _verify(bundle, progress, quick=quick)
    text = _read_card_text(bundle.path(CARD_NAME))
    front = _front(bundle, text, given)
    loaded = _bound(bundle, profile, plan)
    licence, warnings = _licence_text(bundle, front)
    extras = {MANIFEST_NAME: bundle.path(MANIFEST_NAME).read_bytes(), **{n: data for n, (data, _) in loaded.items()}, **licence}
    data = dict(bundle.manifest.files)
    sizes = {name: len(content) for name, content in extras.items()}
    sizes[SUMS_NAME] = sums_bytes([*data, *extras])
    listed = [UploadFile(name, size) for name, size in {**data, **sizes}.items()]
    card = _card(bundle, repo_id, text, front, listed, loaded)
    whole = plan_upload(data, {**sizes, CARD_NAME: len(card)}, _present(bundle.folder))
    folders = _folders(bundle.folder)
    for name, content in {**extras, CARD_NAME: card}.items():
        check_private(name, content.decode("utf-8", "replace"), folders)
    shown = validate_card(card.decode(), str(bundle.path(CARD_NAME)))
    return Publication(bundle, repo_id, replace(whole, warnings=(*warnings, *whole.warnings)), shown, card, extras)


def send(publication: Publication, hub: Hub, *, private: bool, progress: Report) -> tuple[str, Snapshot]:
    """Upload: the data, then, once the hub has it whole, the manifest and the card.  The address and the last commit."""
    bundle, plan, repo_id = publication.bundle, publication.plan, publication.repo_id
    digests = _digests(bundle, [file.name for file in plan.data], progress)
    digests |= {name: hashlib.sha256(data).hexdigest() for name, data in publication.extras.items()}
    address = hub.create(repo_id, private=private)
    before = hub.snapshot(repo_id, None)
    if private and before.is_private is False:
        raise UsageError(f"{repo_id} exists and is public; nothing was sent", hint="Make it private first, or name another")
    old = before.files.get(MANIFEST_NAME)
    # The manifest of another bundle goes before its data do: a stranger must not fetch one with the other.
    withdraw = [MANIFEST_NAME] if old is not None and not old.holds(publication.extras[MANIFEST_NAME]) else []
    data = [file.name for file in plan.data]
    hub.upload(repo_id, bundle.folder, data, f"Data of {bundle.manifest.name}", withdraw=withdraw)
    _check_arrived(hub.snapshot(repo_id, None), plan.data, digests)
    sums = "".join(sums_line(digest, name) for name, digest in digests.items()).encode("utf-8", "surrogateescape")
    small = {**publication.extras, SUMS_NAME: sums, CARD_NAME: publication.card}
    with tempfile.TemporaryDirectory(prefix="bel-publish-") as folder:
        for name, content in small.items():
            (Path(folder) / name).write_bytes(content)
        hub.upload(repo_id, Path(folder), list(small), f"Manifest and card of {bundle.manifest.name}")
    done = hub.snapshot(repo_id, None)
    _check_arrived(done, plan.files, digests)
    return address, done


def _verify(bundle: Bundle, progress: Report, *, quick: bool) -> None:
    report = verify_bundle(bundle, quick=quick, progress=progress)
    if report.problems:
        raise DamagedBundleError(
            f"the bundle does not verify, so that nothing was sent: {report.problems[0]}"
            + (f" (and {report.count - 1} more)" if report.count > 1 else ""),
            hint="`bel-repack verify` lists everything",
        )


def _bound(bundle: Bundle, profile: Path | None, plan: Path | None) -> dict[str, tuple[bytes, Profile | Plan]]:
    """The profile and plan that go along, by their names in the bundle.  Raises BadInputError for those of another model, and
    where there is no such file."""
    own = fingerprint(bundle)
    found: dict[str, tuple[bytes, Profile | Plan]] = {}
    for name, path, load in ((PROFILE_NAME, profile, load_profile), (PLAN_NAME, plan, load_plan)):
        source = path if path is not None else bundle.path(name)
        if not source.exists():
            if path is None:
                continue
            raise BadInputError("no such file", path=str(path))
        read: Profile | Plan = load(source)
        if read.fingerprint != own:
            raise BadInputError(
                f"this {name.removesuffix('.json')} is of another model ({read.model_name}), not of this bundle",
                path=str(source),
                found=f"fingerprint {read.fingerprint}",
                expected=own,
                hint=f"Give one of this bundle, or move {name} away",
            )
        found[name] = (source.read_bytes(), read)
    return found


def _front(bundle: Bundle, text: str, given: Origin) -> dict[str, Any]:
    """The front matter, from README.md, the options and the metadata, which the dense part has from the source."""
    metadata = origin_of_metadata(scan_header(bundle.path(bundle.manifest.dense.name)).text)
    return complete(read_card(text, str(bundle.path(CARD_NAME))), given, metadata)


def _licence_text(bundle: Bundle, front: dict[str, Any]) -> tuple[dict[str, bytes], list[str]]:
    """The file that `license_link` names in the bundle, if it names one; a warning where there is none."""
    link = front.get("license_link")
    if not isinstance(link, str) or "://" in link:
        return {}, []
    if link in LICENSE_NAMES and bundle.path(link).is_file() and not bundle.path(link).is_symlink():
        return {link: read_file(bundle.path(link), MAX_CARD_BYTES)}, []
    return {}, [f"license_link is {printable(link)}, which is not in the bundle: put the licence's text there as LICENSE"]


def _card(
    bundle: Bundle,
    repo_id: str,
    text: str,
    front: dict[str, Any],
    files: list[UploadFile],
    loaded: dict[str, tuple[bytes, Profile | Plan]],
) -> bytes:
    profile, plan = (loaded[name][1] if name in loaded else None for name in (PROFILE_NAME, PLAN_NAME))
    assert not isinstance(profile, Plan) and not isinstance(plan, Profile), "each name has its own kind"
    described = section(bundle.manifest, repo_id, files, profile, plan)
    return compose(text, front, described, str(bundle.path(CARD_NAME))).encode()


def _read_card_text(path: Path) -> str:
    if not os.path.lexists(path):
        return ""
    if path.is_symlink():
        raise BadInputError(
            "README.md is a link, and what it leads to may not be for the public",
            path=str(path),
            hint="Put a file in its place",
        )
    if not path.is_file() or path.stat().st_size > MAX_CARD_BYTES:
        raise BadInputError("this is no model card: not a file, or larger than 4 MiB", path=str(path))
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInputError(
            "the model card is not UTF-8", path=str(path), offset_bytes=error.start, hint="Save it as UTF-8"
        ) from None


def _present(folder: Path) -> list[str]:
    """The names of all files below a folder, relative to it."""
    return [
        Path(place, name).relative_to(folder).as_posix()
        for place, folders, names in os.walk(folder)
        for name in [*names, *(n for n in folders if Path(place, n).is_symlink())]
    ]


def _folders(folder: Path) -> set[str]:
    """Absolute paths that must not be published: the bundle's place, and the user's home."""
    places = {os.path.abspath(folder), os.path.realpath(folder), str(Path.home())}
    return {place for place in places if place.count("/") > 1}


def _digests(bundle: Bundle, names: list[str], progress: Report) -> dict[str, str]:
    """SHA-256 of files of a bundle, read whole."""
    sizes = dict(bundle.manifest.files)
    done, total, digests = 0, sum(sizes[name] for name in names), {}
    for name in names:
        hasher = hashlib.sha256()
        with bundle.path(name).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                hasher.update(chunk)
                done += len(chunk)
                progress("sha256", done, total)
        digests[name] = hasher.hexdigest()
    return digests


def _check_arrived(snapshot: Snapshot, files: tuple[UploadFile, ...], digests: dict[str, str]) -> None:
    """Raise MachineError where the hub does not have a file as it was sent."""
    for file in files:
        there = snapshot.files.get(file.name)
        if there is None:
            raise MachineError(
                f"the hub took the upload but does not list {file.name} (a .gitignore in the repository?)",
                hint="Publish into a new repository",
            )
        other = there.sha256 is not None and file.name in digests and there.sha256 != digests[file.name]
        if there.size_bytes not in (None, file.size_bytes) or other:
            raise MachineError(
                f"the hub has another {file.name} than was sent",
                found=f"{there.size_bytes} bytes, sha256 {there.sha256}",
                expected=f"{file.size_bytes} bytes, sha256 {digests.get(file.name)}",
                hint="Run the same command again",
            )
