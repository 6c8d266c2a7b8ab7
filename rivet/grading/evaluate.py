"""Give an expression tree a value: exact where it is rational, else numeric.

A value is a `Fraction` as long as it is rational, and an mpmath number at a stated precision
otherwise. Everything that could take long (power towers, huge factorials) is refused before it
starts, so an evaluation takes milliseconds whatever the text says.
"""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from rivet.grading.tree import Node
from rivet.grading.verdict import TooExpensive, Unreadable

MAX_BITS = 40_000
MAX_FACTORIAL = 3_000
MAX_MAGNITUDE = 1_000_000
MAX_TERMS = 500
DIGITS = 60

Value = Any  # a Fraction, or an mpmath real or complex number


class Undefined(Unreadable):
    """The expression has no value here: a division by zero, the factorial of a negative number."""


def mpmath_context() -> Any:
    """Return mpmath's context; imported here because most answers never need it."""
    import mpmath

    return mpmath.mp


def is_constant(node: Node) -> bool:
    """Tell whether the expression has no unknown."""
    return not node.has("opaque") and not node.symbols()


def rational(node: Node) -> Fraction | None:
    """Return the exact value of a rational constant, or None for anything else."""
    if not is_constant(node) or node.has("constant"):
        return None
    value = Evaluator().value(node)
    return value if isinstance(value, Fraction) else None


