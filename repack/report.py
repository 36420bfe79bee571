"""The tables that a person reads, made of the same answers as `--json`.  Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bel.formats.units import format_bytes

Rows = list[tuple[str, str]]


def model_rows(answer: dict[str, Any]) -> Rows:
    """What a model or bundle holds."""
    model = answer["model"]
    total = sum(s["bytes"] for s in model["sources"])
    counts = sorted(set(answer["n_experts_by_layer"].values()))
    used = sorted({str(n) for n in answer["n_expert_used_by_layer"].values() if n is not None}, key=int)
    strides = sorted(set(answer["expert_stride_bytes"].values()))
    rows = [
        ("model", f"{model['name'] or '(no name)'}, architecture {model['arch']}"),
        ("source", f"{len(model['sources'])} file(s), {format_bytes(total)}"),
        ("MoE layers", _ranges(answer["moe_layers"])),
        ("experts per layer", f"{_span(counts)}, top-{'/'.join(used) if used else 'k unknown'}"),
        ("blob per expert", _span([format_bytes(s) for s in strides])),
    ]
    if answer["mtp_layers"]:
        rows.append(("MTP layers", f"{_ranges(answer['mtp_layers'])} (not reached by normal decoding)"))
    cycle = answer["token_cycle_bytes"]
    rows.append(
        ("bytes per token", f"{format_bytes(cycle)} of experts" if cycle is not None else "unknown (no expert_used_count)")
    )
    rows += [("dense", format_bytes(answer["dense_bytes"]))]
    if answer["ple_bytes"]:
        rows.append(("PLE", format_bytes(answer["ple_bytes"])))
    rows.append(
        ("experts", f"{format_bytes(answer['experts_bytes'])}, of which padding {format_bytes(answer['padding_bytes'])}")
    )
    if any(s["sha256"] for s in model["sources"]):
        rows += [(f"sha256 {s['name']}", s["sha256"] or "not taken: mostly holes") for s in model["sources"]]
    if answer["content_digest"]:
        rows.append(("content digest", answer["content_digest"]))
    return rows


def conversion_rows(answer: dict[str, Any], bundle: Path) -> Rows:
    """What a conversion did, and what to run next.  `bundle` is its path as the user would write it."""
    rate = answer["bytes_written"] / max(answer["seconds"], 1e-9) / 1e6
    seconds = answer["verify_seconds"]
    rows = [("bundle", str(bundle)), *model_rows(answer)]
    rows.append(("written", f"{format_bytes(answer['bytes_written'])} in {answer['seconds']:.1f} s, {rate:.0f} MB/s"))
    rows.append(("verified", f"in {seconds:.1f} s, every byte" if seconds is not None else "not (--no-verify)"))
    rows.append(("peak memory", format_bytes(answer["peak_rss_bytes"])))
    quoted = shell_word(str(bundle))
    rows.append(("next", f"bel-repack inspect {quoted}"))
    rows.append(("", f"bel-repack restore {quoted} -o DIR    # gives the original files back"))
    return rows


def shell_word(text: str) -> str:
    """A path as a word of a shell command; one that begins with '-' is made relative so that it is no option."""
    import shlex

    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as '0-2, 5 (4)'."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{shown} ({len(numbers)})"


def _span(values: list[Any]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"
