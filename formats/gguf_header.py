"""The GGUF header scanner: every key and tensor info of a file, bounded, with the header's bytes kept verbatim.

It reads no tensor data and needs none to be there, so it works on the first part of an unfinished download.  Source of
the layout: ggml/include/gguf.h lines 1-31 and the checks of ggml/src/gguf.cpp `gguf_init_from_file_impl`.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

from bel.formats.atomic import named_errors
from bel.formats.errors import BadInputError, printable
from bel.formats.gguf_values import ARRAY, SCALAR_BYTES, STRING, U32, read_value, skip_value
from bel.formats.units import MIB, align_up

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 * MIB
MAX_HEADER_BYTES = 96 * MIB
"""The largest vocabularies of 2026 need about 25 MiB; a larger header is a damaged count, and holding it would break
the 200 MB that a conversion may use."""
MAX_ENTRIES = 2**17  # a key takes up to 14 times its bytes of memory; real models have under 10,000 tensors
MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_NAME_BYTES = 63  # GGML_MAX_NAME less the terminator: llama.cpp loads no model with a longer tensor name
MAX_KEY_BYTES = 65535  # the GGUF specification's limit on a key
MAX_ELEMENTS = 2**63 - 1

_START = struct.Struct("<4sIQQ")  # magic, version, tensor count, key count
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_KEY_MIN_BYTES = 8 + 4 + 1  # length, value type, the smallest value
_TENSOR_MIN_BYTES = 8 + 4 + 4 + 8  # length, dimension count, type, offset


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One metadata entry, as places in the header: [start, end) is the whole entry, the value begins at `value_start`."""

    key: str
    type_id: int
    start: int
    value_start: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as the header declares it.  `offset_bytes` counts from the data start; `ne` is fastest first."""

    name: str
    ne: tuple[int, ...]
    type_id: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What [0, data_start_bytes) of a GGUF says.  `raw` holds just these bytes."""

    path: Path
    file_bytes: int
    version: int
    alignment: int
    keys: dict[str, KeyValue]
    tensors: tuple[TensorInfo, ...]
    data_start_bytes: int
    raw: bytearray = field(repr=False)

    def value(self, key: str) -> object:
        """The decoded value of `key`, or None where there is none (a GGUF value is never None)."""
        kv = self.keys.get(key)
        return None if kv is None else read_value(self.raw, kv.value_start, kv.type_id)

    def integer(self, key: str) -> int | None:
        """The value of `key` where it is a single integer, else None."""
        value = self.value(key) if self._type(key) in SCALAR_BYTES else None
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def text(self, key: str) -> str | None:
        """The value of `key` where it is a string, else None."""
        value = self.value(key) if self._type(key) == STRING else None
        return value if isinstance(value, str) else None

    def _type(self, key: str) -> int | None:
        kv = self.keys.get(key)
        return None if kv is None else kv.type_id

    def entry(self, key: str) -> bytes:
        """The verbatim bytes of one entry: key, value type and value."""
        kv = self.keys[key]
        return bytes(self.raw[kv.start : kv.end])


