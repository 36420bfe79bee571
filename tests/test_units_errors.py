"""Sizes on the command line, and the message of an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bel.formats import errors
from bel.formats.errors import BadInputError, BelError, UsageError, printable
from bel.formats.units import align_up, format_bytes, parse_bytes
from refused import refusal


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("700", 700),
        ("12b", 12),
        ("12k", 12 * 2**10),
        ("12K", 12 * 2**10),
        ("12KiB", 12 * 2**10),
        ("12kb", 12_000),
        ("700M", 700 * 2**20),
        ("1.5G", 3 * 2**29),
        ("45GB", 45 * 10**9),
        ("45 GiB", 45 * 2**30),
        (" 2T ", 2**41),
        ("2TB", 2 * 10**12),
        ("0.5k", 512),
        ("9007199254740993", 2**53 + 1),  # not by way of a float
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "G", "-1", "+1", "1e9", "1,5G", "1.G", ".5G", "12X", "12GG", "0x10", "١٢", "nan", "inf", "1 2"]
)
def test_no_sizes(text: str) -> None:
    error = refusal(lambda: parse_bytes(text), UsageError)
    assert error.cause == f"'{text}' is not a size"
    assert error.hint == "Write 12G (GiB), 12GB (10^9 bytes), 700M or a number of bytes"
    assert error.exit_code == 2


@pytest.mark.parametrize("text", ["12ib", "12kibib", "12bib", "12kibb"])
def test_units_that_do_not_exist(text: str) -> None:
    refusal(lambda: parse_bytes(text), UsageError)


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 400 + ".5", "9" * 308 + ".5T"])
def test_numbers_beyond_all_sizes(text: str) -> None:
    refusal(lambda: parse_bytes(text), UsageError)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (2**20, "1.00 MiB"), (3 * 2**29, "1.50 GiB"), (2**41, "2.00 TiB")],
)
def test_shown_sizes(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(0, 2**64), st.integers(1, 2**32))
def test_align_up(count: int, alignment: int) -> None:
    up = align_up(count, alignment)
    assert up % alignment == 0
    assert count <= up < count + alignment


def test_exit_codes_are_distinct() -> None:
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, BelError)]
    codes = {k.__name__: k.exit_code for k in kinds}
    assert codes == {
        "BelError": 1,
        "UsageError": 2,
        "BadInputError": 3,
        "DamagedBundleError": 4,
        "MachineError": 5,
        "InterruptedRun": 130,
    }


def test_a_message_of_all_parts() -> None:
    error = BadInputError("it is bad", path="p", tensor="t", offset_bytes=7, found=0, expected=[1], hint="Mend it")
    assert str(error) == "p: tensor t: it is bad (at byte 7); found 0, expected [1]. Mend it"
    assert (error.path, error.tensor, error.offset_bytes, error.found, error.expected, error.hint) == (
        "p",
        "t",
        7,
        0,
        [1],
        "Mend it",
    )


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (BadInputError("it is bad"), "it is bad"),
        (BadInputError("it is bad", tensor=""), "tensor : it is bad"),
        (BadInputError("it is bad", offset_bytes=0), "it is bad (at byte 0)"),
        (BadInputError("it is bad", expected="x"), "it is bad; expected x"),
        (BadInputError("it is bad", hint="Mend it"), "it is bad. Mend it"),
    ],
)
def test_a_message_of_some_parts(error: BelError, text: str) -> None:
    assert str(error) == text


def test_names_cannot_move_the_cursor() -> None:
    error = BadInputError("bad", path="a\x1b[2J\nb", tensor="\udcff\u202e\r", found="\x07")
    assert str(error) == "a\\x1b[2J\\nb: tensor \\udcff\\u202e\\r: bad; found \\x07"


@given(st.text() | st.binary(max_size=400).map(lambda b: b.decode("utf-8", "surrogateescape")))
def test_printable_is_printable(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) <= 300
    shown.encode()
    if text.isprintable() and len(text) <= 300:
        assert shown == text
