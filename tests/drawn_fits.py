"""Fits of random weights at random sizes, for hypothesis."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path

from hypothesis import strategies as st

from bel.formats.units import GIB, MIB
from bel.profiler.fit import Fit, Question, memory_for, slots_bytes, solve
from bel.profiler.footprint import Footprint, SlotLayer, read_footprint
from fit_models import slot_model

layer_lists = st.lists(
    st.tuples(st.integers(1, 64), st.integers(1, 8), st.integers(1, 5)).map(
        lambda x: SlotLayer(0, max(x[0], x[1]), x[1], 4096 * x[2], 4000 * x[2], 8000, True)
    ),
    min_size=1,
    max_size=6,
)


@st.composite
def footprints(draw: st.DrawFn) -> Footprint:
    """Weights of any shape on the metadata of a small model."""
    layers = tuple(dataclasses.replace(layer, layer=i) for i, layer in enumerate(draw(layer_lists)))
    scale = draw(st.sampled_from([1, 7, 300]))
    layers = tuple(
        dataclasses.replace(x, stride_bytes=x.stride_bytes * scale, weights_bytes=x.weights_bytes * scale) for x in layers
    )
    dense, table = draw(st.integers(0, GIB)), draw(st.integers(0, GIB))
    return dataclasses.replace(
        _plain_footprint(), dense_bytes=dense + table, input_bytes=table, is_tied=draw(st.booleans()), layers=layers
    )


@functools.cache
def _plain_footprint() -> Footprint:
    with tempfile.TemporaryDirectory() as folder:
        return read_footprint(slot_model(Path(folder)))


@st.composite
def fits(draw: st.DrawFn) -> Fit:
    """The answer for random weights, contexts and sizes, around what the weights need."""
    model, context = draw(footprints()), draw(st.integers(1, 40_000))
    first = solve(model, Question(GIB if draw(st.booleans()) else 0, draw(st.integers(0, 4 * GIB)), context))
    share = draw(st.floats(0, 1))
    size = memory_for(first, [int(share * x.n_expert) for x in model.reached]) - draw(st.sampled_from([0, 1, MIB, GIB]))
    name = "vram_bytes" if first.is_gpu else "ram_bytes"
    question = dataclasses.replace(first.question, **{name: max(size, 1)})
    if draw(st.booleans()):
        least = slots_bytes(model.reached, [x.top_k for x in model.reached])
        question = dataclasses.replace(question, slots_bytes=draw(st.integers(least, 2 * first.experts_bytes)))
    return solve(model, question)
