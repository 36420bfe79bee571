"""What the slot pool refuses, and that no token is trusted once something failed under it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

import archs
from bel.formats.bundle import open_bundle
from bel.formats.errors import DamagedBundleError, MachineError, UsageError
from bel.runtime import pool_loading
from bel.runtime import pool_rows as at
from bel.runtime.engine import Engine
from bel.runtime.pager import Pager
from bel.runtime.policies import parse_policy
from bel.runtime.pool_home import cpu_home
from bel.runtime.pool_model import open_pool
from bel.runtime.pool_native import NativePool
from bel.runtime.pool_options import PoolOptions
from bel.runtime.slot_memory import SlotMemory
from exactness import repack
from pooled import SIZES, largest_difference, pool_options, pooled, run_tokens, stock
from trained import EXPERTS, TINY, TOP_K
from trained import tiny as tiny


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    """By name, before anything is loaded."""
    source = archs.make_model("gemma4", tmp_path / "model.gguf")
    bundle = repack(source, tmp_path / "model.bel")
    with pytest.raises(UsageError, match="does not know the architecture gemma4; expected qwen3moe"):
        pooled(bundle, PoolOptions(), 1, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "magic"}, "no pool mode 'magic'"),
        ({"mode": "upload", "policy": "static"}, "policy static does not go with the pool mode upload"),
        ({"mode": "static", "policy": "lru"}, "policy lru does not go with the pool mode static"),
        ({"mode": "split", "policy": "repick:5"}, "policy repick:5 does not go"),
        ({"slots": TOP_K - 1}, "3 slots in layer 0 are fewer than its top-k"),
        ({"slots": 8, "budget_bytes": 1 << 30}, "exclude each other"),
        ({"slots_by_layer": {0: 8}}, "the plan has no slots for layer 1"),
        ({"share": 1.5}, "not between 0 and 1; found 1.5"),
        ({"n_threads": 0}, "need a thread"),
    ],
)
def test_options_that_do_not_do(fields: dict[str, Any], message: str, tiny: Path) -> None:
    """Refused before anything is loaded."""
    given = {**fields, "policy": parse_policy(fields.get("policy", "lru"))}
    with pytest.raises(UsageError, match=message):
        pooled(tiny, PoolOptions(**given), 1, 1)


def test_slots_of_a_fixed_set_are_all_used(tiny: Path) -> None:
    """A plan's order comes first, the rest by number; and an expert that there is not is refused."""
    pool = pooled(tiny, pool_options(tiny, "static", slots=6, wanted={0: (9, 2, 9), 1: ()}), 1, 1).pool
    assert [set(x.in_slots) for x in pool.slots[:2]] == [{9, 2, 0, 1, 3, 4}, {0, 1, 2, 3, 4, 5}]
    with pytest.raises(UsageError, match="an expert is wanted that layer 0 does not have; expected 0 to 31"):
        pooled(tiny, pool_options(tiny, "upload", slots=6, wanted={0: (32,)}), 1, 1)


def test_a_damaged_blob_ends_the_loading(tiny: Path, tmp_path: Path) -> None:
    """Its checksum is compared before a byte of it goes to the home."""
    bundle = tmp_path / "copy.bel"
    subprocess.run(["cp", "-r", str(tiny), str(bundle)], check=True)
    path = next(bundle.glob("*experts.bin"))
    data = bytearray(path.read_bytes())
    layer = open_bundle(bundle).manifest.layers[3]
    data[layer.offset_bytes + 5 * layer.stride_bytes + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedBundleError, match="expert 5 of layer 3"):
        pooled(bundle, PoolOptions(), 1, 1)


def test_a_failed_read_ends_the_loading(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves nothing behind that the next one would stumble over."""
    descriptors = len(os.listdir("/proc/self/fd"))
    finish = Pager.finish

    def failing(self: Pager, tag: int) -> None:
        finish(self, tag)
        if tag == 4:
            raise MachineError("reading 4096 bytes failed: Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Pager, "finish", failing)
        with pytest.raises(MachineError, match="Input/output error"):
            pooled(tiny, pool_options(tiny, "split", slots=TOP_K), 1, 1)
    answer = pooled(tiny, pool_options(tiny, "split", slots=TOP_K), 1, 8)
    assert largest_difference(answer.logits, stock(TINY, 1, 8)) == 0.0
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert "bel-cpu-experts" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("mode", ["upload", "static"])
def test_an_error_within_is_raised_behind_the_decode(mode: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the callback takes an expert of layer 2 for one that does not exist.  The graph is left, the context emptied."""
    fill = NativePool._fill_layer
    rows = []

    def narrowed(self: NativePool, i: int, *rest: Any) -> None:
        fill(self, i, *rest)
        if i == 2:
            rows.append(self._layers[i])

    monkeypatch.setattr(NativePool, "_fill_layer", narrowed)
    engine = Engine.open()
    with open_pool(engine, open_bundle(tiny), SIZES, pool_options(tiny, mode, slots=TOP_K), cpu_home(engine)) as run:
        run.context.decode([5, 6])
        rows[0][at.N_EXPERT] = 1
        with pytest.raises(MachineError, match=r"tensor ffn_moe_topk-2: llama\.cpp chose an expert that does not exist"):
            run.context.decode([7, 8, 9])
        assert run.context.n_past == 0
        rows[0][at.N_EXPERT] = EXPERTS
        again = run_tokens(run.context, 30, 10, True)
    assert largest_difference(again, stock(TINY, 30, 10)) == 0.0


@pytest.mark.parametrize("is_native", [True, False])
def test_a_layer_that_was_not_served_is_an_error(is_native: bool, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products read whatever stands in the slots of the experts' numbers."""
    from bel.runtime import pool_model

    learn = pool_loading._learn

    def forgetful(*arguments: Any) -> Any:
        graphs, taken = learn(*arguments)
        graphs[3].router = b"no such node"
        return graphs, taken

    monkeypatch.setattr(pool_loading, "_learn", forgetful)
    monkeypatch.setattr(pool_model, "self_test", lambda *_: None)  # which would be the first to notice
    with pytest.raises(MachineError, match="did not choose experts in 1 layers"):
        pooled(tiny, pool_options(tiny, "upload", slots=EXPERTS, is_native=is_native), 1, 1)


@pytest.mark.parametrize("is_native", [True, False])
def test_the_self_test_finds_slots_that_hold_something_else(
    is_native: bool, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At start, before a token of the user's is computed: the stage of a layer is filled wrongly, and its slots are not."""
    stage = SlotMemory.stage

    def wrong(self: SlotMemory, i: int, expert: int) -> int:
        return stage(self, i, expert ^ (i == 4))

    monkeypatch.setattr(SlotMemory, "stage", wrong)
    with pytest.raises(MachineError, match="self-test of the slot pool failed"):
        pooled(tiny, pool_options(tiny, "upload", slots=EXPERTS, is_native=is_native), 1, 1)


def test_products_of_another_device_are_refused(tiny: Path) -> None:
    """Where llama.cpp computes the experts elsewhere than in the home, rows and ids would be written to the wrong memory."""
    home = cpu_home(Engine.open())
    other = home.abi.ffi.new("struct buffer_type *", home.abi.ffi.cast("struct buffer_type *", home.kind)[0])
    moved = dataclasses.replace(home, name="GPU7", kind=home.abi.ffi.cast("void *", other))
    with pytest.raises(MachineError, match=r"does not compute .* on GPU7"):
        pooled(tiny, pool_options(tiny, "upload", slots=TOP_K), 1, 1, home=moved)
