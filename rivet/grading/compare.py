"""Decide whether an answer equals the gold, by the gold's form.

Numbers are compared exactly, lists as multisets, tuples and intervals with their brackets, numerals
in a base and times as written, words as words. Where the gold's form and the answer's differ, only
the few pairs that say the same thing are allowed: a value and its name, a set and its inequality.
"""

from fractions import Fraction

from rivet.grading.answers import (
    Answer,
    Based,
    Colon,
    Listing,
    Matrix,
    Ordered,
    Quantity,
    Relation,
    Union,
    Words,
)
from rivet.grading.equality import equal, rounds_to
from rivet.grading.evaluate import is_constant
from rivet.grading.reals import as_reals, same_reals
from rivet.grading.relations import names_value, same_relation, stated_value, strip_name
from rivet.grading.tree import Node, number
from rivet.grading.units import DEGREE, PERCENT, RADIAN


def same(gold: Answer, answer: Answer) -> bool:
    """Tell whether an answer says what the gold says.

    Raises:
        Unreadable: A value in one of them is undefined.
        TooExpensive: A comparison costs too much.
    """
    if isinstance(gold, Words | Based | Colon):
        return gold == strip_name(answer) if not isinstance(answer, type(gold)) else gold == answer
    if isinstance(gold, Quantity):
        return _same_as_quantity(gold, answer)
    if isinstance(gold, Relation):
        return _same_as_relation(gold, answer)
    if isinstance(gold, Listing):
        return _same_as_listing(gold, answer)
    if isinstance(gold, Matrix):
        return _same_as_matrix(gold, answer)
    return _same_as_set(gold, answer)


def _same_as_quantity(gold: Quantity, answer: Answer) -> bool:
    if isinstance(answer, Relation):
        value = stated_value(answer, gold.node)
        return value is not None and not isinstance(value, Relation) and same(gold, value)
    if isinstance(answer, Listing) and len(answer.items) == 1 and answer.is_set:
        return False
    return isinstance(answer, Quantity) and same_quantity(gold, answer)


def same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """Compare two quantities; a unit may be left off, but where both give one they must agree."""
    if gold.unit == answer.unit:
        return _same_value(gold, answer)
    if PERCENT in (gold.unit, answer.unit):
        return _same_percentage(gold, answer)
    if {gold.unit, answer.unit} == {DEGREE, RADIAN}:
        return _same_angle(gold, answer)
    if gold.unit and answer.unit:
        if gold.unit.dimension != answer.unit.dimension:
            return False
        return equal(
            Node("mul", (gold.node, number(gold.unit.factor))),
            Node("mul", (answer.node, number(answer.unit.factor))),
        )
    if DEGREE in (gold.unit, answer.unit) and _same_angle(gold, answer):
        return True
    return _same_value(gold, answer)


def _same_value(gold: Quantity, answer: Quantity) -> bool:
    if equal(gold.node, answer.node):
        return True
    stated_exactly = gold.numeral is not None and "." in gold.numeral
    if answer.numeral is None or "." not in answer.numeral or stated_exactly:
        return False
    return is_constant(gold.node) and rounds_to(gold.node, answer.numeral)


def _same_percentage(gold: Quantity, answer: Quantity) -> bool:
    """Compare when one side has a percent sign: by value, or with the sign left off or added.

    The sign is optional only above one: `20` may stand for 20%, but `0.5` never for 0.5%.
    """
    if gold.unit and answer.unit:
        return False
    percent, plain = (gold, answer) if gold.unit else (answer, gold)
    hundredth = Node("div", (percent.node, number(100)))
    if equal(hundredth, plain.node):
        return True
    if not is_constant(plain.node) or plain.node.op == "div":
        return False
    return _exceeds_one(plain.node) and equal(percent.node, plain.node)


def _exceeds_one(node: Node) -> bool:
    return node.value is not None and node.value > Fraction(1)


