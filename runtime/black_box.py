"""What a process leaves to the one that waits for it: the model's files, and what llama.cpp said last.

llama.cpp ends the process that it is in when one of its assertions fails, and a mapped file that is cut short ends it with a
signal.  Memory that both processes share survives that.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bel.runtime.file_watch import FileState

WORDS_BYTES = 4096
"""The last so many bytes of warnings and errors are kept."""
ROOM_BYTES = 1 << 20
"""Address space; memory is what is written.  The files of a model in hundreds of shards fit in."""
_SIZE = struct.Struct("<I")


class BlackBox:
    """To be made before the fork: then the child writes and the parent reads."""

    def __init__(self) -> None:
        self._room = mmap.mmap(-1, ROOM_BYTES)
        self._said = b""

    def say(self, text: bytes) -> None:
        """Keep more words, at the cost of the oldest."""
        self._said = (self._said + text)[-WORDS_BYTES:]
        self._put(0, self._said)

    def keep_files(self, states: Iterable[FileState], *, is_bundle: bool) -> None:
        """What the files of the model are before it is loaded, in the place of what was kept before.

        Files for which there is no room are left out: that they changed will not be known.
        """
        import json  # not above: the waiting parent needs it after a crash alone

        rows = list(states)
        while len(data := json.dumps(rows).encode()) > ROOM_BYTES - WORDS_BYTES - 2 * _SIZE.size - 1:
            rows.pop()
        self._put(_SIZE.size + WORDS_BYTES, data)
        self._room[-1] = is_bundle

    @property
    def words(self) -> str:
        """What was said last."""
        return self._get(0).decode("utf-8", "replace")

    @property
    def files(self) -> list[FileState]:
        """The files that were kept; none before a model was loaded."""
        import json

        from bel.runtime.file_watch import FileState  # with all that reads files, which the waiting parent does without

        data = self._get(_SIZE.size + WORDS_BYTES)
        return [FileState(*row) for row in json.loads(data)] if data else []

    @property
    def is_bundle(self) -> bool:
        """Whether those files are a bundle's."""
        return bool(self._room[-1])

    @property
    def model(self) -> str | None:
        """The path of the model; None before one was loaded."""
        files = self.files
        if not files:
            return None
        return os.path.dirname(files[0].path) if self.is_bundle else files[0].path

    def _put(self, at: int, data: bytes) -> None:
        start = at + _SIZE.size
        self._room[start : start + len(data)] = data
        self._room[at:start] = _SIZE.pack(len(data))

    def _get(self, at: int) -> bytes:
        start = at + _SIZE.size
        (size,) = _SIZE.unpack(self._room[at:start])
        return self._room[start : start + size]


_box: BlackBox | None = None


def black_box() -> BlackBox | None:
    """That of this process; None where nobody would read it."""
    return _box


def use_black_box(box: BlackBox) -> None:
    """Write to `box` from now on.  To be called before a llama.cpp is opened."""
    global _box  # noqa: PLW0603 - it is about this process
    _box = box
