"""A model as the source files that hold it: one GGUF, or a split set, with one table of all tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bel.formats.errors import BadInputError
from bel.formats.gguf_header import GgufHeader, scan_header
from bel.formats.gguf_regions import tensor_regions
from bel.formats.shards import SplitKeys, check_file, shard_paths, split_keys


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor and its place: `start_bytes` is absolute in source file number `source`."""

    name: str
    type_id: int
    ne: tuple[int, ...]
    source: int
    start_bytes: int
    size_bytes: int
    size_is_guessed: bool


@dataclass(frozen=True, slots=True)
class GgufModel:
    """All source files of a model (in shard order) and all their tensors (in header order, file after file)."""

    files: tuple[GgufHeader, ...]
    tensors: tuple[SourceTensor, ...]

    @property
    def first(self) -> GgufHeader:
        """The header that holds the model's metadata."""
        return self.files[0]

    @property
    def arch(self) -> str | None:
        """`general.architecture`, or None where the file has none."""
        return self.first.text("general.architecture")

    def arch_integers(self, suffix: str, layers: int) -> list[int] | None:
        """`<arch>.<suffix>` as one integer per layer: a scalar is repeated, an array taken as it is; None where absent.

        Raises BadInputError for any other type, and for an array that is shorter than `layers`.
        """
        key = f"{self.arch}.{suffix}"
        value = self.first.value(key)
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool):
            return [value] * layers
        if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise BadInputError(f"{key} is neither an integer nor an array of integers", path=str(self.first.path))
        if len(value) < layers:
            raise BadInputError(
                f"{key} is an array that does not reach every layer",
                path=str(self.first.path),
                found=f"{len(value)} entries",
                expected=f"{layers}",
            )
        return [int(v) for v in value]


def open_model(path: Path, *, need_data: bool = True) -> GgufModel:
    """Read every header of the model that `path` belongs to (any shard may be named).

    Without `need_data` each file may end anywhere behind its header: enough to plan before a download is complete.
    Raises BadInputError where the set is incomplete, foreign, renamed or contradicts itself, or a header is bad.
    """
    check_file(path)
    named = scan_header(path, need_data=need_data)
    keys = split_keys(named)
    files = [named if p == path else _scan_sibling(p, need_data=need_data) for p in shard_paths(path, keys)]
    _check_set(files, keys)
    tensors = [
        SourceTensor(i.name, i.type_id, i.ne, number, r.start_bytes, r.size_bytes, r.size_is_guessed)
        for number, header in enumerate(files)
        for i, r in zip(header.tensors, tensor_regions(header, need_data=need_data), strict=True)
    ]
    _check_names(files, tensors)
    return GgufModel(tuple(files), tuple(tensors))


def _scan_sibling(path: Path, *, need_data: bool) -> GgufHeader:
    check_file(path)
    return scan_header(path, need_data=need_data)


def _check_set(files: list[GgufHeader], keys: SplitKeys) -> None:
    if len(files) == 1:
        return
    for number, header in enumerate(files):
        have = split_keys(header)
        if have.count != keys.count:
            raise BadInputError(
                "the shard belongs to another split set",
                path=str(header.path),
                found=f"split.count {have.count}" if have.count else "no split.count",
                expected=f"split.count {keys.count}",
            )
        if have.number != number:
            raise BadInputError(
                "the shard's split.no does not match its name: shards were swapped or renamed",
                path=str(header.path),
                found=f"split.no {have.number}",
                expected=f"split.no {number} (it counts from 0)",
            )
    total = sum(len(header.tensors) for header in files)
    for header in files:
        declared = split_keys(header).tensors
        if declared is not None and declared != total:
            raise BadInputError(
                "split.tensors.count does not match the set: a shard is foreign or damaged",
                path=str(header.path),
                found=f"{total} tensors in the set's {len(files)} files",
                expected=f"{declared}",
            )


def _check_names(files: list[GgufHeader], tensors: list[SourceTensor]) -> None:
    seen: dict[str, int] = {}
    for tensor in tensors:
        if tensor.name in seen:
            raise BadInputError(
                f"duplicate tensor name: it is in {files[seen[tensor.name]].path.name} already",
                path=str(files[tensor.source].path),
                tensor=tensor.name,
            )
        seen[tensor.name] = tensor.source
