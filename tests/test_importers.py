"""Importers: what each format means, and what of it is refused, by line."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bel.formats.errors import BadInputError
from bel.formats.trace import DECODE, PROMPT, TraceLayer
from bel.formats.trace_calls import LayerCalls, Trace, read_trace
from bel.profiler.importers import Imported
from bel.profiler.importers_bigmoe import read_bigmoe_csv
from bel.profiler.importers_counts import read_counts_json
from bel.profiler.importers_jsonl import read_jsonl
from bel.profiler.importers_moetrace import read_thecodacus_csv
from bel.profiler.importers_npz import read_vllm_npz

ROUTE = Path(__file__).parent / "data_import" / "route.csv"
HEAD = '{"header": {"model": "tiny", "fingerprint": "f1", "layers": [0, 1], "n_expert": 4, "top_k": 2}}\n'


def imported(
    tmp_path: Path, read: Callable[[Path], Imported], content: str | bytes, name: str = "in.txt"
) -> tuple[Trace, list[str]]:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return as_trace(tmp_path, read(path))


def as_trace(tmp_path: Path, rows: Imported) -> tuple[Trace, list[str]]:
    header = rows.header("work")
    rows.write(tmp_path / "out.trace", header)
    trace = read_trace(tmp_path / "out.trace", weights=True)
    (tmp_path / "out.trace").unlink()
    assert trace.notes == ()
    return trace, rows.notes


def calls(layer: LayerCalls) -> list[tuple[int, list[int], list[list[int]]]]:
    """(phase, tokens, ids) of each call."""
    bounds = zip(layer.row_start[:-1].tolist(), layer.row_start[1:].tolist(), strict=True)
    return [
        (int(phase), layer.token[a:b].tolist(), layer.ids[a:b].tolist())
        for phase, (a, b) in zip(layer.phase, bounds, strict=True)
    ]


def row(token: int, layer: int, experts: list[int], phase: str = "decode", **more: Any) -> str:
    return json.dumps({"token": token, "layer": layer, "experts": experts, "phase": phase, **more}) + "\n"


# jsonl


def test_jsonl_with_a_header(tmp_path: Path) -> None:
    head = HEAD.replace('"top_k"', '"expert_bytes": {"1": 4096}, "unknown": [1], "top_k"')
    trace, notes = imported(tmp_path, read_jsonl, head + row(0, 0, [3, 1]) + row(0, 1, [0, 2]) + row(1, 0, [1, 2]))
    assert (trace.header.model_name, trace.header.fingerprint, trace.header.workload) == ("tiny", "f1", "work")
    assert trace.header.layers == (TraceLayer(0, 4, 2, None), TraceLayer(1, 4, 2, 4096))
    assert calls(trace.layers[0]) == [(DECODE, [0], [[3, 1]]), (DECODE, [1], [[1, 2]])]
    assert [x.order.tolist() for x in trace.layers] == [[0, 2], [1]]
    assert notes == []


def test_jsonl_rows_of_one_ubatch_and_layer_are_one_call_wherever_they_stand(tmp_path: Path) -> None:
    rows = [row(t, layer, [t, t + 1], "prompt", ubatch=7) for t in range(3) for layer in (0, 1)]
    rows += [row(3, layer, [0, 3], ubatch=2) for layer in (0, 1)]
    trace, _ = imported(tmp_path, read_jsonl, HEAD + "".join(rows))
    for layer in trace.layers:
        assert calls(layer) == [(PROMPT, [0, 1, 2], [[0, 1], [1, 2], [2, 3]]), (DECODE, [3], [[0, 3]])]
    assert [x.order.tolist() for x in trace.layers] == [[0, 2], [1, 3]]


def test_jsonl_rows_without_ubatch_are_calls_of_their_own(tmp_path: Path) -> None:
    trace, _ = imported(tmp_path, read_jsonl, HEAD + row(0, 0, [0, 1], "prompt") * 2 + row(1, 0, [2, 3], "prompt"))
    assert [len(c[1]) for c in calls(trace.layers[0])] == [1, 1, 1]


def test_jsonl_without_a_header_is_inferred_and_said(tmp_path: Path) -> None:
    trace, notes = imported(tmp_path, read_jsonl, row(0, 5, [9, 1]) + "\n" + row(0, 2, [0, 2]))
    assert trace.header.layers == (TraceLayer(2, 10, 2, None), TraceLayer(5, 10, 2, None))
    assert "inferred" in notes[0]


def test_jsonl_of_windows(tmp_path: Path) -> None:
    text = (HEAD + row(0, 0, [3, 1])).replace("\n", "\r\n")
    trace, _ = imported(tmp_path, read_jsonl, b"\xef\xbb\xbf" + text.encode())
    assert calls(trace.layers[0]) == [(DECODE, [0], [[3, 1]])]


def test_jsonl_last_line_cut_short_is_dropped_and_said(tmp_path: Path) -> None:
    text = HEAD + row(0, 0, [3, 1]) + row(1, 0, [0, 2])
    for cut in range(2, len(row(1, 0, [0, 2]))):
        trace, notes = imported(tmp_path, read_jsonl, text[:-cut])
        assert len(trace.layers[0].ids) == 1
        assert "line 3 is incomplete" in notes[0]
    trace, notes = imported(tmp_path, read_jsonl, text[:-1])
    assert (len(trace.layers[0].ids), notes) == (2, []), "a whole object without a line end is whole"


def test_jsonl_an_expert_named_twice_in_a_row_is_said(tmp_path: Path) -> None:
    trace, notes = imported(tmp_path, read_jsonl, HEAD + row(0, 0, [2, 2]))
    assert trace.layers[0].ids.tolist() == [[2, 2]]
    assert "twice" in notes[0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (row(0, 0, [0, 4]), "expert that is out of range; found 4, expected 0 to 3"),
        (row(0, 0, [0, -1]), "expert that is out of range; found -1"),
        (row(0, 0, [0, 2**70]), "not a whole number"),
        (row(0, 7, [0, 1]), "layer 7 is not one of the MoE layers"),
        (row(0, -1, [0, 1]), "layer -1"),
        (row(0, 0, [0]), "row of 1 experts; found 1, expected top_k 2"),
        (row(0, 0, [0, 1, 2]), "row of 3 experts"),
        (row(0, 0, []), "without experts"),
        (row(-1, 0, [0, 1]), "token is not a non-negative integer"),
        (row(0, 0, [0, 1], "warm-up"), "phase is 'warm-up'"),
        ('{"token": 0, "layer": 0, "experts": [0, 1]}\n', "lacks 'phase'"),
        ('{"token": 0, "layer": 0, "experts": [0, NaN], "phase": "decode"}\n', "NaN"),
        ('{"token": 0, "layer": 0, "experts": [0, 1.0], "phase": "decode"}\n', "not a whole number"),
        ('{"token": 0, "layer": 0, "experts": [0, true], "phase": "decode"}\n', "not a whole number"),
        ('{"token": 0, "layer": 0, "experts": 3, "phase": "decode"}\n', "not a list"),
        ("[1]\n", "not a JSON object"),
        ("nonsense\n", "not valid JSON"),
        ("[" * 100000 + "\n", "not valid JSON"),
        (HEAD, "lacks 'token'"),
        (row(0, 0, [0, 1], ubatch=1) + row(1, 1, [0, 1], "prompt", ubatch=1), "prompt and of decode"),
    ],
)
def test_jsonl_malformed_rows_are_refused_by_line(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(BadInputError) as caught:
        imported(tmp_path, read_jsonl, HEAD + row(0, 1, [2, 3]) + line)
    assert f"in.txt: line {3 + line.count(chr(10)) - 1}: " in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('"n_expert": 0', "n_expert 0"),
        ('"n_expert": 70000', "n_expert 70000"),
        ('"n_expert": 1', "top_k 2"),
        ('"n_expert": -4', "non-negative"),
        ('"n_expert": 4, "layers": []', "stands twice"),
        ('"n_expert": 4, "expert_bytes": {"0": 0}', "expert_bytes of layer 0"),
        ('"n_expert": 4, "expert_bytes": {"00": 5}', "not the number of a layer"),
    ],
)
def test_jsonl_headers_that_cannot_be_are_refused(tmp_path: Path, change: str, said: str) -> None:
    with pytest.raises(BadInputError, match=f"line 1: .*{said}"):
        imported(tmp_path, read_jsonl, HEAD.replace('"n_expert": 4', change) + row(0, 0, [0, 1]))


def test_a_file_without_rows(tmp_path: Path) -> None:
    trace, _ = imported(tmp_path, read_jsonl, HEAD)
    assert [len(x.ids) for x in trace.layers] == [0, 0]
    for empty in ("", "\n\n", '{"header": {}}\n'):
        with pytest.raises(BadInputError, match="no rows"):
            imported(tmp_path, read_jsonl, empty)


def test_lines_that_are_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="line 2: it is not UTF-8"):
        imported(tmp_path, read_jsonl, HEAD.encode() + b"\xff\xfe\n")
    with pytest.raises(BadInputError, match="line 1: it is longer"):
        imported(tmp_path, read_jsonl, b" " * (2**20 + 1))


# bigmoe-csv


def test_bigmoe_excerpt_of_the_public_trace(tmp_path: Path) -> None:
    trace, notes = as_trace(tmp_path, read_bigmoe_csv(ROUTE))
    assert notes == []
    assert (trace.header.model_name, trace.header.arch) == ("Qwen3-30B-A3B-Q4_K_M.gguf", "qwen3moe")
    sizes = {0: 3059712, 6: 2654208, 47: 3059712}
    assert trace.header.layers == tuple(TraceLayer(n, 128, 6, size) for n, size in sizes.items())
    lines = [line for line in ROUTE.read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    for layer in trace.layers:
        mine = [r for r in rows if int(r["layer"]) == layer.info.layer]
        assert layer.ids.ravel().tolist() == [int(r["expert"]) for r in mine]
        assert layer.weights is not None
        wanted = np.array([float(r["weight"]) for r in mine], np.float32).astype(np.float16)
        assert np.array_equal(layer.weights.ravel(), wanted)
        # The prompt is one call (the last layer computes its last token only), each decode step another.
        prompt = 1 if layer.info.layer == 47 else 28
        assert [(c[0], len(c[1])) for c in calls(layer)] == [(PROMPT, prompt)] + [(DECODE, 1)] * 8
        assert layer.token.tolist() == list(range(28 - prompt, 36))
    assert [x.order.tolist() for x in trace.layers] == [list(range(i, 27, 3)) for i in range(3)]


COMMENTS = (
    "# route_trace v1\n# model=/a b/c.gguf arch=qwen3moe n_layer=2 n_expert=8 n_expert_used=2\n# layer=0 expert_bytes=5\n"
)
COLUMNS = "turn,phase,step,layer,slot,expert\n"


def test_bigmoe_ubatches(tmp_path: Path) -> None:
    """A prompt in two ubatches: the layers come twice."""
    slots = lambda step, layer, phase=0, turn=0: "".join(f"{turn},{phase},{step},{layer},{s},{s + step}\n" for s in (0, 1))  # noqa: E731
    text = COMMENTS + "# layer=1 expert_bytes=6\n" + COLUMNS
    text += slots(0, 0) + slots(1, 0) + slots(0, 1) + slots(1, 1) + slots(2, 0) + slots(2, 1)
    text += slots(3, 0, 1) + slots(3, 1, 1) + slots(4, 0, 1) + slots(4, 1, 1) + slots(0, 0, 0, 1) + slots(0, 1, 0, 1)
    trace, _ = imported(tmp_path, read_bigmoe_csv, text)
    assert trace.header.model_name == "c.gguf"
    for layer in trace.layers:
        assert [(c[0], c[1]) for c in calls(layer)] == [(0, [0, 1]), (0, [2]), (1, [3]), (1, [4]), (0, [0])]
        assert layer.ubatch.tolist() == [0, 1, 2, 3, 4]
        assert layer.weights is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (COMMENTS + COLUMNS + "0,1,0,0,0,8\n0,1,0,0,1,1\n", "line 5: layer 0 names an expert that is out of range; found 8"),
        (COMMENTS + COLUMNS + "0,1,0,0,1,3\n", "line 5: the slots of a row are out of order"),
        (COMMENTS + COLUMNS + "0,1,0,0,0,3\n0,1,1,0,0,3\n0,1,1,0,1,3\n", "line 5: layer 0 has a row of 1 experts"),
        (COMMENTS + COLUMNS + "0,1,0,1,0,3\n0,1,0,1,1,3\n", "line 5: layer 1 is not one"),
        (COMMENTS + COLUMNS + "0,2,0,0,0,3\n", "line 5: it is not a row"),
        (COMMENTS + COLUMNS + "0,1,0,0,0\n", "line 5: it is not a row"),
        (COMMENTS + COLUMNS + "0,1,0,0,0,0x3\n", "line 5: it is not a row"),
        (COMMENTS + COLUMNS + "0,1,0,0,0,1_0\n", "line 5: it is not a row"),
        (COMMENTS + COLUMNS[:-1] + ",weight\n0,1,0,0,0,3,nan\n", "line 5: the weight is not a finite number"),
        (COMMENTS + COLUMNS[:-1] + ",weight\n0,1,0,0,0,3,1e9\n", "line 5: the weight is not a finite number"),
        (COMMENTS.replace("v1", "v2") + COLUMNS, "line 1: route_trace version 2 is not supported; version 1 is read"),
        (COMMENTS.replace("_bytes=5", "_bytes=-5") + COLUMNS, "line 3: a layer has no valid number or expert_bytes"),
        (COMMENTS.replace("n_expert=8", "n_expert=x") + COLUMNS, "n_expert is not a count"),
        (COMMENTS + "turn,phase,step,layer,expert\n", "line 4: the column names lack slot"),
    ],
)
def test_bigmoe_malformed_rows_are_refused_by_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadInputError) as caught:
        imported(tmp_path, read_bigmoe_csv, text)
    assert said in str(caught.value)


def test_bigmoe_torn_tail_is_dropped_and_said(tmp_path: Path) -> None:
    text = COMMENTS + COLUMNS + "0,1,0,0,0,3\n0,1,0,0,1,5\n0,1,1,0,0,3\n0,1,1,0,1,5\n"
    for cut in (2, 5, 9, 12, 13, 20):
        trace, notes = imported(tmp_path, read_bigmoe_csv, text[:-cut])
        assert trace.layers[0].ids.tolist() == [[3, 5]]
        assert "truncated" in notes[0]


# thecodacus-csv


def test_thecodacus_prompt_and_decode(tmp_path: Path) -> None:
    """Two prompt ubatches of 3 and 2 tokens; the last layer computes the last token of each only."""
    text = "-3,0,1,2\n-2,0,2,3\n-1,0,3,4\n-1,1,9,8\n"
    text += "-5,0,4,5\n-4,0,5,6\n-4,1,8,7\n"
    text += "0,0,1,2\n0,1,3,4\n1,0,5,6\n1,1,7,8\n"
    trace, notes = imported(tmp_path, read_thecodacus_csv, text)
    assert trace.header.layers == (TraceLayer(0, 10, 2, None), TraceLayer(1, 10, 2, None))
    assert "inferred" in notes[0]
    zero, one = trace.layers
    assert calls(zero) == [
        (PROMPT, [0, 1, 2], [[1, 2], [2, 3], [3, 4]]),
        (PROMPT, [3, 4], [[4, 5], [5, 6]]),
        (DECODE, [5], [[1, 2]]),
        (DECODE, [6], [[5, 6]]),
    ]
    assert [c[2] for c in calls(one)] == [[[9, 8]], [[8, 7]], [[3, 4]], [[7, 8]]]
    assert (zero.order.tolist(), one.order.tolist()) == ([0, 2, 4, 6], [1, 3, 5, 7])
    again, _ = imported(tmp_path, read_thecodacus_csv, "pos,layer,id0,id1\r\n" + text.replace("\n", "\r\n"))
    assert [calls(x) for x in again.layers] == [calls(zero), calls(one)]


def test_thecodacus_one_layer_and_two_runs(tmp_path: Path) -> None:
    text = "-2,0,1,2\n-1,0,2,3\n-4,0,3,4\n-3,0,1,4\n0,0,1,2\n1,0,1,2\n-1,0,7,8\n0,0,1,2\n"
    trace, _ = imported(tmp_path, read_thecodacus_csv, text)
    assert [(c[0], c[1]) for c in calls(trace.layers[0])] == [(0, [0, 1]), (0, [2, 3]), (1, [4]), (1, [5]), (0, [0]), (1, [1])]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("0,0,1\n", "row of 1 experts"),
        ("0,0\n", "it is not a row"),
        ("0,0,1,x\n", "it is not a row"),
        ("0,0,1,2.0\n", "it is not a row"),
        ("0,0,1,-1\n", "out of range; found -1"),
        ("0,0,1,65536\n", "out of range; found 65536"),
        ("0,-2,1,2\n", "layer -2"),
        (f"0,0,1,{10**30}\n", "it is not a row"),
    ],
)
def test_thecodacus_malformed_rows_are_refused_by_line(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(BadInputError) as caught:
        imported(tmp_path, read_thecodacus_csv, "0,0,5,6\n" + line)
    assert "in.txt: line 2: " in str(caught.value)
    assert said in str(caught.value)


def test_thecodacus_last_line_cut_short_is_dropped_and_said(tmp_path: Path) -> None:
    for tail in ("1", "1,", "1,0", "1,0,", "1,0,4", "1,0,4,"):
        trace, notes = imported(tmp_path, read_thecodacus_csv, "0,0,5,6\n" + tail)
        assert trace.layers[0].ids.tolist() == [[5, 6]]
        assert "line 2 is incomplete" in notes[0]


# vllm-npz


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


# counts-json

COUNTS = {"model": "tiny", "fingerprint": "f1", "n_expert": 4, "top_k": 2, "tokens": 100, "counts": {"0": [50, 50, 50, 50]}}


def counts_file(tmp_path: Path, **changes: Any) -> Path:
    (tmp_path / "counts.json").write_text(json.dumps({**COUNTS, **changes}))
    return tmp_path / "counts.json"


def test_counts_become_a_profile(tmp_path: Path) -> None:
    profile = read_counts_json(counts_file(tmp_path), "code")
    (work,) = profile.workloads
    assert (work.name, work.tokens, work.layers[0].counts) == ("code", 100, (50, 50, 50, 50))
    assert work.layers[0].decode.lru_hits is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"counts": {"0": [50, 50, 50, 51]}}, "layer 0: the counts add up to 201, not to tokens"),
        ({"counts": {"0": [101, 99, 0, 0]}}, "expert 0 is counted 101 times in 100 tokens"),
        ({"counts": {"0": [-50, 150, 50, 50]}}, "layer 0: .*non-negative"),
        ({"counts": {"0": [50.0, 50, 50, 50]}}, "non-negative integer"),
        ({"counts": {"0": [True, 99, 50, 50]}}, "non-negative integer"),
        ({"counts": {"0": ["50", 50, 50, 50]}}, "non-negative integer"),
        ({"counts": {"0": [float("nan"), 50, 50, 50]}}, "NaN is not a finite number"),
        ({"counts": {"0": [float("inf"), 50, 50, 50]}}, "Infinity is not a finite number"),
        ({"counts": {"0": [10**30, 50, 50, 50]}}, "non-negative integer"),
        ({"counts": {"0": [100, 100]}}, "a list has 2 numbers where 4 are expected"),
        ({"counts": {"0": None}}, "not a list"),
        ({"counts": {"x": [50] * 4}}, "'x' is not the number of a layer"),
        ({"counts": {}}, "no layers"),
        ({"counts": []}, "counts is not an object"),
        ({"top_k": 5}, "top_k 5 of n_expert 4"),
        ({"top_k": 0}, "top_k 0"),
        ({"n_expert": 10**9}, "cannot be"),
        ({"tokens": -1}, "tokens is not a non-negative"),
        ({"tokens": 1e400}, "Infinity"),
        ({"model": None}, "model is not a string"),
    ],
)
def test_counts_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        read_counts_json(counts_file(tmp_path, **changes), "code")


def test_counts_with_a_missing_key_or_two_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({k: v for k, v in COUNTS.items() if k != "top_k"}))
    with pytest.raises(BadInputError, match="lack the key 'top_k'"):
        read_counts_json(path, "code")
    path.write_text(json.dumps(COUNTS)[:-1] + ', "tokens": 100}')
    with pytest.raises(BadInputError, match="'tokens' stands twice"):
        read_counts_json(path, "code")
    for data, said in (
        (b"\xff\xfe{", "not UTF-8"),
        (b"[1]", "not a JSON object"),
        (b"{", "not valid JSON"),
        (b"1e999", "finite"),
    ):
        path.write_bytes(data)
        with pytest.raises(BadInputError, match=said):
            read_counts_json(path, "code")
