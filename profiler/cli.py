"""`bel-profile`: record, import, summarize and merge what the router does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from bel.formats.console import SETTINGS, json_option, print_json, print_table, run_command
from bel.formats.errors import UsageError
from bel.formats.profile import TOKENS, WEIGHTINGS, frequency_by_layer
from bel.formats.profile_json import FORMAT, encode_profile
from bel.formats.staging import replace_file, staged_file
from bel.formats.units import format_bytes
from bel.profiler.bandwidth_cli import bandwidth_command
from bel.profiler.fit_cli import fit_command
from bel.profiler.output import check_inputs, check_output
from bel.profiler.plan_cli import plan_command
from bel.profiler.profile_cli import force_option, report_profile, say_all, workload_label
from bel.profiler.record_cli import record_command
from bel.profiler.report_cli import report_command
from bel.profiler.simulate_cli import simulate_command

NAME = "bel-profile"
IMPORTS = ("bigmoe-csv", "thecodacus-csv", "jsonl", "counts-json", "vllm-npz")

_PATH = click.Path(path_type=Path)


class _MergeAsOption(click.Group):
    """`bel-profile --merge A B` is the command `merge`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        names = args[: args.index("--")] if "--" in args else args
        if "--merge" in names and args[0] not in self.commands:
            args = ["merge", *(a for i, a in enumerate(args) if a != "--merge" or i >= len(names))]
        return super().parse_args(ctx, args)


@click.group(cls=_MergeAsOption, context_settings=SETTINGS, subcommand_metavar="COMMAND ... | --merge PROFILE...")
@click.version_option(package_name="bel-toolkit", prog_name=NAME)
def main_group() -> None:
    """Record which experts the router of a model picks on real work, and say what a cache of experts would do.

    \b
    Examples:
      bel-profile record model.gguf -f prompts/code --workload code -o code.json
      bel-profile --merge code.json chat.json          writes merged.json
      bel-profile summarize code.trace -o code.json
      bel-profile report code.trace chat.trace --html report.html
      bel-profile simulate code.trace --policy lru,belady --fraction 0.25,0.5
      bel-profile plan merged.json --model model.bel --slots-bytes 8G -o plan.json
      bel-profile bandwidth model.bel                  writes costs.json
      bel-profile fit model.gguf --vram 12G --ram 16G
    """


@main_group.command(context_settings=SETTINGS)
@click.argument("traces", nargs=-1, required=True, type=_PATH, metavar="TRACE...")
@click.option("-o", "output", type=_PATH, required=True, help="The profile to write.")
@force_option
@json_option
def summarize(traces: tuple[Path, ...], output: Path, force: bool, as_json: bool) -> None:
    """Make a profile of one or more traces of one model.  Traces of one workload are pooled, workloads stay apart.

    \b
    Examples:
      bel-profile summarize code.trace -o code.json
      bel-profile summarize code-1.trace code-2.trace chat.trace -o profile.json --json
    """
    from bel.profiler.summarize import summarize as run

    check_inputs(traces)
    check_output(output, traces, force=force)
    summary = run(list(traces))
    say_all(summary.notes)
    replace_file(output, encode_profile(summary.profile))
    report_profile(f"wrote {output}", output, summary.profile, as_json=as_json)


@main_group.command(context_settings=SETTINGS)
@click.argument("profiles", nargs=-1, required=True, type=_PATH, metavar="PROFILE...")
@click.option("-o", "output", type=_PATH, default=Path("merged.json"), show_default=True, help="The merged profile.")
@click.option(
    "--weight",
    type=click.Choice(WEIGHTINGS),
    default=WEIGHTINGS[0],
    show_default=True,
    help="How much each workload counts: the same, or by its tokens.",
)
@force_option
@json_option
def merge(profiles: tuple[Path, ...], output: Path, weight: str, force: bool, as_json: bool) -> None:
    """Merge profiles of one model.  Workloads stay apart, each with its weight; merged profiles merge again.

    An output that is a profile already is replaced: it can be made again.  Anything else needs --force.

    \b
    Examples:
      bel-profile --merge code.json chat.json
      bel-profile --merge code.json chat.json docs.json -o all.json --weight tokens
    """
    from bel.profiler.merge import merge as run

    check_inputs(profiles)
    if len(profiles) < 2:
        raise UsageError("a merge needs two profiles or more", found=str(profiles[0]))
    check_output(output, profiles, force=force)
    merged = run(list(profiles), weight)
    say_all(merged.notes)
    replace_file(output, encode_profile(merged.profile))
    how = "by their tokens" if weight == TOKENS else "equally"
    extra = {"frequency_by_layer": {str(layer): share for layer, share in frequency_by_layer(merged.profile).items()}}
    report_profile(f"wrote {output}, workloads weighted {how}", output, merged.profile, as_json=as_json, extra=extra)


