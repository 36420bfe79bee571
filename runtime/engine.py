"""llama.cpp behind a small Python surface: load a model, run tokens through it, and look at any tensor on the way.

The C interface is declared in `llama_abi.py`; this module, `context.py` and `tensor.py` are its only callers.
"""

from __future__ import annotations

import atexit
import errno
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from bel.formats.errors import BadInputError, BelError, MachineError, printable
from bel.formats.signals import signals_deferred
from bel.runtime.black_box import black_box
from bel.runtime.context import Context, ContextOptions, NativeCallback, Observer
from bel.runtime.file_watch import FileWatch, watch_gguf
from bel.runtime.llama_library import LlamaLibrary, open_library

LOG_LINES = 100  # kept for a message after a failure; loading a model says about this much
_LOG_DEBUG, _LOG_WARN, _LOG_ERROR = 1, 3, 4  # enum ggml_log_level
_LOADING = "load_tensors: loading model tensors"  # llama-model.cpp, before it maps the files
_REFUSALS = (*map(os.strerror, (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EAGAIN)), "unable to allocate")
"""In a message on a load that failed: the machine's words (llama-mmap.cpp), and those on a buffer (llama-model.cpp)."""
_LAZY_ON = 2  # enum llama_lazy_mode
_VOCAB_NONE = 0  # enum llama_vocab_type
LOAD_MODES = {"auto": -1, "none": 0, "mmap": 1, "mlock": 2, "mmap_mlock": 3, "direct_io": 4}
"""enum llama_load_mode (include/llama.h)."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model is loaded.

    `use_extra_bufts` lets llama.cpp keep repacked copies of weights beside the mapped file: other kernels and much more
    memory, some more speed.  `gpu_layers` of -1 puts every layer on a GPU where the library has one.
    `reads_tables_lazily`: tables of which a token uses a few rows (per-layer embeddings) are read row by row.  `overrides`
    replace values of the metadata.  `buffer_types`: pairs of a regular expression and a `ggml_backend_buffer_type_t`: weights
    whose names match are put there, the first match counts.  `device`: the address of the `ggml_backend_dev_t` that layers
    go to, None for all devices.
    """

    load_mode: str = "mmap"
    use_extra_bufts: bool = False
    gpu_layers: int = 0
    reads_tables_lazily: bool = False
    overrides: Mapping[str, int | float | bool | str] = field(default_factory=dict)
    buffer_types: Sequence[tuple[str, Any]] = ()
    device: Any = None


