"""`--force` deletes a bundle and nothing else: what is replaced, and what is refused by name."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import synth
from bel.repack.card import compose
from bel.repack.own_files import contents, foreign_leftovers
from bel.repack.upload_plan import sums_line
from exactness import repack
from faults import mounted, run_cli, tree
from repack_runs import FRONT, assert_refused, ple_model
from repack_runs import reference as reference
from repack_runs import source as source


@pytest.fixture
def bundle(tmp_path: Path, source: Path) -> Path:
    assert run_cli(source, "-o", tmp_path / "out.bel").status == 0
    return tmp_path / "out.bel"


def edit_manifest(bundle: Path, change: Callable[[dict[str, object]], object]) -> None:
    path = bundle / "manifest.json"
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


@pytest.mark.parametrize(
    "files",
    [
        {"manifest.json": "{}", "README.md": "years of work"},
        {"manifest.json": '{"manifest_version": 3, "name": "an extension"}', "plan.json": "{}"},
        {"manifest.json": '["bel-bundle"]', "model-dense.gguf": "GGUF of another tool"},
        {"manifest.json": '{"format": "bel-bundle-like"}', "profile.json": "{}"},
        {"manifest.json": '{"note": "\\"format\\": \\"bel-bundle\\""}', "LICENSE": "mine"},
        {"manifest.json": "not JSON", "SHA256SUMS": "00  file"},
        {"x-experts.idx": "an index of another tool", "x-experts.bin": "a table of experts on wine", "README.md": "mine"},
    ],
)
def test_a_folder_with_names_like_a_bundles_is_no_bundle(tmp_path: Path, source: Path, files: dict[str, str]) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    before = tree(tmp_path)
    assert_refused(run_cli(source, "-o", folder, "--force"), 2, folder, "not a bundle", *files)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "name",
    ["README.md", "plan.json", "profile.json", "LICENSE", "SHA256SUMS", "other-dense.gguf", "source/notes", "source/x.hdr.zst"],
)
def test_what_the_user_put_into_a_bundle_is_refused_by_name(tmp_path: Path, source: Path, bundle: Path, name: str) -> None:
    (bundle / name).write_text("hours of work")
    before = tree(tmp_path)
    assert_refused(run_cli(source, "-o", bundle, "--force"), 2, bundle, name, "Move it out first")
    assert tree(tmp_path) == before
    (bundle / name).unlink()
    assert run_cli(source, "-o", bundle, "--force").status == 0


@pytest.mark.parametrize("name", ["model-ple.gguf", "manifest.json", "source", "source/model-00001-of-00002.gguf.hdr.zst"])
def test_a_folder_or_file_in_the_place_of_a_bundles_own_is_not_deleted(
    tmp_path: Path, source: Path, bundle: Path, name: str
) -> None:
    place = bundle / name
    if name == "source":
        shutil.rmtree(place)
        place.write_text("hours of work")
    else:
        place.unlink()
        place.mkdir()
        (place / "thesis.txt").write_text("hours of work")
    before = tree(tmp_path)
    assert_refused(run_cli(source, "-o", bundle, "--force"), 2, bundle, name)
    assert tree(tmp_path) == before


def test_a_whole_manifest_of_another_tool_is_spared_beside_files_of_ours(tmp_path: Path, source: Path, bundle: Path) -> None:
    (bundle / "manifest.json").write_text('{"manifest_version": 3}')
    before = tree(tmp_path)
    assert_refused(run_cli(source, "-o", bundle, "--force"), 2, "manifest.json")
    assert tree(tmp_path) == before


def rename_files(bundle: Path) -> None:
    """A later version with other names of files, of which its manifest tells."""
    (bundle / "model-experts.bin").rename(bundle / "model-blobs.bin")

    def change(body: dict[str, object]) -> None:
        body["version"], body["files"] = 9, {"blobs": {"parts": [{"name": "model-blobs.bin"}]}}

    edit_manifest(bundle, change)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "manifest cut": lambda b: (b / "manifest.json").write_bytes((b / "manifest.json").read_bytes()[:200]),
    "manifest empty": lambda b: (b / "manifest.json").write_bytes(b""),
    "manifest zeros": lambda b: (b / "manifest.json").write_bytes(b"\0" * 4096),
    "manifest gone": lambda b: (b / "manifest.json").unlink(),
    "manifest cut, tables gone": lambda b: [
        (b / "manifest.json").write_bytes((b / "manifest.json").read_bytes()[:200]),
        *((b / f"model-experts.{end}").write_bytes(b"") for end in ("idx", "bin")),
    ],
    "a newer version": lambda b: edit_manifest(b, lambda body: body.update(version=2)),
    "a newer version with other names": rename_files,
    "a checksum that is wrong": lambda b: edit_manifest(b, lambda body: body.update(digest="0" * 64)),
    "no list of files": lambda b: edit_manifest(b, lambda body: body.update(files=None, sources=3)),
    "no name": lambda b: edit_manifest(b, lambda body: body.pop("name")),
    "manifest gone, table damaged": lambda b: [
        (b / "manifest.json").unlink(),
        (b / "model-experts.idx").write_bytes(b"X" * 100),
    ],
    "files gone": lambda b: [(b / "model-dense.gguf").unlink(), shutil.rmtree(b / "source")],
    "a file that is a link": lambda b: [
        (b / "model-dense.gguf").rename(b.parent / "elsewhere"),
        (b / "model-dense.gguf").symlink_to(b.parent / "elsewhere"),
    ],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_older_or_newer_bundle_is_replaced(
    source: Path, reference: dict[str, tuple[str, int]], bundle: Path, damage: str
) -> None:
    DAMAGES[damage](bundle)
    assert run_cli(source, "-o", bundle).status == 2
    assert run_cli(source, "-o", bundle, "--force").status == 0
    assert tree(bundle) == reference


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_a_kill_left_of_a_replaced_bundle_is_removed(
    bundle: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """The old bundle has the temporary name while it is deleted: any of its files may be gone."""
    folder = tmp_path_factory.mktemp("copy") / "b"
    shutil.copytree(bundle, folder)
    (folder / "SHA256SUMS").write_text(sums(bundle))
    (folder / "README.md").write_text(card(bundle))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in data.draw(st.lists(st.sampled_from(files), unique=True)):
        path.unlink()
    assert foreign_leftovers(folder) == ()
    (folder / "notes.txt").write_text("mine")
    assert foreign_leftovers(folder) == ("notes.txt",)


def test_a_model_in_the_temporary_folder_of_its_output_is_not_deleted(tmp_path: Path) -> None:
    folder = tmp_path / ".out.bel.bel-tmp"
    folder.mkdir()
    model = ple_model().write(folder / "old-dense.gguf")
    before = tree(tmp_path)
    assert_refused(run_cli(model, "-o", tmp_path / "out.bel"), 2, folder, "old-dense.gguf")
    assert tree(tmp_path) == before


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_makes_a_file_of_the_user_a_bundles_own(
    bundle: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A byte of the manifest changed and its end cut: the bundle's own files may be refused then, the user's always are."""
    folder = tmp_path_factory.mktemp("copy") / "b"
    shutil.copytree(bundle, folder)
    text = bytearray((folder / "manifest.json").read_bytes())
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    (folder / "manifest.json").write_bytes(text[: data.draw(st.integers(0, len(text)))])
    users = {"README.md", "plan.json", "profile.json", "LICENSE", "thesis-dense.gguf", "notes"}
    for name in users:
        (folder / name).write_text("mine")
    found = contents(folder)
    assert found.is_bundle
    assert users <= set(found.foreign)


