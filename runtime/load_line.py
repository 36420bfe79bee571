"""The lines that say how a model was loaded: what is in slots, how it is read, and where the memory goes."""

from __future__ import annotations

from statistics import median_low

from bel.formats.units import format_bytes
from bel.runtime.bundle_model import BundleRun
from bel.runtime.running import Running, describe_promise
from bel.runtime.slot_budget import MARGIN_BYTES, clamp_notes


def load_lines(running: Running) -> list[str]:
    """What was loaded: a few lines."""
    trained, positions = running.model.n_ctx_train, running.n_positions
    lines = [*_loaded(running), *_clamped(running)]
    if 0 < trained < positions:
        what = f"--context {positions} is more than the {trained} tokens that the model was trained for"
        lines.append(f"{what}: behind those it likely writes nonsense")
    return lines


def _clamped(running: Running) -> list[str]:
    """What was asked for and cannot be."""
    if running.bundle is not None:
        layers = running.bundle.layers
    elif running.gpu is not None:
        layers = running.gpu.loaded.layers
    else:
        return []
    return clamp_notes(running.asked_slots, max((layer.n_expert for layer in layers if not layer.is_mtp), default=0))


def _loaded(running: Running) -> list[str]:
    run = running.bundle
    if running.gpu is not None or running.stock_gpu is not None:
        from bel.runtime.gpu_report import gpu_lines, stock_gpu_lines  # with all that a GPU needs

        return gpu_lines(running.gpu) if running.gpu is not None else stock_gpu_lines(running.stock_gpu)  # type: ignore[arg-type]
    if run is None:
        return ["stock llama.cpp: the whole model is mapped, and the system reads what it needs"]
    lines = [
        f"{_slots(run)}; preloaded {format_bytes(run.uploaded_bytes)}; policy {running.policy}; reader {run.pager.name}",
        _memory(running, run),
    ]
    if running.policy == "static" and not run.uploaded_bytes:
        lines.append(
            "policy static keeps what a plan preloads, and there is no plan: every expert is read each time it is used"
        )
    if run.pager.why:
        lines.append(f"reads by {run.pager.name}: {run.pager.why}")
    return lines


def slots_by_layer(run: BundleRun) -> dict[int, int]:
    """Slots of each layer that decoding reaches."""
    return {layer.layer: count for layer, count in zip(run.layers, run.cache.slots, strict=True) if not layer.is_mtp}


def _slots(run: BundleRun) -> str:
    slots = slots_by_layer(run)
    most = [layer.n_expert for layer in run.layers if not layer.is_mtp]
    total, counts = sum(most), list(slots.values())
    share = f"{sum(counts)} of {total} experts ({100 * sum(counts) / total:.0f} %)"
    of = f"{max(most)}" if min(most) == max(most) else f"{min(most)} to {max(most)}"
    spread = f"{min(counts)}/{median_low(counts)}/{max(counts)} of {of}"
    return f"{len(slots)} layers, slots per layer (min/median/max) {spread}: {share} in {format_bytes(run.memory.slots)}"


def _memory(running: Running, run: BundleRun) -> str:
    m = run.memory
    parts = {
        "process": m.process,
        "dense": m.dense,
        "KV": m.kv,
        "compute": m.compute,
        "one call": m.call,
        "slots": m.slots,
        "margin": MARGIN_BYTES,
    }
    total = " + ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    return f"memory {format_bytes(m.total)} ({describe_promise(running)}) = {total}"