class Engine:
    """An opened llama.cpp.  `name` and `build` tell which; `log` has the last lines that it wrote."""

    def __init__(self, library: LlamaLibrary) -> None:
        self.library = library
        self.name, self.build = library.engine, library.build
        self.log: deque[tuple[int, str]] = deque(maxlen=LOG_LINES)
        self.log_fd: int | None = None
        """Where warnings and errors are also written at once, for a process that may die before it can report them."""
        self.on_loading: Callable[[], None] | None = None
        """Called when a load has read all headers and no tensor yet."""
        self._line = ""
        self._black_box = black_box()
        if self._black_box is not None:  # its reader shows the words of an assertion; the library itself would print them
            self._abort_callback = library.ffi.callback("abort_text_callback", self._on_abort)
            library.lib.ggml_set_abort_callback(self._abort_callback)
        self._log_callback = library.ffi.callback("log_callback", self._on_log)
        library.lib.llama_log_set(self._log_callback, library.ffi.NULL)
        # Destructors of the library log after Python is gone: without this line they would call into a dead interpreter.
        atexit.register(library.lib.llama_log_set, library.ffi.NULL, library.ffi.NULL)
        library.lib.llama_backend_init()

    @staticmethod
    def open(engine: str = "auto") -> Engine:
        """The engine, opened and checked once per process.  Raises MachineError where it is missing or another version."""
        library = open_library(engine)
        # One for each file, by whatever names it is asked for: a second one would take the log from the first.
        path = library.path.resolve()
        if path not in _OPENED:
            _OPENED[path] = Engine(library)
        return _OPENED[path]

    def load(self, path: Path, options: ModelOptions | None = None) -> Model:
        """Load a GGUF, or the split set that `path` belongs to.

        Raises BadInputError where a file is no sound GGUF, before the library sees it, and where the library refuses it.
        """
        watch, source = watch_gguf(path)
        try:
            return self.load_files([header.path for header in source.files], options, watch=watch, owns_watch=True)
        except BaseException:
            watch.close()
            raise

    def load_files(
        self, paths: Sequence[Path], options: ModelOptions | None = None, *, watch: FileWatch, owns_watch: bool = False
    ) -> Model:
        """Load a model from files that were scanned already, in the order of their shards.

        `watch` has all files that the model is made of since before they were scanned; with `owns_watch` the model closes it.
        Raises what the watch raises where one was changed.
        """
        ffi, lib = self.library.ffi, self.library.lib
        options = options or ModelOptions()
        params = ffi.new("struct any_params *", lib.llama_model_default_params())
        fields = ffi.cast("struct llama_model_params *", params)
        fields.load_mode = LOAD_MODES[options.load_mode]
        fields.use_extra_bufts = options.use_extra_bufts
        if options.reads_tables_lazily:
            fields.lazy_mode = _LAZY_ON
        fields.n_gpu_layers = options.gpu_layers
        if options.device is not None:
            devices = ffi.new("void *[]", [ffi.cast("void *", int(options.device)), ffi.NULL])
            fields.devices = devices
        overrides = _overrides(ffi, options.overrides)
        fields.kv_overrides = overrides
        patterns = [ffi.new("char[]", pattern.encode()) for pattern, _ in options.buffer_types]
        if patterns:  # struct llama_model_tensor_buft_override: pattern and type, ended by an empty pair
            pairs = [x for text, (_, kind) in zip(patterns, options.buffer_types, strict=True) for x in (text, kind)]
            placed = ffi.new("void *[]", [*pairs, ffi.NULL, ffi.NULL])
            fields.tensor_buft_overrides = placed
        names = [ffi.new("char[]", os.fsencode(path)) for path in paths]
        if self._black_box is not None:
            self._black_box.keep_files(watch.states, is_bundle=watch.is_bundle)
        with signals_deferred():
            pointer = lib.llama_model_load_from_splits(ffi.new("const char *[]", names), len(names), params[0])
        try:
            watch.check_names()
        except BaseException:
            if pointer != ffi.NULL:
                lib.llama_model_free(pointer)
            raise
        if pointer == ffi.NULL:
            if self._is_refused():
                raise self.failure(MachineError, "the machine refuses what this model needs", path=str(paths[0]))
            raise self.failure(BadInputError, "llama.cpp does not load this model", path=str(paths[0]))
        return Model(self, pointer, paths[0], watch, owns_watch=owns_watch)

    def failure(self, kind: type[BelError], cause: str, *, path: str | None = None) -> BelError:
        """An error that ends with what the library said last: its warnings and errors where there are any."""
        said = "; ".join(self._last_words())
        return kind(f"{cause}: {printable(said)}" if said else cause, path=path)

    def _is_refused(self) -> bool:
        """Whether the library failed for what the machine did not give: then nothing is said about the file."""
        return any(words in text for text in self._last_words() for words in _REFUSALS)

    def _last_words(self) -> list[str]:
        lines = [text for level, text in self.log if level in (_LOG_WARN, _LOG_ERROR)] or [text for _, text in self.log]
        return lines[-3:]

    def _on_log(self, level: int, text: Any, _user_data: Any) -> None:
        if level == _LOG_DEBUG:  # hundreds of lines for each context, which would push out the few that say something
            return
        piece = self.library.ffi.string(text)
        if level in (_LOG_WARN, _LOG_ERROR):
            if self.log_fd is not None:
                os.write(self.log_fd, piece)
            if self._black_box is not None:
                self._black_box.say(piece)
        *lines, self._line = (self._line + piece.decode("utf-8", "replace")).split("\n")
        self.log.extend((level, line) for line in lines if line.strip())
        if self.on_loading is not None and any(line.startswith(_LOADING) for line in lines):
            self.on_loading()

    def _on_abort(self, text: Any) -> None:
        assert self._black_box is not None, "it is only called for one"
        self._black_box.say(self.library.ffi.string(text) + b"\n")


_OPENED: dict[Path, Engine] = {}


