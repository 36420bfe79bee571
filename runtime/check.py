"""The proof that a bundle computes what its source computes: both run the same text, and every bit is compared.

Stock llama.cpp runs first and leaves what it chose and its logits behind; its greedy tokens are the text that the bundle
then reads.  So a difference does not hide what comes after it, and the two models are not in memory together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bel.formats.atomic import named_errors
from bel.formats.bundle import Bundle
from bel.formats.errors import BadInputError, DamagedBundleError, UsageError
from bel.formats.fingerprint import fingerprint
from bel.formats.gguf_model import GgufModel
from bel.runtime.bundle_model import BundleRun
from bel.runtime.choices import Choice, ChoiceObserver
from bel.runtime.context import Context, ContextOptions, Observer
from bel.runtime.differences import Differences
from bel.runtime.engine import Engine, Model
from bel.runtime.file_watch import FileWatch, watch_gguf
from bel.runtime.logit_spool import ROW_DTYPE, LogitSpool

Text = str | npt.NDArray[np.int32]
Opener = Callable[[ContextOptions, Observer], AbstractContextManager[BundleRun]]
"""Loads the bundle with a context of the given sizes, and an observer of its graphs."""
Progress = Callable[[str, int, int], None]
"""`progress(phase, tokens done, tokens in all)`."""
RANDOM_LENGTHS, RANDOM_SEED = (1, 40, 300), 1


@dataclass(frozen=True, slots=True)
class CheckPrompt:
    """What is run: a text, or token ids (n,) for a model without a tokenizer."""

    name: str
    text: Text


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """`n_predict`: greedy tokens behind each prompt.  `n_ctx` None: as large as needed; the rest as in `ContextOptions`.

    `all_logits`: those of every token of a prompt.  Without it llama.cpp computes the last layer for the last token of each
    batch only, as it does in a generation.
    """

    n_predict: int = 64
    n_ctx: int | None = None
    n_batch: int = 512
    n_ubatch: int = 512
    n_threads: int | None = None
    all_logits: bool = True


@dataclass(slots=True)
class _Step:
    """What stock llama.cpp made of one decode: `place` of its logits in the spool, `n_vocab` in each row."""

    choices: list[Choice]
    place: int
    n_vocab: int


@dataclass(slots=True)
class _Reference:
    """What stock llama.cpp made of one prompt."""

    name: str
    text: Text
    tokens: npt.NDArray[np.int32]
    generated: list[int] = field(default_factory=list)
    steps: list[_Step] = field(default_factory=list)


def random_prompts(n_vocab: int, longest: int) -> list[CheckPrompt]:
    """Prompts of random tokens, the same every time: one token, some, and more than any batch kernel's threshold."""
    random = np.random.default_rng(RANDOM_SEED)
    lengths = sorted({max(1, min(length, longest)) for length in RANDOM_LENGTHS})
    return [CheckPrompt(f"{n} random tokens", random.integers(0, n_vocab, n, np.int32)) for n in lengths]


def check(
    engine: Engine,
    bundle: Bundle,
    source: GgufModel,
    prompts: Sequence[CheckPrompt],
    options: CheckOptions,
    open_bundle_run: Opener,
    progress: Progress = lambda _phase, _done, _total: None,
) -> Differences:
    """Run prompts (random ones where there are none) by stock llama.cpp and by the bundle, and compare.

    Memory beside the model's: the logits of one batch.  Those of the whole run, float32, are on disk meanwhile.  Raises
    BadInputError where the bundle is not the source's or stock llama.cpp does not compute numbers, and whatever a run raises.
    """
    observer, differences = ChoiceObserver(), Differences()
    with LogitSpool() as spool:
        watch, source = watch_gguf(source.first.path)
        with watch:
            check_source(bundle, source)
            references, sizes = _run_stock(engine, source, watch, prompts, options, spool, progress)
        with open_bundle_run(sizes, observer) as run:
            done, total = 0, _total(references, options)
            for reference in references:
                text = reference.text
                tokens = run.model.tokenize(text) if isinstance(text, str) else text
                differences.prompt(reference.name, tokens, reference.tokens)
                for count in _compare(run, observer, reference, spool, differences, options):
                    done += count
                    progress("compare", done, total)
    return differences


def check_source(bundle: Bundle, source: GgufModel) -> None:
    """Raise BadInputError where a bundle was not made of a source, as its fingerprint tells; DamagedBundleError where it was
    and has changed."""
    found, expected = fingerprint(bundle), fingerprint(source)
    if found == expected:
        return
    path, rows = source.first.path, bundle.manifest.sources
    sizes = [header.file_bytes for header in source.files]
    if sizes == [row.size_bytes for row in rows] and all(
        row.sha256 is not None and _sha256(header.path) == row.sha256 for header, row in zip(source.files, rows, strict=True)
    ):
        raise DamagedBundleError(
            "the bundle was made from this model, but its weights are not the model's any more",
            path=str(bundle.folder),
            hint="Run `bel-repack verify` on the bundle",
        )
    raise BadInputError(
        "this is not the model that the bundle was made from",
        path=str(path),
        found=f"fingerprint {expected[:16]}",
        expected=f"{found[:16]}, which {bundle.folder} has",
        hint=f"Its source was {rows[0].name}",
    )


