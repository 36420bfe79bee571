"""The section of a model card that describes a bundle: files, digests, what fits where, and the commands to use it.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from bel.formats.errors import printable
from bel.formats.experts_file import token_cycle_bytes
from bel.formats.manifest import Manifest
from bel.formats.plan import HELD_OUT, IN_SAMPLE, Plan
from bel.formats.profile import PhaseStats, Profile, Workload
from bel.formats.units import GIB, format_bytes
from bel.repack.report import shell_word
from bel.repack.upload_plan import PLAN_NAME, PROFILE_NAME, SUMS_NAME, UploadFile

CARDS_GIB = (8, 12, 16, 24)
RESERVE_BYTES = 2 * GIB  # context, compute buffers and the driver, roughly; `bel-profile fit` counts them
FRACTIONS = (0.125, 0.25, 0.5)
PROJECT = "bel-toolkit"


def bundle_name(repo_id: str) -> str:
    """The folder that a fetched repository gets: NAME.bel."""
    name = repo_id.rpartition("/")[2]
    return name if name.endswith(".bel") else f"{name}.bel"


def section(
    manifest: Manifest, repo_id: str, files: Sequence[UploadFile], profile: Profile | None = None, plan: Plan | None = None
) -> str:
    """The section as Markdown.  `files` are those of the bundle and what goes with it; sizes are bytes."""
    title = _words(manifest.model_name or manifest.name)
    parts = [
        f"# {title}, as a bundle for {PROJECT}\n\n{_what(manifest)}",
        _commands(manifest, repo_id, plan is not None),
        _sizes(manifest),
        _fit(manifest),
    ]
    if profile is not None:
        parts.append(_profile(profile))
    if plan is not None:
        parts.append(_plan(plan))
    return "\n\n".join([*parts, _files(manifest, files)])


def _what(manifest: Manifest) -> str:
    sources = len(manifest.sources)
    return (
        f"This is a GGUF of the architecture {_words(manifest.arch or 'unknown')}, repacked: everything but the routed experts "
        "is in one dense GGUF, and each routed expert of each layer is one aligned block of an experts file, to be read from "
        "disk when the router asks for it. No weight was changed: `restore` gives back the original "
        f"{'file' if sources == 1 else f'{sources} files'} byte for byte."
    )


def _commands(manifest: Manifest, repo_id: str, has_plan: bool) -> str:
    folder = shell_word(bundle_name(repo_id))
    plan = f" --plan {shell_word(f'{bundle_name(repo_id)}/{PLAN_NAME}')}" if has_plan else ""
    names = ", ".join(_code(source.name) for source in manifest.sources[:3]) + (", .." if len(manifest.sources) > 3 else "")
    return f"""## Use

```sh
pip install '{PROJECT}[hub,llama]'
bel-repack fetch {repo_id} -o {folder}
bel-repack verify {folder}
bel-run {folder}{plan} -p "Hello" -n 32
bel-repack restore {folder} -o .
```

`restore` writes {names}. `bel-repack fetch {repo_id} --dense-only -o {folder}` fetches what `bel-profile fit` needs, and no
experts; the same command without `--dense-only` fetches the rest."""


def _sizes(manifest: Manifest) -> str:
    experts = sum(row.size_bytes for row in manifest.experts)
    cycle = token_cycle_bytes(manifest.layers)
    rows = [
        ("dense part", format_bytes(manifest.dense.size_bytes)),
        *([("per-layer embeddings", format_bytes(manifest.ple.size_bytes))] if manifest.ple else []),
        ("experts", f"{format_bytes(experts)} in {len(manifest.layers)} layers"),
        ("experts read for a token, without any cache", format_bytes(cycle) if cycle is not None else "unknown"),
        ("content digest", _code(manifest.content_digest)),
        *((f"SHA-256 of {_code(s.name)}", _code(s.sha256 or "not taken: mostly holes")) for s in manifest.sources),
    ]
    return "## Sizes and digests\n\n" + _table(("what", "value"), rows)


def _fit(manifest: Manifest) -> str:
    """How many of the experts fit beside the dense part, on cards of the usual sizes."""
    experts = sum(layer.n_expert * layer.stride_bytes for layer in manifest.layers)
    rows = []
    for card in CARDS_GIB:
        room = card * GIB - RESERVE_BYTES - manifest.dense.size_bytes
        share = "the dense part does not fit" if room <= 0 else f"{min(1.0, room / experts):.0%} of the experts"
        rows.append((f"{card} GB", share))
    return (
        f"## What fits\n\nBeside the dense part, with {format_bytes(RESERVE_BYTES)} kept for context and buffers (an estimate; "
        "`bel-profile fit` counts them for a context of yours; a card of 8 GB is taken as 8 GiB):\n\n"
        + _table(("memory of the card", "experts that can stay"), rows)
    )


def _profile(profile: Profile) -> str:
    rows = [
        (_words(work.name), str(sum(x.decode.tokens for x in work.layers) // len(work.layers)), *_hit_rates(profile, work))
        for work in profile.workloads
    ]
    head = ("workload", "tokens decoded", *(f"hit rate with {f:.1%} of each layer's experts" for f in FRACTIONS))
    return f"## Profile\n\nHits of an LRU cache in decoding, from the counts of `{PROFILE_NAME}`:\n\n" + _table(head, rows)


def _hit_rates(profile: Profile, work: Workload) -> list[str]:
    return [
        _rate([(s.decode, int(x.n_expert * f)) for x, s in zip(profile.layers, work.layers, strict=True)]) for f in FRACTIONS
    ]


def _rate(layers: list[tuple[PhaseStats, int]]) -> str:
    """Hits by accesses, over layers with their slots."""
    known = [(s.lru_hits[slots], s.accesses) for s, slots in layers if s.lru_hits is not None and s.accesses is not None]
    accesses = sum(n for _, n in known)
    return f"{sum(hits for hits, _ in known) / accesses:.1%}" if len(known) == len(layers) and accesses else "unknown"


def _plan(plan: Plan) -> str:
    predicted = plan.predicted[HELD_OUT] if plan.predicted[HELD_OUT].hit_rate is not None else plan.predicted[IN_SAMPLE]
    rate = f"{predicted.hit_rate:.1%}" if predicted.hit_rate is not None else "unknown"
    slots = sum(layer.slots for layer in plan.layers)
    return f"## Plan\n\n`{PLAN_NAME}`: {slots} slots, {format_bytes(plan.slots_bytes)}; predicted hit rate {rate}."


def _files(manifest: Manifest, files: Sequence[UploadFile]) -> str:
    rows = [(_code(file.name), str(file.size_bytes)) for file in files]
    return (
        f"## Files\n\n{_table(('file', 'bytes'), rows)}\n\nMade with {PROJECT} {_words(manifest.toolkit)}. "
        f"`sha256sum -c {SUMS_NAME}` checks a download without the toolkit."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _words(text: str) -> str:
    """A text from a file as plain words of Markdown: no markup, no line break, no table cell of its own."""
    return "".join(f"&#{ord(c)};" if c in "\\`*_[]<>|#&~" else c for c in printable(text))


def _code(text: str) -> str:
    """A text from a file as code.  A name may not close the code, the table cell, or the marked section."""
    return "`" + printable(text).replace("`", "'").replace("|", "\\|").replace("<!--", "<! --") + "`"
