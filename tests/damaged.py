"""Bundles to damage, each with its source and where it is restored in vain."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import synth
from bel.formats.bundle import open_bundle
from bel.formats.manifest import Manifest
from faults import Outcome, run_cli

PAGE = 4096


def model(seed: int) -> synth.Gguf:
    """Every kind of file: a PLE table, blobs with padding, dirty gaps in the source, a dense file with padding."""
    table = synth.Tensor("per_layer_token_embd.weight", (64, 8), synth.Q8_0, gap_bytes=64)
    odd = synth.Tensor("odd.bias", (5,), synth.F32)
    return synth.moe(tensors=[table, odd, *synth.moe_tensors()], seed=seed, pad_byte=7, tail=b"tail")


@dataclass(frozen=True)
class Made:
    """A bundle, the folder of its source, and where the source is restored in vain."""

    folder: Path
    inputs: Path
    manifest: Manifest

    def restore(self, bundle: Path | None = None) -> tuple[Outcome, Path]:
        """Restore into a folder that does not exist yet."""
        back = self.folder.parent / "back"
        if back.exists():
            shutil.rmtree(back)
        return run_cli("restore", bundle or self.folder, "-o", back), back


def make(folder: Path, seed: int = 0) -> Made:
    """Convert one model, in two source files and two experts files."""
    inputs = folder / f"in{seed}"
    inputs.mkdir(parents=True)
    for name, shard in synth.split(model(seed), [7, 7]).items():
        shard.write(inputs / name)
    bundle = folder / f"m{seed}.bel"
    done = run_cli(inputs / "model-00001-of-00002.gguf", "-o", bundle, "--shard-size", "40000")
    assert done.status == 0, done
    return Made(bundle, inputs, open_bundle(bundle).manifest)


def files_of(bundle: Path) -> list[Path]:
    """All files of a bundle."""
    return sorted(p for p in bundle.rglob("*") if p.is_file())


def copied(made: Made, bundle: Path) -> Made:
    """A copy of a bundle, which may be damaged for good."""
    shutil.copytree(made.folder, bundle)
    return Made(bundle, made.inputs, made.manifest)
