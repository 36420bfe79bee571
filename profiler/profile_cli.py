"""What the commands that write a profile have in common: its label, its notes, and what is said of it at the end."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from bel.formats.console import F, print_json, print_table, say
from bel.formats.errors import UsageError
from bel.formats.profile import Profile
from bel.formats.profile_json import check_workload_name

NAME = "bel-profile"


def force_option(command: F) -> F:
    """The `--force` of commands that write."""
    return click.option("--force", is_flag=True, help="Replace an existing output.")(command)


def workload_label(given: str | None, output: Path) -> str:
    """The name of the work: the one given, or the output's.  Raises UsageError for one that a profile cannot have."""
    name = output.stem if given is None else given
    try:
        check_workload_name(name)
    except ValueError as error:
        raise UsageError(f"--workload: {error}", found=name) from None
    return name


def say_all(notes: Iterable[str]) -> None:
    """Each note on a line of stderr."""
    for note in notes:
        say(NAME, note)


def report_profile(title: str, output: Path, profile: Profile, *, as_json: bool, extra: dict[str, Any] | None = None) -> None:
    """What a profile holds, in one object or one table."""
    works = {
        w.name: {
            "weight": w.weight,
            "prompt_tokens": max(x.prompt.tokens for x in w.layers),
            "decode_tokens": max(x.decode.tokens for x in w.layers),
        }
        for w in profile.workloads
    }
    if as_json:
        model = {"name": profile.model_name, "arch": profile.arch, "fingerprint": profile.fingerprint}
        answer = {"profile": str(output), "model": model, "layers": len(profile.layers), "weighting": profile.weighting}
        print_json({**answer, "workloads": works, **(extra or {})})
        return
    rows = [("model", profile.model_name or "(not named)"), ("layers", str(len(profile.layers)))]
    rows += [
        (name, f"{w['prompt_tokens']} prompt and {w['decode_tokens']} decode tokens, weight {w['weight']:.3f}")
        for name, w in works.items()
    ]
    print_table(title, rows)
