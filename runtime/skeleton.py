"""A file that declares the expert tensors and holds nothing: what llama.cpp loads in the place of the experts.

llama.cpp wants a file for every tensor; the weights of the experts are pointed elsewhere before they are read.  The file is
sparse and has no name: it is gone when its descriptor is closed, however the process ends.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bel.formats.atomic import write_all
from bel.formats.errors import MachineError
from bel.formats.gguf_compose import compose, u16_entry
from bel.formats.manifest import EXPERTS, Manifest

GGUF_VERSION, ALIGNMENT = 3, 32
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class Skeleton:
    """An open skeleton.  `path` leads to it as long as it is open."""

    fd: int
    path: Path

    def empty(self) -> None:
        """Cut the file to nothing, once llama.cpp knows its size and before it maps it.

        Without this the mapping would fill every hole with a page of zeros (MAP_POPULATE, llama-mmap.cpp): gigabytes of page
        cache, charged to the run.  And to touch the mapping ends the process, where it would read zeros for weights.
        """
        os.ftruncate(self.fd, 0)


@contextlib.contextmanager
def make_skeleton(manifest: Manifest, split_no: int) -> Iterator[Skeleton]:
    """The expert tensors of a bundle as file number `split_no` (from 0) of a split set.

    Raises MachineError where no folder for temporary files is on a disk: in a file system of memory llama.cpp would fill the
    holes with memory while it loads.
    """
    tensors = [(t.name, t.ne, t.type_id, t.size_bytes) for t in manifest.tensors if t.dest == EXPERTS]
    layout = compose(GGUF_VERSION, ALIGNMENT, [u16_entry("split.no", split_no)], tensors)
    with tempfile.TemporaryFile(dir=disk_folder(), buffering=0) as file:
        write_all(file.fileno(), memoryview(layout.header()), 0)
        os.ftruncate(file.fileno(), layout.size_bytes)
        yield Skeleton(file.fileno(), Path(f"/proc/self/fd/{file.fileno()}"))


def disk_folder() -> Path:
    """A folder for temporary files that is not in memory.  Raises MachineError where there is none."""
    candidates = [Path(p) for p in (os.environ.get("TMPDIR"), "/var/tmp", tempfile.gettempdir()) if p]
    types = _file_system_types()
    for folder in candidates:
        is_usable = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
        if is_usable and types.get(folder.stat().st_dev) not in _MEMORY_FILE_SYSTEMS:
            return folder
    tried = ", ".join(dict.fromkeys(map(str, candidates)))
    raise MachineError(f"no folder for temporary files is on a disk: tried {tried}", hint="Set TMPDIR to a folder on a disk")


def _file_system_types() -> dict[int, str]:
    """Type of each mounted file system by device number (proc(5), mountinfo)."""
    types = {}
    with Path("/proc/self/mountinfo").open(encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            mount, _, rest = line.partition(" - ")
            major, minor = mount.split()[2].split(":")
            types[os.makedev(int(major), int(minor))] = rest.split()[0]
    return types
