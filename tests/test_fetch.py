"""`bel-repack fetch`: whole and verified or not at all, resumed, and what a hub that fails or lies leads to."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import synth
from bel.formats.bundle import open_bundle
from bel.formats.console import run_command
from bel.profiler.cli import main_group as profile_group
from exactness import repack
from faults import Outcome, answer, finish, real, refused, run_cli, start, tree, wait_until
from hub_server import Fault, Hub, client_environment, serving

REPO = "org/tiny"
EXPERTS, DENSE, HEADER = "tiny-experts.bin", "tiny-dense.gguf", "source/tiny.gguf.hdr.zst"


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two bundles of one shape and other weights, their experts files over the size that the test's hub keeps in git."""
    made = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp("made")
        whole = synth.Gguf(synth.moe_entries(experts=24), synth.moe_tensors(experts=24), seed=seed)
        made.append(repack(whole.write(folder / "tiny.gguf"), folder / "tiny.bel"))
    return made[0], made[1]


@dataclass
class Desk:
    """A hub that has the first bundle, and commands that talk to it."""

    hub: Hub
    environment: dict[str, str]
    folder: Path

    def fetch(self, *arguments: str | Path) -> Outcome:
        return real("fetch", REPO, "--json", *arguments, env=self.environment, cwd=self.folder)

    def put(self, bundle: Path, **other: bytes | None) -> None:
        """Commit the files of a bundle and others; None leaves one out."""
        files = {p.relative_to(bundle).as_posix(): p.read_bytes() for p in bundle.rglob("*") if p.is_file()}
        files |= {"README.md": b"# card\n", "SHA256SUMS": b"", ".gitattributes": b"", "notes.txt": b"not of the bundle"}
        whole = {**files, **{name.replace("__", "."): data for name, data in other.items()}}
        self.hub.repos.setdefault(REPO, [])
        self.hub.commit(REPO, {name: data for name, data in whole.items() if data is not None}, "bundle")


@pytest.fixture
def desk(tmp_path: Path, bundles: tuple[Path, Path]) -> Iterator[Desk]:
    with serving() as hub:
        folder = tmp_path / "here"
        folder.mkdir()
        made = Desk(hub, client_environment(hub, tmp_path / "home"), folder)
        made.put(bundles[0])
        yield made


def same(fetched: Path, bundle: Path) -> None:
    """The fetched bundle holds the files of the published one, and of the rest only what belongs to it."""
    found = {name: what for name, what in tree(fetched).items() if name not in ("README.md", "SHA256SUMS")}
    assert found == tree(bundle)


def test_a_bundle_is_fetched_whole_and_nothing_else(desk: Desk, bundles: tuple[Path, Path]) -> None:
    got = answer(desk.fetch())
    assert [path.name for path in desk.folder.iterdir()] == ["tiny.bel"]
    same(desk.folder / "tiny.bel", bundles[0])
    manifest = open_bundle(bundles[0]).manifest
    assert got["content_digest"] == manifest.content_digest and got["commit"] == desk.hub.repos[REPO][-1].oid
    names = {row["name"] for row in got["files"]}
    assert names == {*dict(manifest.files), "manifest.json", "README.md", "SHA256SUMS"}
    assert got["total_bytes"] == sum(p.stat().st_size for p in (desk.folder / "tiny.bel").rglob("*") if p.is_file())
    assert desk.hub.asked("notes.txt") == 0


def test_a_revision_is_what_is_asked_for(desk: Desk, bundles: tuple[Path, Path]) -> None:
    first = desk.hub.repos[REPO][0].oid
    desk.put(bundles[1])
    assert answer(desk.fetch("--revision", first))["commit"] == first
    same(desk.folder / "tiny.bel", bundles[0])
    refused(desk.fetch("--revision", "none", "-o", "x.bel"), 5, "404")


