"""Decide whether two expressions are equal, and how close a decimal must be to its fraction.

Rational constants are compared exactly. Other constants must agree at 60 digits and again far
beyond the size of every integer involved. Expressions with unknowns must agree at seeded points,
each value exact where it is rational: a chance agreement would need about 500 coinciding digits.
"""

import random
from fractions import Fraction
from typing import Any

from rivet.grading.evaluate import (
    DIGITS,
    Evaluator,
    Undefined,
    Value,
    is_constant,
    mpmath_context,
    rational,
)
from rivet.grading.tree import Node

MIN_DIGITS_FRACTION = 6
MIN_DIGITS_IRRATIONAL = 10
_DOUBLE_DIGITS = 15
_INTEGER_OPS = ("floor", "ceil", "factorial", "factorial2", "binom", "gcd", "lcm", "sum", "prod")


def infinity_sign(node: Node) -> int:
    """Return the sign of a signed infinity, or 0 for everything else."""
    sign = 1
    while node.op == "neg":
        node, sign = node.args[0], -sign
    return sign if node.op == "constant" and node.name == "infty" else 0


def equal(left: Node, right: Node) -> bool:
    """Tell whether two expressions are equal wherever both are defined.

    Raises:
        TooExpensive: Their values cost too much.
        Undefined: A constant among them has no value.
    """
    if _uses(left, "infty") or _uses(right, "infty"):
        return infinity_sign(left) == infinity_sign(right) != 0
    if is_constant(left) and is_constant(right):
        return _equal_constants(left, right)
    return left == right or _equal_functions(left, right)


def ratio_sign(left: Node, right: Node) -> int:
    """Return the sign of c when `left = c * right` for one real constant c, else 0.

    The differences of both sides of two equations are in such a ratio when they are one curve.
    """
    ratios: list[Value] = []
    allow_complex = _uses(left, "i") or _uses(right, "i")
    for point in _points(left, right, count=9):
        try:
            evaluator = Evaluator(point, allow_complex=allow_complex)
            over, under = evaluator.value(left), evaluator.value(right)
        except Undefined:
            continue
        if _is_negligible(over) or _is_negligible(under):
            return 0
        ratios.append(
            over / under
            if isinstance(over, Fraction) == isinstance(under, Fraction)
            else _to_mp(over) / _to_mp(under)
        )
    if len(ratios) < 3 or not all(_close(ratio, ratios[0]) for ratio in ratios):
        return 0
    return 1 if mpmath_context().re(_to_mp(ratios[0])) > 0 else -1


def rounds_to(exact: Node, numeral: str) -> bool:
    """Tell whether a decimal numeral is a correct rounding of a value that it cannot state exactly.

    A fraction needs six significant digits and an irrational number ten. From fifteen digits on,
    the last place of a floating-point number is not held against it.
    """
    digits = numeral.lstrip("+-").partition("e")[0].replace(".", "").lstrip("0")
    fraction = rational(exact)
    if fraction is not None and fraction.denominator > 10**12:
        return False
    if len(digits) < (MIN_DIGITS_IRRATIONAL if fraction is None else MIN_DIGITS_FRACTION):
        return False
    if "e" in numeral.lower() or fraction is not None and fraction.denominator == 1:
        return False
    value = Evaluator().value(exact)
    stated = Fraction(numeral)
    if isinstance(value, mpmath_context().mpc):
        return False
    places = len(numeral.partition(".")[2])
    tolerance = Fraction(1, 2 * 10**places)
    with mpmath_context().workdps(DIGITS):
        error = abs(_to_mp(value) - _to_mp(stated))
        if len(digits) >= _DOUBLE_DIGITS:
            tolerance = max(tolerance, abs(stated) * Fraction(5, 10**_DOUBLE_DIGITS))
        return bool(error <= _to_mp(tolerance))


