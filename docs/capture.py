"""Make docs/convert.svg: what a terminal shows of a conversion.  Run `make demo` first; then python docs/capture.py.

The commands run for real, in a terminal of their own, and what they print is drawn as it came.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import struct
import sys
import tempfile
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
COLUMNS, LINES = 112, 60
COMMANDS = (
    ("bel-repack", "tiny-moe-q8_0.gguf"),
    ("bel-repack", "verify", "tiny-moe-q8_0.bel", "--source", "tiny-moe-q8_0.gguf"),
    ("bel-run", "tiny-moe-q8_0.bel", "-p", "def add(a, b):", "--slots", "16", "-n", "6"),
)
SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<title>a conversion, its verification and a run, in a terminal</title>
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px;
line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}</defs>
<rect class="ground" width="{width}" height="{height}" rx="8" fill="#1b1f24"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def shown(command: tuple[str, ...], folder: Path) -> str:
    """What a terminal gets of a command, with its escape sequences.  Ends the program where the command fails."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
        os.execvp(command[0], command)
    ioctl(terminal, TIOCSWINSZ, struct.pack("4H", LINES, COLUMNS, 0, 0))
    pieces = []
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # the other side is closed: how Linux ends a terminal
            break
        if not piece:
            break
        pieces.append(piece)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(f"{' '.join(command)} failed: {b''.join(pieces).decode()}")
    return b"".join(pieces).decode()


def settled(text: str) -> list[str]:
    """Lines as they stand in the end: of what was written over and over (a progress bar) the last state."""
    lines = re.sub(r"\x1b\[\?25[lh]|\x1b\[\d*[AK]|\x1b\[2K", "", text.replace("\r\n", "\n")).split("\n")
    return [line.rsplit("\r", 1)[-1] for line in lines]


def main() -> None:
    """Run the commands and draw them."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(ROOT / "examples" / "tiny-moe-q8_0.gguf", folder)
        for command in COMMANDS:
            words = [f'"{word}"' if " " in word else word for word in command]
            console.print(Text.assemble(("$ ", "bold green"), (" ".join(words), "bold")))
            for line in settled(shown(command, folder)):
                if line.strip() and "━" not in line:
                    console.print(Text.from_ansi(line.replace(f"{folder}/", "")))
            console.print()
    svg = console.export_svg(title="", code_format=SVG)
    (ROOT / "docs" / "convert.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
