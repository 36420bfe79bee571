"""`bel-repack publish`: what goes and what is refused before a byte leaves, and what a hub that fails leaves behind."""

from __future__ import annotations

import hashlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import synth
from bel.formats.bundle import open_bundle
from bel.formats.console import run_command
from bel.formats.fingerprint import fingerprint
from bel.formats.profile_json import encode_profile
from bel.formats.trace_header import TraceLayer
from bel.profiler.cli import main_group as profile_group
from bel.profiler.summarize import summarize
from exactness import repack
from faults import Outcome, answer, finish, real, refused, run_cli, start, tree, wait_until
from hub_server import Fault, Hub, client_environment, serving
from routes import write_trace

REPO = "org/tiny"
TERMS = {
    "general.license": "apache-2.0",
    "general.base_model.0.repo_url": "https://huggingface.co/Org/Base",
}
LARGE = 24  # experts a layer: the files are over the size that the test's hub keeps in git
DRY = ("--dry-run", "--json")


def model(terms: dict[str, str], seed: int = 0) -> synth.Gguf:
    entries = [*synth.moe_entries(experts=LARGE), *(synth.key(k, synth.STRING, v) for k, v in terms.items())]
    return synth.Gguf(entries, synth.moe_tensors(experts=LARGE), seed=seed)


def bundle_of(folder: Path, terms: dict[str, str] | None = None, seed: int = 0, name: str = "tiny") -> Path:
    """A bundle in a folder of its own."""
    folder.mkdir(exist_ok=True)
    return repack(model(TERMS if terms is None else terms, seed).write(folder / f"{name}.gguf"), folder / f"{name}.bel")


@dataclass
class Desk:
    """A hub, and commands that talk to it."""

    hub: Hub
    environment: dict[str, str]
    folder: Path

    def run(self, *arguments: str | Path) -> Outcome:
        return real(*arguments, env=self.environment, cwd=self.folder)

    def publish(self, bundle: Path, *arguments: str | Path) -> Outcome:
        return self.run("publish", bundle, "--repo-id", REPO, *arguments)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with serving() as hub:
        yield Desk(hub, client_environment(hub, tmp_path / "home"), tmp_path)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return bundle_of(tmp_path / "made")


@pytest.fixture
def profile(tmp_path: Path, bundle: Path) -> Path:
    """A profile of the bundle."""
    manifest = open_bundle(bundle).manifest
    layers = [TraceLayer(x.layer, x.n_expert, 2, x.stride_bytes) for x in manifest.layers]
    made = summarize([write_trace(tmp_path / "code.trace", "code", [(9, 40)], layers=layers)]).profile
    path = tmp_path / "code.json"
    path.write_bytes(encode_profile(replace(made, fingerprint=fingerprint(open_bundle(bundle)))))
    return path


def dry(bundle: Path, *arguments: str | Path) -> Outcome:
    return run_cli("publish", bundle, "--repo-id", REPO, *DRY, *arguments)


def test_a_dry_run_shows_the_plan_and_changes_nothing(bundle: Path) -> None:
    before = tree(bundle, times=True)
    got = answer(dry(bundle))
    manifest = open_bundle(bundle).manifest
    names = {row["name"]: row["bytes"] for row in got["files"]}
    assert set(names) == {*dict(manifest.files), "manifest.json", "README.md", "SHA256SUMS"}
    assert all(names[name] == size for name, size in manifest.files)
    assert got["total_bytes"] == sum(names.values())
    assert got["card"]["license"] == "apache-2.0" and got["card"]["base_model"] == "Org/Base"
    assert got["warnings"] == [] and got["repo_id"] == REPO
    assert tree(bundle, times=True) == before


def test_strays_stay_at_home(bundle: Path) -> None:
    for name in (".env", "tiny-experts.bin.partial", ".cache/huggingface/upload/x.metadata", "source/notes.txt"):
        (bundle / name).parent.mkdir(parents=True, exist_ok=True)
        (bundle / name).write_text("secret")
    got = answer(dry(bundle))
    assert not [
        row for row in got["files"] if row["name"].startswith(".") or "partial" in row["name"] or "notes" in row["name"]
    ]
    assert len(got["warnings"]) == 4 and "hidden" in " ".join(got["warnings"])


def _damage(bundle: Path) -> None:
    path = bundle / "tiny-experts.bin"
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)