class Model:
    """A loaded model.  `watch` has the files that it is read from.  Close it, or use it in a `with`, after its contexts."""

    def __init__(self, engine: Engine, pointer: Any, path: Path, watch: FileWatch, *, owns_watch: bool = False) -> None:
        lib = engine.library.lib
        self.engine, self.path, self.watch, self._pointer = engine, path, watch, pointer
        self._owns_watch = owns_watch
        self._vocab = lib.llama_model_get_vocab(pointer)
        self.n_layer: int = lib.llama_model_n_layer(pointer)
        self.n_ctx_train: int = lib.llama_model_n_ctx_train(pointer)
        self.n_vocab: int = lib.llama_vocab_n_tokens(self._vocab)
        self.has_tokenizer: bool = lib.llama_vocab_type(self._vocab) != _VOCAB_NONE

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Free the model.  A second call does nothing."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            self.engine.library.lib.llama_model_free(pointer)
        if self._owns_watch:
            self.watch.close()

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> npt.NDArray[np.int32]:
        """Token ids (n,) of a text.  `parse_special`: names of special tokens in the text become those tokens.

        Raises BadInputError where the model has no tokenizer.
        """
        self._need_tokenizer()
        ffi, lib = self.engine.library.ffi, self.engine.library.lib
        data = text.encode("utf-8", "replace")  # a lone surrogate would end the process inside the library
        room = len(data) + 8  # a token is at least a byte, and there are a few special ones
        while True:
            tokens = ffi.new("int32_t[]", room)
            count = lib.llama_tokenize(self._vocab, data, len(data), tokens, room, add_special, parse_special)
            if count >= 0:
                return np.frombuffer(ffi.buffer(tokens), np.int32, count).copy()
            room = -count

    def detokenize(self, tokens: Sequence[int] | npt.NDArray[np.int32], *, special: bool = False) -> bytes:
        """The text of tokens as bytes: a token may end inside a UTF-8 character.  `special` shows special tokens too."""
        self._need_tokenizer()
        ffi, lib = self.engine.library.ffi, self.engine.library.lib
        ids = ffi.new("int32_t[]", [int(t) for t in tokens])
        room = 16 * len(ids) + 16
        while True:
            text = ffi.new("char[]", room)
            count = lib.llama_detokenize(self._vocab, ids, len(ids), text, room, False, special)
            if count >= 0:
                return bytes(ffi.buffer(text, count))
            room = -count

    def is_end(self, token: int) -> bool:
        """Whether a token ends a generation (end of text, end of turn)."""
        return bool(self.engine.library.lib.llama_vocab_is_eog(self._vocab, token))

    def chat_prompt(self, messages: Sequence[tuple[str, str]]) -> str:
        """Messages (role, content) in the model's own chat template, up to where the answer begins.

        Raises BadInputError where the model has no template, or one that llama.cpp does not know.
        """
        ffi, lib = self.engine.library.ffi, self.engine.library.lib
        template = lib.llama_model_chat_template(self._pointer, ffi.NULL)
        if template == ffi.NULL:
            raise BadInputError("the model has no chat template", path=str(self.path))
        kept = [(ffi.new("char[]", role.encode()), ffi.new("char[]", text.encode())) for role, text in messages]
        chat = ffi.new("struct llama_chat_message[]", kept)
        room = 2 * sum(len(text) for _, text in kept) + 1024
        while True:
            text = ffi.new("char[]", room)
            count = lib.llama_chat_apply_template(template, chat, len(kept), True, text, room)
            if count < 0:
                raise BadInputError("llama.cpp does not know the model's chat template", path=str(self.path))
            if count <= room:
                return bytes(ffi.buffer(text, count)).decode("utf-8", "replace")
            room = count

    def context(
        self,
        options: ContextOptions,
        observer: Observer | NativeCallback | None = None,
        after: Callable[[], None] | None = None,
    ) -> Context:
        """A context that runs tokens through the model; `after` is called behind each decode that succeeded.

        Raises MachineError where there is no memory for it.
        """
        return Context(self, self._pointer, options, observer, after)

    def _need_tokenizer(self) -> None:
        if not self.has_tokenizer:
            raise BadInputError("the model has no tokenizer, so it cannot read text", path=str(self.path))


def _overrides(ffi: Any, values: Mapping[str, int | float | bool | str]) -> Any:
    """A `llama_model_kv_override` array, ended by an entry with an empty key; NULL for none."""
    if not values:
        return ffi.NULL
    rows = ffi.new("struct llama_model_kv_override[]", len(values) + 1)
    for row, (key, value) in zip(rows, values.items(), strict=False):
        row.key = key.encode()
        if isinstance(value, bool):
            row.tag, row.val_bool = 2, value
        elif isinstance(value, int):
            row.tag, row.val_i64 = 0, value
        elif isinstance(value, float):
            row.tag, row.val_f64 = 1, value
        else:
            row.tag, row.val_str = 3, value.encode()
    return rows
