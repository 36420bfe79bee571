"""Where each tensor's bytes lie in a GGUF file, checked against one another and against the file's end."""

from __future__ import annotations

from dataclasses import dataclass

from bel.formats.errors import BadInputError
from bel.formats.ggml_types import GGML_TYPES, tensor_bytes, type_name
from bel.formats.gguf_header import GgufHeader, TensorInfo


@dataclass(frozen=True, slots=True)
class Region:
    """The bytes of one tensor: absolute place in its file, and whether the size had to be taken from the next offset."""

    start_bytes: int
    size_bytes: int
    size_is_guessed: bool


def tensor_regions(header: GgufHeader, *, need_data: bool = True) -> tuple[Region, ...]:
    """One region per tensor of the header, in header order.

    A type of known block size takes what it needs; an unknown one takes all up to the next tensor (or the end of the
    file).  Raises BadInputError for overlap, for a row that is not whole blocks, and for data beyond the file's end,
    naming the first tensor (by place) that does not fit and the missing bytes.

    Without `need_data` the file may end anywhere behind its header, as an unfinished download does; an unknown type in the
    last place is then refused, since its size cannot be told.
    """
    # A tensor without bytes shares its offset with the next one, whatever their order in the header.
    order = sorted(range(len(header.tensors)), key=lambda i: (header.tensors[i].offset_bytes, _has_bytes(header.tensors[i]), i))
    regions: list[Region | None] = [None] * len(order)
    for place, index in enumerate(order):
        info = header.tensors[index]
        start = header.data_start_bytes + info.offset_bytes
        limit, follower = _limit(header, order, place)
        size = _known_bytes(header, info)
        guessed = size is None
        if size is None:
            if follower is None and not need_data:
                raise _unknown_size(header, info)
            if start > limit:
                raise _truncated(header, info, start, header.tensors[order[-1]])
            size = limit - start
        if need_data and start + size > header.file_bytes:
            raise _truncated(header, info, start + size, header.tensors[order[-1]])
        if follower is not None and start + size > limit:
            raise BadInputError(
                f"the tensor's data overlap the next tensor's, {follower.name}",
                path=str(header.path),
                tensor=info.name,
                offset_bytes=start,
                found=f"{size} bytes",
                expected=f"at most {limit - start}",
            )
        regions[index] = Region(start, size, guessed)
    return tuple(r for r in regions if r is not None)


def _limit(header: GgufHeader, order: list[int], place: int) -> tuple[int, TensorInfo | None]:
    """Where the region at `place` must end, and the tensor that begins there (None: the end of the file)."""
    if place + 1 == len(order):
        return header.file_bytes, None
    follower = header.tensors[order[place + 1]]
    return header.data_start_bytes + follower.offset_bytes, follower


def _known_bytes(header: GgufHeader, info: TensorInfo) -> int | None:
    try:
        return tensor_bytes(info.type_id, info.ne)
    except ValueError as error:
        raise BadInputError(f"the tensor's shape is damaged: {error}", path=str(header.path), tensor=info.name) from None


def _unknown_size(header: GgufHeader, info: TensorInfo) -> BadInputError:
    return BadInputError(
        f"the last tensor has {type_name(info.type_id)}, which is not in the type table: its size can be told from the whole "
        "file only",
        path=str(header.path),
        tensor=info.name,
    )


def _truncated(header: GgufHeader, info: TensorInfo, end: int, last: TensorInfo) -> BadInputError:
    need = max(end, header.data_start_bytes + last.offset_bytes + (tensor_bytes_or_zero(last)))
    return BadInputError(
        "the file is truncated: this tensor's data reach past the end of the file",
        path=str(header.path),
        tensor=info.name,
        offset_bytes=header.data_start_bytes + info.offset_bytes,
        found=f"{header.file_bytes} bytes in the file",
        expected=f"at least {need}, so {need - header.file_bytes} are missing",
        hint="Download it again, or let the download finish",
    )


def tensor_bytes_or_zero(info: TensorInfo) -> int:
    """Bytes of a tensor of known type and whole rows, else 0."""
    try:
        return tensor_bytes(info.type_id, info.ne) or 0
    except ValueError:
        return 0


def _has_bytes(info: TensorInfo) -> bool:
    return info.type_id not in GGML_TYPES or 0 not in info.ne
