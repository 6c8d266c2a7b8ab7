"""Properties that hold for any text: no crash, golds equal themselves, a changed digit is wrong."""

import re
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rivet.grading.decide import decide_math, read_gold
from rivet.grading.extract import extract
from rivet.grading.intake import check_math_gold
from rivet.grading.local_kinds import decide_integer

GOLDS = [
    "12", "-305", r"\frac{7}{12}", r"-\frac{3}{8}", "0.125", r"35\%", r"2\sqrt{7}", r"3\pi",
    r"120^\circ", r"\$4.75", r"18\text{ cm}^2", "x^2-4x+7", r"\frac{n(n-1)}{2}", "4-9i", "(2,-5)",
    r"\left(\frac{1}{2}, 3\right]", r"(-\infty,1)\cup(4,\infty)", "2,5,11", r"\{1,4\}",
    r"1\pm\sqrt{3}", "y=3x-2", r"\begin{pmatrix} 2 \\ -1 \end{pmatrix}", "312_5", "x=9",
    r"\sin 2x", "3 < x \\le 7", r"\lfloor n/2 \rfloor", "2^{100}", "C", r"\text{odd}", "10:45",
    r"2\frac{3}{4}", "f(x)=x+1", r"x^2+y^2=25", r"\binom{n}{3}", "1,234", r"e^{-2t}\cos 3t",
]  # fmt: skip
TOKENS = [
    "\\frac", "\\sqrt", "{", "}", "(", ")", "[", "]", "^", "_", "1", "23", "0", ".5", "x", "n",
    "i", "e", "\\pi", "+", "-", "*", "/", "=", "<", "\\le ", "\\cup ", "\\infty ", "!", "|", ",",
    ";", "\\text{", "or", " and ", "%", "\\pm ", "^\\circ", "\\sin ", "\\log", "\\lfloor ",
    "\\rfloor ", "\\binom", "\\sum_{k=1}^{9}", "\\{", "\\}", ":", "\\in ", "\\mathbb{R}",
    "\\setminus ", "\\begin{pmatrix}", "\\end{pmatrix}", "&", "\\\\", "\\overline{3}", "10^",
    "9999", "\\tan ", "max(", "\\max", " ", "$", "\\boxed{", "\\,", "²", "−", "√", "½",
    "\\approx ", "\\exp", "[3]", " cm", "\\$", "\\arcsin ", "^{-1}", "\\langle ",
]  # fmt: skip
MESSY = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=16).map("".join)
QUICK = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@QUICK
@given(gold=st.sampled_from(GOLDS), answer=st.text(max_size=80) | MESSY)
def test_any_text_gets_a_verdict(gold, answer):
    assert decide_math(gold, answer)[0] in ("right", "wrong", "no_answer")


@QUICK
@given(gold=MESSY)
def test_any_text_is_read_as_a_gold_or_named_unusable(gold):
    _, readings, trouble = read_gold(gold)
    assert readings or trouble or re.search("[A-J]", gold)
    check_math_gold(gold)


@QUICK
@given(text=st.text() | st.lists(st.sampled_from([*TOKENS, "<think>", "</think>"])).map("".join))
def test_extraction_never_fails(text):
    for mode in ("reward", "eval"):
        found = extract(text, mode)
        assert (found.answer is None) == (found.source == "none")