def card(bundle: Path, text: str = "") -> str:
    return compose(text, FRONT, f"# {bundle.name}\n\nsizes, digests and commands", "README.md")


def sums(bundle: Path, *more: str) -> str:
    names = [str(path.relative_to(bundle)) for path in sorted(bundle.rglob("*")) if path.is_file()]
    return "".join(sums_line(hashlib.sha256(name.encode()).hexdigest(), name) for name in [*names, *more])


def test_what_a_fetch_brings_is_replaced(source: Path, reference: dict[str, tuple[str, int]], bundle: Path) -> None:
    (bundle / "SHA256SUMS").write_text(sums(bundle, "profile.json"))
    (bundle / "README.md").write_text(card(bundle))
    assert run_cli(source, "-o", bundle, "--force").status == 0
    assert tree(bundle) == reference


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("license: mit", "license: mit  # asked the author on Monday"),
        lambda text: text.replace("license: mit", "license: mit\nlanguage: en"),
        lambda text: text.replace("pipeline_tag: text-generation", "pipeline_tag: fill-mask"),
        lambda text: text + "My own measurements: 11 tokens/s",
        lambda text: text.replace("---\n\n<!--", "---\n\nMy own measurements\n\n<!--"),
        lambda text: text.replace("<!-- bel-repack: end -->", ""),
        lambda text: text[:0] + "A text of mine",
    ],
)
def test_a_card_with_a_word_of_the_user_is_not_deleted(
    tmp_path: Path, source: Path, bundle: Path, change: Callable[[str], str]
) -> None:
    assert change(card(bundle)) != card(bundle)
    (bundle / "README.md").write_text(change(card(bundle)))
    before = tree(tmp_path)
    assert_refused(run_cli(source, "-o", bundle, "--force"), 2, "README.md")
    assert tree(tmp_path) == before


