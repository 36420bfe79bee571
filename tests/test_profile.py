"""Profiles: what summarize counts, what a merge means, and what a loader refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.errors import BadInputError
from bel.formats.profile import EQUAL, TOKENS, LayerTime, frequency_by_layer
from bel.formats.profile_json import encode_profile, load_profile
from bel.formats.trace import DECODE, PROMPT, TraceHeader, TraceLayer, TraceWriter
from bel.profiler.importers_counts import read_counts_json
from bel.profiler.merge import merge
from bel.profiler.same_model import Identity, check_all_same
from bel.profiler.summarize import summarize

HEADER = TraceHeader(
    "tiny", "olmoe", "f1", (TraceLayer(0, 6, 2, 100), TraceLayer(2, 4, 1, None)), "code", ("p1",), "test", "b1"
)


def trace_file(path: Path, header: TraceHeader = HEADER, seed: int = 0, tokens: int = 12, prompt: int = 5) -> Path:
    """One prompt of `prompt` rows in one ubatch, then decode rows."""
    rng = np.random.default_rng(seed)
    with TraceWriter(path, header, sync=False) as writer:
        starts = [0, *range(prompt, tokens)] if tokens else []
        for ubatch, start in enumerate(starts):
            rows = prompt if ubatch == 0 else 1
            for row in header.layers:
                ids = np.stack([rng.permutation(row.n_expert)[: row.top_k] for _ in range(rows)]).astype(np.uint16)
                writer.append(
                    phase=DECODE if ubatch else PROMPT,
                    ubatch=ubatch,
                    layer=row.layer,
                    tokens=np.arange(start, start + rows),
                    ids=ids,
                    time_ns=1000 * ubatch if header.has_times else None,
                )
    return path


def profile_file(tmp_path: Path, name: str, header: TraceHeader = HEADER, **how: Any) -> Path:
    trace = trace_file(tmp_path / f"{name}.trace", replace(header, workload=name), **how)
    path = tmp_path / f"{name}.json"
    path.write_bytes(encode_profile(summarize([trace]).profile))
    return path


def counts_file(tmp_path: Path, name: str, **changes: Any) -> Path:
    body = {"model": "tiny", "fingerprint": "f1", "n_expert": 4, "top_k": 2, "tokens": 100, "counts": {"0": [50] * 4}}
    source = tmp_path / f"{name}-counts.json"
    source.write_text(json.dumps({**body, **changes}))
    path = tmp_path / f"{name}.json"
    path.write_bytes(encode_profile(read_counts_json(source, name)))
    return path


# summarize


def test_a_summary_counts_what_the_trace_holds(tmp_path: Path) -> None:
    header = replace(HEADER, has_times=True)
    summary = summarize([trace_file(tmp_path / "a.trace", header)])
    assert summary.notes == ()
    profile = summary.profile
    assert (profile.model_name, profile.arch, profile.fingerprint, profile.layers) == ("tiny", "olmoe", "f1", HEADER.layers)
    (work,) = profile.workloads
    assert (work.name, work.weight, work.tokens) == ("code", 1.0, 12)
    assert work.runs[0].prompts == ("p1",)
    for info, stats in zip(profile.layers, work.layers, strict=True):
        assert (stats.prompt.tokens, stats.decode.tokens) == (5, 7)
        assert (stats.prompt.calls, stats.decode.calls) == (1, 7)
        assert sum(stats.prompt.counts) == 5 * info.top_k
        assert sum(stats.decode.counts) == 7 * info.top_k == stats.decode.accesses
        assert stats.prompt.accesses == stats.prompt.cold_misses == sum(c > 0 for c in stats.prompt.counts)
        assert stats.decode.time == LayerTime(7, 4000, 4000, 6400)
        assert stats.prompt.time == LayerTime(1, 0, 0, 0)


def test_a_summary_of_known_calls(tmp_path: Path) -> None:
    """A cycle 01 12 23 30 of two experts a token: every token shares one expert with the one before."""
    header = replace(HEADER, layers=(TraceLayer(0, 4, 2, None),))
    with TraceWriter(tmp_path / "a.trace", header, sync=False) as writer:
        for t in range(24):
            ids = np.array([[t % 4, (t + 1) % 4]], np.uint16)
            writer.append(phase=DECODE, ubatch=t, layer=0, tokens=np.array([t]), ids=ids)
    stats = summarize([tmp_path / "a.trace"]).profile.workloads[0].layers[0]
    assert stats.decode.counts == (12, 12, 12, 12)
    assert stats.decode.lru_hits == (0, 23, 23, 23, 44)  # the shared expert is the last used: one slot is enough for it
    assert (stats.decode.accesses, stats.decode.cold_misses) == (48, 4)
    assert stats.locality["decode"] == {"repeated": 23, "of": 46}
    assert stats.prompt.tokens == 0


def test_traces_of_one_workload_are_pooled_and_others_stay_apart(tmp_path: Path) -> None:
    a = trace_file(tmp_path / "a.trace", seed=1)
    b = trace_file(tmp_path / "b.trace", seed=2, tokens=20)
    c = trace_file(tmp_path / "c.trace", replace(HEADER, workload="chat"), seed=3)
    summary = summarize([a, b, c])
    assert [(w.name, w.weight, w.tokens, len(w.runs)) for w in summary.profile.workloads] == [
        ("code", 0.5, 32, 2),
        ("chat", 0.5, 12, 1),
    ]
    assert "pooled" in summary.notes[0]
    apart = [summarize([p]).profile.workloads[0].layers[0].decode for p in (a, b)]
    pooled = summary.profile.workloads[0].layers[0].decode
    assert pooled.counts == tuple(x + y for x, y in zip(apart[0].counts, apart[1].counts, strict=True))
    assert pooled.lru_hits == tuple(x + y for x, y in zip(apart[0].lru_hits or (), apart[1].lru_hits or (), strict=True))


def test_a_torn_trace_is_summarized_and_said(tmp_path: Path) -> None:
    path = trace_file(tmp_path / "a.trace")
    path.write_bytes(path.read_bytes()[:-3])
    assert "torn" in summarize([path]).notes[0]
    empty = summarize([trace_file(tmp_path / "b.trace", tokens=0)])
    assert "no tokens" in empty.notes[0]
    assert empty.profile.workloads[0].tokens == 0


def test_traces_of_two_models_are_refused(tmp_path: Path) -> None:
    other = replace(HEADER, fingerprint="f2")
    with pytest.raises(BadInputError, match=r"b\.trace.*a\.trace.*fingerprint 'f1'.*fingerprint 'f2'"):
        summarize([trace_file(tmp_path / "a.trace"), trace_file(tmp_path / "b.trace", other)])


# the file


@given(seed=st.integers(0, 2**32), tokens=st.integers(0, 20), prompt=st.integers(1, 6))
@settings(max_examples=25)
def test_a_profile_reads_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, seed: int, tokens: int, prompt: int
) -> None:
    folder = tmp_path_factory.mktemp("profile")
    tokens = max(tokens, prompt) if tokens else 0
    profile = summarize([trace_file(folder / "a.trace", replace(HEADER, has_times=True), seed, tokens, prompt)]).profile
    (folder / "a.json").write_bytes(encode_profile(profile))
    again = load_profile(folder / "a.json")
    assert again == profile
    assert encode_profile(again) == (folder / "a.json").read_bytes()


def test_a_profile_of_windows_is_the_same_profile(tmp_path: Path) -> None:
    path = profile_file(tmp_path, "code")
    (tmp_path / "w.json").write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert load_profile(tmp_path / "w.json") == load_profile(path)


def test_a_person_can_read_a_profile(tmp_path: Path) -> None:
    lines = profile_file(tmp_path, "code").read_text().splitlines()
    assert '  "0": {"n_expert": 6, "top_k": 2, "expert_bytes": 100},' in lines
    assert max(map(len, lines)) < 400
    body = json.loads("\n".join(lines))
    work = body["workloads"]["code"]
    assert work["tokens_by_layer"]["0"] == {"prompt": 5, "decode": 7}
    assert [len(work[k]["2"]["decode"]) for k in ("counts_by_layer", "lru_hits_by_layer")] == [4, 5]


Change = Callable[[dict[str, Any]], object]


def at(*keys: str) -> Callable[[Any], Change]:
    """A change of one place of a profile."""

    def change(value: Any) -> Change:
        def apply(body: dict[str, Any]) -> None:
            *way, last = keys
            for key in way:
                body = body[key]
            if value is None:
                del body[last]
            else:
                body[last] = value

        return apply

    return change


WORK = ("workloads", "code")
COUNTS = (*WORK, "counts_by_layer", "0", "decode")
HITS = (*WORK, "lru_hits_by_layer", "0", "decode")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (at(*COUNTS)([float("nan")] * 6), "NaN is not a finite number"),
        (at(*COUNTS)([float("inf")] * 6), "Infinity is not a finite number"),
        (at(*COUNTS)([-1, 15, 0, 0, 0, 0]), "layer 0, decode: a count is not a non-negative integer"),
        (at(*COUNTS)([14.0, 0, 0, 0, 0, 0]), "not a non-negative integer"),
        (at(*COUNTS)([True, 13, 0, 0, 0, 0]), "not a non-negative integer"),
        (at(*COUNTS)([10**40, 0, 0, 0, 0, 0]), "not a non-negative integer"),
        (at(*COUNTS)([14, 0, 0, 0, 0]), "a list has 5 numbers where 6 are expected"),
        (at(*COUNTS)([15, 0, 0, 0, 0, 0]), "the counts add up to 15, not to tokens"),
        (at(*COUNTS)("14"), "decode is not a list"),
        (at(*COUNTS)(None), "lacks the key 'decode'"),
        (at(*HITS)([0, 9, 5, 5, 5, 5, 5]), "LRU hits fall"),
        (at(*HITS)([1] * 7), "LRU hits"),
        (at(*HITS)([0] * 6), "where 7 are expected"),
        (at(*WORK, "accesses_by_layer", "0", "decode")(10**6), "do not fit its counts"),
        (at(*WORK, "calls_by_layer", "0", "decode")(8), "do not fit its counts"),
        (at(*WORK, "cold_misses_by_layer", "0", "decode")(99), "do not fit its counts"),
        (at(*WORK, "tokens_by_layer", "0", "decode")(-7), "decode is not a non-negative integer"),
        (at(*WORK, "tokens_by_layer", "0")([1, 2]), "0 is not an object"),
        (at(*WORK, "tokens_by_layer", "2")(None), "lacks the key '2'"),
        (at(*WORK, "time_ns_by_layer", "0", "decode")({"calls": -1}), "calls is not a non-negative"),
        (at(*WORK, "weight")(0.5), "do not add up to 1"),
        (at(*WORK, "weight")(-1), "weight is -1"),
        (at(*WORK, "weight")("1"), "weight is 1, not a number"),
        (at(*WORK, "runs")([{"engine": 1}]), "prompts"),
        (at("workloads")({}), "0 workloads"),
        (at("workloads")({"a\x1bb": {}}), "unprintable"),
        (at("workloads")([]), "workloads is not an object"),
        (at("weighting")("mine"), "weighting is 'mine'"),
        (at("layers", "0", "n_expert")(7), "where 7 are expected"),
        (at("layers", "0", "n_expert")(10**9), "takes 2 of 1000000000 experts"),
        (at("layers", "0", "top_k")(1), "the counts add up"),
        (at("layers", "0", "top_k")(0), "takes 0 of 6"),
        (at("layers", "02")({"n_expert": 4, "top_k": 1, "expert_bytes": None}), "'02' is not the number of a layer"),
        (at("layers", "1")({"n_expert": 4, "top_k": 1, "expert_bytes": None}), "ascending order"),
        (at("layers")({}), "no layers"),
        (at("model", "fingerprint")(5), "fingerprint is not a string"),
        (at("model")(None), "lacks the key 'model'"),
        (at("version")(2), "profile version 2 is not supported; this toolkit reads 1"),
        (at("version")(True), "version True is not supported"),
        (at("version")("1"), "not supported"),
        (at("format")("bel-plan"), "not a profile"),
    ],
)
def test_a_profile_that_lies_is_refused(tmp_path: Path, change: Change, said: str) -> None:
    path = profile_file(tmp_path, "code")
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))
    with pytest.raises(BadInputError) as caught:
        load_profile(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for data in (b"", b"{", b"[]", b"null", b"\xff\xfe{\0}\0", b"[" * 10**6, b'{"format": "bel-profile"}', b'{"counts": {}}'):
        path.write_bytes(data)
        with pytest.raises(BadInputError, match=r"a\.json"):
            load_profile(path)
    with pytest.raises(BadInputError, match="not a file"):
        load_profile(tmp_path)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = profile_file(tmp_path, "code")
    text = path.read_text()
    path.write_text(text.replace('"weight": 1.0', '"weight": 1.0, "weight": 1.0'))
    with pytest.raises(BadInputError, match="'weight' stands twice"):
        load_profile(path)


# merge


def test_equal_weight_is_the_mean_of_the_shares_and_token_weight_that_of_the_tokens(tmp_path: Path) -> None:
    code = counts_file(tmp_path, "code", counts={"0": [50] * 4, "1": [100, 100, 0, 0]})
    chat = counts_file(tmp_path, "chat", tokens=300, counts={"0": [300, 300, 0, 0], "1": [0, 0, 300, 300]})
    equal, tokens = (merge([code, chat], weighting).profile for weighting in (EQUAL, TOKENS))
    assert frequency_by_layer(equal) == {0: [0.375, 0.375, 0.125, 0.125], 1: [0.25] * 4}
    assert frequency_by_layer(tokens) == {0: [0.4375, 0.4375, 0.0625, 0.0625], 1: [0.125, 0.125, 0.375, 0.375]}
    assert [(w.name, w.weight) for w in tokens.workloads] == [("code", 0.25), ("chat", 0.75)]
    assert equal.workloads[0].layers == load_profile(code).workloads[0].layers, "counts stay as they were"


def test_a_layer_without_selections_has_no_frequencies(tmp_path: Path) -> None:
    profile = summarize([trace_file(tmp_path / "a.trace", tokens=0)]).profile
    assert frequency_by_layer(profile) == {0: None, 2: None}


@pytest.mark.parametrize("weighting", [EQUAL, TOKENS])
def test_merges_of_merges_are_the_merge_of_all(tmp_path: Path, weighting: str) -> None:
    files = [profile_file(tmp_path, name, seed=i, tokens=10 * i) for i, name in enumerate("abcd", 1)]
    pairs = []
    for i in (0, 2):
        pairs.append(tmp_path / f"pair{i}.json")
        pairs[-1].write_bytes(encode_profile(merge(files[i : i + 2], TOKENS).profile))
    whole = merge(files, weighting).profile
    assert merge(pairs, weighting).profile == whole
    assert [w.name for w in whole.workloads] == list("abcd")
    reverse = merge(files[::-1], weighting).profile
    for layer, mean in frequency_by_layer(whole).items():
        assert mean == pytest.approx(frequency_by_layer(reverse)[layer])
        assert mean is not None
        assert sum(mean) == pytest.approx(1)


def test_a_profile_without_tokens_is_left_out_and_said(tmp_path: Path) -> None:
    files = [profile_file(tmp_path, "code"), profile_file(tmp_path, "none", tokens=0), profile_file(tmp_path, "chat", seed=1)]
    merged = merge(files, EQUAL)
    assert [(w.name, w.weight) for w in merged.profile.workloads] == [("code", 0.5), ("chat", 0.5)]
    assert [n for n in merged.notes if "none.json" in n and "left out" in n] == list(merged.notes)
    with pytest.raises(BadInputError, match="nothing to merge"):
        merge([files[1], files[1]], EQUAL)


def test_workloads_of_one_name_stay_apart(tmp_path: Path) -> None:
    code = profile_file(tmp_path, "code")
    merged = merge([code, code, code], EQUAL)
    assert [w.name for w in merged.profile.workloads] == ["code", "code-2", "code-3"]
    assert "called code-2" in merged.notes[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fingerprint": "f2"}, "fingerprint 'f1'.*fingerprint 'f2'"),
        ({"fingerprint": ""}, "fingerprint 'f1'.*fingerprint ''"),
        ({"model": "big"}, "model 'tiny'.*model 'big'"),
        ({"n_expert": 8, "counts": {"0": [25] * 8}}, "4 experts in layer 0.*8 experts in layer 0"),
        ({"top_k": 1, "counts": {"0": [25] * 4}}, "top_k 2 in layer 0.*top_k 1 in layer 0"),
        ({"counts": {"1": [50] * 4}}, "layers 0, this has layers 1"),
        ({"counts": {"0": [50] * 4, "1": [50] * 4}}, "layers 0, this has layers 0, 1"),
    ],
)
def test_another_model_is_refused_by_both_names(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    code, chat = counts_file(tmp_path, "code"), counts_file(tmp_path, "chat", **changes)
    with pytest.raises(BadInputError, match=rf"chat\.json: .*code\.json: that has {said}") as caught:
        merge([code, chat], EQUAL)
    assert caught.value.exit_code == 3


def test_what_one_file_does_not_know_is_no_other_model(tmp_path: Path) -> None:
    code = profile_file(tmp_path, "code", replace(HEADER, arch=""))
    layers = (replace(HEADER.layers[0], expert_bytes=None), replace(HEADER.layers[1], expert_bytes=7))
    chat = profile_file(tmp_path, "chat", replace(HEADER, layers=layers))
    merged = merge([code, chat], EQUAL).profile
    assert merged.arch == "olmoe"
    assert [x.expert_bytes for x in merged.layers] == [100, 7]
    one, two, three = (Identity(n, "m", a, "f", HEADER.layers) for n, a in (("1", ""), ("2", "x"), ("3", "y")))
    check_all_same([one, two])
    with pytest.raises(BadInputError, match="architecture 'x'"):
        check_all_same([one, two, three])
    other = replace(one, layers=(replace(HEADER.layers[0], expert_bytes=101), HEADER.layers[1]))
    with pytest.raises(BadInputError, match="experts of 100 bytes"):
        check_all_same([one, other])
