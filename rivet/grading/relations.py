"""Equations and inequalities: what they name, what they state, and when two are the same.

`x = 5` names a value and may stand for it. `3x + 4y + 14 = 0` is an unsolved equation: nothing on
it is an answer except the same equation again.
"""

import re
from collections.abc import Callable

from rivet.grading.answers import Answer, Ordered, Quantity, Relation
from rivet.grading.equality import equal, ratio_sign
from rivet.grading.evaluate import is_constant, rational
from rivet.grading.tree import Node

Same = Callable[[Answer, Answer], bool]
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}


def names_value(relation: Relation) -> Answer | None:
    """Return v from `name = v` or `name in v`, where the name does not occur in v."""
    if relation.operators not in (("=",), ("in",)):
        return None
    name = _name(relation.sides[0])
    value = relation.sides[1]
    if name is None or isinstance(value, Relation):
        return None
    if isinstance(value, Quantity) and name in _mentioned(value.node):
        return None
    return value


def strip_name(answer: Answer) -> Answer:
    """Return v for `name = v`, and any other answer as it is."""
    if isinstance(answer, Relation):
        value = names_value(answer)
        return answer if value is None else value
    return answer


def stated_value(relation: Relation, gold: Node) -> Answer | None:
    """Return the value that an answer's equation ends in, where the gold is a plain expression.

    `x = 5` and `a + b = 3 + 5 = 8` state a value. A chain whose constant sides disagree, and an
    equation still to be solved, state none.
    """
    if set(relation.operators) != {"="}:
        return None
    last = relation.sides[-1]
    quantities = [side for side in relation.sides if isinstance(side, Quantity)]
    if len(quantities) != len(relation.sides) or not isinstance(last, Quantity):
        return None
    constants = [side for side in quantities[1:-1] if is_constant(side.node)]
    if any(not equal(side.node, last.node) for side in constants):
        return None
    first = quantities[0]
    if len(quantities) == 2 and is_constant(first.node) and _name(last) is not None:
        return first
    if is_constant(first.node):
        # `3 + 5 = 8` is a sum worked out; `0 = 0` says nothing.
        is_worked_out = first.node != last.node and equal(first.node, last.node)
        return last if is_worked_out else None
    name = _name(first)
    if name is not None:
        return None if name in _mentioned(last.node) else last
    if not is_constant(last.node):
        return None
    is_chain = bool(constants)
    if is_chain or (_is_asked_for(first.node) and rational(last.node) != 0):
        return last
    return None


def same_relation(gold: Relation, answer: Relation, same: Same) -> bool:
    """Tell whether two relations are the same statement."""
    if gold.operators == answer.operators and len(gold.sides) == len(answer.sides):
        if all(same(a, b) for a, b in zip(gold.sides, answer.sides, strict=True)):
            return True
    gold_value = names_value(gold)
    if gold_value is not None and _is_solved(gold_value):
        return _same_named(gold, gold_value, answer, same)
    if len(gold.operators) != 1 or len(answer.operators) != 1:
        return False
    left, right = _difference(gold), _difference(answer)
    if left is None or right is None:
        return False
    renamed = _rename_argument(gold, answer, right)
    sign = ratio_sign(left, renamed)
    if sign == 0:
        return False
    operator = answer.operators[0]
    if operator not in _FLIPPED or gold.operators[0] not in _FLIPPED:
        return False
    if operator in ("=", "!="):
        return gold.operators[0] == operator
    return gold.operators[0] == (operator if sign > 0 else _FLIPPED[operator])


def _same_named(gold: Relation, value: Answer, answer: Relation, same: Same) -> bool:
    """Compare `name = value` with an answer that must state it solved, for the same name."""
    sides = answer.sides
    if len(sides) == 2 and _name(sides[0]) is None and _name(sides[1]) is not None:
        sides = sides[::-1]
    if set(answer.operators) != {"="} or not same(gold.sides[0], sides[0]):
        return False
    if any(not same(value, side) for side in sides[1:-1] if _is_solved(side)):
        return False
    return same(value, sides[-1])


def _is_solved(value: Answer) -> bool:
    return not isinstance(value, Quantity) or is_constant(value.node)


def _name(answer: Answer) -> str | None:
    """Return the name that a left side gives: x, f(x), AB or (x, y)."""
    if isinstance(answer, Ordered):
        names = [_name(item) for item in answer.items]
        return "(" + ",".join(name or "" for name in names) + ")" if all(names) else None
    if not isinstance(answer, Quantity) or answer.unit is not None:
        return None
    node = answer.node
    if node.op == "symbol":
        return node.name
    if node.op == "abs" and re.fullmatch(r"[A-Zz].*|\w+\(.*", _name_of(node.args[0]) or ""):
        # |AB|, |z|, |\vec a| are quantities; |x| = 5 has yet to be solved.
        return f"|{_name_of(node.args[0])}|"
    return _name_of(node)


def _name_of(node: Node) -> str | None:
    if node.op == "symbol":
        return node.name
    if node.op == "opaque":
        return node.name
    if node.op == "mul" and all(arg.op == "symbol" for arg in node.args):
        # A two-letter length such as AB, or y(x) with an argument.
        return "*".join(arg.name for arg in node.args)
    return None


def _mentioned(node: Node) -> frozenset[str]:
    opaque = frozenset(part.name for part in node.walk() if part.op == "opaque")
    return node.symbols() | opaque


def _is_asked_for(node: Node) -> bool:
    """Tell whether a left side such as `m + n`, `a - b` or `\\sin A` is what a question asks for.

    `2x`, `-x` and `\\sqrt{x}` are not: they belong to an equation that has yet to be solved.
    """
    if node.op in ("sin", "cos", "tan"):
        return _name_of(node.args[0]) is not None
    if node.op != "add":
        return False
    first, *rest = node.args
    terms = [first, *(term.args[0] if term.op == "neg" else term for term in rest)]
    return all(_name_of(term) is not None for term in terms)


def _difference(relation: Relation) -> Node | None:
    left, right = relation.sides
    if not isinstance(left, Quantity) or not isinstance(right, Quantity):
        return None
    if left.unit is not None or right.unit is not None:
        return None
    return Node("add", (left.node, Node("neg", (right.node,))))


def _rename_argument(gold: Relation, answer: Relation, node: Node) -> Node:
    """Read `f(n) = n` as `f(x) = x` when the gold calls the argument x."""
    left, right = gold.sides[0], answer.sides[0]
    if not isinstance(left, Quantity) or not isinstance(right, Quantity):
        return node
    ours, theirs = left.node, right.node
    if ours.op != "opaque" or theirs.op != "opaque" or ours.name != theirs.name:
        return node
    if len(ours.args) != 1 or len(theirs.args) != 1:
        return node
    new, old = ours.args[0], theirs.args[0]
    if new.op != "symbol" or old.op != "symbol" or new.name in node.symbols():
        return node
    return _substitute(node, old.name, new)


def _substitute(node: Node, name: str, new: Node) -> Node:
    if node.op == "symbol":
        return new if node.name == name else node
    args = tuple(_substitute(arg, name, new) for arg in node.args)
    return Node(node.op, args, node.value, node.name)
