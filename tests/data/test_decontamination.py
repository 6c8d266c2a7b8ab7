"""Finding evaluation problems in training text."""

from __future__ import annotations

import pytest

from data.decontamination import Contamination

LONG = (
    "A train leaves the station at noon and travels north at sixty miles an hour until it meets "
    "another train that left two hours later"
)


@pytest.mark.parametrize(
    ("text", "is_equal"),
    [
        ("Find the GCD of 12, 18.", True),
        ("find  the gcd\nof 12, 18.", True),
        ("Find the GCD of １２, 18.", True),  # full-width digits
        ("Find the GCD of 12, 19.", False),
        ("Find the GCD of 12, 18, 30.", False),
        ("Please find the GCD of 12, 18.", False),
    ],
)
def test_equality_ignores_case_width_and_space_and_nothing_else(text: str, is_equal: bool) -> None:
    assert Contamination(["Find the GCD of 12, 18."]).equals(text) == is_equal


def test_symbols_tell_short_statements_apart() -> None:
    assert not Contamination(["Calculate 12 + 18."]).equals("Calculate 12 - 18.")


def test_thirteen_words_in_a_row_are_an_overlap_and_twelve_are_not() -> None:
    words = LONG.split()
    check = Contamination([LONG])
    assert check.overlaps("Once: " + ", ".join(words[4:17]).upper() + "!")
    assert not check.overlaps("Once: " + " ".join(words[4:16]) + " and so on for a long while")


def test_short_statements_never_overlap() -> None:
    assert not Contamination(["Find the GCD of 12, 18."]).overlaps("Find the GCD of 12, 18.")


def test_no_statement_finds_nothing() -> None:
    check = Contamination([])
    assert len(check) == 0 and not check.equals("") and not check.overlaps(LONG)
