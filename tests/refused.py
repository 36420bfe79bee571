"""Asking for a refusal: the exact class, and a message that names the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bel.formats.errors import BadInputError, BelError
from bel.formats.gguf_model import open_model


def refusal(call: Callable[[], object], kind: type[BelError] = BadInputError) -> BelError:
    """The error that `call` raises, which must be exactly of class `kind`."""
    with pytest.raises(BelError) as caught:
        call()
    assert type(caught.value) is kind, f"{type(caught.value).__name__}: {caught.value}"
    return caught.value


def bad_model(path: Path, culprit: Path | None = None) -> BelError:
    """The BadInputError with which the model at `path` is refused; `culprit` is the file that it must name."""
    error = refusal(lambda: open_model(path))
    named = str(culprit or path)
    assert error.path == named
    assert str(error).startswith(f"{named}: ")
    assert error.cause in str(error)
    assert error.exit_code == 3
    return error
