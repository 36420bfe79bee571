"""Import of JSON: what a line of calls and what counts mean, and what of them is refused, by line or by layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bel.formats.errors import BadInputError
from bel.formats.trace import DECODE, PROMPT, TraceLayer
from bel.profiler.importers_counts import read_counts_json
from bel.profiler.importers_jsonl import read_jsonl
from imported_traces import calls, imported

HEAD = '{"header": {"model": "tiny", "fingerprint": "f1", "layers": [0, 1], "n_expert": 4, "top_k": 2}}\n'


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
