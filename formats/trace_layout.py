"""The structs of a trace file, once.  `SPEC.md`, "Trace", has the same tables; a test compares the two."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from blake3 import blake3

MAGIC = b"BELTRACE"
VERSION = 1
READABLE_VERSIONS = (1,)
DIGEST_BYTES = 16  # half a BLAKE3: these digests find damage, they do not sign anything

FILE_HEAD = struct.Struct("<8sII16s")
FILE_FIELDS = ("magic", "version", "header_bytes", "header_digest")
BLOCK_HEAD = struct.Struct("<4sIIIIIIIIIIII16s16s")
COLUMNS = ("phase", "layer", "ubatch", "rows", "token", "ids", "weights", "times")
BLOCK_FIELDS = (
    "mark",
    "number",
    "calls",
    "rows",
    "ids",
    *(f"{name}_bytes" for name in COLUMNS),
    "payload_digest",
    "head_digest",
)
BLOCK_MARK = b"BELB"
END_MARK = b"BELE"  # the recording was closed in order; nothing follows

MAX_HEADER_BYTES = 16 * 2**20
MAX_BLOCK_CALLS = 1 << 20
MAX_BLOCK_ROWS = 1 << 22
MAX_BLOCK_IDS = 1 << 24  # 32 MiB of ids: what a reader holds for one block stays small whatever the file says
_NO_DIGEST = bytes(DIGEST_BYTES)


@dataclass(frozen=True, slots=True)
class BlockHead:
    """Sizes of one block.  `column_bytes` are the compressed sizes in the order of `COLUMNS`."""

    mark: bytes
    number: int
    calls: int
    rows: int
    ids: int
    column_bytes: tuple[int, ...]
    payload_digest: bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of all columns."""
        return sum(self.column_bytes)

    @property
    def is_bounded(self) -> bool:
        """Whether the counts are those of a block that a writer may make."""
        fits = 1 <= self.calls <= MAX_BLOCK_CALLS and self.calls <= self.rows <= MAX_BLOCK_ROWS
        return fits and self.rows <= self.ids <= MAX_BLOCK_IDS

    def pack(self, run_digest: bytes) -> bytes:
        """The head as bytes.  `run_digest` is the file head's: a block of another run, or out of its place, never passes."""
        sizes = (self.mark, self.number, self.calls, self.rows, self.ids, *self.column_bytes, self.payload_digest)
        bare = BLOCK_HEAD.pack(*sizes, _NO_DIGEST)
        return bare[:-DIGEST_BYTES] + short_digest(run_digest + bare[:-DIGEST_BYTES])


def unpack_block_head(data: bytes, run_digest: bytes) -> BlockHead | None:
    """The head in `data` (`BLOCK_HEAD.size` bytes), or None where its digest does not match."""
    if short_digest(run_digest + data[:-DIGEST_BYTES]) != data[-DIGEST_BYTES:]:
        return None
    mark, number, calls, rows, ids, *rest = BLOCK_HEAD.unpack(data)
    return BlockHead(mark, number, calls, rows, ids, tuple(rest[: len(COLUMNS)]), rest[len(COLUMNS)])


def pack_file_head(json_header: bytes) -> bytes:
    """Magic, version, length, digest, and the JSON header."""
    bare = FILE_HEAD.pack(MAGIC, VERSION, len(json_header), _NO_DIGEST)[:-DIGEST_BYTES]
    return bare + short_digest(bare + json_header) + json_header


def short_digest(data: bytes) -> bytes:
    """The first 16 bytes of BLAKE3."""
    return blake3(data).digest(DIGEST_BYTES)
