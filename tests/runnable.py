"""The code blocks of a Markdown page that are marked as runnable, and a shell that runs those of a page in order.

A fenced block with the info string `sh run` is a piece of a bash session that the whole page shares, so that `cd` and
variables carry over; one with `python run` is a program of its own in the session's folder.  A block `text shows` behind
one of them is an excerpt of its output: its lines stand there, one directly behind the other.  A line `...` is a gap, and
an `…` inside a line is anything; blanks at the end of a line do not count.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
HANG_SECONDS = 300.0
"""When a session is given up: far beyond what any takes, so only a hang reaches it."""
RUNNABLE = {"sh run": "sh", "python run": "python"}
SHOWS = "text shows"
GAP, ANYTHING = "...", "…"
_FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<marks>`{3,}|~{3,})[ \t]*(?P<info>.*?)[ \t]*")


class BadPageError(Exception):
    """A page whose marks are not understood, or a block of it that does not do what the page says; names page and line."""


@dataclass(frozen=True, slots=True)
class Fence:
    """A fenced block: the number of its first line of code, its info string, and its lines without the fence's indent."""

    line: int
    info: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A runnable block.  `shows` is what its output must show, None where the page shows nothing."""

    line: int
    kind: str
    text: str
    shows: tuple[str, ...] | None = None


def fences(text: str, page: str) -> Iterator[Fence]:
    """The fenced blocks of a page."""
    lines = enumerate(text.splitlines(), 1)
    for number, line in lines:
        opened = _FENCE.fullmatch(line)
        if opened is None or ("`" in opened["marks"] and "`" in opened["info"]):
            continue
        body: list[str] = []
        for _, inner in lines:
            if re.fullmatch(rf"[ \t]*{opened['marks'][0]}{{{len(opened['marks'])},}}[ \t]*", inner):
                break
            body.append(inner.removeprefix(opened["indent"]))
        else:
            raise BadPageError(f"{page}:{number}: a fenced block has no end")
        yield Fence(number + 1, opened["info"], tuple(body))


def runnable(text: str, page: str) -> list[Block]:
    """The runnable blocks of a page, in order.  Raises BadPageError for a mark that would leave a block unrun or unchecked."""
    blocks: list[Block] = []
    expects = False
    for fence in fences(text, page):
        if fence.info == SHOWS:
            if not expects or not any(line.strip() not in ("", GAP) for line in fence.lines):
                raise BadPageError(f"{page}:{fence.line}: `{SHOWS}` must follow a runnable block directly, and show something")
            blocks[-1] = replace(blocks[-1], shows=fence.lines)
        elif fence.info in RUNNABLE:
            blocks.append(Block(fence.line, RUNNABLE[fence.info], "\n".join(fence.lines) + "\n"))
        elif {"run", "shows"} & set(fence.info.split()):
            known = ", ".join(f"`{info}`" for info in (*RUNNABLE, SHOWS))
            raise BadPageError(f"{page}:{fence.line}: a block is marked `{fence.info}`; known marks are {known}")
        expects = fence.info in RUNNABLE
    return blocks


def missing(shows: Sequence[str], output: str) -> str | None:
    """The first lines of an excerpt that the output does not show in their place; None where it shows all."""
    lines, at = output.splitlines(), 0
    for part in _parts(shows):
        patterns = [re.compile(".*".join(map(re.escape, line.rstrip().split(ANYTHING))) + r"\s*") for line in part]
        starts = range(at, len(lines) - len(part) + 1)
        found = next((s for s in starts if all(p.fullmatch(lines[s + i]) for i, p in enumerate(patterns))), None)
        if found is None:
            return "\n".join(part)
        at = found + len(part)
    return None


def _parts(shows: Sequence[str]) -> Iterator[list[str]]:
    """What stands between the gaps."""
    part: list[str] = []
    for line in (*shows, GAP):
        if line.strip() != GAP:
            part.append(line)
        elif part:
            yield part
            part = []


def run_page(page: str, blocks: Sequence[Block], folder: Path, scratch: Path, environment: Mapping[str, str]) -> list[str]:
    """Run the blocks of a page in `folder`; the output of each, standard error included.

    `scratch` is a folder for the session's own files.  Raises BadPageError for the first block that fails, does not come
    to its end, or does not show what the page says.
    """
    status = _session(_driver(page, blocks, scratch), folder, environment)
    outputs = []
    for number, block in enumerate(blocks):
        name = f"{page}:{block.line}"
        file = scratch / f"{number}.out"
        output = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        if not (scratch / f"{number}.end").is_file():
            raise BadPageError(
                f"{name}: this block failed or did not come to its end (status {status}):\n{block.text}\n{output}"
            )
        lacking = missing(block.shows, output) if block.shows is not None else None
        if lacking is not None:
            raise BadPageError(f"{name}: the output does not show\n{lacking}\n\nThe output:\n{output}")
        outputs.append(output)
    if status != 0:
        raise BadPageError(f"{page}: all blocks came to their end, but the session's status is {status}")
    return outputs


def _driver(page: str, blocks: Sequence[Block], scratch: Path) -> Path:
    """The script of a session.  Each block is a file in which it has the page's name and line numbers, for messages."""
    lines = []
    for number, block in enumerate(blocks):
        own, end = scratch / str(number) / Path(page).name, shlex.quote(str(scratch / f"{number}.end"))
        own.parent.mkdir()
        reached = f": > {end}\n"
        inner = reached if block.kind == "sh" else ""  # behind the last line: a `return` does not pass for an end
        own.write_text("\n" * (block.line - 1) + block.text + inner, encoding="utf-8")
        lines += ["set -euo pipefail", f"exec > {shlex.quote(str(scratch / f'{number}.out'))} 2>&1"]
        lines += [f". {shlex.quote(str(own))}"] if block.kind == "sh" else [f"python {shlex.quote(str(own))}", reached]
        lines.append(f"[ -e {end} ]")
    driver = scratch / "session.sh"
    driver.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return driver


def _session(driver: Path, folder: Path, environment: Mapping[str, str]) -> int:
    with one_cpu():
        process = subprocess.Popen(
            ["bash", str(driver)], cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        return process.wait(HANG_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


@contextmanager
def one_cpu() -> Iterator[None]:
    """What is started in the block has one CPU.

    Without it the number of threads, and with it the last bits of a logit and now and then a greedy text, would depend on
    the machine; and threads of llama.cpp that wait for a busy CPU cost a hundred times what one thread does.
    """
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cpus)[os.getpid() % len(cpus)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)


def user_environment(base: Mapping[str, str], home: Path) -> dict[str, str]:
    """The environment of a user of this interpreter's commands, and no public hub: `home` is for the client's files.

    Output comes in the order in which it is written, as on a terminal.
    """
    rest = {key: value for key, value in base.items() if key not in ("COLUMNS", "PYTHONPATH")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{base['PATH']}"
    return {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "PYTHONUNBUFFERED": "1", **rest, "PATH": path}