class Evaluator:
    """Evaluates trees at one point and one precision.

    Args:
        point: Values of the unknowns.
        digits: Decimal digits of numeric values.
        allow_complex: Whether a root or logarithm may leave the reals; if not it is `Undefined`.

    Attributes:
        bits: Size of the largest integer that became numeric, for choosing a precision.
    """

    def __init__(
        self,
        point: Mapping[str, Fraction] | None = None,
        *,
        digits: int = DIGITS,
        allow_complex: bool = True,
    ) -> None:
        self.point = point or {}
        self.digits = digits
        self.allow_complex = allow_complex
        self.bits = 0

    def value(self, node: Node) -> Value:
        """Return the value of a tree.

        Raises:
            Undefined: It has none here.
            TooExpensive: It would take too long.
        """
        if node.op == "number":
            assert node.value is not None
            return node.value
        if node.op == "symbol":
            return self.point[node.name]
        if node.op in ("sum", "prod"):
            return self.series(node)
        args = [self.value(arg) for arg in node.args]
        if all(isinstance(arg, Fraction) for arg in args):
            exact = self.exact(node.op, args)
            if exact is not None:
                return exact
        with mpmath_context().workdps(self.digits):
            try:
                result = self.numeric(node, [self.to_number(arg) for arg in args])
            except (ZeroDivisionError, ValueError, TypeError) as error:
                raise Undefined(f"undefined value: {error}") from error
            except (OverflowError, MemoryError) as error:
                raise TooExpensive("the value is too large") from error
        return self.checked(result)

    def series(self, node: Node) -> Value:
        """Add up or multiply out a finite series, term by term."""
        body, low, high = node.args
        bounds = self.value(low), self.value(high)
        if not all(isinstance(bound, Fraction) and bound.denominator == 1 for bound in bounds):
            raise Undefined("the bounds of a sum are not whole numbers")
        first, last = (int(bound) for bound in bounds)
        if last - first >= MAX_TERMS or body.has("sum", "prod"):
            raise TooExpensive("a sum has too many terms")
        result: Value = Fraction(node.op == "prod")
        outer = self.point
        for index in range(first, last + 1):
            self.point = {**outer, node.name: Fraction(index)}
            result = self.combine("add" if node.op == "sum" else "mul", result, self.value(body))
        self.point = outer
        return result

    def combine(self, op: str, first: Value, second: Value) -> Value:
        """Add or multiply two values."""
        if isinstance(first, Fraction) and isinstance(second, Fraction):
            return self.exact(op, [first, second])
        with mpmath_context().workdps(self.digits):
            return self.numeric(Node(op), [self.to_number(first), self.to_number(second)])

    def checked(self, result: Value) -> Value:
        """Refuse infinities and, when only reals are wanted, complex values."""
        mp = mpmath_context()
        if mp.isnan(result) or mp.isinf(result):
            raise Undefined("undefined value")
        if isinstance(result, mp.mpc):
            if result.imag == 0:
                return result.real
            if not self.allow_complex:
                raise Undefined("not a real value")
        return result

    def to_number(self, value: Value) -> Any:
        """Turn an exact value into a number at this precision."""
        if isinstance(value, Fraction):
            bits = value.numerator.bit_length() + value.denominator.bit_length()
            self.bits = max(self.bits, bits)
            return mpmath_context().mpf(value.numerator) / value.denominator
        return value

    def exact(self, op: str, args: list[Fraction]) -> Fraction | None:
        """Apply an operator to rationals; None when the result is not known to be rational."""
        operation = _EXACT.get(op)
        if operation is None:
            return None
        try:
            result = operation(*args)
        except TypeError as error:
            raise Undefined(f"{op} of {len(args)} values") from error
        if result is not None:
            bits = max(result.numerator.bit_length(), result.denominator.bit_length())
            if bits > 2 * MAX_BITS:
                raise TooExpensive("the value has too many digits")
        return result

    def numeric(self, node: Node, args: list[Any]) -> Any:
        """Apply an operator to numbers at this precision."""
        mp = mpmath_context()
        op = node.op
        if op == "constant":
            return {"pi": +mp.pi, "e": +mp.e, "i": mp.mpc(0, 1), "infty": mp.inf}[node.name]
        if op == "add":
            return sum(args[1:], args[0])
        if op == "mul":
            return args[0] * args[1]
        if op == "neg":
            return -args[0]
        if op == "div":
            return args[0] / args[1]
        if op == "pow":
            return self.power(args[0], args[1], self.exponent_fraction(node.args[1]))
        if op == "sqrt":
            return mp.sqrt(args[0])
        if op == "root":
            degree = self.exponent_fraction(node.args[1])
            if not degree:
                raise Undefined("a root of an unknown degree")
            return self.power(args[0], 1 / args[1], 1 / degree)
        if op == "opaque":
            return self.opaque(node.name, args)
        if op in ("floor", "ceil") and isinstance(args[0], mp.mpf):
            return getattr(mp, op)(args[0])
        if op == "abs":
            return abs(args[0])
        if op in _NUMERIC:
            return self.transcendental(op, args)
        raise Undefined(f"no value for {op}")

    def exponent_fraction(self, node: Node) -> Fraction | None:
        """Return an exponent's exact value, which decides how a negative base is raised."""
        value = self.value(node)
        return value if isinstance(value, Fraction) else None

    def power(self, base: Any, exponent: Any, exact: Fraction | None) -> Any:
        """Raise to a power; an odd root of a negative real is the real one."""
        mp = mpmath_context()
        if base == 0:
            if mp.re(exponent) <= 0:
                raise Undefined("zero to a power that is not positive")
            return mp.mpf(0)
        if abs(exponent) > MAX_MAGNITUDE or abs(exponent * mp.log(abs(base))) > MAX_MAGNITUDE:
            raise TooExpensive("a power is too large")
        if exact is not None and exact.denominator == 1:
            return mp.power(base, int(exact))
        is_negative = isinstance(base, mp.mpf) and base < 0
        if is_negative and exact is not None and exact.denominator % 2 and exact.denominator < 100:
            sign = -1 if exact.numerator % 2 else 1
            return sign * mp.power(-base, exponent)
        return mp.power(base, exponent)

    def transcendental(self, op: str, args: list[Any]) -> Any:
        """Apply a named function."""
        mp = mpmath_context()
        if any(abs(arg) > mp.mpf(10) ** 30 for arg in args) and op not in ("ln", "log", "lg"):
            raise TooExpensive("the argument of a function is too large")
        if op in ("exp", "sinh", "cosh") and abs(args[0]) > MAX_MAGNITUDE:
            raise TooExpensive("a power is too large")
        if op in ("ln", "log", "lg", "log_base") and args[0] == 0:
            raise Undefined("logarithm of zero")
        return _NUMERIC[op](mp, *args)

    def opaque(self, name: str, args: list[Any]) -> Any:
        """Give an unknown function a fixed, generic meaning, so that f(x) equals only f(x)."""
        mp = mpmath_context()
        seed = mp.mpf(sum(ord(char) * (31 + 7 * at) for at, char in enumerate(name)) % 9973) / 991
        total = sum((arg * mp.sqrt(at + 2) for at, arg in enumerate(args)), mp.mpf(0))
        return mp.cos(total + seed) + seed


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        return None
    power = exponent.numerator
    if base == 0:
        if power <= 0:
            raise Undefined("zero to a power that is not positive")
        return Fraction(0)
    if abs(base) == 1:
        return base if power % 2 else Fraction(1)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(power) > MAX_BITS:
        raise TooExpensive("a power is too large")
    return base**power


