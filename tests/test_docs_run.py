"""Every code block of README and docs that is marked as runnable is run, and its output shows what the page says."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hub_server import client_environment, serving
from runnable import ANYTHING, GAP, ROOT, BadPageError, Block, missing, run_page, runnable, user_environment

MUST_RUN = (
    "README.md",
    "docs/bel-repack.md",
    "docs/bel-profile.md",
    "docs/bel-run.md",
    "docs/bundle-format.md",
    "docs/how-it-works.md",
    "docs/publish.md",
)
WITH_HUB = ("README.md", "docs/bel-repack.md", "docs/publish.md")
"""Pages whose blocks may talk to a hub: it is one on loopback."""
PAGES = sorted(
    p for p in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("formats/*.md"))
)
_MARKED = re.compile(r"^[ \t]*(?:```|~~~).*\b(?:run|shows)\b", re.MULTILINE)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, example: Path) -> Path:
    """The working folder of a page: a model and two prompts of each kind, also under the names that they have in a checkout."""
    made = tmp_path / "here"
    for place, model in ((made, "model.gguf"), (made / "examples", example.name)):
        for work in ("code", "chat"):
            (place / "prompts" / work).mkdir(parents=True)
            for name in (f"{work}_01.txt", f"{work}_02.txt"):
                shutil.copyfile(example.parent / "prompts" / work / name, place / "prompts" / work / name)
        shutil.copyfile(example, place / model)
    return made


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    made = tmp_path / "session"
    made.mkdir()
    return made


@pytest.mark.parametrize("page", [p for p in PAGES if _MARKED.search(text_of(p))], ids=name_of)
def test_a_page_does_what_it_says(page: Path, folder: Path, scratch: Path, tmp_path: Path) -> None:
    name, home = name_of(page), tmp_path / "home"
    blocks = runnable(text_of(page), name)
    if name not in WITH_HUB:
        run_page(name, blocks, folder, scratch, user_environment(os.environ, home))
        return
    with serving() as hub:
        run_page(
            name, blocks, folder, scratch, {**user_environment(client_environment(hub, home), home), "HF_HUB_OFFLINE": "0"}
        )


@pytest.mark.parametrize("name", MUST_RUN)
def test_a_page_for_users_has_something_to_run(name: str) -> None:
    assert runnable(text_of(ROOT / name), name), f"{name}: no block is marked `sh run` or `python run`"


def page(*blocks: tuple[str, str]) -> str:
    return "# A page\n\n" + "\n\nWords.\n\n".join(f"```{info}\n{text}\n```" for info, text in blocks) + "\n"


def run(text: str, folder: Path, scratch: Path) -> list[str]:
    return run_page("docs/x.md", runnable(text, "docs/x.md"), folder, scratch, user_environment(os.environ, scratch))


def test_a_page_is_one_session_in_a_folder_with_a_model_and_prompts(folder: Path, scratch: Path) -> None:
    text = page(
        ("sh run", "ls prompts/*\ncd prompts; kind=code"),
        ("sh", "false"),
        ("python run", "from pathlib import Path\nprint(Path.cwd().name, Path('../model.gguf').stat().st_size)"),
        ("sh run", 'ls "$kind"; bel-repack --version; echo problem >&2'),
    )
    outputs = run(text, folder, scratch)
    assert "prompts/chat:\nchat_01.txt\nchat_02.txt\n" in outputs[0]
    assert outputs[1] == f"prompts {(folder / 'model.gguf').stat().st_size}\n"
    assert re.fullmatch(r"code_01.txt\ncode_02.txt\nbel-repack.*\nproblem\n", outputs[2])


FAILING = {
    "status": ("sh run", "false\necho on"),
    "pipe": ("sh run", "false | cat"),
    "variable": ("sh run", "echo $not_set_anywhere"),
    "early-exit": ("sh run", "exit 0"),
    "early-return": ("sh run", "return 0"),
    "open-quote": ("sh run", "echo 'x"),
    "open-here-document": ("sh run", "cat <<X"),
    "python": ("python run", "raise SystemExit(3)"),
    "exception": ("python run", "import json\njson.loads('{')"),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_failing_block_is_named_by_page_and_line(case: str, folder: Path, scratch: Path) -> None:
    text = page(("sh run", "echo fine"), FAILING[case], ("sh run", "touch later"))
    line = text.splitlines().index(f"```{FAILING[case][0]}", 4) + 2
    with pytest.raises(BadPageError, match=rf"^docs/x\.md:{line}: this block failed"):
        run(text, folder, scratch)
    assert not (folder / "later").exists()


def test_a_message_of_the_shell_has_the_line_of_the_page(folder: Path, scratch: Path) -> None:
    with pytest.raises(BadPageError, match=r"x\.md: line 5: no-such-command"):
        run(page(("sh run", "true\nno-such-command")), folder, scratch)


def test_a_block_must_show_what_stands_behind_it(folder: Path, scratch: Path) -> None:
    block = ("sh run", "seq 5")
    assert run(page(block, ("text shows", "2\n3\n...\n5")), folder, scratch) == ["1\n2\n3\n4\n5\n"]
    again = scratch / "again"
    again.mkdir()
    with pytest.raises(BadPageError, match=r"^docs/x\.md:4: the output does not show\n2\n4\n"):
        run(page(block, ("text shows", "2\n4")), folder, again)


BAD_MARKS = {
    "bash": "```bash run\ntrue\n```\n",
    "order": "```run sh\ntrue\n```\n",
    "alone": "```text shows\n1\n```\n",
    "twice": "```sh run\necho 1\n```\n```text shows\n1\n```\n```text shows\n1\n```\n",
    "behind-another": "```sh run\necho 1\n```\n```json\n1\n```\n```text shows\n1\n```\n",
    "nothing": "```sh run\necho 1\n```\n```text shows\n...\n\n```\n",
    "no-end": "```sh run\ntrue\n",
}


@pytest.mark.parametrize("case", BAD_MARKS)
def test_a_mark_that_would_leave_a_block_unrun_is_refused(case: str) -> None:
    with pytest.raises(BadPageError, match=r"^p\.md:\d+: "):
        runnable(BAD_MARKS[case], "p.md")


def test_blocks_are_found_as_markdown_has_them() -> None:
    text = (
        "- a list\n\n  ~~~sh run\n  a\n    b\n  ~~~\n\n````markdown\n```sh run\nnot\n```\n````\n``` python run \nc\n````\n`x`\n"
    )
    assert runnable(text, "p.md") == [Block(4, "sh", "a\n  b\n"), Block(14, "python", "c\n")]


LINES = st.lists(st.text("ab c", max_size=4), min_size=1, max_size=12)


@given(LINES, st.data())
def test_an_excerpt_with_gaps_and_wildcards_is_shown(lines: list[str], data: st.DataObject) -> None:
    kept = data.draw(st.lists(st.booleans(), min_size=len(lines), max_size=len(lines)))
    cut = data.draw(st.integers(0, 4))
    shows = [f"{line[:cut]}{ANYTHING}" if keep else GAP for line, keep in zip(lines, kept, strict=True)]
    assert missing(shows, "\n".join(lines) + "\n") is None


@given(LINES, st.integers(0, 11))
def test_a_line_that_is_not_there_is_missed(lines: list[str], at: int) -> None:
    spoiled = [*lines]
    spoiled[at % len(lines)] += "x"
    assert missing(spoiled, "\n".join(lines) + "\n") is not None
    assert missing([*lines, "a"], "\n".join(lines) + "\n") is not None, "nothing follows the last line"


@pytest.mark.parametrize("shows", [["b", "a"], ["a", "c"], ["a", GAP, "a"], ["a."], ["b", GAP, "a"]])
def test_order_and_neighbours_count(shows: list[str]) -> None:
    assert missing(shows, "a\nb\nc\n") is not None
