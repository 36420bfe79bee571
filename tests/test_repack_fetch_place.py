"""Where `fetch` works: it deletes nothing of the user's, is alone there, and names an address that is none."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import synth
from bel.repack.card import compose
from exactness import repack
from faults import Outcome, answer, finish, real, refused, start, tree, wait_until
from hub_server import Fault, Hub, client_environment, serving
from repack_runs import FRONT

REPO = "org/tiny"
EXPERTS = "tiny-experts.bin"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    whole = synth.Gguf(synth.moe_entries(experts=24), synth.moe_tensors(experts=24))
    return repack(whole.write(folder / "tiny.gguf"), folder / "tiny.bel")


def test_what_publish_and_fetch_make_is_no_obstacle_to_another_conversion(tmp_path: Path, bundle: Path) -> None:
    """Card and sums of a fetched bundle are the toolkit's own, and go with it; a word that was added does not."""
    model = bundle.parent / "tiny.gguf"
    own = repack(model, tmp_path / "tiny.bel")
    with serving() as hub:
        environment = client_environment(hub, tmp_path / "home")
        terms = ["--license", "other", "--license-name", "my own: terms", "--license-link", "https://x.org/?a#b"]
        sent = real("publish", own, "--repo-id", "org/new", *terms, "--base-model", "Org/Base", env=environment)
        assert sent.status == 0, sent
        assert real("fetch", "org/new", "-o", tmp_path / "got.bel", env=environment).status == 0
    got = tmp_path / "got.bel"
    assert {"README.md", "SHA256SUMS"} <= {p.name for p in got.iterdir()}
    with (got / "README.md").open("a") as file:
        file.write("11 tokens/s on my machine\n")
    refused(real(model, "-o", got, "--force"), 2, "README.md.*Move it out first")
    (got / "README.md").write_bytes(hub.files("org/new")["README.md"])
    for place in (own, got):
        assert real(model, "-o", place, "--force").status == 0
        assert tree(place) == tree(bundle)


@dataclass
class Desk:
    """A hub that has a bundle with a profile and a card, and `fetch` of it."""

    hub: Hub
    environment: dict[str, str]
    folder: Path
    files: dict[str, bytes]

    def fetch(self, *arguments: str | Path) -> Outcome:
        return real("fetch", REPO, *arguments, env=self.environment, cwd=self.folder)

    def put(self, **other: bytes) -> None:
        self.hub.commit(REPO, {**self.files, **{name.replace("__", "."): data for name, data in other.items()}}, "bundle")


def card(section: str) -> bytes:
    return compose("", FRONT, section, "README.md").encode()


@pytest.fixture
def desk(tmp_path: Path, bundle: Path) -> Iterator[Desk]:
    with serving() as hub:
        (tmp_path / "here").mkdir()
        files = {p.relative_to(bundle).as_posix(): p.read_bytes() for p in bundle.rglob("*") if p.is_file()}
        files |= {"profile.json": b'{"theirs": 1}', "plan.json": b"{}", "README.md": card("first")}
        made = Desk(hub, client_environment(hub, tmp_path / "home"), tmp_path / "here", files)
        hub.repos[REPO] = []
        made.put()
        yield made


def test_a_profile_that_was_put_into_a_part_is_kept(desk: Desk) -> None:
    """The documented order: the dense part, a plan for it beside it, the rest."""
    assert desk.fetch("--dense-only").status == 0
    part = desk.folder / "tiny.bel"
    (part / "profile.json").write_text("hours of work")
    (part / "README.md").write_text("notes of mine")
    got = desk.fetch("--json")
    assert {row["name"] for row in answer(got)["files"]} >= {EXPERTS, "plan.json"}
    assert (part / "profile.json").read_text() == "hours of work"
    assert (part / "README.md").read_text() == "notes of mine"
    for name in ("profile.json", "README.md"):
        assert f"{name} is not what the hub has, and stays as it is" in got.stderr
    assert (part / EXPERTS).read_bytes() == desk.files[EXPERTS]


def test_a_card_without_a_word_of_the_user_is_brought_up_to_date(desk: Desk) -> None:
    assert desk.fetch("--dense-only").status == 0
    desk.put(README__md=card("second"))
    got = desk.fetch()
    assert (got.status, got.stderr) == (0, "")
    assert (desk.folder / "tiny.bel" / "README.md").read_bytes() == card("second")


def test_what_else_is_in_a_part_stays(desk: Desk) -> None:
    assert desk.fetch("--dense-only").status == 0
    part = desk.folder / "tiny.bel"
    (part / ".cache").mkdir()
    for name in (".cache/mine", "notes.txt"):
        (part / name).write_text("mine")
    assert desk.fetch().status == 0
    assert {(part / name).read_text() for name in (".cache/mine", "notes.txt")} == {"mine"}
    assert not (part / ".cache" / "huggingface").exists()


@pytest.mark.parametrize("kind", ["link", "folder", "cache"])
def test_a_temporary_name_that_is_the_users_is_refused(desk: Desk, kind: str) -> None:
    place = desk.folder / ".tiny.bel.bel-fetch"
    precious = desk.folder / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    if kind == "link":
        place.symlink_to(precious)
    elif kind == "folder":
        precious.rename(place)
    else:
        (place / "source").mkdir(parents=True)
        precious.rename(place / "source" / "precious")
    before = tree(desk.folder)
    refused(desk.fetch(), 5 if kind == "link" else 2, r"\.tiny\.bel\.bel-fetch")
    assert tree(desk.folder) == before
    assert desk.hub.asked(f"GET .*{EXPERTS}") == 0