REFUSALS: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "damaged": (_damage, 4, "does not verify.*checksum mismatch"),
    "cut": (lambda b: (b / "tiny-experts.bin").write_bytes(b"x"), 4, "truncated"),
    "missing": (lambda b: (b / "tiny-dense.gguf").unlink(), 4, "missing"),
    "no-manifest": (lambda b: (b / "manifest.json").unlink(), 4, "no manifest.json"),
    "bad-yaml": (lambda b: (b / "README.md").write_text("---\na: b: c\n---\n"), 3, "front matter is not valid YAML"),
    "not-utf8": (lambda b: (b / "README.md").write_bytes(b"\xff\xfe"), 3, "not UTF-8"),
    "folder": (lambda b: (b / "README.md").mkdir(), 3, "no model card"),
    "path": (lambda b: (b / "README.md").write_text(f"See {b}/x\n"), 3, "README.md.*path of a machine"),
    "one-mark": (lambda b: (b / "README.md").write_text("<!-- bel-repack: end -->\n"), 3, "mark"),
    "strange-profile": (lambda b: (b / "profile.json").write_text("{}"), 3, "profile.json.*not a profile"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_wrong_is_refused_before_a_byte_leaves(bundle: Path, case: str) -> None:
    spoil, status, message = REFUSALS[case]
    spoil(bundle)
    refused(dry(bundle), status, message)


def test_terms_that_nobody_names_are_refused_and_options_supply_them(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path / "bare", {})
    refused(dry(bundle), 2, "--license")
    refused(dry(bundle, "--license", "mit"), 2, "--base-model")
    refused(dry(bundle, "--license", "other", "--base-model", "A/B"), 2, "--license-name and --license-link")
    options = ["--license", "other", "--license-name", "own", "--license-link", "LICENSE", "--base-model", "A/B"]
    card = answer(dry(bundle, *options))["card"]
    assert (card["license"], card["license_name"], card["base_model"]) == ("other", "own", "A/B")


def test_a_licence_text_goes_with_the_card_that_links_to_it(tmp_path: Path) -> None:
    bundle = bundle_of(
        tmp_path / "own", {"general.license": "other", "general.license.name": "own", "general.license.link": "LICENSE"}
    )
    assert "license_link is LICENSE, which is not in the bundle" in answer(dry(bundle, "--base-model", "A/B"))["warnings"][0]
    (bundle / "LICENSE").write_text("You may.")
    got = answer(dry(bundle, "--base-model", "A/B"))
    assert {"name": "LICENSE", "bytes": 8} in got["files"] and got["warnings"] == []


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "org/..", "org/na me", "-x/y"])
def test_a_name_that_is_no_repository_is_refused(bundle: Path, name: str) -> None:
    refused(run_cli("publish", bundle, f"--repo-id={name}", *DRY), 2, "repository|ORG/NAME")


