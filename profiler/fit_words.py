"""The answer of a fit in words: what fits, which policy suits it, and what to try next, with the numbers."""

from __future__ import annotations

import dataclasses
import math
import shlex

from bel.formats.errors import UsageError
from bel.formats.units import GIB, MIB, format_bytes
from bel.profiler.fit import Fit, Question, least_slots, memory_for, ram_for_the_rest, ram_in_use, slots_bytes, solve, spread
from bel.profiler.verdicts import percent
from bel.runtime.run_options import DEFAULT_POLICY

STATIC_SHARE, DOUBTFUL_SHARE = 0.20, 0.15
"""Share of resident experts: from the first on a static set is right, below the second it is not."""
TARGETS = (STATIC_SHARE, 0.5, 1.0)  # shares of the experts that advice aims at
SMALLEST_BITS = 2.0  # a weight; smaller quants lose too much to be worth advice
RUN_CACHE_TYPE = "f16"  # the only type that bel-run makes a cache of


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """How advice names a run.  `bundle`: its path, None where the model is none.  `limits_ram`: the question's RAM was given;
    else it is what the machine has, which bel-run finds out by itself.
    """

    bundle: str | None = None
    limits_ram: bool = False


def verdict(fit: Fit) -> str:
    """One or two sentences: what fits, where the rest is, and which policy suits that."""
    if not fit.fits:
        return _misfit(fit)
    place = "VRAM" if fit.is_gpu else "RAM"
    if fit.resident_fraction == 1:
        return (
            f"Everything fits in {place}: all {sum(fit.slots)} experts are resident, and stock llama.cpp with "
            f"{'all layers on the GPU' if fit.is_gpu else 'mmap'} runs it as well."
        )
    share = percent(fit.resident_fraction)
    return (
        f"{slot_words(fit)} of {expert_words(fit)} experts in each layer fit in {place}: {share} of the experts are resident; "
        f"{_rest(fit)}. {_policy(fit)}"
    )


def slot_words(fit: Fit) -> str:
    """Slots of a layer as '8', or '8 to 16' where layers differ."""
    return _range(fit.slots)


def expert_words(fit: Fit) -> str:
    """Experts of a layer, in the same way."""
    return _range(tuple(x.n_expert for x in fit.model.reached))


