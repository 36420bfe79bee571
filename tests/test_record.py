"""Recording on the real library: what is run, what the trace says of it, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import archs
from bel.formats.errors import BadInputError, UsageError
from bel.formats.trace import DECODE, PROMPT
from bel.formats.trace_calls import read_trace
from bel.profiler.record import record
from bel.runtime.context import ContextOptions
from bel.runtime.engine import Engine
from bel.runtime.prompts import Prompt
from recordings import CHAT, CODE, EXAMPLE, layers_of, record_request, tokens_of


def test_a_prompt_of_one_token(tmp_path: Path) -> None:
    """The whole way through the worker, on a model that puts no token before a text."""
    model = archs.make_model("olmoe", tmp_path / "model.gguf")
    request = replace(record_request(tmp_path, prompts=(Prompt("p", "a"),), n_predict=3), model=model, ignore_end=True)
    result = record(request)
    assert (result.prompt_tokens, result.decode_tokens) == (1, 3)
    for calls in layers_of(request.trace).values():
        assert calls.phase.tolist() == [PROMPT, DECODE, DECODE, DECODE]
        assert calls.token.tolist() == [0, 1, 2, 3]


def test_the_trace_says_what_was_run(tmp_path: Path) -> None:
    """The header names the model, the engine, the prompts by digest and the sampling; not the time, not the place."""
    request = record_request(tmp_path, prompts=(CODE, CHAT), n_predict=6, workload="mixed", ignore_end=True)
    progress: list[tuple[int, int]] = []
    result = record(request, lambda done, total: progress.append((done, total)))
    got = read_trace(request.trace)
    header = got.header
    assert (header.model_name, header.arch, header.workload) == ("tiny-moe", "qwen3moe", "mixed")
    assert (header.engine, header.engine_build) == ("xllamacpp", "11549") == (result.engine, result.engine_build)
    assert header.prompts == (CODE.digest, CHAT.digest)
    assert not header.has_weights
    assert not header.has_times
    assert [(row.layer, row.n_expert, row.top_k, row.expert_bytes) for row in header.layers] == [
        (layer, 32, 4, 3 * 128 * 64 // 32 * 34) for layer in range(6)
    ]
    assert header.sampling is not None
    assert header.sampling["temperature"] == 0
    assert str(tmp_path) not in repr(header)
    sizes = [len(tokens_of(prompt.text)) for prompt in (CODE, CHAT)]
    ran = [(p.name, p.prompt_tokens, p.decode_tokens, p.ended) for p in result.prompts]
    assert ran == [("code", sizes[0], 6, False), ("chat", sizes[1], 6, False)]
    assert got.notes == ()
    assert all(len(calls.ids) == sum(sizes) + 12 for calls in got.layers)
    assert progress
    assert all(0 <= done <= total for done, total in progress)


def test_twice_the_same(tmp_path: Path) -> None:
    """The same request gives the same bytes."""
    first, second = (replace(record_request(tmp_path), trace=tmp_path / name, n_predict=150) for name in ("1.trace", "2.trace"))
    record(first)
    record(second)
    assert first.trace.read_bytes() == second.trace.read_bytes()


def test_sampling_is_seeded(tmp_path: Path) -> None:
    """A temperature draws other tokens than the greedy ones, the same for the same seed."""
    hot = replace(record_request(tmp_path, n_predict=30), temperature=1.5, seed=7)
    runs = [replace(hot, trace=tmp_path / f"{i}.trace", seed=seed) for i, seed in enumerate((7, 7, 8))]
    for run in runs:
        record(run)
    one, same, other = (run.trace.read_bytes() for run in runs)
    assert one == same
    assert layers_of(runs[0].trace)[5].ids.tolist() != layers_of(runs[2].trace)[5].ids.tolist()
    assert one != other


def test_the_end_of_the_text_ends_a_prompt(tmp_path: Path) -> None:
    """Generation stops where the model ends its text, unless it may not; then every token asked for is recorded."""
    with Engine.open().load(EXAMPLE) as model, model.context(ContextOptions(256, n_threads=1)) as context:
        ending = Prompt("ends", model.chat_prompt([("user", "What is two plus two?")]))
        context.decode(model.tokenize(ending.text))
        made = [int(context.logits[-1].argmax())]
        while not model.is_end(made[-1]) and len(made) < 200:
            context.decode(made[-1:])
            made.append(int(context.logits[-1].argmax()))
        assert 5 < len(made) < 50, "the example answers this one with a short sentence"
    result = record(record_request(tmp_path, prompts=(ending,), n_predict=200))
    assert (result.decode_tokens, result.prompts[0].ended) == (len(made) - 1, True)
    on = record(replace(record_request(tmp_path, prompts=(ending,), n_predict=200), ignore_end=True, replace=True))
    assert (on.decode_tokens, on.prompts[0].ended) == (200, False)


def test_a_context_that_would_fill_up_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """The numbers, whose they are, and the number that would fit; no file."""
    request = record_request(tmp_path, n_predict=500)
    n = len(tokens_of(CODE.text))
    with pytest.raises(UsageError, match="the context would fill up") as caught:
        record(request)
    for fact in (
        f"has {n} tokens",
        f"found {n + 500} tokens",
        "at most 512, the context that the model was trained",
        f"-n {512 - n}",
    ):
        assert fact in str(caught.value)
    with pytest.raises(UsageError, match=f"at most {n}, the context given. Shorten the prompt"):
        record(replace(request, n_predict=1, n_ctx=n))
    assert not request.trace.exists()
    assert record(replace(request, n_predict=512 - n, ignore_end=True)).decode_tokens == 512 - n


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    """Errors of the worker arrive as what they were there, with their facts."""
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    with pytest.raises(BadInputError, match="GGUF") as caught:
        record(replace(record_request(tmp_path), model=text))
    assert caught.value.path == str(text)
    with pytest.raises(UsageError, match="is not an engine"):
        record(replace(record_request(tmp_path), engine="ollama"))
    with pytest.raises(UsageError, match="temperature"):
        record(replace(record_request(tmp_path), temperature=-1.0))
    with pytest.raises(FileNotFoundError) as missing:
        record(replace(record_request(tmp_path), trace=tmp_path / "no" / "x.trace"))
    assert missing.value.filename is not None
    existing = tmp_path / "x.trace"
    existing.write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        record(replace(record_request(tmp_path), trace=existing))
    assert existing.read_text() == "mine"
