"""Check golds before anything is graded with them.

A gold must parse fully, equal itself, and differ when any one digit changes; otherwise the grader
would refuse right answers or accept wrong ones.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rivet.grading.local_kinds import is_letter
from rivet.grading.records import read_records, text_field
from rivet.grading.verdict import Kind

if TYPE_CHECKING:
    from rivet.grading.grader import Grader

MAX_DIGITS_TRIED = 24


def check_math_gold(gold: str) -> str | None:
    """Return what is wrong with a gold of the kind `math`, or None. Runs in a worker."""
    from rivet.grading.decide import decide_math, read_gold

    _, readings, trouble = read_gold(gold)
    if trouble:
        return trouble
    if not readings:
        return None
    for match in list(re.finditer(r"\d", gold))[:MAX_DIGITS_TRIED]:
        digit = str((int(match.group()) + 1) % 10)
        changed = gold[: match.start()] + digit + gold[match.end() :]
        if decide_math(gold, changed)[0] == "right":
            return f"it still equals itself with one digit changed: {changed[:80]}"
    return None


def check_gold(gold: str, kind: Kind = "math") -> str | None:
    """Return what makes a gold unusable, or None.

    Args:
        gold: The gold answer.
        kind: How it will be graded.
    """
    if kind == "choice":
        return None if is_letter(gold) else "it is not the letter of a choice"
    if kind == "exact":
        return None if gold.strip() else "it is empty"
    return check_math_gold(gold)


@dataclass(frozen=True, slots=True)
class IntakeReport:
    """The golds of one file.

    Args:
        total: How many golds the file has.
        unusable: (id, gold, what is wrong with it) of those that cannot be graded with.
    """

    total: int
    unusable: list[tuple[str, str, str]]


def check_file(path: Path, grader: "Grader") -> IntakeReport:
    """Check every gold of a file of problems (field `answer`) or of graded cases (field `gold`).

    Raises:
        BadRequest: A line cannot be read or has no gold, with its file and line.
    """
    identifiers: list[str] = []
    golds: list[str] = []
    problems: dict[int, str] = {}
    for number, record in read_records(path):
        name = "gold" if "gold" in record else "answer"
        gold = text_field(path, number, record, name)
        if "choices" in record and not is_letter(gold):
            problems[len(golds)] = "it is not the letter of a choice"
        identifiers.append(str(record.get("id", f"{path.name}:{number}")))
        golds.append(gold)
    distinct = list(dict.fromkeys(golds))
    found = dict(zip(distinct, grader.check_golds(distinct), strict=True))
    for index, gold in enumerate(golds):
        problem = found[gold]
        if problem is not None:
            problems.setdefault(index, problem)
    unusable = [(identifiers[i], golds[i], problems[i]) for i in sorted(problems)]
    return IntakeReport(len(golds), unusable)
