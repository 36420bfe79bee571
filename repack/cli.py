"""`bel-repack`: convert, inspect, verify, restore, publish and fetch."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from bel.formats.bundle import check_sizes, is_bundle, open_bundle
from bel.formats.console import SETTINGS, Progress, all_or_nothing, json_option, print_json, print_table, run_command, say
from bel.formats.errors import DamagedBundleError, UsageError
from bel.formats.experts import find_experts, warnings
from bel.formats.gguf_model import GgufModel, open_model
from bel.formats.process import peak_rss_bytes
from bel.formats.shards import model_base_name
from bel.formats.units import format_bytes, parse_bytes
from bel.repack.layout import plan_layout
from bel.repack.path_cli import PATH
from bel.repack.publish_cli import fetch, publish
from bel.repack.report import conversion_rows, model_rows

NAME = "bel-repack"
SHOWN_PROBLEMS = 20  # a person reads no more; --json has 200
DEFAULT_SHARD_SIZE = "45GB"  # below the 50 GB that Hugging Face takes for one file


class _ConvertByDefault(click.Group):
    """`bel-repack MODEL.gguf` converts; anything that is not the name of another command is an argument of `convert`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help", "--version"):
            args = ["convert", *args]
        return super().parse_args(ctx, args)


def _size(_ctx: click.Context, _parameter: click.Parameter, value: str) -> int:
    return parse_bytes(value)


@click.group(cls=_ConvertByDefault, context_settings=SETTINGS, subcommand_metavar="MODEL.gguf [OPTIONS] | COMMAND ...")
@click.version_option(package_name="bel-toolkit", prog_name=NAME)
def main_group() -> None:
    """Repack a mixture-of-experts GGUF into a bundle: a dense GGUF, an experts file with one aligned blob per expert,
    and all that is needed to give the original back byte for byte.

    \b
    Examples:
      bel-repack model.gguf                      make model.bel/ beside the model, verified
      bel-repack model-00001-of-00003.gguf       any shard of a split set
      bel-repack model.gguf -o /data/model.bel   somewhere else
      bel-repack convert --help                  the options of the conversion
    """