def is_near(exact: Node, numeral: str) -> bool:
    """Tell whether a decimal numeral is within one unit of its last place of a constant."""
    if not is_constant(exact) or "e" in numeral.lower():
        return False
    value = Evaluator(allow_complex=False).value(exact)
    with mpmath_context().workdps(DIGITS):
        error = abs(_to_mp(value) - _to_mp(Fraction(numeral)))
        return bool(error <= mpmath_context().mpf(10) ** -len(numeral.partition(".")[2]))


def _uses(node: Node, constant: str) -> bool:
    return any(part.op == "constant" and part.name == constant for part in node.walk())


def _equal_constants(left: Node, right: Node) -> bool:
    rough = Evaluator()
    values = rough.value(left), rough.value(right)
    if all(isinstance(value, Fraction) for value in values):
        return bool(values[0] == values[1])
    if not _close(*values) and not all(_is_negligible(value) for value in values):
        return False
    # Beyond the size of every integer involved, so that 2^2024 and 2^2024 + 1 differ under a root.
    return _agree_sharply(left, right, values, Evaluator(digits=120 + rough.bits * 2 // 3))


def _agree_sharply(left: Node, right: Node, rough: tuple[Value, Value], sharp: Evaluator) -> bool:
    """Confirm at a higher precision that two values agree, or that both are truly zero.

    What is zero shrinks as the precision grows; what is only small stays.
    """
    values = sharp.value(left), sharp.value(right)
    if _close(*values, digits=sharp.digits):
        return True
    shrink = mpmath_context().mpf(10) ** ((DIGITS - sharp.digits) // 2)
    return all(
        value == 0 or (not isinstance(value, Fraction) and abs(value) <= abs(before) * shrink)
        for value, before in zip(values, rough, strict=True)
    )


def _equal_functions(left: Node, right: Node) -> bool:
    """Compare over the reals first; expressions that are nowhere real are compared as complex."""
    is_complex = _uses(left, "i") or _uses(right, "i")
    for allow_complex in [True] if is_complex else [False, True]:
        agreed = 0
        for point in _points(left, right, count=14):
            try:
                evaluator = Evaluator(point, allow_complex=allow_complex)
                values = evaluator.value(left), evaluator.value(right)
                if not _close(*values):
                    if not all(_is_negligible(value) for value in values):
                        return False
                    sharp = Evaluator(point, digits=3 * DIGITS, allow_complex=allow_complex)
                    if not _agree_sharply(left, right, values, sharp):
                        return False
            except Undefined:
                continue
            agreed += 1
        if agreed >= 4:
            return True
    return False


def _points(left: Node, right: Node, *, count: int) -> list[dict[str, Fraction]]:
    """Return seeded values for the unknowns: integers where a floor or factorial asks for them."""
    names = sorted(left.symbols() | right.symbols())
    rng = random.Random(20_240_229)
    if left.has(*_INTEGER_OPS) or right.has(*_INTEGER_OPS):
        highs = [(9, 12, 40)[index % 3] for index in range(2 * count)]
        return [{name: Fraction(rng.randint(1, high)) for name in names} for high in highs]
    points = []
    for index in range(count):
        low, high = ((30, 290), (4, 90), (-290, 290), (2_000, 90_000))[index % 4]
        points.append({name: Fraction(rng.randint(low, high) * 2 + 1, 194) for name in names})
    return points


def _close(first: Value, second: Value, *, digits: int = DIGITS) -> bool:
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    mp = mpmath_context()
    with mp.workdps(digits):
        first, second = _to_mp(first), _to_mp(second)
        scale = max(abs(first), abs(second))
        return bool(abs(first - second) <= scale * mp.mpf(10) ** -(digits * 2 // 3))


def _is_negligible(value: Value) -> bool:
    if isinstance(value, Fraction):
        return value == 0
    return bool(abs(value) < mpmath_context().mpf(10) ** -(DIGITS * 2 // 3))


def _to_mp(value: Value) -> Any:
    if isinstance(value, Fraction):
        return mpmath_context().mpf(value.numerator) / value.denominator
    return value
