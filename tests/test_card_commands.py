"""The commands of a model card, exactly as they are printed on it, as a stranger runs them: against a hub on loopback."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bel.formats.bundle import open_bundle
from bel.formats.console import run_command
from bel.profiler.cli import main_group as profile_group
from exactness import repack
from faults import answer, real, run_cli
from hub_server import Hub, client_environment, serving
from runnable import fences, one_cpu, user_environment

REPO = "org/tiny-moe"
TERMS = ("--license", "mit", "--base-model", "Org/Base")


@dataclass(frozen=True)
class Stranger:
    """Someone with an empty folder and the toolkit: the card that the hub shows, and a shell."""

    hub: Hub
    folder: Path
    environment: dict[str, str]

    @property
    def card(self) -> str:
        return self.hub.files(REPO)["README.md"].decode()

    @property
    def block(self) -> str:
        """The commands of the card: its one block of shell."""
        found = ["\n".join(fence.lines) for fence in fences(self.card, "README.md") if fence.info == "sh"]
        assert len(found) == 1
        return found[0]

    def shell(self, script: str) -> str:
        """What a script prints.  The installed toolkit is what `pip install` of the card finds: no index is asked."""
        with one_cpu():
            ended = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", script],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
        assert ended.returncode == 0, (script, ended.stdout, ended.stderr)
        return ended.stdout


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[Stranger]:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    with serving() as hub:
        own = {
            "PIP_NO_INDEX": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_ROOT_USER_ACTION": "ignore",
            "HF_HUB_OFFLINE": "0",
        }
        home = tmp_path / "home"
        yield Stranger(hub, folder, {**user_environment(client_environment(hub, home), home), **own})


def publish(stranger: Stranger, bundle: Path, *options: str | Path) -> None:
    answer(real("publish", bundle, "--repo-id", REPO, *TERMS, "--json", *options, env=stranger.environment))


def profiler(*arguments: str | Path) -> None:
    assert run_command(profile_group, "bel-profile", [str(a) for a in arguments]) == 0


def test_the_block_of_the_card_fetches_verifies_runs_and_restores(stranger: Stranger, example: Path, tmp_path: Path) -> None:
    publish(stranger, repack(example, tmp_path / "t.bel"))
    assert [line.split()[:2] for line in stranger.block.splitlines()] == [
        ["pip", "install"],
        ["bel-repack", "fetch"],
        ["bel-repack", "verify"],
        ["bel-run", "tiny-moe.bel"],
        ["bel-repack", "restore"],
    ]
    said = stranger.shell(stranger.block)
    assert "fetched, every byte verified" in said and "192 blobs" in said
    stock = stranger.shell(f"bel-run {example.name} --stock -p Hello -n 32")
    assert len(stock.split()) > 10 and stock in said, "what was run is the model that was restored"
    assert (stranger.folder / example.name).read_bytes() == example.read_bytes()
    assert {path.name for path in stranger.folder.iterdir()} == {"tiny-moe.bel", example.name}


def test_the_inline_commands_of_the_card_work_too(stranger: Stranger, example: Path, tmp_path: Path) -> None:
    publish(stranger, repack(example, tmp_path / "t.bel"))
    dense = re.findall(r"`(bel-repack fetch [^`]*--dense-only[^`]*)`", stranger.card)
    assert len(dense) == 1
    stranger.shell(dense[0])
    assert not list((stranger.folder / "tiny-moe.bel").glob("*experts.bin"))
    assert "expert slots" in stranger.shell("bel-profile fit tiny-moe.bel --vram 12G --ram 16G")
    stranger.shell(dense[0].replace(" --dense-only", ""))  # "the same command without `--dense-only` fetches the rest"
    sums = re.findall(r"`(sha256sum [^`]*)`", stranger.card)
    assert len(sums) == 1
    assert "experts.bin: OK" in stranger.shell(f"cd tiny-moe.bel; {sums[0]}")
    assert run_cli("verify", stranger.folder / "tiny-moe.bel", "--source", example).status == 0


def test_the_card_of_a_bundle_with_a_plan_runs_by_it(stranger: Stranger, example: Path, tmp_path: Path) -> None:
    bundle, profile, plan = repack(example, tmp_path / "t.bel"), tmp_path / "code.json", tmp_path / "plan.json"
    profiler("record", example, "-p", "def total(prices):", "-n", "8", "--threads", "1", "-o", profile)
    profiler("plan", profile, "--model", bundle, "--slots-bytes", "2688k", "--objective", "misses", "-o", plan)
    publish(stranger, bundle, "--profile", profile, "--plan", plan)
    run = [line for line in stranger.block.splitlines() if line.startswith("bel-run")]
    assert len(run) == 1 and " --plan tiny-moe.bel/plan.json " in run[0]
    assert "## Profile" in stranger.card and "## Plan" in stranger.card
    said = stranger.shell(f"{{ {stranger.block}\n}} 2>&1")
    assert "96 of 192 experts (50 %)" in said
    assert (stranger.folder / example.name).read_bytes() == example.read_bytes()
    assert open_bundle(stranger.folder / "tiny-moe.bel").manifest.content_digest in stranger.card
