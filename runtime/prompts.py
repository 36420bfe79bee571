"""The prompts of a run: texts from the command line, files, every file of a folder, or standard input."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from bel.formats.atomic import named_errors
from bel.formats.digest import bytes_digest
from bel.formats.errors import BadInputError, UsageError

MAX_PROMPT_BYTES = 16 * 2**20
"""Far beyond any context; a file above it was named by mistake."""
STDIN = "standard input"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to run.  `name` is what messages call it: its path, or where on the command line it stood."""

    name: str
    text: str

    @property
    def digest(self) -> str:
        """BLAKE3 of the text's UTF-8 bytes, as 64 hex digits."""
        return bytes_digest(self.text.encode("utf-8", "surrogateescape"))


def read_prompts(paths: Sequence[Path], texts: Sequence[str] = ()) -> tuple[Prompt, ...]:
    """The texts, then the files in the order given; a folder stands for every file below it, sorted by path.

    Raises UsageError where there is no prompt at all, and BadInputError for one that is missing, empty, too large or not
    UTF-8.
    """
    prompts = [_checked(Prompt(f"-p number {i}", text)) for i, text in enumerate(texts, 1)]
    prompts += [_checked(Prompt(str(file), _read(file))) for path in paths for file in _files(path)]
    if not prompts:
        raise UsageError("there is no prompt", hint="Give a text with -p, or a file or a folder with -f")
    return tuple(prompts)


def read_prompt(text: str | None, path: Path | None, stdin: BinaryIO) -> Prompt:
    """The one prompt of a generation: a text, a file, or all of `stdin` (a path of `-`, or neither given).

    The text is taken as it is, its last newline included.  Raises UsageError for two of them, or for a terminal as input that
    was not asked for; BadInputError for a prompt that is missing, empty, too large or not UTF-8.
    """
    if text is not None and path is not None:
        raise UsageError("-p and -f are two prompts", hint="Give one of them")
    if text is not None:
        return _checked(Prompt("-p", text))
    if path is not None and str(path) != "-":
        if path.is_fifo():  # what a shell makes of `-f <(command)`
            with path.open("rb") as pipe:
                return _from_stream(str(path), pipe)
        return _checked(Prompt(str(path), _read(path)))
    if path is None and stdin.isatty():
        raise UsageError("there is no prompt", hint="Give a text with -p, a file with -f, or send it to standard input")
    return _from_stream(STDIN, stdin)


def _from_stream(name: str, stream: BinaryIO) -> Prompt:
    data = stream.read(MAX_PROMPT_BYTES + 1)
    _check_size(name, len(data))
    return _checked(Prompt(name, _decoded(name, data)))


def _files(path: Path) -> list[Path]:
    if not os.path.lexists(path):
        raise BadInputError("no such file or folder", path=str(path))
    if not path.is_dir():
        return [path]
    found = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    if not found:
        raise BadInputError("the folder holds no files", path=str(path))
    return sorted(found)


def _read(path: Path) -> str:
    if not os.path.lexists(path):
        raise BadInputError("no such file", path=str(path))
    if not path.is_file():
        raise BadInputError("this is not a file", path=str(path))
    _check_size(str(path), path.stat().st_size)
    with named_errors(path):
        data = path.read_bytes()
    return _decoded(str(path), data)


def _check_size(name: str, size_bytes: int) -> None:
    if size_bytes > MAX_PROMPT_BYTES:
        raise BadInputError(
            "the prompt is too large", path=name, found=f"{size_bytes} bytes", expected=f"at most {MAX_PROMPT_BYTES}"
        )


def _decoded(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInputError("the prompt is not UTF-8 text", path=name, offset_bytes=error.start) from None


def _checked(prompt: Prompt) -> Prompt:
    if not prompt.text:
        raise BadInputError("the prompt is empty", path=prompt.name)
    if any("\ud800" <= c <= "\udfff" for c in prompt.text):  # how Python keeps bytes of an argument that are not UTF-8
        raise BadInputError("the prompt is not UTF-8 text", path=prompt.name)
    return prompt