@main_group.command(context_settings=SETTINGS)
@click.argument("model", type=PATH)
@click.option("-o", "output", type=PATH, help="The bundle to make.  Default: NAME.bel beside the model.")
@click.option(
    "--ple",
    type=click.Choice(["auto", "keep", "split"]),
    default="auto",
    show_default=True,
    help="Per-layer embeddings in a file of their own: where they are 5 % of the dense bytes, never, or always.",
)
@click.option(
    "--shard-size",
    metavar="SIZE",
    callback=_size,
    default=DEFAULT_SHARD_SIZE,
    show_default=True,
    help="Cut the experts file on layer boundaries below this size (45GB is 10^9, 45G is GiB).",
)
@click.option("--no-verify", is_flag=True, help="Do not read the bundle back.")
@click.option("--force", is_flag=True, help="Replace an existing bundle, once the new one is complete.")
@click.option("--dry-run", is_flag=True, help="Show what the bundle would hold; write nothing.")
@json_option
def convert(
    model: Path, output: Path | None, ple: str, shard_size: int, no_verify: bool, force: bool, dry_run: bool, as_json: bool
) -> None:
    """Convert MODEL.gguf (a single file, or any shard of a split set) into a bundle.

    \b
    Examples:
      bel-repack model.gguf
      bel-repack model.gguf -o big.bel --shard-size 20GB
      bel-repack -- -odd-name.gguf
    """
    from bel.repack.convert import convert as run
    from bel.repack.convert import space_needed
    from bel.repack.inspect import describe_layout, describe_manifest
    from bel.repack.stream import sparse_bytes
    from bel.repack.target import check_space, check_target, default_folder, resolve_target

    source = open_model(model)
    name = model_base_name(model)
    named = output if output is not None else default_folder(model) / f"{name}.bel"
    target = resolve_target(named)
    layout = plan_layout(source, name, ple=ple, shard_bytes=shard_size)
    _say_warnings(source)
    check_target(target, [h.path for h in source.files], force=force, named=named)
    if dry_run:
        check_space(target.parent, space_needed(source, layout))
        answer = {"bundle": str(target), "dry_run": True, **describe_layout(source, layout)}
        if as_json:
            print_json(answer)
        else:
            print_table("what the bundle would hold (nothing was written)", [("bundle", str(named)), *model_rows(answer)])
        return
    holes = sum(sparse_bytes(h.path, h.file_bytes) for h in source.files)
    if holes:
        unwritten = f"{format_bytes(holes)} of the source are holes (never written, read as zeros)"
        say(NAME, f"warning: {unwritten}: an unfinished download looks like this")
    progress = Progress(NAME)
    try:
        with all_or_nothing():
            done = run(source, layout, target, force=force, check=not no_verify, progress=progress)
    finally:
        progress.close()
    answer = {
        "bundle": str(target),
        **describe_manifest(done.manifest),
        "seconds": round(done.seconds, 3),
        "verify_seconds": None if done.verify_seconds is None else round(done.verify_seconds, 3),
        "bytes_read": done.bytes_read,
        "bytes_written": done.bytes_written,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    if as_json:
        print_json(answer)
    else:
        print_table("repacked", conversion_rows(answer, named))


@main_group.command(context_settings=SETTINGS)
@click.argument("path", type=PATH)
@click.option("--digest", is_flag=True, help="Read every byte of a GGUF and print its content digest and SHA-256.")
@json_option
def inspect(path: Path, digest: bool, as_json: bool) -> None:
    """Show what PATH holds: a GGUF (any shard) or a bundle.

    \b
    Examples:
      bel-repack inspect model.gguf
      bel-repack inspect model.bel --json
    """
    from bel.repack.inspect import describe_layout, describe_manifest, digest_model

    if is_bundle(path):
        if digest:
            raise UsageError("--digest is for a GGUF", path=str(path), hint="bel-repack verify reads every byte of a bundle")
        bundle = open_bundle(path)
        check_sizes(bundle)
        answer = {"format": "bundle", **describe_manifest(bundle.manifest)}
    else:
        source = open_model(path)
        layout = plan_layout(source, model_base_name(path), ple="auto", shard_bytes=2**63)
        _say_warnings(source)
        answer = {"format": "gguf", **describe_layout(source, layout)}
        if digest:
            progress = Progress(NAME)
            try:
                answer["content_digest"], sums = digest_model(source, progress)
            finally:
                progress.close()
            for row, value in zip(answer["model"]["sources"], sums, strict=True):
                row["sha256"] = value
    if as_json:
        print_json(answer)
    else:
        print_table(f"{answer['format']} {path}", model_rows(answer))


@main_group.command(context_settings=SETTINGS)
@click.argument("bundle", type=PATH)
@click.option("--source", type=PATH, help="Also compare with the original GGUF (any shard), byte for byte.")
@click.option("--quick", is_flag=True, help="Sizes, headers, digest tables and a sample of the blobs only.")
@json_option
def verify(bundle: Path, source: Path | None, quick: bool, as_json: bool) -> int:
    """Read BUNDLE and compare every byte with what was written.  Exit status 4 where something differs.

    \b
    Examples:
      bel-repack verify model.bel
      bel-repack verify model.bel --source model.gguf
      bel-repack verify model.bel --quick
    """
    from bel.repack.compare import compare_source
    from bel.repack.verify import Report, verify_bundle

    if quick and source is not None:
        say(NAME, "--source compares every byte, so every byte is read; --quick has no effect beside it")
        quick = False
    model = open_model(source) if source is not None else None
    progress = Progress(NAME)
    try:
        opened = open_bundle(bundle)
        report = verify_bundle(opened, quick=quick, progress=progress)
        sound = not report.problems
        if model is not None and sound:
            compare_source(opened, model, report, progress)
    except DamagedBundleError as error:
        report, sound = Report([str(error)]), False
    finally:
        progress.close()
    if as_json:
        print_json(
            {
                "ok": not report.problems,
                "blobs_checked": report.blobs_checked,
                "bytes_checked": report.bytes_checked,
                "problems": report.problems,
            }
        )
    for problem in report.problems[:SHOWN_PROBLEMS]:
        say(NAME, problem)
    if len(report.problems) > SHOWN_PROBLEMS:
        say(NAME, f"and {report.count - SHOWN_PROBLEMS} more")
    if report.problems:
        what = f"{source} is not the source of {bundle}" if sound else f"{bundle} is damaged"
        say(NAME, f"error: {what}: {report.count} problem(s)")
        return DamagedBundleError.exit_code
    if not as_json:
        how = "sizes, headers and a sample" if quick else "every byte"
        against = f", and equal to {source}" if source is not None else ""
        print_table(
            "ok",
            [
                ("bundle", str(bundle)),
                ("checked", f"{how}: {report.blobs_checked} blobs, {format_bytes(report.bytes_checked)}{against}"),
            ],
        )
    return 0


@main_group.command(context_settings=SETTINGS)
@click.argument("bundle", type=PATH)
@click.option(
    "-o",
    "output",
    type=PATH,
    default=Path("."),
    help="The folder for the restored files; made if its parent exists.  Default: the current folder.",
)
@click.option("--force", is_flag=True, help="Replace existing files of the same names.")
@json_option
def restore(bundle: Path, output: Path, force: bool, as_json: bool) -> None:
    """Give back the original GGUF file or split set of BUNDLE, byte for byte.

    \b
    Examples:
      bel-repack restore model.bel -o restored
    """
    from bel.repack.restore import restore as run

    progress = Progress(NAME)
    try:
        with all_or_nothing():
            files = run(open_bundle(bundle), output, force=force, progress=progress)
    finally:
        progress.close()
    if as_json:
        print_json({"files": [{"name": f.name, "bytes": f.size_bytes, "sha256": f.sha256} for f in files]})
    else:
        rows = [
            (f.name, f"{format_bytes(f.size_bytes)}  sha256 {f.sha256 or '(not taken: the source was mostly holes)'}")
            for f in files
        ]
        print_table(f"restored into {output}, equal to the source byte for byte", rows)


main_group.add_command(publish)
main_group.add_command(fetch)


def _say_warnings(model: GgufModel) -> None:
    for text in warnings(model, find_experts(model)):
        say(NAME, f"warning: {text}")


def main() -> None:
    """Entry point."""
    sys.exit(run_command(main_group, NAME))


__all__ = ["main", "main_group"]