def _range(numbers: tuple[int, ...]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _misfit(fit: Fit) -> str:
    place, total = ("VRAM", fit.question.vram_bytes) if fit.is_gpu else ("RAM", fit.question.ram_bytes)
    left = (
        f"leave {format_bytes(fit.room_bytes)} for slots"
        if fit.room_bytes > 0
        else f"are {format_bytes(-fit.room_bytes)} more than there is"
    )
    text = (
        f"Does not fit: dense weights, caches, compute buffer{_stage(fit)} margin take {format_bytes(fit.fixed_bytes)} of "
        f"{format_bytes(total)} of {place} and {left}. The floor, top-k slots a layer, is {format_bytes(fit.floor_bytes)}."
    )
    if fit.room_bytes > 0:
        text += " Below one token cycle an LRU hits nothing: each token evicts what the next one needs."
    return text


def _stage(fit: Fit) -> str:
    if fit.call_bytes:
        return ", the experts of one call and"
    return ", a layer's stage and" if fit.stage_bytes else " and"


def _rest(fit: Fit) -> str:
    ram, disk = format_bytes(fit.in_ram_bytes), format_bytes(fit.on_disk_bytes)
    if not fit.on_disk_bytes:
        return f"the other {ram} of experts fit in RAM"
    return f"{ram} of the others fit in RAM and {disk} stay on disk" if fit.in_ram_bytes else f"the other {disk} stay on disk"


def _policy(fit: Fit) -> str:
    share = fit.resident_fraction
    if share >= STATIC_SHARE:
        return _static_words(fit)
    if share >= DOUBTFUL_SHARE:
        return (
            f"Between {percent(DOUBTFUL_SHARE, 0)} and {percent(STATIC_SHARE, 0)} a static set is doubtful: compare it with "
            f"{DEFAULT_POLICY} (bel-run's default) and LRU."
        )
    floor = slots_bytes(fit.model.reached, [x.top_k for x in fit.model.reached])
    cycle = (
        " This is the floor, one token cycle: only experts that two tokens in a row share are hit."
        if (fit.slots_bytes == floor)
        else ""
    )
    return (
        f"Below {percent(DOUBTFUL_SHARE, 0)} a static set is no longer the right policy: use one that adapts, {DEFAULT_POLICY} "
        f"(bel-run's default) or LRU (--policy lru).{cycle}"
    )


def _static_words(fit: Fit) -> str:
    if not fit.is_gpu:
        return "A static set from a profile of the same work is a sound choice at this size."
    return (
        "bel-run --gpu tries the ways that can be and takes the fastest, or an exact one that is nearly as fast. A static set "
        "from a profile of the same work needs no transfers, but was the slowest of the pool's ways where measured."
    )


def advice(fit: Fit, run: Run | None = None) -> list[str]:
    """What to try next, most useful first; nothing that would change nothing."""
    found: list[str | None] = []
    free = fit
    if fit.question.slots is not None or fit.question.slots_bytes is not None:
        free = solve(fit.model, _free(fit.question))
        if sum(free.slots) > sum(fit.slots):
            found.append(f"More fits than was asked for: {slot_words(free)} slots in each layer.")
    if not free.fits or free.resident_fraction < 1:
        changes = (_smaller_cache(free), _shorter_context(free), _without_gpu(free), _more_memory(free))
        found += [words and _unbound(words, fit.question) for words in changes]
        found += [_smaller_quant(free), _more_ram(fit)]
    if fit.fits and fit.resident_fraction < 1:
        found.append(f"See what each policy hits at this size: bel-profile simulate TRACE --slots {max(fit.slots)}")
        found.append(_run_line(fit, run or Run()))
    found.append(_other_cache(fit))
    return [words for words in found if words]


def _run_line(fit: Fit, run: Run) -> str | None:
    """The command that runs just this: none without a GPU, whose --ram says it, and for a cache that bel-run does not make."""
    if not fit.is_gpu or fit.question.cache_type != RUN_CACHE_TYPE:
        return None
    bundle = "BUNDLE" if run.bundle is None else shlex.quote(run.bundle)
    line = f"bel-run {bundle} --engine FOLDER --gpu --slots {max(fit.slots)} --context {fit.question.context}"
    # bel-run keeps all experts in host memory where it may: without a limit it would take more than there is said to be.
    if run.limits_ram and ram_in_use(fit) < fit.model.dense_bytes + fit.experts_bytes:
        line += f" --ram {ram_in_use(fit) // MIB}M"
    return f"Run it so: {line}"


def _other_cache(fit: Fit) -> str | None:
    if fit.question.cache_type == RUN_CACHE_TYPE:
        return None
    return f"--kv {fit.question.cache_type} is for llama.cpp's own programs: bel-run's cache is {RUN_CACHE_TYPE}."


def _gain(fit: Fit, change: Question) -> str | None:
    """What a changed question gives, or None where it gives no more."""
    better = solve(fit.model, change)
    if not better.fits or sum(better.slots) <= sum(fit.slots):
        return None
    return f"{slot_words(better)} slots in each layer instead of {slot_words(fit)}"


def _unbound(words: str, question: Question) -> str:
    """Advice that holds for `_free(question)`, with the options that must go."""
    bound = (("--slots", question.slots), ("--slots-bytes", question.slots_bytes))
    given = " and ".join(option for option, value in bound if value is not None)
    return f"{words.removesuffix('.')} (without {given})." if given else words


def _free(question: Question) -> Question:
    return dataclasses.replace(question, slots=None, slots_bytes=None)


def _smaller_cache(fit: Fit) -> str | None:
    if fit.question.cache_type not in ("f16", "f32", "bf16"):
        return None
    change = dataclasses.replace(fit.question, cache_type="q8_0")
    try:
        gain = _gain(fit, change)
    except UsageError:  # llama.cpp refuses the type for this model's heads
        return None
    where = f"in llama.cpp's own programs (bel-run's cache is {RUN_CACHE_TYPE})"
    return f"--kv q8_0 nearly halves the KV cache, {where}: {gain}." if gain else None


def _shorter_context(fit: Fit) -> str | None:
    if fit.question.context < 2048:
        return None
    half = fit.question.context // 2
    gain = _gain(fit, dataclasses.replace(fit.question, context=half))
    return f"--context {half}: {gain}." if gain else None


def _without_gpu(fit: Fit) -> str | None:
    if fit.fits or not fit.is_gpu:
        return None
    other = solve(fit.model, dataclasses.replace(fit.question, vram_bytes=0))
    return f"Without the GPU (--vram 0) it fits in RAM, with {slot_words(other)} slots in each layer." if other.fits else None


def _target(fit: Fit) -> float:
    return next(share for share in TARGETS if share > fit.resident_fraction)


def _more_memory(fit: Fit) -> str:
    option = "--vram" if fit.is_gpu else "--ram"
    layers = fit.model.reached
    aims = [("the floor", spread(layers, 0))] if not fit.fits else []
    shares = [(_share_words(share), _share_slots(fit, share)) for share in TARGETS if share >= _target(fit)]
    aims += [(aim, slots) for aim, slots in shares if slots_bytes(layers, slots) > fit.floor_bytes]
    words = [f"{size_option(memory_for(fit, slots))} for {aim}" for aim, slots in aims]
    return f"More memory: {option} {', '.join(words)}."


def _share_slots(fit: Fit, share: float) -> tuple[int, ...]:
    """The fewest slots in every layer that are this share of the experts."""
    layers = fit.model.reached
    return spread(layers, least_slots(layers, share))


def size_option(count: int) -> str:
    """`count` bytes as an option takes them, rounded up to a tenth of a GiB or a whole MiB: '17.1G', '600M'."""
    if count < GIB:
        return f"{-(-count // MIB)}M"
    tenths = -(-10 * count // GIB)
    return f"{tenths // 10}.{tenths % 10}G"


def _share_words(share: float) -> str:
    return "all experts" if share == 1 else f"{percent(share, 0)} of the experts"


def _smaller_quant(fit: Fit) -> str | None:
    if fit.room_bytes <= 0:
        return None
    bits = max(layer.bits for layer in fit.model.reached)
    target = _target(fit)
    goal = math.floor(10 * bits * fit.room_bytes / slots_bytes(fit.model.reached, _share_slots(fit, target))) / 10
    if not SMALLEST_BITS <= goal < bits:
        return None
    aim = _share_words(target)
    return f"A smaller quant: with {goal:.1f} bits a weight of the experts (now {bits:.1f}), {aim} would be resident."


def _more_ram(fit: Fit) -> str | None:
    if not fit.is_gpu or not fit.on_disk_bytes or not fit.fits:
        return None
    return (
        f"More RAM: --ram {size_option(ram_for_the_rest(fit))} holds all experts without a slot, and nothing is read from disk."
    )