@pytest.mark.slow
@settings(max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(gold=st.sampled_from(GOLDS), answer=MESSY, cut=st.integers(0, 12))
def test_a_damaged_gold_gets_a_verdict(gold, answer, cut):
    assert decide_math(gold, gold[:cut] + answer + gold[cut:])[0] in ("right", "wrong")


@pytest.mark.parametrize("answer", [r"18\text{ cm^}^2", "18 cm^^2", "18 cm^-", "18 m^2^3"])
def test_a_unit_with_a_broken_power_is_wrong(answer):
    assert decide_math(r"18\text{ cm}^2", answer)[0] == "wrong"


@pytest.mark.parametrize("gold", GOLDS)
def test_a_gold_in_a_box_is_right(gold):
    boxed = extract(rf"Hence \boxed{{{gold}}}.").answer
    assert boxed == gold
    assert decide_math(gold, boxed)[0] == "right"


@pytest.mark.parametrize("gold", GOLDS)
def test_a_gold_passes_intake(gold):
    assert check_math_gold(gold) is None


@pytest.mark.parametrize("gold", GOLDS)
def test_every_changed_digit_is_wrong(gold):
    for match in re.finditer(r"\d", gold):
        digit = str((int(match.group()) + 1) % 10)
        changed = gold[: match.start()] + digit + gold[match.end() :]
        assert decide_math(gold, changed)[0] == "wrong", changed


@QUICK
@given(st.integers(), st.integers())
def test_integers_are_compared_exactly(first, second):
    for gold, answer in ((first, second), (first, first)):
        expected = "right" if gold == answer else "wrong"
        assert decide_integer(str(gold), str(answer)) == (
            expected,
            "same integer" if gold == answer else "another integer",
        )
        assert decide_math(str(gold), str(answer))[0] == expected
        assert decide_math(str(gold), f"{answer:,}")[0] == expected


@QUICK
@given(st.fractions(max_denominator=10_000), st.fractions(max_denominator=10_000))
def test_fractions_are_compared_exactly(first, second):
    gold = rf"\frac{{{first.numerator}}}{{{first.denominator}}}"
    for answer in (second, first):
        spelled = f"{answer.numerator}/{answer.denominator}"
        expected = "right" if answer == first else "wrong"
        assert decide_math(gold, spelled)[0] == expected
        scaled = rf"\frac{{{3 * answer.numerator}}}{{{3 * answer.denominator}}}"
        assert decide_math(gold, scaled)[0] == expected


@QUICK
@given(st.integers(1, 999), st.integers(2, 999), st.integers(1, 12), st.sampled_from([0, 1, -1, 7]))
def test_a_decimal_counts_only_as_a_correct_rounding(over, under, places, error):
    value = Fraction(over, under)
    scaled = round(value * 10**places) + error
    numeral = f"{scaled // 10**places}.{scaled % 10**places:0{places}d}"
    significant = len(numeral.replace(".", "").lstrip("0"))
    exact = Fraction(scaled, 10**places) == value
    rounded = error == 0 and significant >= 6 and value.denominator != 1
    half = abs(Fraction(scaled, 10**places) - value) * 2 * 10**places == 1
    if not half:
        expected = "right" if exact or rounded else "wrong"
        assert decide_math(rf"\frac{{{over}}}{{{under}}}", numeral)[0] == expected


@QUICK
@given(st.lists(st.integers(-99, 99), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_lists_ignore_order_and_nothing_else(values, rng):
    shuffled = list(values)
    rng.shuffle(shuffled)
    gold = ", ".join(map(str, values))
    assert decide_math(gold, ", ".join(map(str, shuffled)))[0] == "right"
    assert decide_math(gold, ", ".join(map(str, [*shuffled, 100])))[0] == "wrong"
    assert decide_math(gold, ", ".join(map(str, [shuffled[0] + 200, *shuffled[1:]])))[0] == "wrong"


@QUICK
@given(st.lists(st.integers(-9, 9), min_size=3, max_size=5), st.integers(0, 4))
def test_a_polynomial_equals_its_rearrangement_only(coefficients, index):
    def spell(values, order):
        return "+".join(f"({values[power]})x^{power}" for power in order)

    order = list(range(len(coefficients)))
    gold = spell(coefficients, order)
    assert decide_math(gold, spell(coefficients, order[::-1]))[0] == "right"
    changed = list(coefficients)
    changed[index % len(changed)] += 1
    assert decide_math(gold, spell(changed, order))[0] == "wrong"
