"""Import of vLLM's arrays: what their axes mean, and archives that are hostile."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bel.formats.errors import BadInputError
from bel.formats.trace import DECODE, TraceLayer
from bel.formats.trace_calls import Trace
from bel.profiler.importers_npz import read_vllm_npz
from imported_traces import as_trace, calls


def npz(tmp_path: Path, **arrays: Any) -> tuple[Trace, list[str]]:
    np.savez(tmp_path / "in.npz", **arrays)
    return as_trace(tmp_path, read_vllm_npz(tmp_path / "in.npz"))


def routed(rows: int, layers: int = 2, top_k: int = 2, dtype: str = "i2") -> np.ndarray:
    first = np.arange(rows * layers).reshape(rows, layers, 1) % 8
    return (first + np.arange(top_k)).astype(dtype)


def test_vllm_prompt_and_generation(tmp_path: Path) -> None:
    trace, notes = npz(tmp_path, routed_experts=routed(3), prompt_routed_experts=routed(4, dtype="u1"), n_expert=16)
    assert [(c[0], c[1]) for c in calls(trace.layers[0])] == [(0, [0, 1, 2, 3]), (1, [4]), (1, [5]), (1, [6])]
    assert trace.layers[1].ids.tolist() == routed(4)[:, 1].tolist() + routed(3)[:, 1].tolist()
    assert (trace.header.layers[1], notes) == (TraceLayer(1, 16, 2, None), [])


def test_vllm_prompt_len_and_layer_numbers(tmp_path: Path) -> None:
    trace, _ = npz(tmp_path, routed_experts=routed(5), prompt_len=2, layers=np.array([3, 7]))
    assert [x.layer for x in trace.header.layers] == [3, 7]
    assert [(c[0], len(c[1])) for c in calls(trace.layers[0])] == [(0, 2), (1, 1), (1, 1), (1, 1)]


def test_vllm_plain_array_has_no_phases_and_says_so(tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", routed(3, dtype="u8"))
    trace, notes = as_trace(tmp_path, read_vllm_npz(tmp_path / "in.npy"))
    assert [c[0] for c in calls(trace.layers[0])] == [DECODE] * 3
    assert "decode row" in notes[0]
    np.savez_compressed(tmp_path / "in.npz", routed(3))
    again, _ = as_trace(tmp_path, read_vllm_npz(tmp_path / "in.npz"))
    assert [calls(x) for x in again.layers] == [calls(x) for x in trace.layers]


def test_vllm_padding_rows_are_dropped_and_said(tmp_path: Path) -> None:
    array = routed(4)
    array[1] = -1
    trace, notes = npz(tmp_path, routed_experts=array, prompt_len=0)
    assert trace.layers[0].token.tolist() == [0, 2, 3]
    assert notes[0] == "2 rows of -1 are padding and are dropped"
    array[2, 1, 0] = -1
    with pytest.raises(BadInputError, match=r"row 2, layer 1: .* found -1"):
        npz(tmp_path, routed_experts=array)


def test_vllm_layers_without_a_router_are_dropped_and_said(tmp_path: Path) -> None:
    array = routed(4)
    array[:, 0] = 0
    trace, notes = npz(tmp_path, routed_experts=array, prompt_len=0)
    assert [x.layer for x in trace.header.layers] == [1]
    assert "layers 0 name one expert in all slots" in notes[0]


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"routed_experts": routed(3), "n_expert": np.int64(4)}, "out of range"),
        ({"routed_experts": routed(3), "n_expert": np.int64(1)}, "below the top_k"),
        ({"routed_experts": routed(3), "n_expert": np.int64(-1)}, "n_expert is not one integer"),
        ({"routed_experts": routed(3), "prompt_len": np.int64(4)}, "prompt_len is not one integer up to 3"),
        ({"routed_experts": routed(3), "layers": np.array([1, 1])}, "ascending"),
        ({"routed_experts": routed(3), "layers": np.array([1, 2, 3])}, "ascending"),
        ({"routed_experts": routed(3).astype("f4")}, "not an integer array"),
        ({"routed_experts": routed(3)[0]}, "not an integer array"),
        ({"routed_experts": np.zeros((3, 0, 2), "i2")}, "no layers or no experts"),
        ({"routed_experts": routed(3), "prompt_routed_experts": routed(3, 3)}, "not an integer array"),
        ({"a": routed(3), "b": routed(3)}, "nor one array of three dimensions"),
        ({"routed_experts": routed(2, dtype="i8") + 70000}, "out of range; found 70000"),
    ],
)
def test_vllm_arrays_that_cannot_be_are_refused(tmp_path: Path, arrays: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        npz(tmp_path, **arrays)


def npy(header: str, data: bytes = b"") -> bytes:
    raw = header.encode() + b"\n"
    return b"\x93NUMPY\1\0" + len(raw).to_bytes(2, "little") + raw + data


@pytest.mark.parametrize(
    "member",
    [
        npy("{'descr': '<i2', 'fortran_order': False, 'shape': (1000000000, 48, 8)}"),
        npy("{'descr': '<i2', 'fortran_order': False, 'shape': (-1, -2, 2)}", bytes(8)),
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (1, 1, 1)}", bytes(8)),
        npy("{'descr': '<i2', 'fortran_order': False}"),
        npy("__import__('os').abort()"),
        b"\x93NUMPY\4\0",
        b"",
    ],
)
def test_vllm_hostile_members_are_refused(tmp_path: Path, member: bytes) -> None:
    path = tmp_path / "in.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("routed_experts.npy", member)
    with pytest.raises(BadInputError, match=r"not a valid \.npz"):
        read_vllm_npz(path)
    (tmp_path / "in.npy").write_bytes(member)
    with pytest.raises(BadInputError, match=r"not a valid \.npz"):
        read_vllm_npz(tmp_path / "in.npy")


def test_vllm_a_file_that_unpacks_to_far_too_much_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "in.npz", "w", zipfile.ZIP_DEFLATED) as archive, archive.open("a.npy", "w") as file:
        for _ in range(80):
            file.write(bytes(2**20))
    with pytest.raises(BadInputError, match="unpacks to far more"):
        read_vllm_npz(tmp_path / "in.npz")


def test_vllm_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, routed_experts=routed(50))
    data = bytearray(buffer.getvalue())
    data[80] ^= 0xFF
    (tmp_path / "in.npz").write_bytes(data)
    with pytest.raises(BadInputError, match=r"not a valid \.npz"):
        read_vllm_npz(tmp_path / "in.npz")
