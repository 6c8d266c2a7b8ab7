"""The notations that the parser knows: names of letters and functions, shapes of numerals."""

import re
from fractions import Fraction

from rivet.grading.verdict import Unreadable

GREEK = frozenset(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron rho sigma "
    "varsigma tau upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi "
    "Omega hbar ell mho".split()
)
FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth ln log "
    "lg exp max min gcd lcm".split()
)
PLAIN_NAMES = {
    "sqrt": "sqrt", "pi": "pi", "inf": "infty", "infinity": "infty", "infty": "infty",
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "binom": "binom",
} | {name: name for name in FUNCTIONS}  # fmt: skip
ACCENTS = frozenset("vec dot ddot bar hat tilde overline widehat mathcal mathbf mathbb".split())
INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "arccot"}

NUMBER = re.compile(r"\d+(?:\.\d*)?(?:[eE][+-]?\d+(?![\d.]))?|\.\d+(?:[eE][+-]?\d+(?![\d.]))?")
REPEATING = re.compile(r"(\d*)\.(\d*)\s*\\(?:overline|bar)\s*\{\s*(\d+)\s*\}")
MIXED = re.compile(r"(\d+)\s*\\frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
NUMBER_FRACTION = re.compile(r"\\frac\s*(?:\{\s*\d+\s*\}|\d)\s*(?:\{\s*\d+\s*\}|\d)")
LETTERS = re.compile(r"[A-Za-z]+")
POINTS = re.compile(r"(?:\s*[A-Za-z](?:_\{?\d+\}?)?'*)+")
PRIMES = re.compile(r"\^\s*\{?\s*(\\prime\s*)+\}?|\^\s*\{?\s*\*\s*\}?(?!\w)")
TEXT = re.compile(r"\\text\{\s*([A-Za-z])\s*\}")


def decimal(text: str) -> Fraction:
    """Return the exact value of a decimal numeral, which may have an exponent.

    Raises:
        Unreadable: The exponent is absurd.
    """
    mantissa, _, exponent = text.lower().partition("e")
    if exponent and abs(int(exponent)) > 5000:
        raise Unreadable("the exponent is too large")
    whole, _, part = mantissa.partition(".")
    if len(whole) + len(part) > 4000:
        raise Unreadable("the number has too many digits")
    value = Fraction(int(whole + part or "0"), 10 ** len(part))
    return value * Fraction(10) ** int(exponent) if exponent else value
