"""Whether files are still what they were: what was checked once and is read again must not have been written to meanwhile."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from bel.formats.errors import DamagedBundleError


class FileWatch:
    """Files with their size and time of change; a file that was replaced under its name is still the one that was opened."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._fds: list[int] = []
        try:
            for path in self._paths:
                self._fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except BaseException:
            self.close()
            raise
        self._states = [_state(fd) for fd in self._fds]

    def check(self) -> None:
        """Raise DamagedBundleError for a file that was written to since it was opened."""
        for path, fd, state in zip(self._paths, self._fds, self._states, strict=True):
            if _state(fd) != state:
                raise DamagedBundleError(
                    "the file was changed while the model runs from it",
                    path=str(path),
                    hint="Run `bel-repack verify` on the bundle",
                )

    def close(self) -> None:
        """Close the files.  A second call does nothing."""
        while self._fds:
            os.close(self._fds.pop())


def _state(fd: int) -> tuple[int, int]:
    state = os.fstat(fd)
    return state.st_size, state.st_mtime_ns
