"""The standard streams of a command, so that an error of theirs can be told from one of a file or of the machine."""

from __future__ import annotations

import fcntl
import io
import os
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class StreamName(str):
    """What an OSError has as its file name where the file is a standard stream."""

    __slots__ = ()


STDOUT, STDERR = StreamName("standard output"), StreamName("standard error")


def open_closed() -> None:
    """Give a closed standard stream the null device: else the first file that is opened would get its number and its text.

    For output it is one that cannot be written to, so that an answer that nobody got is an error.  Messages may go nowhere.
    """
    for number in range(3):
        try:
            fcntl.fcntl(number, fcntl.F_GETFD)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_RDWR)


class _Raw(io.FileIO):
    def __init__(self, number: int, stream: StreamName) -> None:
        super().__init__(number, "w", closefd=False)
        self._stream = stream

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = self._stream
            raise


def named(stream: TextIO | None, number: int, name: StreamName) -> TextIO:
    """A stream in the place of the interpreter's (None where it found a closed one), whose errors of writing carry `name`."""
    buffer = io.BufferedWriter(_Raw(number, name))
    if not isinstance(stream, io.TextIOWrapper):
        return io.TextIOWrapper(buffer, "utf-8", "backslashreplace", newline="\n", line_buffering=number == 2)
    stream.flush()
    # A name of a file need not be writable in the locale's encoding; half a table would be lost for it.
    errors = "backslashreplace" if stream.errors == "strict" else stream.errors
    direct = stream.line_buffering or stream.write_through
    return io.TextIOWrapper(buffer, stream.encoding, errors, newline="\n", line_buffering=direct)