def test_dense_only_is_enough_for_fit_and_the_rest_follows(
    desk: Desk, example: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.hub.repos.clear()
    trained = repack(example, desk.folder / "t.bel")
    desk.put(trained)
    got = answer(desk.fetch("-o", "part.bel", "--dense-only"))
    assert desk.hub.asked(r"experts\.(bin|idx)") == 0
    assert not [row for row in got["files"] if "experts" in row["name"]]
    part = desk.folder / "part.bel"
    capsys.readouterr()
    fits = []
    for path in (part, trained):
        assert run_command(profile_group, "bel-profile", ["fit", str(path), "--vram", "1G", "--ram", "1G", "--json"]) == 0
        fits.append(capsys.readouterr().out)
    assert fits[0] == fits[1]
    assert run_cli("verify", part).status == 4, "a part is no whole bundle"
    asked = desk.hub.asked("GET .*dense.gguf")
    answer(desk.fetch("-o", "part.bel"))
    assert desk.hub.asked("GET .*dense.gguf") == asked, "what is there is not fetched again"
    same(part, trained)


def test_a_part_of_another_bundle_is_not_completed(desk: Desk, bundles: tuple[Path, Path]) -> None:
    answer(desk.fetch("--dense-only"))
    before = tree(desk.folder)
    desk.put(bundles[1])
    refused(desk.fetch(), 2, "part of another bundle.*content digest")
    assert tree(desk.folder) == before


@pytest.mark.parametrize("kind", ["file", "folder", "bundle", "no-parent", "here"])
def test_what_exists_is_not_overwritten(desk: Desk, bundles: tuple[Path, Path], kind: str) -> None:
    target = desk.folder / ("none/tiny.bel" if kind == "no-parent" else "tiny.bel")
    if kind == "file":
        target.write_text("mine")
    elif kind == "folder":
        target.mkdir()
    elif kind == "bundle":
        shutil.copytree(bundles[0], target)
    elif kind == "here":
        target = Path(".")
    before = tree(desk.folder)
    refused(desk.fetch("-o", target), 2, "exists already|does not exist")
    assert tree(desk.folder) == before


def test_a_repository_that_is_no_bundle_is_refused(desk: Desk, bundles: tuple[Path, Path]) -> None:
    desk.put(bundles[0], manifest__json=None)
    refused(desk.fetch(), 3, "org/tiny is no bundle: it has no manifest.json")
    assert list(desk.folder.iterdir()) == []
    refused(real("fetch", "org/none", env=desk.environment, cwd=desk.folder), 5, "404.*Check the name")
    refused(real("fetch", "none", env=desk.environment, cwd=desk.folder), 2, "ORG/NAME")


def test_a_repository_that_lacks_a_file_is_refused_before_the_download(desk: Desk, bundles: tuple[Path, Path]) -> None:
    files = {**desk.hub.files(REPO)}
    desk.hub.commit(REPO, {name: data for name, data in files.items() if name != EXPERTS}, "without")
    refused(desk.fetch(), 4, f"the repository lacks {EXPERTS}")
    desk.hub.commit(REPO, {**files, EXPERTS: files[EXPERTS][:-1]}, "short")
    refused(desk.fetch(), 4, f"{EXPERTS} has the wrong size.*found {len(files[EXPERTS]) - 1} bytes")
    assert desk.hub.asked("GET .*(dense|experts)") == 0
    desk.hub.commit(REPO, {**files, "manifest.json": files["manifest.json"].replace(b'"dense"', b'"dunce"')}, "edited")
    refused(desk.fetch(), 4, "manifest's checksum does not match")
    desk.hub.commit(REPO, files, "mended")
    answer(desk.fetch())
    same(desk.folder / "tiny.bel", bundles[0])


@pytest.mark.parametrize("name", [EXPERTS, HEADER, "manifest.json", "README.md"])
def test_a_file_that_comes_back_different_is_named_and_fetched_again(desk: Desk, bundles: tuple[Path, Path], name: str) -> None:
    at = {EXPERTS: 5000, "README.md": 3}.get(name, 100)
    desk.hub.faults = [Fault(f"GET .*/resolve/.*{re.escape(name)}", flip_byte=at)]
    refused(desk.fetch(), 4, re.escape(name))
    assert not (desk.folder / "tiny.bel").exists()
    others = desk.hub.asked("GET .*/resolve/")
    answer(desk.fetch())
    if name != "manifest.json":
        assert desk.hub.asked("GET .*/resolve/") == others + 1, "only the wrong file is fetched again"
    same(desk.folder / "tiny.bel", bundles[0])


def test_a_lie_that_stands_on_the_hub_is_refused_each_time(desk: Desk) -> None:
    files = dict(desk.hub.files(REPO))
    data = bytearray(files[EXPERTS])
    data[9000] ^= 1
    desk.hub.commit(REPO, {**files, EXPERTS: bytes(data)}, "changed")
    for _ in range(2):
        refused(desk.fetch(), 4, f"{EXPERTS}: checksum mismatch in layer 0 expert")
    assert not (desk.folder / "tiny.bel").exists()


FAULTS = {
    "401": (Fault("GET /api/models/", 401, "Invalid username or password."), "401.*hf auth login"),
    "403": (Fault(f"GET .*{EXPERTS}", 403, "gated", times=9), "403.*gated"),
    "404": (Fault(f"HEAD .*{EXPERTS}", 404, "gone", {"X-Error-Code": "EntryNotFound"}, times=9), "404"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_refusing_hub_is_quoted_and_the_next_run_goes_on(desk: Desk, bundles: tuple[Path, Path], case: str) -> None:
    fault, message = FAULTS[case]
    desk.hub.faults = [replace(fault)]
    refused(desk.fetch(), 5, message)
    assert not (desk.folder / "tiny.bel").exists()
    desk.hub.faults = []
    before = desk.hub.asked(f"GET .*/resolve/.*{DENSE}")
    answer(desk.fetch())
    assert desk.hub.asked(f"GET .*/resolve/.*{DENSE}") == max(before, 1), "what came whole is not fetched again"
    same(desk.folder / "tiny.bel", bundles[0])
    assert [path.name for path in desk.folder.iterdir()] == ["tiny.bel"]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(f"GET .*/resolve/.*{EXPERTS}", cut_bytes=50_000),
        Fault(f"GET .*/resolve/.*{EXPERTS}", 429, "slow down", {"Retry-After": "0"}),
    ],
    ids=["cut", "429"],
)
def test_a_passing_trouble_is_overcome(desk: Desk, bundles: tuple[Path, Path], fault: Fault) -> None:
    desk.hub.faults = [fault]
    answer(desk.fetch())
    assert fault.times == 0
    assert desk.hub.asked(f"GET .*/resolve/.*{EXPERTS}") == 2
    same(desk.folder / "tiny.bel", bundles[0])


def test_a_killed_fetch_leaves_no_bundle_and_is_taken_up(desk: Desk, bundles: tuple[Path, Path]) -> None:
    """Killed while the hub holds the experts back; what had come is not asked for again, and no half file stays."""
    desk.hub.faults = [Fault(f"GET .*/resolve/.*{EXPERTS}", 429, "wait", {"Retry-After": "60"}, times=9)]
    process = start("fetch", REPO, env=desk.environment, cwd=desk.folder)
    work = desk.folder / ".tiny.bel.bel-fetch"
    whole = [work / DENSE, work / HEADER, work / "tiny-experts.idx"]
    assert wait_until(lambda: all(path.exists() for path in whole) and desk.hub.asked(f"GET .*{EXPERTS}") > 0, process)
    process.kill()
    process.communicate()
    assert not (desk.folder / "tiny.bel").exists()
    desk.hub.faults = []
    answer(desk.fetch())
    same(desk.folder / "tiny.bel", bundles[0])
    assert [path.name for path in desk.folder.iterdir()] == ["tiny.bel"]


def test_ctrl_c_ends_a_fetch_that_waits(desk: Desk, bundles: tuple[Path, Path]) -> None:
    """The client would wait for its workers, here for ten minutes of a rate limit, before it let go."""
    desk.hub.faults = [Fault(f"GET .*/resolve/.*{EXPERTS}", 429, "wait", {"Retry-After": "600"}, times=9)]
    process = start("fetch", REPO, env=desk.environment, cwd=desk.folder)
    assert wait_until(lambda: desk.hub.asked(f"GET .*/resolve/.*{EXPERTS}") > 0, process)
    process.send_signal(signal.SIGINT)
    outcome = finish(process)
    refused(outcome, 130, "interrupted; the same command goes on")
    assert not (desk.folder / "tiny.bel").exists()
    desk.hub.faults = []
    answer(desk.fetch())
    same(desk.folder / "tiny.bel", bundles[0])


def test_an_update_between_two_runs_is_no_mixture(desk: Desk, bundles: tuple[Path, Path]) -> None:
    """The first run fails late; then the repository gets another bundle, and that one is fetched, whole."""
    desk.hub.faults = [Fault(f"GET .*{EXPERTS}", 403, "not now", times=9)]
    refused(desk.fetch(), 5, "403")
    desk.hub.faults = []
    desk.put(bundles[1])
    answer(desk.fetch())
    same(desk.folder / "tiny.bel", bundles[1])
