"""Sets of real numbers: intervals, unions and inequalities brought to one form.

A set is a sorted tuple of pieces; a point is a closed piece of no length. Only inequalities that
state their solution become sets: `x^2 - 4x + 3 < 0` is a question, not an answer.
"""

import functools
from dataclasses import dataclass

from rivet.grading.answers import Answer, Listing, Ordered, Quantity, RealLine, Relation, Union
from rivet.grading.equality import equal, infinity_sign
from rivet.grading.evaluate import Evaluator, is_constant
from rivet.grading.tree import Node, number

_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "="}
_INFINITY = Node("constant", name="infty")
_MINUS_INFINITY = Node("neg", (_INFINITY,))


@dataclass(frozen=True, slots=True)
class Piece:
    """One interval; a bound is closed when it belongs to the set."""

    low: Node
    low_closed: bool
    high: Node
    high_closed: bool


@dataclass(frozen=True, slots=True)
class Reals:
    """A set of reals and the unknown that it belongs to, where one is named."""

    pieces: tuple[Piece, ...]
    unknown: str | None = None


def as_reals(answer: Answer) -> Reals | None:
    """Return the set of reals that an answer states, or None when it states none."""
    if isinstance(answer, Relation):
        return _from_relation(answer)
    if isinstance(answer, Listing) and answer.items and not answer.is_set:
        return _from_conditions(answer)
    pieces = _pieces(answer)
    return None if pieces is None else Reals(_tidy(pieces))


def same_reals(left: Reals, right: Reals) -> bool:
    """Tell whether two sets are equal and do not belong to two different unknowns."""
    if left.unknown and right.unknown and left.unknown != right.unknown:
        return False
    if len(left.pieces) != len(right.pieces):
        return False
    return all(
        a.low_closed == b.low_closed
        and a.high_closed == b.high_closed
        and equal(a.low, b.low)
        and equal(a.high, b.high)
        for a, b in zip(left.pieces, right.pieces, strict=True)
    )


def _pieces(answer: Answer) -> list[Piece] | None:
    if isinstance(answer, RealLine):
        return [Piece(_MINUS_INFINITY, False, _INFINITY, False)]
    if isinstance(answer, Ordered):
        return _interval(answer)
    if isinstance(answer, Listing) and answer.is_set:
        nodes = [_bound(item) for item in answer.items]
        if any(node is None for node in nodes):
            return None
        return [Piece(node, True, node, True) for node in nodes if node is not None]
    if isinstance(answer, Union):
        pieces: list[Piece] = []
        for part in answer.parts:
            more = _pieces(part)
            if more is None:
                return None
            pieces.extend(more)
        return pieces if answer.removed is None else _remove(pieces, answer.removed)
    return None


def _interval(answer: Ordered) -> list[Piece] | None:
    if len(answer.items) != 2 or answer.opening == "<":
        return None
    low, high = _bound(answer.items[0]), _bound(answer.items[1])
    if low is None or high is None:
        return None
    if _is_known(low) and _is_known(high) and _compare(low, high) >= 0:
        return None
    return [Piece(low, answer.opening == "[", high, answer.closing == "]")]


def _bound(answer: Answer) -> Node | None:
    return answer.node if isinstance(answer, Quantity) and answer.unit is None else None


def _remove(pieces: list[Piece], removed: Answer) -> list[Piece] | None:
    """Take single points out of a set."""
    points = _pieces(removed)
    if points is None:
        return None
    for point in points:
        if not (point.low == point.high and _is_known(point.low)):
            return None
        kept: list[Piece] = []
        for piece in pieces:
            if not (_is_known(piece.low) and _is_known(piece.high)):
                return None
            below, above = _compare(piece.low, point.low), _compare(point.low, piece.high)
            if below < 0 and above < 0:
                kept.append(Piece(piece.low, piece.low_closed, point.low, False))
                kept.append(Piece(point.low, False, piece.high, piece.high_closed))
            elif below == 0:
                kept.append(Piece(piece.low, False, piece.high, piece.high_closed))
            elif above == 0:
                kept.append(Piece(piece.low, piece.low_closed, piece.high, False))
            else:
                kept.append(piece)
        pieces = kept
    return pieces


def _from_relation(relation: Relation) -> Reals | None:
    if relation.operators == ("in",):
        unknown = _unknown(relation.sides[0])
        inner = as_reals(relation.sides[1])
        return Reals(inner.pieces, unknown) if unknown and inner else None
    magnitude = _from_magnitude(relation)
    if magnitude is not None:
        return magnitude
    sides, operators = list(relation.sides), list(relation.operators)
    names = [_unknown(side) for side in sides]
    if len(sides) == 3 and names[1] is not None:
        at = 1
    elif len(sides) == 2 and names.count(None) == 1:
        at = 1 if names[0] is None else 0
    else:
        return None
    pieces = [Piece(_MINUS_INFINITY, False, _INFINITY, False)]
    for index, operator in enumerate(operators):
        if index >= at:
            other, direction = sides[index + 1], operator
        else:
            other, direction = sides[index], _FLIPPED.get(operator, "")
        bound = _bound(other)
        if bound is None or names[at] in bound.symbols() or direction in ("", "="):
            return None
        narrowed = _narrow(pieces, direction, bound)
        if narrowed is None:
            return None
        pieces = narrowed
    return Reals(_tidy(pieces), names[at])


