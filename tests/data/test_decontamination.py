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


def test_half_of_a_statement_is_an_overlap_and_less_is_not() -> None:
    words = LONG.split()  # 25 words, 21 runs of five
    check = Contamination([LONG])
    assert check.holds("Once: " + ", ".join(words[4:19]).upper() + "!")  # 11 runs
    assert not check.holds("Once: " + " ".join(words[4:18]) + " and so on for a long while")
    assert Contamination([LONG], min_share=0.4).holds("Once: " + " ".join(words[4:18]))
    (found,) = check.find(f"Read this. {LONG}. Then answer.")
    assert (found.share, found.is_equal, found.passage) == (1.0, False, LONG.lower())


def test_short_statements_are_found_only_where_they_are_equal() -> None:
    check = Contamination(["Find the GCD of 12, 18."])
    assert check.holds("Find the GCD of 12, 18.")
    assert not check.holds("Find the GCD of 12, 18. Then find their LCM.")
    (found,) = check.find("find the gcd of 12, 18")
    assert found.is_equal and check.find("Find the GCD of 12, 18, 20.") == []


@pytest.mark.parametrize(
    "text",
    [
        r"The zeros of $x^4 + ax^2 + bx + 9$ are four real numbers in progression. Find \(b\).",
        r"The zeros of \[x^{4}+a x^{2}+b x+9\] are four real numbers\ in progression. Find $b.$",
        r"\textbf{3.} The zeros of $\displaystyle x^{4} + a\,x^2 + b\,x + 9$ are four"
        r" \emph{real} numbers in progression.  Find $b$!",
    ],
)
def test_other_latex_is_the_same_problem(text: str) -> None:
    statement = (
        r"The zeros of $x^{4}+a x^{2}+b x+9$ are four real numbers in progression. Find $b$."
    )
    assert Contamination([statement]).find(text)


def test_layout_commands_and_their_spellings_make_no_difference() -> None:
    check = Contamination([r"Compute $\dfrac{1}{2} + \cdots + \left(3\right)$."])
    assert check.equals(r"compute $\frac{1}{2}+\ldots+(3)$")
    assert not check.equals(r"compute $\frac{1}{2}-\ldots+(3)$")


def test_a_template_with_other_numbers_is_another_problem() -> None:
    template = (
        "A baker has {} loaves in the shop and sells {} of them in the morning, then bakes {} more "
        "at noon and gives {} away; how many loaves are there in the evening?"
    )
    check = Contamination([template.format(120, 45, 30, 7)])
    assert check.holds("Think hard. " + template.format(120, 45, 30, 7))
    assert not check.holds(template.format(210, 54, 33, 9))


def test_what_many_statements_share_says_nothing() -> None:
    tail = " Enter the answer as an integer between 0 and 999 without any leading zeros or signs."
    own = [
        "Count the primes below fifty.",
        "Sum the odd squares up to nine.",
        "Name the root of x.",
        "Give the area of a unit disc.",
        "How long is the side of it?",
    ]
    check = Contamination(statement + tail for statement in own)
    assert check.find("What is the order of this group?" + tail) == []
    assert [o.statement for o in check.find(own[2] + tail)] == [2]


def test_drawings_are_left_out() -> None:
    drawing = "[asy] draw((0,0)--(1,0)--(1,1)--(0,1)--cycle); label(a, (0,0)); dot((2,3)); [/asy]"
    check = Contamination([f"What is the area of the shaded square in this figure? {drawing} Why?"])
    assert check.find(f"How long is the diagonal? {drawing}") == []


def test_no_statement_finds_nothing_and_one_given_twice_is_one() -> None:
    check = Contamination([])
    assert len(check) == 0 and not check.equals("") and not check.holds(LONG)
    assert len(Contamination([LONG, LONG.upper()])) == 1
    assert [o.statement for o in Contamination([LONG, LONG]).find(LONG)] == [0]
    with pytest.raises(ValueError, match="min_share is 0"):
        Contamination([LONG], min_share=0)
