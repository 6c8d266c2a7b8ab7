"""The forms that an answer can take, as frozen records.

The reader (`reader.py`) makes them from normalised text, and `compare.py` decides by the gold's
form.
"""

from dataclasses import dataclass

from rivet.grading.tree import Node
from rivet.grading.units import Unit


@dataclass(frozen=True, slots=True)
class Quantity:
    """One expression, possibly with a unit.

    Args:
        node: The expression.
        unit: Its unit, if one is written.
        numeral: The decimal numeral, when the expression is nothing else.
        text: The text it was read from.
    """

    node: Node
    unit: Unit | None
    numeral: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Words:
    """A text that is no mathematics, in lower case."""

    words: str


@dataclass(frozen=True, slots=True)
class Based:
    """A numeral in a stated base; compared as written."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Colon:
    """A ratio or a time of day; compared part by part as written."""

    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """Several values whose order does not matter: a list or a set in braces.

    Args:
        items: The values.
        is_set: Whether braces say that repetition does not matter.
        joined_by: "or", "and" or "," between the last two.
    """

    items: tuple["Answer", ...]
    is_set: bool = False
    joined_by: str = ","


@dataclass(frozen=True, slots=True)
class Ordered:
    """A tuple, a point or an interval: order and brackets matter."""

    items: tuple["Answer", ...]
    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class Union:
    """A union of sets, or a set without some points (`removed`)."""

    parts: tuple["Answer", ...]
    removed: "Answer | None" = None


@dataclass(frozen=True, slots=True)
class RealLine:
    """All real numbers."""


@dataclass(frozen=True, slots=True)
class Relation:
    """Sides joined by `=`, `<`, `<=`, `>`, `>=`, `!=` or `in`.

    Args:
        sides: The sides, each read on its own.
        operators: What stands between them, one fewer.
    """

    sides: tuple["Answer", ...]
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix or column vector, row by row."""

    rows: tuple[tuple["Answer", ...], ...]


Answer = Quantity | Words | Based | Colon | Listing | Ordered | Union | RealLine | Relation | Matrix