def test_what_an_earlier_run_left_is_no_obstacle(desk: Desk, bundle: Path) -> None:
    place = desk.folder / ".tiny.bel.bel-fetch"
    shutil.copytree(bundle, place)
    (place / "manifest.json").unlink()
    (place / "old-dense.gguf").write_bytes(b"")
    (place / "README.md").write_text("a card of an author")
    (place / ".cache" / "huggingface" / "download").mkdir(parents=True)
    assert desk.fetch().status == 0
    assert {name for name, (what, _) in tree(desk.folder / "tiny.bel").items() if what != "folder"} == set(desk.files)


def test_a_look_at_the_dense_part_keeps_what_came_already(desk: Desk) -> None:
    desk.hub.faults = [Fault("GET .*/resolve/.*experts.idx", 403, "not now", times=9)]
    experts = desk.folder / ".tiny.bel.bel-fetch" / EXPERTS
    while not experts.exists():
        refused(desk.fetch(), 5, "403")
    desk.hub.faults = []
    assert desk.fetch("--dense-only").status == 0
    assert (desk.folder / "tiny.bel" / EXPERTS).read_bytes() == desk.files[EXPERTS]
    asked = desk.hub.asked(f"GET .*/resolve/.*{EXPERTS}")
    assert desk.fetch().status == 0
    assert desk.hub.asked(f"GET .*/resolve/.*{EXPERTS}") == asked


def test_a_look_at_the_dense_part_is_not_stopped_by_another_bundles_experts(desk: Desk) -> None:
    place = desk.folder / ".tiny.bel.bel-fetch"
    place.mkdir()
    for name, byte in ((EXPERTS, b"o"), ("tiny-experts.idx", b"p")):
        (place / name).write_bytes(byte * len(desk.files[name]))
    assert desk.fetch("--dense-only").status == 0
    assert "tiny-dense.gguf" in {p.name for p in (desk.folder / "tiny.bel").iterdir()}
    assert not (desk.folder / "tiny.bel" / EXPERTS).exists()
    assert desk.fetch().status == 0
    assert (desk.folder / "tiny.bel" / EXPERTS).read_bytes() == desk.files[EXPERTS]


def test_two_fetches_of_one_output(desk: Desk) -> None:
    desk.hub.faults = [Fault(f"GET .*/resolve/.*{EXPERTS}", 429, "wait", {"Retry-After": "60"}, times=9)]
    first = start("fetch", REPO, env=desk.environment, cwd=desk.folder)
    try:
        assert wait_until(lambda: desk.hub.asked(f"GET .*/resolve/.*{EXPERTS}") > 0, first)
        refused(desk.fetch(), 5, "another run is writing this output.*Wait")
        assert (desk.folder / ".tiny.bel.bel-fetch" / "manifest.json").is_file(), "what the first works in stays"
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    desk.hub.faults = []
    assert desk.fetch().status == 0, "the lock went with its holder"


def test_two_fetches_that_complete_one_part(desk: Desk) -> None:
    assert desk.fetch("--dense-only").status == 0
    desk.hub.faults = [Fault(f"GET .*/resolve/.*{EXPERTS}", 429, "wait", {"Retry-After": "60"}, times=9)]
    first = start("fetch", REPO, env=desk.environment, cwd=desk.folder)
    try:
        assert wait_until(lambda: desk.hub.asked(f"GET .*/resolve/.*{EXPERTS}") > 0, first)
        refused(desk.fetch(), 5, "another run is writing this output")
    finally:
        first.send_signal(signal.SIGINT)
        assert finish(first).status == 130
    desk.hub.faults = []
    assert desk.fetch().status == 0


def test_the_output_may_be_a_link(desk: Desk, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (desk.folder / "tiny.bel").symlink_to(disk / "real.bel")
    assert desk.fetch("--dense-only").status == 0
    assert desk.fetch().status == 0
    assert os.readlink(desk.folder / "tiny.bel") == str(disk / "real.bel")
    assert (disk / "real.bel" / EXPERTS).read_bytes() == desk.files[EXPERTS]
    assert [p.name for p in disk.iterdir()] == ["real.bel"]
    assert [p.name for p in desk.folder.iterdir()] == ["tiny.bel"]


@pytest.mark.parametrize("address", ["nope", "localhost:8080", "http://", "https://[broken"])
def test_an_address_that_is_none_is_named(desk: Desk, address: str) -> None:
    refused(desk.fetch("--endpoint", address), 2, "is not the address of a hub.*https://.*--endpoint")
    desk.environment["HF_ENDPOINT"] = address
    refused(desk.fetch(), 2, "is not the address of a hub.*HF_ENDPOINT")
    assert list(desk.folder.iterdir()) == []


def test_publish_asks_for_the_address_before_it_reads_a_byte(desk: Desk, bundle: Path) -> None:
    """To verify a large bundle takes an hour; this one is damaged, and that would be said."""
    damaged = shutil.copytree(bundle, desk.folder / "tiny.bel")
    (damaged / EXPERTS).write_bytes(b"")
    outcome = real("publish", damaged, "--repo-id", REPO, "--endpoint", "nope", env=desk.environment)
    refused(outcome, 2, "'nope' is not the address of a hub")


def test_a_hub_that_is_not_there(desk: Desk) -> None:
    outcome = desk.fetch("--endpoint", "http://127.0.0.1:9")
    refused(outcome, 5, "cannot be reached: check the network and its address")
    assert "goes on where it stopped" not in outcome.stderr