def _same_angle(gold: Quantity, answer: Quantity) -> bool:
    """Compare degrees with a multiple of pi, which can only be radians."""
    degrees, plain = (gold, answer) if gold.unit == DEGREE else (answer, gold)
    if not any(node.op == "constant" and node.name == "pi" for node in plain.node.walk()):
        return False
    half_turn = Node("div", (Node("constant", name="pi"), number(180)))
    return equal(Node("mul", (degrees.node, half_turn)), plain.node)


def _same_as_relation(gold: Relation, answer: Answer) -> bool:
    gold_set = as_reals(gold)
    if gold_set is not None:
        answer_set = as_reals(answer)
        return answer_set is not None and same_reals(gold_set, answer_set)
    if isinstance(answer, Relation):
        return same_relation(gold, answer, same)
    if isinstance(answer, Listing) and len(answer.items) == 1:
        return False
    named = names_value(gold)
    return named is not None and same(named, answer)


def _same_as_listing(gold: Listing, answer: Answer) -> bool:
    gold_set = as_reals(gold) if not gold.is_set else None
    if gold_set is not None:
        answer_set = as_reals(answer)
        return answer_set is not None and same_reals(gold_set, answer_set)
    if isinstance(answer, Relation) and answer.operators in (("=",), ("in",)):
        value = names_value(answer)
        return value is not None and not isinstance(value, Relation) and same(gold, value)
    if not isinstance(answer, Listing):
        single = gold.is_set and len(gold.items) == 1
        return single and same(gold.items[0], answer)
    gold_items, answer_items = list(gold.items), list(answer.items)
    if gold.is_set and answer.is_set:
        gold_items, answer_items = _distinct(gold_items), _distinct(answer_items)
    if len(gold_items) != len(answer_items):
        return False
    if _match_all(gold_items, answer_items):
        return True
    if any(isinstance(item, Relation) for item in gold_items) and any(
        isinstance(item, Relation) for item in answer_items
    ):
        return False
    return _match_all(_without_shared_name(gold_items), _without_shared_name(answer_items))


def _match_all(gold: list[Answer], answers: list[Answer]) -> bool:
    """Pair every gold item with its own answer item."""
    left = list(answers)
    for item in gold:
        at = next((index for index, other in enumerate(left) if same(item, other)), None)
        if at is None:
            return False
        left.pop(at)
    return True


def _distinct(items: list[Answer]) -> list[Answer]:
    kept: list[Answer] = []
    for item in items:
        if not any(same(other, item) for other in kept):
            kept.append(item)
    return kept


def _without_shared_name(items: list[Answer]) -> list[Answer]:
    """Read `x = 1, x = 2` as `1, 2`; items with different names keep them."""
    names = [item.sides[0] for item in items if isinstance(item, Relation)]
    if len(names) != len(items) or any(name != names[0] for name in names):
        return items
    values = [names_value(item) for item in items if isinstance(item, Relation)]
    return [value for value in values if value is not None] if None not in values else items


def _same_as_matrix(gold: Matrix, answer: Answer) -> bool:
    answer = strip_name(answer)
    if not isinstance(answer, Matrix) or len(gold.rows) != len(answer.rows):
        return False
    return all(
        len(row) == len(other) and all(same(a, b) for a, b in zip(row, other, strict=True))
        for row, other in zip(gold.rows, answer.rows, strict=True)
    )


def _same_as_set(gold: Answer, answer: Answer) -> bool:
    """Compare with a tuple, an interval or a union."""
    bare = strip_name(answer)
    if isinstance(gold, Ordered) and isinstance(bare, Ordered):
        return (
            gold.opening == bare.opening
            and gold.closing == bare.closing
            and len(gold.items) == len(bare.items)
            and all(same(a, b) for a, b in zip(gold.items, bare.items, strict=True))
        )
    gold_set, answer_set = as_reals(gold), as_reals(answer)
    if gold_set is not None and answer_set is not None:
        return same_reals(gold_set, answer_set)
    if isinstance(gold, Union) and isinstance(bare, Union):
        return (
            len(gold.parts) == len(bare.parts)
            and gold.removed == bare.removed
            and _match_all(list(gold.parts), list(bare.parts))
        )
    return False