def test_a_file_over_the_limit_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is lowered: 50 GB are not written for a test."""
    monkeypatch.setattr("bel.repack.upload_plan.MAX_FILE_BYTES", 50_000)
    refused(dry(bundle), 2, r"tiny-experts\.bin: larger than the 50 GB.*--shard-size")


def test_a_bound_profile_and_plan_go_along(tmp_path: Path, bundle: Path, profile: Path) -> None:
    plan = tmp_path / "plan.json"
    slots = str(sum(8 * x.stride_bytes for x in open_bundle(bundle).manifest.layers))
    made = ["plan", str(profile), "--model", str(bundle), "--slots-bytes", slots, "-o", str(plan), "--objective", "misses"]
    assert run_command(profile_group, "bel-profile", made) == 0
    names = {row["name"]: row["bytes"] for row in answer(dry(bundle, "--profile", profile, "--plan", plan))["files"]}
    assert names["profile.json"] == profile.stat().st_size and names["plan.json"] == plan.stat().st_size
    (bundle / "profile.json").write_bytes(profile.read_bytes())
    assert "profile.json" in {row["name"] for row in answer(dry(bundle))["files"]}
    other = bundle_of(tmp_path / "other", seed=1)
    refused(dry(other, "--profile", profile), 3, "code.json.*another model.*fingerprint")
    refused(dry(other, "--plan", plan), 3, "plan.json.*another model.*fingerprint")
    refused(dry(bundle, "--profile", tmp_path / "no.json"), 3, r"no\.json: no such file")


def test_a_published_bundle_comes_back(desk: Desk, bundle: Path, profile: Path) -> None:
    """Publish, fetch into an empty folder, verify, restore: the sha256 of the original."""
    planned = answer(desk.publish(bundle, "--profile", profile, *DRY))["files"]
    assert desk.hub.requests == []
    sent = answer(desk.publish(bundle, "--profile", profile, "--json"))
    assert sent["files"] == planned
    there = desk.hub.files(REPO)
    assert {name: len(data) for name, data in there.items()} == {".gitattributes": 17} | {
        row["name"]: row["bytes"] for row in planned
    }
    assert sent["commit"] == desk.hub.repos[REPO][-1].oid
    assert "manifest.json" not in desk.hub.repos[REPO][-2].files, "the manifest goes last"
    for line in there["SHA256SUMS"].decode().splitlines():
        digest, _, name = line.partition("  ")
        assert digest == hashlib.sha256(there[name]).hexdigest()
    got = answer(desk.run("fetch", REPO, "--json"))
    fetched = desk.folder / "tiny.bel"
    assert got["bundle"] == str(fetched) and got["commit"] == sent["commit"]
    assert {path.relative_to(fetched).as_posix() for path in fetched.rglob("*") if path.is_file()} == set(there) - {
        ".gitattributes"
    }
    assert run_cli("verify", fetched).status == 0
    assert run_cli("restore", fetched, "-o", desk.folder / "back").status == 0
    assert (desk.folder / "back/tiny.gguf").read_bytes() == (bundle.parent / "tiny.gguf").read_bytes()
    again = answer(run_cli("publish", fetched, "--repo-id", REPO, *DRY))
    assert again["files"] == planned and again["card"] == sent["card"], "a fetched bundle publishes as it was published"


def test_source_shards_bundle_and_restored_shards_have_one_content_digest(tmp_path: Path) -> None:
    whole = model(TERMS)
    single, folder = whole.write(tmp_path / "one.gguf"), tmp_path / "set"
    folder.mkdir()
    count = len(whole.tensors)
    shards = [shard.write(folder / name) for name, shard in synth.split(whole, [count - 5, 5], "tiny").items()]
    bundle = repack(shards[0], tmp_path / "set.bel")
    assert run_cli("restore", bundle, "-o", tmp_path / "back").status == 0
    restored = tmp_path / "back" / shards[0].name
    digests = {
        answer(run_cli("inspect", path, "--json", *extra))["content_digest"]
        for path, extra in ((single, ["--digest"]), (shards[0], ["--digest"]), (bundle, []), (restored, ["--digest"]))
    }
    assert len(digests) == 1 and None not in digests


def test_a_card_that_is_a_link_is_not_followed(desk: Desk, bundle: Path, tmp_path: Path) -> None:
    """What it leads to would be public: any file of the machine."""
    secret = tmp_path / "secret.txt"
    secret.write_text("password\n", encoding="utf-8")
    (bundle / "README.md").symlink_to(secret)
    refused(desk.publish(bundle), 3, "README.md is a link")
    assert desk.hub.requests == []


def test_damage_that_a_sample_misses_is_found_before_anything_is_sent(desk: Desk, bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    path = bundle / "tiny-experts.bin"
    for expert in range(1, LARGE):
        whole = path.read_bytes()
        data = bytearray(whole)
        data[manifest.layers[0].offset_bytes + expert * manifest.layers[0].stride_bytes] ^= 1
        path.write_bytes(data)
        if dry(bundle).status == 0:
            break
        path.write_bytes(whole)
    else:
        pytest.fail("the sample is every blob: the test shows nothing")
    refused(desk.publish(bundle), 4, "nothing was sent.*checksum mismatch")
    assert desk.hub.requests == []


def test_what_shall_be_private_is_not_put_in_public(desk: Desk, bundle: Path) -> None:
    assert desk.publish(bundle, "--private").status == 0 and desk.hub.private == {REPO}
    desk.hub.private.clear()
    commits = len(desk.hub.repos[REPO])
    refused(desk.publish(bundle, "--private"), 2, "exists and is public")
    assert len(desk.hub.repos[REPO]) == commits


def no_bundle(desk: Desk) -> None:
    """What is there now is nothing that `fetch` accepts."""
    assert REPO not in desk.hub.repos or "manifest.json" not in desk.hub.files(REPO)
    outcome = desk.run("fetch", REPO, "-o", desk.folder / "half.bel")
    assert outcome.status in (3, 5) and "Traceback" not in outcome.stderr
    assert not [path.name for path in desk.folder.iterdir() if "half" in path.name]


PUBLISH_FAULTS = {
    "401-create": (Fault("POST /api/repos/create", 401, "Invalid credentials"), "401.*hf auth login"),
    "413-file": (Fault("PUT /lfs/", 413, "too large for this plan"), "413.*too large for this plan"),
    "429-create": (Fault("POST /api/repos/create", 429, "slow down"), "429.*rate limit"),
    "403-manifest": (Fault("POST .*/commit/", 403, "no write access", skip=1), "403.*no write access.*token"),
    "other-bytes": (Fault("POST .*/commit/", flip_byte=5000), "has another .*bin than was sent"),
}


@pytest.mark.parametrize("case", PUBLISH_FAULTS)
def test_a_refusing_hub_is_quoted_and_leaves_no_bundle(desk: Desk, bundle: Path, case: str) -> None:
    fault, message = PUBLISH_FAULTS[case]
    desk.hub.faults = [replace(fault)]
    refused(desk.publish(bundle, "--json"), 5, message)
    no_bundle(desk)
    sent = desk.hub.asked("^PUT /lfs/")
    assert desk.publish(bundle).status == 0, "the same command goes on"
    assert "manifest.json" in desk.hub.files(REPO)
    if case == "403-manifest":
        assert desk.hub.asked("^PUT /lfs/") - sent <= 1, "the data are not sent a second time"


@pytest.mark.parametrize(
    "fault",
    [
        Fault("PUT /lfs/", cut_bytes=6000),
        Fault("POST .*/preupload/", 429, "slow down", {"Retry-After": "0"}),
        Fault("POST .*/objects/batch", 503, "busy"),
    ],
    ids=["reset", "429", "503"],
)
def test_a_passing_trouble_is_overcome(desk: Desk, bundle: Path, fault: Fault) -> None:
    desk.hub.faults = [fault]
    outcome = desk.publish(bundle)
    assert outcome.status == 0, outcome
    assert fault.times == 0
    assert dict(open_bundle(bundle).manifest.files).items() <= {n: len(d) for n, d in desk.hub.files(REPO).items()}.items()


def test_ctrl_c_ends_an_upload_that_waits(desk: Desk, bundle: Path) -> None:
    desk.hub.faults = [Fault("PUT /lfs/", 429, "wait", {"Retry-After": "600"}, times=9)]
    process = start("publish", bundle, "--repo-id", REPO, env=desk.environment, cwd=desk.folder)
    assert wait_until(lambda: desk.hub.asked("PUT /lfs/") > 0, process)
    process.send_signal(signal.SIGINT)
    refused(finish(process), 130, "interrupted; the same command goes on")
    no_bundle(desk)
    desk.hub.faults = []
    assert desk.publish(bundle).status == 0


def test_another_bundle_takes_a_repository_over_without_a_mixture(desk: Desk, bundle: Path, tmp_path: Path) -> None:
    """The old manifest goes with the first new data, and no commit has one with the data of the other."""
    other = bundle_of(tmp_path / "other", seed=1)
    assert desk.publish(bundle).status == 0
    assert desk.publish(other).status == 0
    experts = {(b / "tiny-experts.bin").read_bytes(): (b / "manifest.json").read_bytes() for b in (bundle, other)}
    accepted = [c.files for c in desk.hub.repos[REPO] if "manifest.json" in c.files]
    assert [files["manifest.json"] for files in accepted] == list(experts.values())
    assert all(experts[files["tiny-experts.bin"]] == files["manifest.json"] for files in accepted)
    commits = len(desk.hub.repos[REPO])
    assert desk.publish(other).status == 0 and len(desk.hub.repos[REPO]) == commits, "nothing new, no commit"


def test_a_hub_without_xet_is_told_how_to_be_served(desk: Desk, bundle: Path) -> None:
    del desk.environment["HF_HUB_DISABLE_XET"]
    refused(desk.publish(bundle), 5, "xet-write-token.*HF_HUB_DISABLE_XET=1")
    no_bundle(desk)


def test_without_the_client_the_extra_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused(dry(bundle), 5, r"needs huggingface_hub.*bel-toolkit\[hub\]")
    refused(run_cli("fetch", REPO), 5, r"needs huggingface_hub.*bel-toolkit\[hub\]")