def _divide(over: Fraction, under: Fraction) -> Fraction:
    if under == 0:
        raise Undefined("division by zero")
    return over / under


def _whole(value: Fraction, limit: int) -> int:
    if value.denominator != 1 or value < 0:
        raise Undefined("not a whole number")
    if value > limit:
        raise TooExpensive("a factorial or binomial is too large")
    return value.numerator


def _factorial(value: Fraction) -> Fraction:
    return Fraction(math.factorial(_whole(value, MAX_FACTORIAL)))


def _double_factorial(value: Fraction) -> Fraction:
    if value == -1:
        return Fraction(1)
    return Fraction(math.prod(range(_whole(value, MAX_FACTORIAL), 0, -2)))


def _binomial(upper: Fraction, lower: Fraction) -> Fraction:
    count = _whole(lower, MAX_FACTORIAL)
    if upper.denominator == 1 and upper >= 0:
        return Fraction(math.comb(_whole(upper, 10 * MAX_FACTORIAL), count))
    bits = max(upper.numerator.bit_length(), upper.denominator.bit_length())
    if bits * count > MAX_BITS:
        raise TooExpensive("a binomial is too large")
    product = Fraction(1)
    for index in range(count):
        product *= (upper - index) / (index + 1)
    return product


def _square_root(value: Fraction) -> Fraction | None:
    if value < 0:
        return None
    over, under = math.isqrt(value.numerator), math.isqrt(value.denominator)
    if over * over == value.numerator and under * under == value.denominator:
        return Fraction(over, under)
    return None


def _integers(function: Callable[..., int]) -> Callable[..., Fraction]:
    def apply(*args: Fraction) -> Fraction:
        if any(arg.denominator != 1 for arg in args):
            raise Undefined("not whole numbers")
        return Fraction(function(*(arg.numerator for arg in args)))

    return apply


_EXACT: dict[str, Callable[..., Fraction | None]] = {
    "add": lambda *args: sum(args, Fraction(0)),
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "div": _divide,
    "pow": _power,
    "sqrt": _square_root,
    "abs": abs,
    "floor": lambda a: Fraction(math.floor(a)),
    "ceil": lambda a: Fraction(math.ceil(a)),
    "factorial": _factorial,
    "factorial2": _double_factorial,
    "binom": _binomial,
    "max": max,
    "min": min,
    "gcd": _integers(math.gcd),
    "lcm": _integers(math.lcm),
}

# `log` without a base means different bases to different authors, so it gets one that neither the
# natural nor the decimal reading matches: only identities that hold in every base are accepted.
_NUMERIC: dict[str, Callable[..., Any]] = {
    "sin": lambda mp, x: mp.sin(x),
    "cos": lambda mp, x: mp.cos(x),
    "tan": lambda mp, x: mp.tan(x),
    "cot": lambda mp, x: mp.cot(x),
    "sec": lambda mp, x: mp.sec(x),
    "csc": lambda mp, x: mp.csc(x),
    "arcsin": lambda mp, x: mp.asin(x),
    "arccos": lambda mp, x: mp.acos(x),
    "arctan": lambda mp, x: mp.atan(x),
    "arccot": lambda mp, x: mp.pi / 2 - mp.atan(x),
    "arcsec": lambda mp, x: mp.acos(1 / x),
    "arccsc": lambda mp, x: mp.asin(1 / x),
    "sinh": lambda mp, x: mp.sinh(x),
    "cosh": lambda mp, x: mp.cosh(x),
    "tanh": lambda mp, x: mp.tanh(x),
    "coth": lambda mp, x: mp.coth(x),
    "exp": lambda mp, x: mp.exp(x),
    "ln": lambda mp, x: mp.log(x),
    "lg": lambda mp, x: mp.log(x) / mp.log(10),
    "log": lambda mp, x: mp.log(x) / mp.log(mp.mpf(7) / 3),
    "log_base": lambda mp, x, b: mp.log(x) / mp.log(b),
    "max": lambda mp, *xs: max(xs),
    "min": lambda mp, *xs: min(xs),
}