class _Window:
    """The front of a file, read on as far as the scan has come, and never past the file's end or the limit."""

    def __init__(self, fd: int, path: Path, file_bytes: int) -> None:
        self.fd, self.path, self.file_bytes = fd, path, file_bytes
        self.buffer = bytearray()
        self.doing = "the start of the header"

    def need(self, buffer: bytearray, end: int) -> None:
        """Make `buffer` (this window's own) at least `end` bytes long.  Raises BadInputError where it cannot."""
        if end <= len(buffer):
            return
        if end > self.file_bytes:
            raise BadInputError(
                f"the header runs past the end of the file while reading {self.doing}: truncated, or a damaged count",
                path=str(self.path),
                offset_bytes=len(buffer),
                found=f"{self.file_bytes} bytes in the file",
                expected=f"at least {end}",
            )
        if end > MAX_HEADER_BYTES:
            raise BadInputError(
                f"the header is larger than {MAX_HEADER_BYTES // MIB} MiB at {self.doing}: too large to be a real one",
                path=str(self.path),
                expected="a damaged length or count is the likely cause",
            )
        goal = min(self.file_bytes, MAX_HEADER_BYTES, max(end, len(buffer) * 3 // 2, MIB))
        while len(buffer) < goal:
            data = os.pread(self.fd, min(goal - len(buffer), 4 * MIB), len(buffer))
            if not data:
                raise BadInputError("the file became shorter while it was read", path=str(self.path))
            buffer += data

    def u32(self, at: int) -> int:
        self.need(self.buffer, at + 4)
        return int(_U32.unpack_from(self.buffer, at)[0])

    def u64(self, at: int) -> int:
        self.need(self.buffer, at + 8)
        return int(_U64.unpack_from(self.buffer, at)[0])

    def name(self, at: int, limit: int) -> tuple[str, int]:
        """The string at `at` and the offset behind it; a length above `limit` bytes is refused before it is read."""
        length = self.u64(at)
        if length > limit:
            raise BadInputError(
                f"{self.doing} has a name of {length} bytes; llama.cpp's limit is under {limit + 1}",
                path=str(self.path),
                offset_bytes=at,
            )
        self.need(self.buffer, at + 8 + length)
        return bytes(self.buffer[at + 8 : at + 8 + length]).decode("utf-8", "surrogateescape"), at + 8 + length


def scan_header(path: Path, *, need_data: bool = True) -> GgufHeader:
    """Scan the header of one GGUF file.  Raises BadInputError for whatever a reader could take in two ways, OSError for I/O.

    Without `need_data` the file may end right behind the tensor infos, before the padding that leads to the data.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with named_errors(path):
            return _scan(_Window(fd, path, os.fstat(fd).st_size), need_data)
    finally:
        os.close(fd)


def _scan(window: _Window, need_data: bool) -> GgufHeader:
    version, n_tensors, n_keys = _start(window)
    at = _START.size
    keys: dict[str, KeyValue] = {}
    for index in range(n_keys):
        window.doing = f"metadata key {index + 1} of {n_keys}"
        kv = _key_value(window, at)
        if kv.key in keys:
            raise BadInputError(f"duplicate metadata key {printable(kv.key)}", path=str(window.path), offset_bytes=at)
        keys[kv.key] = kv
        at = kv.end
    alignment = _alignment(window, keys)
    tensors: dict[str, TensorInfo] = {}
    for index in range(n_tensors):
        window.doing = f"tensor info {index + 1} of {n_tensors}"
        start = at
        info, at = _tensor_info(window, at)
        if info.name in tensors:
            raise BadInputError("duplicate tensor name", path=str(window.path), tensor=info.name, offset_bytes=start)
        if info.offset_bytes % alignment:
            raise BadInputError(
                "the tensor's data offset is not aligned",
                path=str(window.path),
                tensor=info.name,
                found=f"offset {info.offset_bytes}",
                expected=f"a multiple of general.alignment {alignment}",
            )
        tensors[info.name] = info
    # llama.cpp pads the header only where tensors follow (gguf.cpp, `if (n_tensors > 0)`).
    data_start = align_up(at, alignment) if n_tensors else at
    window.doing = "the padding between header and tensor data"
    if need_data:
        window.need(window.buffer, data_start)
    del window.buffer[data_start:]
    return GgufHeader(
        window.path, window.file_bytes, version, alignment, keys, tuple(tensors.values()), data_start, window.buffer
    )


def _start(window: _Window) -> tuple[int, int, int]:
    path, size = str(window.path), window.file_bytes
    if size < _START.size:
        what = "the file is empty (0 bytes)" if size == 0 else f"the file is too short for a GGUF ({size} bytes)"
        raise BadInputError(what + _looks_like(window), path=path)
    window.need(window.buffer, _START.size)
    magic, version, n_tensors, n_keys = _START.unpack_from(window.buffer)
    if magic != MAGIC:
        raise BadInputError(f"this is not a GGUF file{_looks_like(window)}", path=path, found=repr(magic), expected=repr(MAGIC))
    if version & 0xFFFF == 0 and version:
        raise BadInputError(
            "this is a big-endian GGUF (its byte order is not this machine's)",
            path=path,
            hint="Convert it with llama.cpp's gguf_convert_endian.py first",
        )
    if version not in VERSIONS:
        known = " and ".join(str(v) for v in VERSIONS)
        raise BadInputError(f"GGUF version {version} is not supported; versions {known} are", path=path)
    for count, least, what in ((n_keys, _KEY_MIN_BYTES, "metadata keys"), (n_tensors, _TENSOR_MIN_BYTES, "tensors")):
        if count * least > size:
            raise BadInputError(
                f"the header declares {count} {what}, more than fit: truncated, or a damaged count",
                path=path,
                found=f"{size} bytes in the file",
                expected=f"at least {count * least}",
            )
        if count > MAX_ENTRIES:
            raise BadInputError(
                f"the header declares {count} {what}, more than any model has: a damaged count",
                path=path,
                expected=f"at most {MAX_ENTRIES}",
            )
    return version, n_tensors, n_keys


def _looks_like(window: _Window) -> str:
    """What a small file that is no GGUF most often is: what a checkout or a copy left in the place of the real one."""
    text = os.pread(window.fd, 512, 0)
    if text.startswith(b"version https://git-lfs"):
        return ": it is a Git LFS pointer; fetch the file itself with git lfs pull"
    shown = text.decode("utf-8", "replace").strip()
    if window.file_bytes < 512 and "/" in shown and shown.isprintable():
        return f": it holds the text {shown[:120]}, so it may be a symbolic link that was copied as text"
    return ""


def _key_value(window: _Window, start: int) -> KeyValue:
    key, at = window.name(start, MAX_KEY_BYTES)
    window.doing = f"the value of key {printable(key)}"
    type_id = window.u32(at)
    try:
        end = skip_value(window.buffer, at + 4, type_id, window.need)
    except ValueError as error:
        raise BadInputError(f"{window.doing}: {error}", path=str(window.path), offset_bytes=at) from None
    return KeyValue(key, type_id, start, at + 4, end)


def _alignment(window: _Window, keys: dict[str, KeyValue]) -> int:
    kv = keys.get("general.alignment")
    if kv is None:
        return DEFAULT_ALIGNMENT
    if kv.type_id != U32:
        raise BadInputError(
            "general.alignment has the wrong type",
            path=str(window.path),
            found=f"an {'array' if kv.type_id == ARRAY else f'entry of value type {kv.type_id}'}",
            expected="u32",
        )
    value = window.u32(kv.value_start)
    if value > MAX_ALIGNMENT:
        raise BadInputError(
            "general.alignment is too large", path=str(window.path), found=value, expected=f"at most {MAX_ALIGNMENT}"
        )
    if value == 0 or value & (value - 1):
        raise BadInputError(
            "general.alignment is not a power of two", path=str(window.path), found=value, offset_bytes=kv.value_start
        )
    return value


def _tensor_info(window: _Window, at: int) -> tuple[TensorInfo, int]:
    name, at = window.name(at, MAX_NAME_BYTES)
    path = str(window.path)
    window.doing = f"the info of tensor {printable(name)}"
    n_dims = window.u32(at)
    if n_dims > MAX_DIMS:
        raise BadInputError(
            f"the tensor has {n_dims} dimensions; ggml has at most {MAX_DIMS}", path=path, tensor=name, offset_bytes=at
        )
    at += 4
    window.need(window.buffer, at + 8 * n_dims + 12)
    ne = struct.unpack_from(f"<{n_dims}Q", window.buffer, at)
    elements = 1
    for n in ne:
        elements *= n
    if any(n > MAX_ELEMENTS for n in ne) or elements > MAX_ELEMENTS:
        raise BadInputError(
            "the tensor's dimensions overflow", path=path, tensor=name, found=list(ne), expected="fewer than 2^63 elements"
        )
    at += 8 * n_dims
    type_id = window.u32(at)
    if type_id >= 2**31:  # an int32 in the file
        raise BadInputError("the tensor has a negative type id", path=path, tensor=name, found=type_id - 2**32)
    return TensorInfo(name, ne, type_id, window.u64(at + 4)), at + 12