def _from_magnitude(relation: Relation) -> Reals | None:
    """Read `|x| < a` and `|x| > a` for a constant a."""
    left, right = relation.sides[0], _bound(relation.sides[-1])
    if len(relation.sides) != 2 or not isinstance(left, Quantity) or left.node.op != "abs":
        return None
    inner, operator = left.node.args[0], relation.operators[0]
    if inner.op != "symbol" or right is None or not is_constant(right):
        return None
    if operator not in ("<", "<=", ">", ">=") or _compare(right, number(0)) <= 0:
        return None
    closed, minus = operator.endswith("="), Node("neg", (right,))
    if operator.startswith("<"):
        return Reals((Piece(minus, closed, right, closed),), inner.name)
    below = Piece(_MINUS_INFINITY, False, minus, closed)
    return Reals((below, Piece(right, closed, _INFINITY, False)), inner.name)


def _narrow(pieces: list[Piece], direction: str, bound: Node) -> list[Piece] | None:
    """Cut a set that is still one piece by one inequality."""
    if len(pieces) != 1:
        return None
    piece = pieces[0]
    closed = direction.endswith("=") and not infinity_sign(bound)
    if direction == "!=":
        if piece.low != _MINUS_INFINITY or piece.high != _INFINITY:
            return None
        return [
            Piece(piece.low, False, bound, False),
            Piece(bound, False, piece.high, False),
        ]
    if direction.startswith("<"):
        return (
            [Piece(piece.low, piece.low_closed, bound, closed)] if piece.high == _INFINITY else None
        )
    return (
        [Piece(bound, closed, piece.high, piece.high_closed)]
        if piece.low == _MINUS_INFINITY
        else None
    )


def _from_conditions(listing: Listing) -> Reals | None:
    """Read `x < -1 or x > 1` as a union and `x > 1 and x < 3` as an intersection.

    A comma says neither, except before an excluded point: `-1 < x < 1, x \\ne 0`.
    """
    excludes = any(isinstance(i, Relation) and i.operators == ("!=",) for i in listing.items[1:])
    if listing.joined_by == "," and not excludes:
        return None
    sets = [as_reals(item) for item in listing.items]
    if any(part is None or part.unknown is None for part in sets):
        return None
    known = [part for part in sets if part is not None]
    if len({part.unknown for part in known}) != 1:
        return None
    if listing.joined_by == "or":
        pieces = [piece for part in known for piece in part.pieces]
        return Reals(_tidy(pieces), known[0].unknown)
    pieces = list(known[0].pieces)
    for part in known[1:]:
        pieces = _intersect(pieces, list(part.pieces))
    return Reals(_tidy(pieces), known[0].unknown) if pieces else None


def _intersect(left: list[Piece], right: list[Piece]) -> list[Piece]:
    out: list[Piece] = []
    for a in left:
        for b in right:
            bounds = (a.low, a.high, b.low, b.high)
            if not all(_is_known(bound) for bound in bounds):
                return []
            lows = _compare(a.low, b.low)
            low, low_closed = (
                (a.low, a.low_closed and b.low_closed)
                if lows == 0
                else ((a.low, a.low_closed) if lows > 0 else (b.low, b.low_closed))
            )
            highs = _compare(a.high, b.high)
            high, high_closed = (
                (a.high, a.high_closed and b.high_closed)
                if highs == 0
                else ((a.high, a.high_closed) if highs < 0 else (b.high, b.high_closed))
            )
            order = _compare(low, high)
            if order < 0 or (order == 0 and low_closed and high_closed):
                out.append(Piece(low, low_closed, high, high_closed))
    return out


def _unknown(answer: Answer) -> str | None:
    """Return the name of a side that is a bare unknown."""
    if isinstance(answer, Quantity) and answer.unit is None and answer.node.op == "symbol":
        return answer.node.name
    return None


def _is_known(node: Node) -> bool:
    return bool(infinity_sign(node)) or is_constant(node)


def _compare(left: Node, right: Node) -> int:
    """Return -1, 0 or 1 for two known bounds."""
    signs = infinity_sign(left), infinity_sign(right)
    if any(signs):
        return (signs[0] > signs[1]) - (signs[0] < signs[1])
    if equal(left, right):
        return 0
    difference = Evaluator(allow_complex=False).value(Node("add", (left, Node("neg", (right,)))))
    return -1 if difference < 0 else 1


def _compare_lows(left: Piece, right: Piece) -> int:
    return _compare(left.low, right.low)


def _tidy(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Sort the pieces and join those that touch, when every bound is known."""
    if len(pieces) < 2 or not all(_is_known(p.low) and _is_known(p.high) for p in pieces):
        return tuple(pieces)
    ordered = sorted(pieces, key=functools.cmp_to_key(_compare_lows))
    out = [ordered[0]]
    for piece in ordered[1:]:
        last = out[-1]
        gap = _compare(last.high, piece.low)
        if gap < 0 or (gap == 0 and not (last.high_closed or piece.low_closed)):
            out.append(piece)
            continue
        reach = _compare(last.high, piece.high)
        high, closed = (
            (last.high, last.high_closed) if reach > 0 else (piece.high, piece.high_closed)
        )
        if reach == 0:
            closed = last.high_closed or piece.high_closed
        out[-1] = Piece(
            last.low,
            last.low_closed or (piece.low_closed and _compare(last.low, piece.low) == 0),
            high,
            closed,
        )
    return tuple(out)
