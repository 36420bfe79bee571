"""costs.json: round trip, and every way in which a file may be wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bel.formats import costs as costs_module
from bel.formats.costs import Costs, costs_json, encode_costs, load_costs
from bel.formats.errors import BadInputError

SPEC = (Path(__file__).parent.parent / "formats" / "SPEC.md").read_text(encoding="utf-8")
KNOWN = Costs(
    block_bytes=2654208,
    nvme_bytes_per_s=2.5e9,
    nvme_depths=((1, 1.25e9), (4, 2.5e9), (16, 2.25e9)),
    memory_bytes_per_s=1.1e10,
    cpu_expert_seconds=0.0008,
    h2d_bytes_per_s=None,
    d2h_bytes_per_s=2e10,
    layer_seconds=((0, 0.001), (3, 0.002)),
    machine="a machine",
)
rates = st.floats(min_value=costs_module.MIN_BYTES_PER_S, max_value=costs_module.MAX_BYTES_PER_S)
seconds = st.floats(min_value=costs_module.MIN_SECONDS, max_value=costs_module.MAX_SECONDS)


@st.composite
def all_costs(draw: st.DrawFn) -> Costs:
    depths = tuple(sorted(draw(st.dictionaries(st.integers(1, 65536), rates, max_size=5)).items()))
    layers = draw(st.none() | st.dictionaries(st.integers(0, 10**9 - 1), seconds, max_size=5))
    return Costs(
        block_bytes=draw(st.integers(1, 2**40)),
        nvme_bytes_per_s=max((rate for _, rate in depths), default=draw(rates)),
        nvme_depths=depths,
        memory_bytes_per_s=draw(rates),
        cpu_expert_seconds=draw(st.none() | seconds),
        h2d_bytes_per_s=draw(st.none() | rates),
        d2h_bytes_per_s=draw(st.none() | rates),
        layer_seconds=None if layers is None else tuple(sorted(layers.items())),
        machine="".join(c for c in draw(st.text(max_size=100)) if c.isprintable()),
    )


def refusal(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "costs.json"
    path.write_bytes(data)
    with pytest.raises(BadInputError) as caught:
        load_costs(path)
    assert "costs.json" in str(caught.value)
    return str(caught.value)


@given(costs=all_costs())
def test_what_is_written_is_read_and_written_again_alike(tmp_path: Path, costs: Costs) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(encode_costs(costs))
    assert load_costs(path) == costs
    assert encode_costs(load_costs(path)) == path.read_bytes()


def test_spec_has_the_keys_of_the_code_and_no_others() -> None:
    match = re.search(r"^## Costs\n(.*?)(?=^## )", SPEC, re.MULTILINE | re.DOTALL)
    assert match
    assert re.findall(r"^\| `(\w+)`", match[1], re.MULTILINE) == list(costs_json(KNOWN))
    assert f'"{costs_module.FORMAT}"' in match[1] and f"| `version` | {costs_module.VERSION};" in match[1]


@pytest.mark.parametrize("key", [k for k in costs_json(KNOWN) if k not in ("format", "version")])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    body = costs_json(KNOWN)
    del body[key]
    assert f"'{key}'" in refusal(tmp_path, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_bytes", 0),
        ("block_bytes", 2**41),
        ("block_bytes", 4096.5),
        ("block_bytes", True),
        ("nvme_bytes_per_s", 0),
        ("nvme_bytes_per_s", -1.0),
        ("nvme_bytes_per_s", None),
        ("nvme_bytes_per_s", 2e9),
        ("nvme_bytes_per_s", 10**400),
        ("nvme_depths", []),
        ("nvme_depths", {"0": 2.5e9}),
        ("nvme_depths", {"+1": 2.5e9}),
        ("nvme_depths", {"01": 2.5e9}),
        ("nvme_depths", {"\u0661": 2.5e9}),
        ("nvme_depths", {"65537": 2.5e9}),
        ("nvme_depths", {"2": 2.5e9, "1": 1e9}),
        ("nvme_depths", {"1": "2.5e9"}),
        ("nvme_depths", {"1": 2.6e9}),
        ("memory_bytes_per_s", True),
        ("memory_bytes_per_s", 1.1e15),
        ("memory_bytes_per_s", 1e-300),
        ("cpu_expert_seconds", 0),
        ("cpu_expert_seconds", 1e-300),
        ("cpu_expert_seconds", "fast"),
        ("h2d_bytes_per_s", {}),
        ("d2h_bytes_per_s", -0.0),
        ("layer_seconds", {"1": 0.1, "0": 0.1}),
        ("layer_seconds", {"x": 0.1}),
        ("layer_seconds", {"0": None}),
        ("layer_seconds", [0.1]),
        ("machine", None),
        ("machine", "a\nb"),
        ("machine", "\x1b[2J"),
        ("machine", "x" * 1001),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(tmp_path: Path, key: str, value: Any) -> None:
    assert key in refusal(tmp_path, json.dumps({**costs_json(KNOWN), key: value}).encode())


def test_other_files_and_versions_are_refused(tmp_path: Path) -> None:
    assert "not a costs file" in refusal(tmp_path, b'{"format": "bel-profile", "version": 1}')
    assert "costs version 2 is not supported; this toolkit reads 1" in refusal(
        tmp_path, json.dumps({**costs_json(KNOWN), "version": 2}).encode()
    )
    assert "version True" in refusal(tmp_path, json.dumps({**costs_json(KNOWN), "version": True}).encode())
    assert "NaN" in refusal(tmp_path, encode_costs(KNOWN).replace(b"11000000000.0", b"NaN"))
    assert "twice" in refusal(tmp_path, encode_costs(KNOWN).replace(b'"machine"', b'"version": 1, "machine"'))


def test_unknown_keys_and_whole_numbers_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**costs_json(KNOWN), "later": 1, "memory_bytes_per_s": 11_000_000_000}))
    assert load_costs(path) == KNOWN


@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_and_nothing_else(tmp_path: Path, data: st.DataObject) -> None:
    encoded = bytearray(encode_costs(KNOWN))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "costs.json"
    path.write_bytes(encoded[: data.draw(st.integers(0, len(encoded)))] if data.draw(st.booleans()) else encoded)
    try:
        loaded = load_costs(path)
    except BadInputError as error:
        assert "costs.json" in str(error)
    else:
        path.write_bytes(encode_costs(loaded))
        assert load_costs(path) == loaded