def test_sums_of_other_files_are_not_deleted(tmp_path: Path, source: Path, bundle: Path) -> None:
    (bundle / "SHA256SUMS").write_text(sums(bundle, "thesis.txt"))
    before = tree(tmp_path)
    assert_refused(run_cli(source, "-o", bundle, "--force"), 2, "SHA256SUMS")
    assert tree(tmp_path) == before


def test_a_name_with_a_line_break_is_replaced_and_shown_on_one_line(tmp_path: Path) -> None:
    model = ple_model().write(tmp_path / "a\nb.gguf")
    bundle = repack(model, tmp_path / "a\nb.bel")
    (bundle / "SHA256SUMS").write_text(sums(bundle))
    assert run_cli(model, "--force").status == 0
    (bundle / "my\nnotes").write_text("mine")
    assert_refused(run_cli(model, "--force"), 2, "my\\nnotes")


def test_a_bundle_inside_a_bundle_is_not_deleted_with_it(tmp_path: Path, source: Path, bundle: Path) -> None:
    inner = repack(synth.moe().write(tmp_path / "inner.gguf"), bundle / "inner.bel")
    before = tree(inner)
    assert_refused(run_cli(source, "-o", bundle, "--force"), 2, "inner.bel")
    assert tree(inner) == before


def test_a_mount_point_is_refused_before_the_conversion(tmp_path: Path, source: Path) -> None:
    with mounted(tmp_path / "disk") as disk:
        assert_refused(run_cli(source, "-o", disk, "--force", "--dry-run"), 2, disk, "mount point", "inside it")
        assert run_cli(source, "-o", disk / "out.bel").status == 0


def test_a_folder_of_the_user_with_the_temporary_name_is_not_emptied(tmp_path: Path, source: Path) -> None:
    folder = tmp_path / ".out.bel.bel-tmp"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    (folder / "model-dense.gguf").write_text("")
    before = tree(tmp_path)
    assert_refused(run_cli(source, "-o", tmp_path / "out.bel"), 2, folder, "thesis.txt")
    assert tree(tmp_path) == before


def test_a_folder_where_restore_works_is_not_emptied(tmp_path: Path, bundle: Path) -> None:
    folder = tmp_path / "back" / ".bel-restore.bel-tmp" / "photos"
    folder.mkdir(parents=True)
    (folder / "photo").write_text("years of work")
    before = tree(tmp_path)
    assert_refused(run_cli("restore", bundle, "-o", tmp_path / "back", "--force"), 2, "photos")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("flags", [[], ["--force"]])
def test_the_root_is_no_output(source: Path, flags: list[str]) -> None:
    assert_refused(run_cli(source, "-o", "/", *flags), 2, "/", "contains the input")


def test_the_old_bundle_that_a_kill_left_aside_is_named(tmp_path: Path, source: Path, bundle: Path) -> None:
    """On a file system that cannot swap two names the old bundle has this name for a moment; it may be the only one."""
    aside = tmp_path / ".out.bel.bel-tmp.old"
    bundle.rename(aside)
    before = tree(tmp_path)
    assert_refused(run_cli(source, "-o", bundle, "--force"), 2, aside, "the old one")
    assert tree(tmp_path) == before
    aside.rename(bundle)
    assert run_cli(source, "-o", bundle, "--force").status == 0


@pytest.mark.parametrize("arguments", [["-o", ""], ["-o", "", "--force"]], ids=["new", "force"])
def test_an_empty_path_is_not_the_current_folder(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for command in ([source, *arguments], [""], ["inspect", ""], ["verify", ""], ["restore", ""]):
        outcome = run_cli(*command)
        assert outcome.status == 2
        assert "the path is empty" in outcome.stderr
    assert list((tmp_path / "here").iterdir()) == []
