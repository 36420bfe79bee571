"""`--from vllm-npz`: the routed_experts array of vLLM (`--enable-return-routed-experts`), saved with numpy.

An array of shape (tokens, layers, top_k) of integers: `CompletionOutput.routed_experts`, docs/training/routed_experts_replay.md
of vLLM.  In an .npz it is called `routed_experts`, or is the only array of three dimensions; beside it may stand
`prompt_routed_experts` (the same for the prompt), `prompt_len` (how many first rows are the prompt's), `layers` (the model's
number of each layer) and `n_expert`.  A plain .npy holds the one array.  Rows of -1 are padding: vLLM marks tokens with them
that its prefix cache served.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bel.formats.errors import BadInputError
from bel.formats.trace import DECODE, PROMPT
from bel.formats.trace_header import MAX_EXPERTS
from bel.profiler.importers import Imported, Origin

_MAX_EXPANSION = 64  # ids compress a few times, never this much; a file that unpacks to more is not a trace
_SMALL_BYTES = 64 * 2**20
_MAIN, _PROMPT = "routed_experts", "prompt_routed_experts"


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    data: npt.NDArray[Any]


def read_vllm_npz(path: Path) -> Imported:
    """Read an .npz or .npy of routed experts.  Raises BadInputError, naming array and place."""
    arrays = {m.name: m.data for m in _members(path)}
    main = arrays.get(_MAIN)
    if main is None:
        others = [a for name, a in arrays.items() if a.ndim == 3 and name != _PROMPT]
        if len(others) != 1:
            raise _bad(path, f"there is no array {_MAIN}, nor one array of three dimensions", sorted(arrays))
        main = others[0]
    prompt = arrays.get(_PROMPT)
    for name, array in ((_MAIN, main), (_PROMPT, prompt)):
        if array is not None and (array.ndim != 3 or array.dtype.kind not in "iu" or array.shape[1:] != main.shape[1:]):
            raise _bad(path, f"{name} is not an integer array (tokens, layers, top_k)", f"{array.dtype} {array.shape}")
    if 0 in main.shape[1:]:
        raise _bad(path, f"{_MAIN} has no layers or no experts", main.shape)
    numbers = _layer_numbers(path, arrays.get("layers"), main.shape[1])
    n_expert = _scalar(path, arrays, "n_expert", MAX_EXPERTS)
    if n_expert is not None and n_expert < main.shape[2]:
        raise _bad(path, f"n_expert is below the top_k of {main.shape[2]}", n_expert)
    imported = Imported(path, Origin(engine="vLLM", layers=tuple(numbers), n_expert=n_expert, top_k=main.shape[2]))
    prompt_rows = _scalar(path, arrays, "prompt_len", len(main))
    if prompt is None and prompt_rows is not None:
        prompt, main = main[:prompt_rows], main[prompt_rows:]
    elif prompt is None:
        imported.notes.append("the file does not tell prompt from decode (prompt_len): every row is taken as a decode row")
    _add(imported, numbers, prompt, main)
    return imported


def _add(imported: Imported, numbers: list[int], prompt: npt.NDArray[Any] | None, decode: npt.NDArray[Any]) -> None:
    """The prompt is one ubatch, each decode row another."""
    prompt_rows = 0 if prompt is None else len(prompt)
    # Signed: next to an unsigned array the -1 of another would become a float.
    whole = np.concatenate([a.astype(np.int64) for a in (prompt, decode) if a is not None])
    padding = (whole == -1).all(axis=2)
    if padding.any():
        imported.notes.append(f"{int(padding.sum())} rows of -1 are padding and are dropped")
    unused = _unused_layers(whole, padding)
    if unused.any():
        where = ", ".join(str(n) for n, is_unused in zip(numbers, unused, strict=True) if is_unused)
        imported.notes.append(f"layers {where} name one expert in all slots of every row: no MoE layers; they are dropped")
        kept = tuple(n for n, is_unused in zip(numbers, unused, strict=True) if not is_unused)
        imported.origin = Origin(engine="vLLM", layers=kept, n_expert=imported.origin.n_expert, top_k=imported.origin.top_k)
    for row, place in np.argwhere(~padding & ~unused):
        is_prompt = row < prompt_rows
        imported.add(
            f"row {row}, layer {numbers[place]}",
            layer=numbers[place],
            token=int(row),
            phase=PROMPT if is_prompt else DECODE,
            ubatch=0 if is_prompt else int(row) + 1,
            ids=whole[row, place].tolist(),
        )


def _unused_layers(whole: npt.NDArray[Any], padding: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Layers without a router leave vLLM's buffer as it was: one id in all slots, which no router gives.  (layers,) bool."""
    if whole.shape[2] < 2 or not len(whole):
        return np.zeros(whole.shape[1], np.bool_)
    same: npt.NDArray[np.bool_] = ((whole == whole[:, :, :1]).all(axis=2) | padding).all(axis=0) & ~padding.all(axis=0)
    return same


def _layer_numbers(path: Path, layers: npt.NDArray[Any] | None, count: int) -> list[int]:
    if layers is None:
        return list(range(count))
    numbers: list[int] = layers.tolist() if layers.ndim == 1 and layers.dtype.kind in "iu" else []
    if len(numbers) != count or numbers != sorted(set(numbers)) or not 0 <= numbers[0] <= numbers[-1] < 1 << 31:
        raise _bad(path, "layers does not number the layers in ascending order", numbers[:8], f"{count} numbers")
    return numbers


def _scalar(path: Path, arrays: dict[str, npt.NDArray[Any]], name: str, limit: int) -> int | None:
    if name not in arrays:
        return None
    array = arrays[name]
    if array.size != 1 or array.dtype.kind not in "iu" or not 0 <= int(array.reshape(-1)[0]) <= limit:
        raise _bad(path, f"{name} is not one integer up to {limit}", f"{array.dtype} {array.shape}")
    return int(array.reshape(-1)[0])


def _members(path: Path) -> Iterator[_Member]:
    """The arrays of an .npz, or the one of an .npy."""
    size_bytes = path.stat().st_size
    try:
        if not zipfile.is_zipfile(path):
            yield _Member(_MAIN, _array(path.read_bytes()))
            return
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if sum(m.file_size for m in members) > max(_SMALL_BYTES, _MAX_EXPANSION * size_bytes):
                raise _bad(path, "the file unpacks to far more than ids can", sum(m.file_size for m in members))
            for member in members:
                with archive.open(member) as file:
                    yield _Member(member.filename.removesuffix(".npy"), _array(file.read(member.file_size + 1)))
    except (ValueError, EOFError, zipfile.BadZipFile, NotImplementedError, RuntimeError, SyntaxError, zlib.error) as error:
        raise _bad(path, f"this is not a valid .npz or .npy file of plain arrays: {str(error)[:200]}") from None


def _array(data: bytes) -> npt.NDArray[Any]:
    """One .npy, whose header must claim no more than the bytes that follow.  Raises ValueError."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f".npy version {version} is not supported; versions 1.0 and 2.0 are read")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are never loaded")
    count = 1
    for length in shape:
        count *= length
    if count * dtype.itemsize != len(data) - file.tell():
        raise ValueError(f"its header claims {count} numbers of {dtype.itemsize} bytes, {len(data) - file.tell()} bytes follow")
    array: npt.NDArray[Any] = np.frombuffer(data, dtype, count, file.tell()).reshape(shape, order="F" if is_fortran else "C")
    return array


def _bad(path: Path, cause: str, found: object = None, expected: object = None) -> BadInputError:
    return BadInputError(cause, path=str(path), found=found, expected=expected)
