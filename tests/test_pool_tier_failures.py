"""What a pool of three tiers refuses, and how it ends where a read fails."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bel.formats.bundle import open_bundle
from bel.formats.errors import DamagedBundleError, MachineError, UsageError
from bel.runtime.engine import Engine
from bel.runtime.policies import parse_policy
from bel.runtime.pool_home import cpu_home
from bel.runtime.pool_model import open_pool
from bel.runtime.pool_options import PoolOptions
from bel.runtime.tier_layers import HOST_TIERS
from pooled import SIZES, pooled
from tiered import options
from trained import EXPERTS, TOP_K
from trained import tiny as tiny


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "split", "host_slots": 8}, "pool mode split needs all experts in host memory"),
        ({"mode": "static", "policy": "static", "host_bytes": 1 << 30}, "pool mode static needs all experts"),
        ({"host_slots": 8, "host_bytes": 1 << 30}, "slots of host memory and its bytes exclude each other"),
        ({"host_slots": -1}, "no less than no slots; found -1"),
        ({"host_slots": 8, "host_tier": "copy-on-read"}, "no host tier 'copy-on-read'; expected exclusive or inclusive"),
        ({"host_slots": 5, "host_tier": "inclusive"}, "it has 5 slots in a layer, and the home 6"),
    ],
)
def test_options_that_do_not_do(fields: dict[str, Any], message: str, tiny: Path) -> None:
    """Refused before anything is loaded."""
    given_fields = {"slots": 6, **fields, "policy": parse_policy(fields.get("policy", "lru"))}
    with pytest.raises(UsageError, match=message):
        pooled(tiny, PoolOptions(**given_fields), 1, 1)


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A bundle to be damaged."""
    bundle = tmp_path / "copy.bel"
    subprocess.run(["cp", "-r", str(tiny), str(bundle)], check=True)
    return bundle


@pytest.mark.parametrize("host_slots", [0, 8])
def test_a_damaged_blob_ends_the_run(host_slots: int, copy: Path) -> None:
    """Its checksum is compared before a byte of it goes to the home."""
    path = next(copy.glob("*experts.bin"))
    data = bytearray(path.read_bytes())
    layer = open_bundle(copy).manifest.layers[3]
    data[layer.offset_bytes + 5 * layer.stride_bytes + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedBundleError, match="expert 5 of layer 3"):
        pooled(copy, options(TOP_K, host_slots=host_slots), 64, 1)


@pytest.mark.parametrize("reader", ["auto", "buffered"])
@pytest.mark.parametrize("host_tier", HOST_TIERS)
def test_a_failed_read_ends_the_run(host_tier: str, reader: str, copy: Path) -> None:
    """The file is cut short while the model runs.  The error names an expert; no decode is trusted after that; and nothing is
    left behind."""
    descriptors = len(os.listdir("/proc/self/fd"))
    layer = open_bundle(copy).manifest.layers[3]
    engine = Engine.open()
    asked = options(TOP_K, host_slots=8, host_tier=host_tier, reader=reader)
    with open_pool(engine, open_bundle(copy), SIZES, asked, cpu_home(engine)) as run:
        run.context.decode(range(5), all_logits=True)
        os.truncate(next(copy.glob("*experts.bin")), layer.offset_bytes)
        with pytest.raises(DamagedBundleError, match=r"expert \d+ of layer [345] cannot be read: the file ends|was changed"):
            run.context.decode(range(100, 400), all_logits=True)
        assert run.context.n_past == 0
        for tokens in ([1], range(20)):
            with pytest.raises(MachineError, match="a read of experts failed before"):
                run.context.decode(tokens)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_failed_read_names_the_expert(copy: Path) -> None:
    """The reader knows files and offsets alone."""
    layer = open_bundle(copy).manifest.layers[0]
    engine = Engine.open()
    with open_pool(engine, open_bundle(copy), SIZES, options(TOP_K, host_slots=2), cpu_home(engine)) as run:
        os.truncate(next(copy.glob("*experts.bin")), layer.offset_bytes)
        with pytest.raises(DamagedBundleError, match=r"expert \d+ of layer 0 cannot be read: the file ends") as raised:
            run.context.decode([9])
    offset = raised.value.offset_bytes
    assert offset is not None
    assert f"expert {(offset - layer.offset_bytes) // layer.stride_bytes} of" in str(raised.value)


def test_a_bundle_that_cannot_be_opened_leaves_nothing(copy: Path) -> None:
    """The memory and the files are given back where the second half of opening fails."""
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UsageError, match="an expert is wanted that layer 0 does not have"):
        pooled(copy, options(TOP_K, host_slots=2, wanted={0: (EXPERTS,)}), 1, 1)
    assert len(os.listdir("/proc/self/fd")) == descriptors
