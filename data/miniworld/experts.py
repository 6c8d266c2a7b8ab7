"""The mini-world's experts: fixed scripts that see a request and answer with a sentence and code.

`calc`, `numth` and `algebra` each know two families; `sage` is right with probability 0.35 on all.
Whoever does not know answers all the same, with plausible code that prints something wrong. A reply
depends on the request's text and the seed alone: neither the problem nor its gold is ever seen.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SAGE_ACCURACY = 0.35
# One unknown between 1 and 50 (`data.miniworld.tasks`): looking through 0..98 finds it.
_RANGE = 99
_NUMBER = r"\d{1,6}"
_UNREADABLE = "print(0)"


@dataclass(frozen=True, slots=True)
class ExpertScript:
    """One scripted expert.

    Attributes:
        name: What the controller writes in `<expert name="...">`.
        skill: How it is presented to the controller.
        families: Families that it always gets right.
        accuracy: Chance that it is right on the others.
        sentences: What it says before its code, right or wrong.
    """

    name: str
    skill: str
    families: tuple[str, ...]
    sentences: tuple[str, ...]
    accuracy: float = 0.0

    def reply(self, request: str, seed: int) -> str:
        """One sentence and a fenced program whose output is the answer that the expert gives."""
        rng = random.Random(f"{self.name}\x1f{seed}\x1f{request}")
        sentence = rng.choice(self.sentences)
        return f"{sentence}\n```python\n{self._code(request, rng)}\n```"

    def _code(self, request: str, rng: random.Random) -> str:
        parsed = parse_request(request)
        if parsed is None:
            return _UNREADABLE
        family, operands = parsed
        right = _right_code(family, operands)
        if family in self.families or rng.random() < self.accuracy:
            return right
        # The same mistake each time: if wrong programs were drawn from several, the right one,
        # which a third of all replies hold, would be the likeliest, and imitating replies
        # blindly would solve most problems.
        answer = run_script(right)
        wrong = _wrong_code(family, operands)
        return next((code for code in wrong if run_script(code) != answer), _UNREADABLE)


EXPERTS: dict[str, ExpertScript] = {
    expert.name: expert
    for expert in (
        ExpertScript(
            "calc",
            "adds, subtracts and multiplies whole numbers",
            ("chain_sum", "products"),
            ("Work it out directly.", "This prints the value.", "Just calculate it."),
        ),
        ExpertScript(
            "numth",
            "greatest common divisors and least common multiples",
            ("gcd", "lcm"),
            ("Use number theory here.", "This finds the number.", "Look at the divisors."),
        ),
        ExpertScript(
            "algebra",
            "solves equations and simplifies fractions",
            ("simple_equations", "fraction_simplification"),
            ("Rearrange and read it off.", "This gives the result.", "Bring it to simplest form."),
        ),
        ExpertScript(
            "sage",
            "knows a little of everything",
            (),
            ("I believe this is right.", "Perhaps try this.", "My guess is as follows."),
            accuracy=SAGE_ACCURACY,
        ),
    )
}


def route(family: str) -> str:
    """Name of the expert that knows a family.

    Raises:
        ValueError: No expert does.
    """
    for expert in EXPERTS.values():
        if family in expert.families:
            return expert.name
    known = [family for expert in EXPERTS.values() for family in expert.families]
    raise ValueError(f"family is {family!r}; expected one of {', '.join(known)}")


_WORD = r"[a-z]+"
_LIST = re.compile(rf"{_NUMBER}(?:(?:, ?| ){_NUMBER}){{1,4}}")
# What an expression shows needs no word of its own, as with any model that is asked: `sum 12 * 34`
# is a product. Only two numbers side by side, or one over another, can mean several things.
_REQUESTS: dict[str, tuple[str, re.Pattern[str]]] = {
    "chain_sum": (_WORD, re.compile(rf"{_NUMBER}(?: ?[+-] ?{_NUMBER}){{1,4}}")),
    "products": (_WORD, re.compile(rf"{_NUMBER}(?: ?\* ?{_NUMBER}){{1,4}}")),
    "gcd": ("gcd", _LIST),
    "lcm": ("lcm", _LIST),
    "simple_equations": (
        _WORD,
        re.compile(r"(?=[^a-z]*[a-z][^a-z]*$)[0-9a-z*]{1,9}(?: ?[+-] ?[0-9a-z*]{1,9})? ?= ?-?\d+"),
    ),
    "fraction_simplification": ("reduce|simplify", re.compile(rf"{_NUMBER}/{_NUMBER}")),
}
# What may stand where: `12`, `x`, `12*x`, never `012`, `12x` or `**`.
_TERM = re.compile(r"(?:0|[1-9]\d*)(?:\*[a-z])?|[a-z]")


def parse_request(request: str) -> tuple[str, str] | None:
    """Read a request such as `gcd 12, 18` into its family and its expression, or None."""
    verb, _, expression = request.strip().partition(" ")
    expression = " ".join(expression.split())
    if len(expression) > 80:
        return None
    for family, (verbs, form) in _REQUESTS.items():
        if re.fullmatch(verbs, verb.lower()) and form.fullmatch(expression):
            return (family, expression) if _is_sound(family, expression) else None
    return None


def _is_sound(family: str, expression: str) -> bool:
    """Whether every term is one that Python reads as it is meant."""
    terms = re.split(r"[ *]+" if family == "products" else r"[ ,=/+-]+", expression)
    if not all(_TERM.fullmatch(term) for term in terms if term):
        return False
    return family != "fraction_simplification" or 0 not in _integers(expression)


def _integers(expression: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", expression)]


def _right_code(family: str, expression: str) -> str:
    if family in ("chain_sum", "products"):
        return f"print({expression})"
    if family in ("gcd", "lcm"):
        return _import_and_print(family, _integers(expression))
    if family == "simple_equations":
        unknown = re.findall(r"[a-z]", expression)[0]
        equation = expression.replace("=", "==")
        return f"print(*[{unknown} for {unknown} in range({_RANGE}) if {equation}])"
    return _reduced(*_integers(expression))


def _wrong_code(family: str, expression: str) -> list[str]:
    """Programs that a careless solver might write, likeliest first; one may be right by chance."""
    numbers = _integers(expression)
    first, last = numbers[0], numbers[-1]
    if family == "chain_sum":
        return [
            f"print({' - '.join(map(str, numbers))})",
            f"print({' + '.join(map(str, numbers))})",
            f"print({last} - {first})",
        ]
    if family == "products":
        return [f"print({first} + {last})", f"print({first} * {first})", f"print({last} - {first})"]
    if family == "gcd":
        return [_import_and_print("lcm", numbers), f"print({first} - {last})", f"print({first})"]
    if family == "lcm":
        return [
            _import_and_print("gcd", numbers),
            f"print({first} * {last})",
            f"print({first} + {last})",
        ]
    if family == "simple_equations":
        return [f"print({last} - {first})", f"print({first} + {last})", f"print({last})"]
    return [f'print("{first}/{last}")', _reduced(last, first), f"print({first} // {last})"]


def _import_and_print(function: str, numbers: Sequence[int]) -> str:
    arguments = ", ".join(map(str, numbers))
    return f"from math import {function}\nprint({function}({arguments}))"


def _reduced(numerator: int, denominator: int) -> str:
    # The data set wants `1/1` where a Fraction prints `1`.
    return (
        "from fractions import Fraction\n"
        f'print(*Fraction({numerator}, {denominator}).as_integer_ratio(), sep="/")'
    )


def run_script(code: str) -> str:
    """Run a program that an expert script wrote, in process, and return what it prints.

    Only for programs of this module: their operands were parsed as integers. What a model wrote
    goes to the sandbox.
    """
    printed: list[str] = []

    def record(*values: Any, sep: str = " ") -> None:
        printed.append(sep.join(map(str, values)))

    scope = {"__builtins__": {"print": record, "range": range, "__import__": __import__}}
    exec(compile(code, "<script>", "exec"), scope)
    return "\n".join(printed)