def _run_stock(
    engine: Engine,
    source: GgufModel,
    watch: FileWatch,
    prompts: Sequence[CheckPrompt],
    options: CheckOptions,
    spool: LogitSpool,
    progress: Progress,
) -> tuple[list[_Reference], ContextOptions]:
    """What there is to compare with, and the sizes of the context, which are to be the same."""
    observer = ChoiceObserver()
    with engine.load_files([header.path for header in source.files], watch=watch) as model:
        room = (options.n_ctx or model.n_ctx_train or max(RANDOM_LENGTHS) + options.n_predict) - options.n_predict
        references = [_tokenized(model, prompt) for prompt in prompts or random_prompts(model.n_vocab, room)]
        sizes = _context_options(references, options)
        rows = _total(references, options) if options.all_logits else len(references) * (options.n_predict + 1)
        spool.reserve(rows * model.n_vocab * ROW_DTYPE.itemsize)
        done, total = 0, _total(references, options)
        with model.context(sizes, observer) as context:
            for reference in references:
                for count in _reference_steps(context, observer, reference, spool, options):
                    done += count
                    progress("stock", done, total)
    return references, sizes


def _sha256(path: Path) -> str:
    with named_errors(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _total(references: Sequence[_Reference], options: CheckOptions) -> int:
    return sum(len(reference.tokens) + options.n_predict for reference in references)


def _tokenized(model: Model, prompt: CheckPrompt) -> _Reference:
    tokens = model.tokenize(prompt.text) if isinstance(prompt.text, str) else prompt.text
    if not len(tokens):
        raise BadInputError("the model's tokenizer makes no token of the prompt", path=prompt.name)
    return _Reference(prompt.name, prompt.text, tokens)


def _context_options(references: Sequence[_Reference], options: CheckOptions) -> ContextOptions:
    longest = max(references, key=lambda reference: len(reference.tokens))
    need = len(longest.tokens) + options.n_predict
    n_ctx = need if options.n_ctx is None else options.n_ctx
    if need > n_ctx:
        raise UsageError(
            f"{longest.name} does not fit: it has {len(longest.tokens)} tokens, and {options.n_predict} are to be generated",
            found=f"{need} tokens",
            expected=f"at most {n_ctx}",
            hint="Shorten the prompt, or give a smaller -n or a larger --context",
        )
    return ContextOptions(n_ctx, min(options.n_batch, n_ctx), min(options.n_ubatch, n_ctx), options.n_threads)


def _reference_steps(
    context: Context, observer: ChoiceObserver, reference: _Reference, spool: LogitSpool, options: CheckOptions
) -> Iterator[int]:
    for tokens in _batches(context, reference, options.n_predict):
        context.decode(tokens, all_logits=options.all_logits)
        logits = context.logits
        if np.isnan(logits).any():  # equal to nothing: every comparison would fail, whatever the bundle does
            raise BadInputError(
                "the model's own logits are not numbers: it is damaged, or not what it claims to be",
                path=str(context.model.path),
                found=f"NaN in {reference.name}",
            )
        reference.steps.append(_Step(observer.take(), spool.append(logits), logits.shape[1]))
        reference.generated.append(int(logits[-1].argmax()))
        yield len(tokens)


def _batches(context: Context, reference: _Reference, n_predict: int) -> Iterator[Sequence[int] | npt.NDArray[np.int32]]:
    """The decodes of a prompt from an empty context on: itself in batches, then one by one what followed the last decode.

    The best token behind each is in `reference.generated`: of stock's last decode when its run asks, of all decodes later.
    """
    context.clear()
    starts = range(0, len(reference.tokens), context.n_batch)
    for start in starts:
        yield reference.tokens[start : start + context.n_batch]
    for number in range(n_predict):
        yield [reference.generated[len(starts) - 1 + number]]


def _compare(
    run: BundleRun,
    observer: ChoiceObserver,
    reference: _Reference,
    spool: LogitSpool,
    differences: Differences,
    options: CheckOptions,
) -> Iterator[int]:
    """Run one prompt as stock did; yields the tokens of each decode."""
    context, counters = run.context, run.cache.counters
    n_prompt, name = len(reference.tokens), reference.name
    for number, tokens in enumerate(_batches(context, reference, options.n_predict)):
        start = context.n_past
        counters.now = counters.decode if start >= n_prompt else counters.prompt
        context.decode(tokens, all_logits=options.all_logits)
        step, logits, end = reference.steps[number], context.logits, context.n_past
        differences.choices(name, start, observer.take(), step.choices)
        for row, found in enumerate(logits):
            differences.logits(name, end - len(logits) + row, found, spool.read(step.place, row, step.n_vocab))
        if n_prompt <= end < n_prompt + options.n_predict:
            differences.token(name, end - 1, int(logits[-1].argmax()), reference.generated[number])
        yield len(tokens)
