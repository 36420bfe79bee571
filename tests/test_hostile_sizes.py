"""Manifests that claim more than there is: what they cost is in proportion to what they are."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import synth
from bel.formats.digest import bytes_digest
from bel.formats.errors import DamagedBundleError
from bel.formats.manifest import decode
from damaged import PAGE, Made, copied, make
from faults import real
from forged import rewrite


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("damage"))


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Made:
    return copied(made, tmp_path / "m.bel")


def limited(mib: int) -> Callable[[], None]:
    """A limit on the address space of a child: a huge allocation fails at once instead of costing the machine."""
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (mib * 2**20, mib * 2**20))


@pytest.mark.parametrize("command", ["verify", "restore"])
def test_a_digest_table_that_claims_gigabytes_is_refused_before_it_is_read(copy: Made, command: str) -> None:
    """2^27 experts of one byte, in sparse files of the sizes that the manifest gives."""
    n, stacks = 2**27, [i for i, t in enumerate(copy.manifest.tensors) if t.dest == "experts"]

    def edit(body: dict[str, Any]) -> None:
        body["layers"] = {"0": body["layers"]["0"]}
        layer = body["layers"]["0"]
        layer.update(n_expert=n, n_used=None, parts=[{**p, "bytes": 1} for p in layer["parts"]])
        keep = [p["tensor"] for p in layer["parts"]]
        for i in stacks:
            body["tensors"][i].update(bytes=n if i in keep else 1, ne=[1, 1, n])
            if i not in keep:
                body["tensors"][i].update(dest="dense", dest_offset=body["files"]["dense"]["digest_bytes"])
        for row in body["sources"]:
            row.update(bytes=2**33, hole_bytes=2**33, sha256=None)
        for number, tensor in enumerate(body["tensors"]):
            tensor["source_offset"] = 2**20 + number * 2**28
        body["files"]["experts"] = [{**body["files"]["experts"][0], "bytes": PAGE + n * layer["stride"]}]
        body["files"]["index"].update(bytes=24 + n * 3 * 32, digest_bytes=24 + n * 3 * 32)

    rewrite(copy.folder, edit)
    body = json.loads((copy.folder / "manifest.json").read_bytes())
    for row in (body["files"]["index"], body["files"]["experts"][0]):
        os.truncate(copy.folder / row["name"], row["bytes"])
    args = ("restore", copy.folder, "-o", copy.folder.parent / "back") if command == "restore" else ("verify", copy.folder)
    outcome = real(*args, preexec_fn=limited(1500))
    assert outcome.status == 4, outcome


def test_a_source_that_claims_terabytes_of_nothing(copy: Made) -> None:
    def edit(body: dict[str, Any]) -> None:
        body["sources"][1].update(bytes=2**40, hole_bytes=2**40, sha256=None)

    rewrite(copy.folder, edit)
    outcome = real("restore", copy.folder, "-o", copy.folder.parent / "back", preexec_fn=limited(350))
    assert outcome.status in (0, 4), outcome


@pytest.mark.parametrize("where", ["a manifest", "a GGUF"])
def test_a_tensor_of_no_bytes_and_countless_slices(copy: Made, where: str) -> None:
    if where == "a manifest":
        rewrite(copy.folder, lambda b: b["tensors"][1].update(bytes=0, ne=[0, 1, 2**40], type=0))
        args: tuple[str | Path, ...] = ("restore", copy.folder, "-o", copy.folder.parent / "back")
    else:
        nothing = synth.Tensor("nothing.weight", (0, 1, 2**40), synth.F32)
        args = ("inspect", "--digest", synth.moe(tensors=[nothing, *synth.moe_tensors()]).write(copy.folder.parent / "m.gguf"))

    def limit() -> None:
        limited(700)()
        resource.setrlimit(resource.RLIMIT_CPU, (2, 2))

    outcome = real(*args, preexec_fn=limit)
    assert outcome.status in (0, 3, 4), outcome


def seconds_to_decode(body: dict[str, Any]) -> float:
    body["digest"] = "0" * 64
    text = json.dumps(body)
    data = text.replace(f'"digest": "{"0" * 64}"', f'"digest": "{bytes_digest(text.encode())}"', 1).encode()
    best = 1e9
    for _ in range(2):
        began = time.process_time()
        with contextlib.suppress(DamagedBundleError):
            decode(data, "manifest.json")
        best = min(best, time.process_time() - began)
    return best


def many_dimensions(body: dict[str, Any], n: int) -> None:
    body["tensors"][0]["ne"] = [1] * n


def many_layers(body: dict[str, Any], n: int) -> None:
    body["tensors"] = body["tensors"] + [body["tensors"][0]] * n
    body["layers"] = {str(i): body["layers"]["0"] for i in range(n)}


def many_sources(body: dict[str, Any], n: int) -> None:
    first = body["sources"][0]
    body["sources"] = [{**first, "name": f"{i}.gguf", "header_file": f"source/{i}", "kept": []} for i in range(n)]
    table = {**body["tensors"][1], "source": 0, "bytes": 0, "source_offset": 0, "dest": "dense"}
    stacks = [{**t, "source": n - 1} for t in body["tensors"] if t["dest"] == "experts"]
    body["tensors"] = stacks + [table] * n
    at = 0
    for layer in body["layers"].values():
        for part in layer["parts"]:
            part["tensor"], at = at, at + 1


@pytest.mark.parametrize("grow", [many_dimensions, many_layers, many_sources])
def test_decoding_takes_time_in_proportion_to_the_manifest(made: Made, grow: Callable[[dict[str, Any], int], None]) -> None:
    """A manifest may have 64 MiB: what is quadratic in it takes hours to be refused."""
    seconds = []
    for n in (100, 3200):
        body = json.loads((made.folder / "manifest.json").read_bytes())
        grow(body, n)
        seconds.append(seconds_to_decode(body))
    assert seconds[1] < 3 * 32 * seconds[0], seconds
