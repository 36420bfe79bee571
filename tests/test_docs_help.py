"""The help in docs/ is that of the real commands, and every link and picture of docs/ leads somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parent.parent / "docs"
MAKER = DOCS / "make_help.py"
PAGES = sorted(DOCS.glob("*.md"))
SCRIPTS = {"bel-repack": "bel.repack.cli", "bel-profile": "bel.profiler.cli", "bel-run": "bel.runtime.cli"}
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_help", MAKER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("program", SCRIPTS)
def test_the_help_of_a_page_is_in_step(program: str, maker: ModuleType) -> None:
    page = next(p for p in maker.PAGES if p.program == program)
    difference = maker.difference(page)
    assert not difference, f"docs/{program}.md is out of step; run: python docs/make_help.py\n{difference}"


@pytest.mark.parametrize("program", SCRIPTS)
def test_the_maker_sees_what_a_user_sees(program: str, maker: ModuleType) -> None:
    """The help in the process of the maker against that of the program as it is started, in a terminal of 100 columns."""
    page = next(p for p in maker.PAGES if p.program == program)
    call = list(page.calls())[-1]
    start = f"import sys; sys.argv[0] = {program!r}; from {SCRIPTS[program]} import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", start, *call, "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": str(maker.WIDTH + 2)},
        check=True,
    )
    assert done.stdout.rstrip("\n") == maker.help_text(page, call)


def test_every_command_has_its_help(maker: ModuleType) -> None:
    """Written out by hand: a command that is forgotten by the maker is not forgotten here."""
    shown = {" ".join([page.program, *call]) for page in maker.PAGES for call in page.calls()}
    repack = {f"bel-repack {c}" for c in ("convert", "inspect", "verify", "restore", "publish", "fetch")}
    profile = ["record", "merge", "summarize", "import", "report", "simulate", "plan", "fit", "bandwidth"]
    run = {"bel-run", "bel-run --bench", "bel-run --check-against"}
    assert shown >= {"bel-repack", "bel-profile", *repack, *(f"bel-profile {c}" for c in profile), *run}


def test_a_page_that_is_out_of_step_is_found(maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = maker.PAGES[0]
    text = page.path.read_text(encoding="utf-8")
    assert "--shard-size" in text
    (tmp_path / page.path.name).write_text(text.replace("--shard-size", "--size-of-shards"), encoding="utf-8")
    monkeypatch.setattr(maker, "DOCS", tmp_path)
    assert "-  --size-of-shards" in maker.difference(page)
    (tmp_path / page.path.name).write_text(text.replace(maker.END, ""), encoding="utf-8")
    with pytest.raises(ValueError, match="markers"):
        maker.difference(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Files that a page names, and the headings in them; addresses in the web are not tried."""
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {target} leads nowhere"
        if anchor:
            assert anchor in _anchors(path), f"{page.name}: {target}: no such heading"


def test_the_index_names_every_page() -> None:
    named = set(LINK.findall((DOCS / "README.md").read_text(encoding="utf-8")))
    assert {p.name for p in PAGES if p.name != "README.md"} <= named


@pytest.mark.parametrize("picture", sorted(DOCS.glob("*.svg")), ids=lambda p: p.name)
def test_pictures_stand_alone(picture: Path) -> None:
    """Well-formed, with a size and a title, and nothing fetched from elsewhere: a page shows it as an image."""
    root = ElementTree.parse(picture).getroot()
    assert root.get("viewBox") and root.find("{http://www.w3.org/2000/svg}title") is not None
    text = picture.read_text(encoding="utf-8")
    assert "href" not in text and "@import" not in text and "url(http" not in text
    assert "prefers-color-scheme: dark" in text or 'class="ground"' in text, "legible on a dark page, or on a ground of its own"


def _anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes of the headings outside code blocks."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
