"""`bel-repack publish` and `bel-repack fetch`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import click

from bel.formats.bundle import open_bundle
from bel.formats.console import SETTINGS, Progress, json_option, print_json, print_table, say
from bel.formats.errors import InterruptedRun
from bel.formats.signals import INTERRUPTS
from bel.formats.units import format_bytes
from bel.repack.path_cli import PATH
from bel.repack.report import shell_word

NAME = "bel-repack"
_ENDPOINT = click.option(
    "--endpoint", metavar="URL", help="Another hub than the client's default.  One without Xet: set HF_HUB_DISABLE_XET=1."
)


@contextlib.contextmanager
def _ends_at_once() -> Iterator[None]:
    """End the process at Ctrl-C while the client's workers still run: they would keep it until their files are through."""
    try:
        yield
    except KeyboardInterrupt:
        message = "interrupted; the same command goes on where it stopped"
        if threading.active_count() == 1:
            raise InterruptedRun(message) from None
        say(NAME, f"error: {message}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(InterruptedRun.exit_code)


@click.command(context_settings=SETTINGS)
@click.argument("bundle", type=PATH)
@click.option("--repo-id", required=True, metavar="ORG/NAME", help="The repository; made if need be.")
@click.option("--private", is_flag=True, help="Make the repository private.")
@click.option("--license", "license_id", metavar="ID", help="The licence, where the source's metadata does not name it.")
@click.option("--license-name", metavar="TEXT", help="The licence's name, with the licence 'other'.")
@click.option("--license-link", metavar="URL", help="Where the licence's text is, with the licence 'other'.")
@click.option("--base-model", metavar="ORG/NAME", help="The model this is made of, where the metadata does not name it.")
@click.option("--profile", type=PATH, help="A profile of this bundle to publish with it.  Default: its profile.json, if any.")
@click.option("--plan", type=PATH, help="A plan of this bundle to publish with it.  Default: its plan.json, if any.")
@click.option("--dry-run", is_flag=True, help="Check everything and show what would be uploaded; send nothing.")
@_ENDPOINT
@json_option
def publish(
    bundle: Path,
    repo_id: str,
    private: bool,
    license_id: str | None,
    license_name: str | None,
    license_link: str | None,
    base_model: str | None,
    profile: Path | None,
    plan: Path | None,
    dry_run: bool,
    endpoint: str | None,
    as_json: bool,
) -> None:
    """Upload BUNDLE with a model card to a repository on Hugging Face.

    The bundle is verified first, and only its own files go: the manifest last, so that an upload that ends early is no
    bundle to anybody.  The same command again goes on where it stopped.

    \b
    Examples:
      bel-repack publish model.bel --repo-id ORG/NAME --dry-run
      bel-repack publish model.bel --repo-id ORG/NAME --license apache-2.0 --base-model ORG/BASE
      bel-repack publish model.bel --repo-id ORG/NAME --profile merged.json --plan plan.json
    """
    from bel.repack.hub import Hub, need_client

    need_client(endpoint)
    from bel.repack.card import Origin
    from bel.repack.publish import prepare, send

    given = Origin(license_id, license_name, license_link, base_model)
    progress = Progress(NAME)
    try:
        ready = prepare(open_bundle(bundle), repo_id, given, profile=profile, plan=plan, quick=dry_run, progress=progress)
        files = [{"name": file.name, "bytes": file.size_bytes} for file in ready.plan.files]
        answer = {
            "repo_id": repo_id,
            "files": files,
            "total_bytes": ready.plan.total_bytes,
            "card": json.loads(json.dumps(ready.front, default=str)),
            "warnings": list(ready.plan.warnings),
            "dry_run": dry_run,
        }
        for warning in ready.plan.warnings:
            say(NAME, f"warning: {warning}")
        if not as_json:
            rows = [(file.name, f"{file.size_bytes} bytes") for file in ready.plan.files]
            rows += [("in all", format_bytes(ready.plan.total_bytes))]
            # Before the upload the plan goes to stderr: stdout stays empty where the upload fails.
            print_table(f"{'would be uploaded' if dry_run else 'is uploaded'} to {repo_id}", rows, err=not dry_run)
        if not dry_run:
            hub = Hub(endpoint, show_progress=sys.stderr.isatty())
            with _ends_at_once():
                address, done = send(ready, hub, private=private, progress=progress)
                INTERRUPTS.done()
            answer |= {"url": address, "commit": done.commit}
    finally:
        progress.close()
    if as_json:
        print_json(answer)
    elif not dry_run:
        print_table("published", [("at", address), ("commit", done.commit), ("next", f"bel-repack fetch {repo_id}")])


@click.command(context_settings=SETTINGS)
@click.argument("repo_id", metavar="ORG/NAME")
@click.option("-o", "output", type=PATH, help="The bundle to make.  Default: NAME.bel in the current folder.")
@click.option("--revision", metavar="R", help="A branch, tag or commit.  Default: the main branch.")
@click.option("--dense-only", is_flag=True, help="Only what `bel-profile fit` needs; the experts can follow later.")
@_ENDPOINT
@json_option
def fetch(
    repo_id: str, output: Path | None, revision: str | None, dense_only: bool, endpoint: str | None, as_json: bool
) -> None:
    """Download the bundle ORG/NAME and verify every byte.

    The bundle gets its name once it is whole and verified.  After an interruption the same command goes on with the files
    that are still missing.

    \b
    Examples:
      bel-repack fetch ORG/NAME
      bel-repack fetch ORG/NAME -o models/NAME.bel --revision v1
      bel-repack fetch ORG/NAME --dense-only
    """
    from bel.repack.hub import Hub, check_repo_id, need_client

    need_client(endpoint)
    from bel.repack.card_section import bundle_name
    from bel.repack.fetch import fetch as run

    check_repo_id(repo_id)
    target = output if output is not None else Path(bundle_name(repo_id))
    progress = Progress(NAME)
    try:
        hub = Hub(endpoint, show_progress=sys.stderr.isatty())
        with _ends_at_once():
            done = run(hub, repo_id, target, revision=revision, dense_only=dense_only, progress=progress)
    finally:
        progress.close()
    if as_json:
        files = [{"name": name, "bytes": size} for name, size in done.files]
        total = sum(size for _, size in done.files)
        print_json(
            {
                "bundle": str(target.absolute()),
                "repo_id": repo_id,
                "commit": done.commit,
                "dense_only": dense_only,
                "files": files,
                "total_bytes": total,
                "content_digest": done.content_digest,
            }
        )
        return
    word = shell_word(str(target))
    following = f"bel-profile fit {word} --vram 12G --ram 16G" if dense_only else f'bel-run {word} -p "Hello"'
    rows = [("bundle", str(target)), ("commit", done.commit), ("content digest", done.content_digest), ("next", following)]
    print_table("fetched, without the experts" if dense_only else "fetched, every byte verified", rows)
