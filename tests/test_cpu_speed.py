"""Speeds of memory and the CPU: a plain copy, and the products of the chosen experts."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bel.formats.errors import BadInputError, MachineError
from bel.formats.units import KIB, MIB
from bel.profiler.bandwidth_target import Experts, Slices, read_slice
from bel.profiler.expert_time import ExpertTime, expert_time, judge
from bel.profiler.machine import cpu_count
from bel.profiler.memory_speed import MIN_RANGE_BYTES, copy_bytes_per_s, uncached_bytes
from bel.runtime.expert_product import ExpertProducts, Projection
from bel.runtime.llama_library import open_library
from measured import assert_alike

Q8_0 = gguf.GGMLQuantizationType.Q8_0


def test_a_copy_is_as_fast_as_a_plain_one() -> None:
    size = 32 * MIB
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)

    def plain() -> float:
        begin = time.perf_counter()
        np.copyto(target, source)
        return size / (time.perf_counter() - begin)

    assert_alike(plain, lambda: copy_bytes_per_s(2 * size, 1, passes=3))


@given(cache=st.integers(1, 2**32), free=st.integers(0, 2**42))
def test_what_is_walked_over_is_more_than_the_cache_and_less_than_memory(cache: int, free: int) -> None:
    if free < 4 * MIN_RANGE_BYTES:
        with pytest.raises(MachineError, match="too little free memory"):
            uncached_bytes(cache, free)
        return
    size = uncached_bytes(cache, free)
    assert MIN_RANGE_BYTES <= size <= free // 4
    assert size >= 2 * cache or size == free // 4


def quantised(rows: int, columns: int, kind: gguf.GGMLQuantizationType, seed: int) -> Any:
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    return np.ascontiguousarray(gguf.quants.quantize(values, kind))


@pytest.mark.parametrize("kind", [Q8_0, gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.F16])
def test_products_are_those_of_the_chosen_experts(kind: gguf.GGMLQuantizationType) -> None:
    """Two projections in blobs with a stride and gaps, three experts in two stacks."""
    shapes = [(48, 64), (64, 96)]
    weights = [[[quantised(*s, kind, 100 * a + 10 * e + p) for p, s in enumerate(shapes)] for e in range(3)] for a in range(2)]
    sizes = [w.nbytes for w in weights[0][0]]
    places = [64, 64 + sizes[0] + 128]
    blobs = np.full((2, 3, 32 * KIB), 255, np.uint8)
    for a, e, p in itertools.product(range(2), range(3), range(2)):
        blobs[a, e, places[p] : places[p] + sizes[p]] = weights[a][e][p].view(np.uint8).ravel()
    parts = [Projection(int(kind), columns, rows, at) for (rows, columns), at in zip(shapes, places, strict=True)]
    assert [part.size_bytes for part in parts] == sizes
    with ExpertProducts(open_library(), blobs, parts, steps=2, n_threads=1) as products:
        for stack, chosen in [(1, [2, 0]), (0, [1, 1])]:
            products.compute(stack, chosen)
            for step, p in itertools.product(range(2), range(2)):
                exact = gguf.quants.dequantize(weights[stack][chosen[step]][p], kind) @ products.inputs[p]
                error = np.abs(products.outputs[step][p] - exact).max()
                assert error < 0.02 * np.abs(exact).max()  # the kernel rounds the input to 8 bits
        for wrong in [(2, [0, 0]), (0, [0, 3]), (0, [0]), (0, [-1, 0])]:
            with pytest.raises(ValueError, match="each of the blobs"):
                products.compute(*wrong)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (Projection(24, 64, 4, 0), "no CPU kernel for I8"),
        (Projection(153, 64, 4, 0), "type 153 has no known size"),
        (Projection(8, 33, 4, 0), "not whole Q8_0 blocks"),
    ],
)
def test_a_type_without_kernels_is_refused_and_not_jumped_into(part: Projection, said: str) -> None:
    with pytest.raises(MachineError, match=said):
        ExpertProducts(open_library(), np.zeros((1, 2, 4096), np.uint8), [part], steps=1, n_threads=1)


def test_blobs_of_another_form_are_a_bug_of_the_caller() -> None:
    part = Projection(8, 64, 60, 0)
    with pytest.raises(ValueError, match="behind its blob"):
        ExpertProducts(open_library(), np.zeros((1, 1, 4000), np.uint8), [part], steps=1, n_threads=1)
    with pytest.raises(ValueError, match="contiguous"):
        ExpertProducts(open_library(), np.zeros((1, 8192), np.uint8), [part], steps=1, n_threads=1)


def experts_in(path: Path, rows: int) -> Experts:
    """A layer of 16 experts with one projection of rows x 512."""
    weights = np.stack([quantised(rows, 512, Q8_0, e).view(np.uint8).ravel() for e in range(16)])
    path.write_bytes(weights.tobytes())
    size = weights.shape[1]
    return Experts(0, 16, (Slices("up", int(Q8_0), 512, rows, path, 0, size, size),), 4, 4 * size)


def test_a_larger_expert_takes_longer(tmp_path: Path) -> None:
    def seconds(rows: int) -> float:
        experts = experts_in(tmp_path / f"{rows}", rows)
        return expert_time(open_library(), experts, range_bytes=32 * MIB, n_threads=1, seconds=0.1).seconds

    assert seconds(2048) / seconds(128) > 4  # 16 on an idle machine; a busy one interrupts the longer more


def test_threads_that_wait_for_each_other_are_not_the_time_of_an_expert(tmp_path: Path) -> None:
    """Two threads on one busy CPU: 0.0087 ms, then 20.3 ms, then 0.0094 ms were measured one after the other."""
    assert judge([20e-3, 9e-6, 20.3e-3], 10e-6, 2).seconds == 9e-6
    assert "0.02" in judge([20e-3, 9e-6, 20.3e-3], 10e-6, 2).note
    always = judge([20e-3, 20.3e-3], 10e-6, 2)
    assert (always.seconds, always.n_threads) == (10e-6, 1) and "with 2 threads" in always.note
    assert judge([5e-6, 6e-6], 10e-6, 2) == ExpertTime(5e-6, 2, "")
    experts = experts_in(tmp_path / "x", 128)
    one, many = (
        expert_time(open_library(), experts, range_bytes=8 * MIB, n_threads=n, seconds=0.1).seconds
        for n in (1, 4 * cpu_count())
    )
    assert many / one < 50


def test_weights_that_do_not_fit_their_dimensions_are_not_multiplied(tmp_path: Path) -> None:
    experts = experts_in(tmp_path / "weights", 128)
    lie = dataclasses.replace(experts, slices=(dataclasses.replace(experts.slices[0], rows=129),))
    with pytest.raises(BadInputError, match="do not fit their dimensions"):
        expert_time(open_library(), lie, range_bytes=MIB, n_threads=1, seconds=0.0)


def test_a_slice_behind_the_end_of_its_file_is_named(tmp_path: Path) -> None:
    experts = experts_in(tmp_path / "weights", 128)
    os.truncate(tmp_path / "weights", 16 * experts.slices[0].size_bytes - 1)
    assert len(read_slice(experts.slices[0], 14)) == experts.slices[0].size_bytes
    with pytest.raises(BadInputError, match=r"weights: the file ends inside an expert \(at byte"):
        read_slice(experts.slices[0], 15)
