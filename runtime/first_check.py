"""The first look at a bundle, before a model is loaded: no token may be computed from wrong bytes.

The dense weights are compared with their digests whole: every token uses them, and llama.cpp reads them unseen.  Of the
experts, which are checked when they are read, only the ends of the files: an unfinished copy or download leaves zeros there,
and that shall be found now and not after an hour of text.  A per-layer embedding table, of which a token reads a few rows,
is left to `bel-repack verify`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from bel.formats.atomic import named_errors, read_all
from bel.formats.bundle import Bundle, read_index
from bel.formats.digest import DIGEST_BYTES, data_digest, slice_count
from bel.formats.errors import DamagedBundleError
from bel.formats.experts_file import parts_in_order
from bel.formats.manifest import DENSE, TensorRow

TAIL_BYTES = 16 << 20
"""Read of each experts file: the whole of a small bundle, some milliseconds of a large one."""
_READ_BYTES = 8 << 20
_HINT = "Run `bel-repack verify` on the bundle, or copy it anew"


def check_dense(bundle: Bundle) -> None:
    """Raise DamagedBundleError where the dense file's header or a tensor in it is not what was written.

    It reads, and does not map, so that a disk's error is one of ours and not the end of the process.
    """
    row = bundle.manifest.dense
    path = bundle.path(row.name)
    with _opened(path) as fd:
        if _digest_at(fd, 0, row.digest_bytes).hex() != row.digest:
            raise DamagedBundleError("the checksum of the header does not match", path=str(path), hint=_HINT)
        for tensor in bundle.manifest.tensors:
            if tensor.dest == DENSE and _tensor_digest(fd, tensor) != tensor.digest:
                raise DamagedBundleError(
                    "the checksum of the tensor does not match",
                    path=str(path),
                    tensor=tensor.name,
                    offset_bytes=tensor.dest_offset_bytes,
                    hint=_HINT,
                )


def check_tails(bundle: Bundle, tail_bytes: int = TAIL_BYTES) -> None:
    """Raise DamagedBundleError where a part in the last `tail_bytes` of an experts file is not what was written."""
    index = read_index(bundle)
    for shard, row in enumerate(bundle.manifest.experts):
        path, start = bundle.path(row.name), max(0, row.size_bytes - tail_bytes)
        with _opened(path) as fd:
            for number, (layer, expert, part) in enumerate(parts_in_order(bundle.manifest.layers)):
                at = layer.part_offset(expert, part)
                if layer.shard != shard or at < start:
                    continue
                if _digest_at(fd, at, part.size_bytes) != index[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]:
                    raise DamagedBundleError(
                        f"the checksum of expert {expert} of layer {layer.layer} ({part.role}) does not match",
                        path=str(path),
                        offset_bytes=at,
                        hint=_HINT,
                    )
            os.posix_fadvise(fd, start, 0, os.POSIX_FADV_DONTNEED)


def _tensor_digest(fd: int, row: TensorRow) -> str:
    count = slice_count(row.ne, row.size_bytes)
    size = row.size_bytes // count
    return data_digest(b"".join(_digest_at(fd, row.dest_offset_bytes + i * size, size) for i in range(count))).hex()


def _digest_at(fd: int, offset_bytes: int, size_bytes: int) -> bytes:
    hasher = blake3()  # of one thread: with more it panics where none can be started, and the reading takes as long
    for at in range(0, size_bytes, _READ_BYTES):
        hasher.update(read_all(fd, min(_READ_BYTES, size_bytes - at), offset_bytes + at))
    return hasher.digest()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with named_errors(path):
            yield fd
    finally:
        os.close(fd)
