"""Logits of a run on disk: those of a long text are larger than the memory that a model is run in."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from bel.formats.atomic import named_errors, read_all, write_all
from bel.formats.errors import MachineError
from bel.formats.units import format_bytes
from bel.runtime.skeleton import disk_folder

ROW_DTYPE = np.dtype("<f4")


class LogitSpool:
    """Rows of logits, (n_vocab,) float32 each, in a file without a name that is gone when it is closed."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = disk_folder() if folder is None else folder
        self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - `close` closes it
        self._end_bytes = 0

    def reserve(self, size_bytes: int) -> None:
        """Raise MachineError where the disk has not so much room, before anything long has begun."""
        free = shutil.disk_usage(self._folder).free
        if size_bytes > free:
            raise MachineError(
                f"the logits of stock llama.cpp need {format_bytes(size_bytes)} until they are compared",
                path=str(self._folder),
                found=f"{format_bytes(free)} free",
                hint="Give fewer or shorter prompts, a smaller -n, or set TMPDIR to a folder on another disk",
            )

    def append(self, rows: npt.NDArray[np.float32]) -> int:
        """Write rows (n, n_vocab); the place is for `read`."""
        place = self._end_bytes
        data = np.ascontiguousarray(rows, ROW_DTYPE)
        with named_errors(self._folder):
            write_all(self._file.fileno(), data.data.cast("B"), place)
        self._end_bytes += data.nbytes
        return place

    def read(self, place: int, row: int, n_vocab: int) -> npt.NDArray[np.float32]:
        """Row number `row` of what was appended at `place`."""
        size = n_vocab * ROW_DTYPE.itemsize
        with named_errors(self._folder):
            data = read_all(self._file.fileno(), size, place + row * size)
        return np.frombuffer(data, ROW_DTYPE, n_vocab)

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def __enter__(self) -> LogitSpool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
