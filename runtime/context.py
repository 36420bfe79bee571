"""A running sequence: tokens in, logits out, and an observer that sees any tensor on the way.

Facts about the library's behaviour: src/llama-context.cpp and ggml/src/ggml-backend.cpp of llama.cpp build 11549.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from bel.formats.errors import BadInputError, MachineError, UsageError
from bel.formats.signals import signals_deferred
from bel.formats.threads import check_startable
from bel.runtime.llama_abi import CONTEXT_LAYOUTS, HOW_TO_INSTALL
from bel.runtime.tensor import Tensor

if TYPE_CHECKING:
    from bel.runtime.engine import Model

_FEWER_THREADS = "Give fewer --threads, or raise the limit of processes (ulimit -u, or that of the container)"


class ContextFull(UsageError):  # noqa: N818 - what it is, not that it is an error
    """A sequence needs more positions than its context has."""


class Observer(Protocol):
    """Sees the nodes of every graph in the order of computation.  An exception ends the decode, which raises it."""

    def ask(self, tensor: Tensor) -> bool:
        """Whether the node is to be seen once it is computed.  Each yes makes llama.cpp stop and wait there."""

    def seen(self, tensor: Tensor) -> None:
        """The node is computed."""


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """Sizes of a context in tokens: positions, most tokens of a decode, most tokens of one graph; and the threads, of which
    graphs of one token may have fewer (`n_threads_single`).

    `n_outputs`: of how many tokens of a decode the logits may be asked for, None for all.  llama.cpp makes room for them
    beforehand: with 512 tokens a graph and a vocabulary of 150,000 that is 300 MB.  `moe_cache_bytes` of a device's memory are
    llama.cpp's own cache of the experts that it keeps in host memory; 0 for none.
    """

    n_ctx: int
    n_batch: int = 512
    n_ubatch: int = 512
    n_threads: int | None = None
    n_outputs: int | None = None
    moe_cache_bytes: int = 0
    n_threads_single: int | None = None


@dataclass(frozen=True, slots=True)
class NativeCallback:
    """A compiled `ggml_backend_sched_eval_callback` by its address, and what it is called with.

    Whoever made it keeps both alive as long as the context, and raises behind a decode what went wrong within.  `leave` is
    called behind every decode, also one that failed, before anything else is asked of llama.cpp.
    """

    address: int
    user_data: int
    leave: Callable[[], None] = lambda: None


class Context:
    """One sequence in a model.  `n_past` positions are in use.  `after` is called behind every decode that succeeded.

    Close it, or use it in a `with`, before its model.
    """

    def __init__(
        self,
        model: Model,
        pointer: Any,
        options: ContextOptions,
        observer: Observer | NativeCallback | None,
        after: Callable[[], None] | None = None,
    ) -> None:
        library = model.engine.library
        ffi, lib = library.ffi, library.lib
        self.model, self.options, self.n_past = model, options, 0
        self._n_logits = 0
        self._error: BaseException | None = None
        self._after = after
        self._leave = observer.leave if isinstance(observer, NativeCallback) else lambda: None
        # The library keeps the address of the callback only: without this reference it would be freed under it.
        self._callback = self._made_callback(observer)
        params = ffi.new("struct any_params *", lib.llama_context_default_params())
        fields = ffi.cast(f"struct {library.context_params} *", params)
        fields.n_ctx, fields.n_batch, fields.n_ubatch = options.n_ctx, options.n_batch, options.n_ubatch
        fields.n_threads_batch = options.n_threads or len(os.sched_getaffinity(0))
        fields.n_threads = options.n_threads_single or fields.n_threads_batch
        fields.n_outputs_max = options.n_outputs or 0  # 0: as many as tokens
        fields.cb_eval = self._callback
        if isinstance(observer, NativeCallback):
            fields.cb_eval_user_data = ffi.cast("void *", observer.user_data)
        if options.moe_cache_bytes:
            if library.context_params != CONTEXT_LAYOUTS[0]:
                raise MachineError(
                    "this llama.cpp has no expert cache of its own",
                    path=str(library.path),
                    found=library.build,
                    hint=HOW_TO_INSTALL,
                )
            fields.moe_cache_size = options.moe_cache_bytes
        fields.swa_full = False  # as llama.cpp's own programs: a sliding window keeps its window, not the whole context
        check_startable(max(fields.n_threads_batch, fields.n_threads) - 1, hint=_FEWER_THREADS)
        with signals_deferred():
            self._pointer = lib.llama_init_from_model(pointer, params[0])
        if self._pointer == ffi.NULL:
            what = f"llama.cpp cannot make a context of {options.n_ctx} positions (a smaller --context needs less memory)"
            raise model.engine.failure(MachineError, what, path=str(model.path))
        # It rounds the sizes; a batch above its own limit would abort the process.
        self.n_batch: int = min(options.n_batch, lib.llama_n_batch(self._pointer))
        self.n_ubatch: int = lib.llama_n_ubatch(self._pointer)
        self.n_ctx: int = min(options.n_ctx, lib.llama_n_ctx(self._pointer))
        self._memory = lib.llama_get_memory(self._pointer)
        self._c_tokens, self._tokens = _buffer(ffi, "int32_t", np.int32, self.n_batch)
        self._c_positions, self._positions = _buffer(ffi, "int32_t", np.int32, self.n_batch)
        self._c_wanted, self._wanted = _buffer(ffi, "int8_t", np.int8, self.n_batch)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Free the context.  A second call does nothing."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            self.model.engine.library.lib.llama_free(pointer)

    @property
    def n_prompt(self) -> int:
        """Tokens of the longest prompt that is one graph."""
        return min(self.n_ubatch, self.n_batch, self.n_ctx)

    def clear(self) -> None:
        """Forget the sequence."""
        self.n_past = self._n_logits = 0
        if self._memory != self.model.engine.library.ffi.NULL:
            self.model.engine.library.lib.llama_memory_clear(self._memory, True)

    def decode(self, tokens: Sequence[int] | npt.NDArray[np.integer[Any]], *, all_logits: bool = False) -> None:
        """Run tokens (n,) through the model, behind those that are in the context already.

        `all_logits` asks for the logits of each token and not of the last alone: without it the last layer computes
        the last token only.  Raises ContextFull where they do not fit, UsageError for a token that the vocabulary does not
        have, MachineError where the library fails, DamagedBundleError (BadInputError for a GGUF) where a file of the model was
        changed, and what the observer raised; after that the context is empty.
        """
        library = self.model.engine.library
        count = self._fill(np.asarray(tokens, np.int64), all_logits)
        batch = library.ffi.new("struct llama_batch *")
        batch.n_tokens, batch.token, batch.pos, batch.logits = count, self._c_tokens, self._c_positions, self._c_wanted
        self._error, self._n_logits = None, 0
        try:
            with signals_deferred():
                status = library.lib.llama_decode(self._pointer, batch[0])
                self._leave()
            if self._error is None:
                self.model.watch.check()  # behind the computing: what it read was what had been checked
        except BaseException:  # of a handler: llama.cpp has the tokens already
            self.clear()
            raise
        if self._error is not None or status != 0:
            self._fail(status, count)
        if self._after is not None:
            try:
                self._after()
            except BaseException:
                self.clear()
                raise
        self.n_past += count
        self._n_logits = count if all_logits else 1

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """Logits of the last decode, shape (rows asked for, n_vocab): a view that the next decode overwrites.

        Raises BadInputError where the model makes none.
        """
        library = self.model.engine.library
        pointer = library.lib.llama_get_logits(self._pointer) if self._n_logits else library.ffi.NULL
        if pointer == library.ffi.NULL:
            raise BadInputError("the model gives no logits: it is not one that generates text", path=str(self.model.path))
        size = self._n_logits * self.model.n_vocab
        values = np.frombuffer(library.ffi.buffer(pointer, 4 * size), np.float32, size)
        return values.reshape(self._n_logits, self.model.n_vocab)

    def _fill(self, tokens: npt.NDArray[np.int64], all_logits: bool) -> int:
        count = len(tokens)
        if not 1 <= count <= self.n_batch:
            raise ValueError(f"{count} tokens in a batch of at most {self.n_batch}")
        if all_logits and count > (self.options.n_outputs or count):
            raise ValueError(f"logits of {count} tokens from a context that was made for {self.options.n_outputs}")
        if self.n_past + count > self.n_ctx:
            raise ContextFull(
                "the context is full",
                found=f"{self.n_past} positions used, {count} more wanted",
                expected=f"at most {self.n_ctx} in all",
            )
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.model.n_vocab:
            bad = tokens[(tokens < 0) | (tokens >= self.model.n_vocab)][0]
            raise UsageError("no such token", found=int(bad), expected=f"0 to {self.model.n_vocab - 1}")
        self._tokens[:count] = tokens
        self._positions[:count] = np.arange(self.n_past, self.n_past + count)
        self._wanted[:count] = all_logits
        self._wanted[count - 1] = 1
        return count

    def _fail(self, status: int, count: int) -> None:
        """Raise what a decode ended with.  The sequence is dropped: some of its layers may hold the tokens already."""
        error, used = self._error, self.n_past
        self._error = None
        self.clear()
        if error is not None:
            raise error
        if status == 1:  # no slot in the memory
            raise ContextFull(
                "the context is full: llama.cpp finds no place", found=f"{used} used, {count} more", expected=f"{self.n_ctx}"
            )
        raise self.model.engine.failure(MachineError, f"llama.cpp failed to decode (status {status})")

    def _made_callback(self, observer: Observer | NativeCallback | None) -> Any:
        ffi = self.model.engine.library.ffi
        if isinstance(observer, NativeCallback):
            return ffi.cast("eval_callback", observer.address)
        return ffi.callback("eval_callback", self._eval_callback(observer)) if observer else ffi.NULL

    def _eval_callback(self, observer: Observer) -> Callable[[Any, bool, Any], bool]:
        ffi, lib = self.model.engine.library.ffi, self.model.engine.library.lib
        ask, seen = observer.ask, observer.seen

        def on_node(pointer: Any, is_ask: bool, _user_data: Any) -> bool:
            # Nothing may leave this function: llama.cpp takes an exception for a no, and reports success.
            try:
                if self._error is None:
                    if is_ask:
                        return ask(Tensor(ffi, lib, pointer))
                    seen(Tensor(ffi, lib, pointer))
                    return True
            except BaseException as error:
                self._error = error
            # Stop at this node and leave the graph: what follows could read weights that the observer has not brought.
            return is_ask

        return on_node


def _buffer(ffi: Any, c_type: str, dtype: type[np.generic], count: int) -> tuple[Any, npt.NDArray[Any]]:
    """C memory for `count` numbers, and the same memory as an array."""
    memory = ffi.new(f"{c_type}[]", count)
    return memory, np.frombuffer(ffi.buffer(memory), dtype)
