"""Import of the CSV files of other programs: what their columns mean, and what of them is refused, by line."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from bel.formats.errors import BadInputError
from bel.formats.trace import DECODE, PROMPT, TraceLayer
from bel.profiler.importers_bigmoe import read_bigmoe_csv
from bel.profiler.importers_moetrace import read_thecodacus_csv
from imported_traces import as_trace, calls, imported

ROUTE = Path(__file__).parent / "data_import" / "route.csv"


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
