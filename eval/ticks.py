"""Round numbers along an axis, and how they are written."""

from __future__ import annotations

import math
from collections.abc import Sequence


def ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """Round numbers between two bounds, about `count` of them; `whole` takes integers only."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    raw = span / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = magnitude * next(m for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Evenly spaced ticks as text, with the digits that tell neighbours apart and no more."""
    largest = max(map(abs, values), default=0.0)
    if largest == 0:
        return ["0"] * len(values)
    step = values[1] - values[0] if len(values) > 1 else 0.0
    places = _places(step or largest)  # alone, or so close that they are the same number
    if 1e-3 <= largest < 1e6:
        form = f",.{max(0, places)}f"
    else:
        form = f".{max(0, places + _exponent(largest))}e"
    return [format(value, form) if value else "0" for value in values]


def _places(step: float) -> int:
    """Decimal places of a round step, negative for tens and more."""
    places = -_exponent(step)
    rest = step * 10.0**places
    return places if abs(rest - round(rest)) < 0.1 else places + 1  # 2.5 has two digits


def _exponent(value: float) -> int:
    """Of the first digit: 3 for 1000; a rounding error below a power of ten is one."""
    return math.floor(math.log10(value) + 1e-6)