@main_group.command("import", context_settings=SETTINGS)
@click.argument("file", type=_PATH)
@click.option("--from", "kind", type=click.Choice(IMPORTS), required=True, help="The format of FILE.")
@click.option("--workload", help="The label of the work.  Default: the output's name.")
@click.option("-o", "output", type=_PATH, required=True, help="The trace to write; a profile for counts-json.")
@force_option
@json_option
def import_file(file: Path, kind: str, workload: str | None, output: Path, force: bool, as_json: bool) -> None:
    """Turn FILE, the router trace of another tool, into a trace; bare counts into a profile.

    \b
    Formats:
      bigmoe-csv      route trace of BigMoeOnEdge
      thecodacus-csv  llama-moe-trace: pos,layer,id0,id1,...; negative positions are prompt rows
      jsonl           {"token": 0, "layer": 0, "experts": [3, 1], "phase": "decode"} on each line
      vllm-npz        vLLM's routed_experts (tokens, layers, top_k)
      counts-json     {"model", "fingerprint", "n_expert", "top_k", "tokens", "counts": {layer: [..]}}

    \b
    Examples:
      bel-profile import route.csv --from bigmoe-csv --workload chat -o chat.trace
      bel-profile import counts.json --from counts-json --workload code -o code.json
    """
    label = workload_label(workload, output)
    check_inputs([file], files=True)
    check_output(output, [file], force=force, replaces=FORMAT if kind == "counts-json" else "")
    if kind == "counts-json":
        from bel.profiler.importers_counts import read_counts_json

        profile = read_counts_json(file, label)
        replace_file(output, encode_profile(profile))
        report_profile(f"wrote {output}", output, profile, as_json=as_json)
        return
    imported = _reader(kind)(file)
    header = imported.header(label)
    with staged_file(output) as fresh:
        imported.write(fresh, header)
    say_all(f"{file}: {note}" for note in imported.notes)
    ids = sum(len(rows.ids) for rows in imported.layers.values())
    tokens = max((len(rows.token) for rows in imported.layers.values()), default=0)
    size = output.stat().st_size
    answer = {
        "trace": str(output),
        "workload": label,
        "layers": len(header.layers),
        "tokens": tokens,
        "ids": ids,
        "trace_bytes": size,
        "notes": imported.notes,
    }
    if as_json:
        print_json(answer)
        return
    rows = [("workload", label), ("layers", str(len(header.layers))), ("tokens", str(tokens)), ("expert ids", str(ids))]
    print_table(f"wrote {output}, {format_bytes(size)}", rows)


def _reader(kind: str) -> Callable[[Path], Any]:
    if kind == "bigmoe-csv":
        from bel.profiler.importers_bigmoe import read_bigmoe_csv

        return read_bigmoe_csv
    if kind == "thecodacus-csv":
        from bel.profiler.importers_moetrace import read_thecodacus_csv

        return read_thecodacus_csv
    if kind == "jsonl":
        from bel.profiler.importers_jsonl import read_jsonl

        return read_jsonl
    from bel.profiler.importers_npz import read_vllm_npz

    return read_vllm_npz


main_group.add_command(record_command)
main_group.add_command(plan_command)
main_group.add_command(report_command)
main_group.add_command(bandwidth_command)
main_group.add_command(fit_command)
main_group.add_command(simulate_command)


def main() -> None:
    """Entry point."""
    sys.exit(run_command(main_group, NAME))


__all__ = ["main", "main_group"]

if __name__ == "__main__":
    main()
