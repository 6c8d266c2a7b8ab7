"""Problems of the mini-world: six Reasoning Gym families with splits that share no operands.

A problem belongs to one split by its operands alone: a hash of them, blind to their order and to
the seed, says which. So no seed and no size can put a problem of one split into another, and
`gcd(12, 18)` and `gcd(18, 12)` count as one problem. Graded by the data set's own scorer from
`meta["entry"]` (`rivet.grading`, kind `reasoning_gym`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from data.problems import Problem

Split = Literal["train", "test", "validation"]
SOURCE = "miniworld"
# Shares of the operand space, in percent.
_SHARES: dict[str, int] = {"train": 70, "test": 20, "validation": 10}
_MAX_DRAWS_PER_PROBLEM = 100


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of problem.

    Attributes:
        name: The Reasoning Gym data set.
        config: Its parameters.
        expression: Cuts the expression that a solver has to copy out of an entry.
        statement: Short statement around the expression; None keeps the data set's own question.
        verb: First word of a request about this family.
    """

    name: str
    config: dict[str, Any]
    expression: Callable[[dict[str, Any]], str]
    statement: str | None
    verb: str


def _numbers(entry: dict[str, Any]) -> str:
    return ", ".join(map(str, entry["metadata"]["numbers"]))


def _fraction(entry: dict[str, Any]) -> str:
    return f"{entry['metadata']['numerator']}/{entry['metadata']['denominator']}"


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "chain_sum",
            {"min_terms": 2, "max_terms": 3, "min_digits": 2, "max_digits": 3},
            lambda entry: entry["metadata"]["expression"],
            "Calculate {}.",
            "sum",
        ),
        Family(
            "products",
            {"min_digits": 2, "max_digits": 3},
            lambda entry: entry["metadata"]["expression"],
            "Multiply {}.",
            "product",
        ),
        Family(
            "gcd",
            {"min_value": 10, "max_value": 999},
            _numbers,
            "Find the GCD of {}.",
            "gcd",
        ),
        Family(
            "lcm",
            {"min_value": 10, "max_value": 300},
            _numbers,
            "Find the LCM of {}.",
            "lcm",
        ),
        Family(
            "simple_equations",
            {"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 50},
            lambda entry: entry["metadata"]["equation"],
            None,
            "solve",
        ),
        Family(
            "fraction_simplification",
            {
                "min_value": 1,
                "max_value": 99,
                "min_factor": 2,
                "max_factor": 10,
                "styles": ("plain",),
            },
            _fraction,
            "Simplify the fraction {}.",
            "reduce",
        ),
    )
}


def build_split(
    split: Split, per_family: int, seed: int, families: Sequence[str] = ()
) -> list[Problem]:
    """Draw problems of every family, interleaved so that any prefix is balanced.

    Args:
        split: Which share of the operand space.
        per_family: Problems of each family.
        seed: Same seed, same problems in the same order.
        families: Which families; empty for all. The problems of a family are the same ones
            whichever others are drawn beside it.

    Raises:
        ValueError: The split or a family is unknown, or a family has too few distinct problems.
    """
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}; expected one of {', '.join(get_args(Split))}")
    if per_family < 1:
        raise ValueError(f"per_family is {per_family}; expected at least 1")
    check_families(families)
    chosen = [family for name, family in FAMILIES.items() if not families or name in families]
    columns = [_draw(family, split, per_family, seed) for family in chosen]
    return [problem for row in zip(*columns, strict=True) for problem in row]


def check_families(families: Sequence[str]) -> None:
    """Refuse names of families that the mini-world does not have, and repetitions.

    Raises:
        ValueError: With the families that there are.
    """
    unknown = [name for name in families if name not in FAMILIES]
    if unknown or len(set(families)) < len(families):
        raise ValueError(
            f"families is {', '.join(families)}; expected different ones of {', '.join(FAMILIES)}"
        )


