"""Every error that a command may end with, one class a cause, each with its exit code."""

from __future__ import annotations


class BelError(Exception):
    """Base of all errors that reach a user as a message without a traceback.

    The message is composed of the cause and of what is known about the place: `path` (file), `tensor`,
    `offset_bytes` (absolute, in the file), `found`, `expected` and `hint` (the next step).  The same values
    stay available as attributes.
    """

    exit_code = 1

    def __init__(
        self,
        cause: str,
        *,
        path: str | None = None,
        tensor: str | None = None,
        offset_bytes: int | None = None,
        found: object = None,
        expected: object = None,
        hint: str | None = None,
    ) -> None:
        self.cause = cause
        self.path = path
        self.tensor = tensor
        self.offset_bytes = offset_bytes
        self.found = found
        self.expected = expected
        self.hint = hint
        super().__init__(self._message())

    def _message(self) -> str:
        place = [printable(self.path)] if self.path else []
        if self.tensor is not None:
            place.append(f"tensor {printable(self.tensor)}")
        text = ": ".join([*place, self.cause])
        if self.offset_bytes is not None:
            text += f" (at byte {self.offset_bytes})"
        facts = []
        if self.found is not None:
            facts.append(f"found {printable(str(self.found))}")
        if self.expected is not None:
            facts.append(f"expected {printable(str(self.expected))}")
        if facts:
            text += "; " + ", ".join(facts)
        if self.hint:
            text += f". {self.hint}"
        return text


class UsageError(BelError):
    """The command line asks for something that cannot be done."""

    exit_code = 2


class BadInputError(BelError):
    """A source file is not what it claims to be, or is of a kind that is not supported."""

    exit_code = 3


class DamagedBundleError(BelError):
    """A bundle's bytes are not those that were written."""

    exit_code = 4


class MachineError(BelError):
    """The machine refused: no space, no permission, no memory, no descriptors, a read or write error."""

    exit_code = 5


class InterruptedRun(BelError):  # noqa: N818 - not an error of ours: the user or the system asked us to stop
    """Ctrl-C or a termination signal arrived."""

    exit_code = 130


def printable(text: str) -> str:
    """`printable_line`, cut at 300 characters: for names and texts that came from a file."""
    shown = printable_line(text)
    return shown if len(shown) <= 300 else shown[:297] + "..."


def printable_line(text: str) -> str:
    """`text` for a terminal, on one line: control characters and undecodable bytes are escaped.

    Names in a file are arbitrary bytes; printed raw they could move the cursor or forge a line of output.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)