def request_for(problem: Problem) -> str:
    """The request that copies a mini-world problem's operands without a mistake.

    Raises:
        ValueError: The problem is not one of the mini-world's.
    """
    family = FAMILIES.get(problem.meta.get("family", ""))
    if family is None or "entry" not in problem.meta:
        raise ValueError(f"{problem.id}: no mini-world problem; expected one from build_split")
    return f"{family.verb} {family.expression(problem.meta['entry'])}"


def operand_key(family: str, expression: str) -> str:
    """Identify a problem by its operands: order, sign of a whole equation and name of the unknown
    make no difference.
    """
    if family == "chain_sum":
        terms = re.findall(r"[+-]?\d+", expression.replace(" ", ""))
        parts = sorted(term if term[0] in "+-" else f"+{term}" for term in terms)
    elif family in ("products", "gcd", "lcm"):
        parts = sorted(re.findall(r"\d+", expression), key=int)
    elif family == "simple_equations":
        left, right = re.sub(r"[a-z]", "x", expression.replace(" ", "")).split("=")
        terms = [_signed(term) for term in re.findall(r"[+-]?[^+-]+", left)]
        # `8 - 5x = -212` and `5x - 8 = 212` are one problem.
        if right.startswith("-") or (right == "0" and any(re.match(r"-.*x", t) for t in terms)):
            terms = [("-" if term[0] == "+" else "+") + term[1:] for term in terms]
            right = right.removeprefix("-")
        parts = [*sorted(terms), right]
    else:
        parts = expression.split("/")
    return f"{family}/{','.join(parts)}"


def split_of(key: str) -> Split:
    """The split that an operand key belongs to."""
    share = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % 100
    for split in get_args(Split):
        share -= _SHARES[split]
        if share < 0:
            return split
    raise AssertionError("the shares add up to 100")


def _signed(term: str) -> str:
    return term if term[0] in "+-" else f"+{term}"


def _draw(family: Family, split: Split, count: int, seed: int) -> list[Problem]:
    problems: list[Problem] = []
    seen: set[str] = set()
    for draws, entry in enumerate(_entries(family, seed)):
        if draws > count * _MAX_DRAWS_PER_PROBLEM:
            raise ValueError(
                f"{family.name}: only {len(problems)} distinct problems of the {split} split in "
                f"{draws} draws; expected {count}: ask for fewer per family"
            )
        expression = family.expression(entry)
        key = operand_key(family.name, expression)
        if key in seen or split_of(key) != split or _is_degenerate(family, expression):
            continue
        seen.add(key)
        problems.append(_problem(family, entry, expression, key))
        if len(problems) == count:
            break
    return problems


def _entries(family: Family, seed: int) -> Iterator[dict[str, Any]]:
    from reasoning_gym import create_dataset  # slow to import, and the experts do without it

    # Entry i of a data set depends on seed + i, so neighbouring seeds would share their entries.
    digest = hashlib.blake2b(f"{family.name}\x1f{seed}".encode(), digest_size=6).digest()
    start = int.from_bytes(digest, "big")
    size = 10**9
    dataset = create_dataset(family.name, seed=start, size=size, **family.config)
    return (dataset[i] for i in range(size))


def _is_degenerate(family: Family, expression: str) -> bool:
    """True for an equation without its unknown, such as `0 = 0`."""
    return family.name == "simple_equations" and not re.search(r"[a-z]", expression)


def _problem(family: Family, entry: dict[str, Any], expression: str, key: str) -> Problem:
    statement = entry["question"]
    if family.statement is not None:
        statement = family.statement.format(expression)
    metadata = {name: value for name, value in entry["metadata"].items() if name != "difficulty"}
    meta = {
        "family": family.name,
        "dataset": family.name,
        "entry": {"question": entry["question"], "answer": entry["answer"], "metadata": metadata},
    }
    return Problem(key, statement, entry["answer"], SOURCE, "reasoning_gym", meta)
