"""Majority voting over the answers of several samples, by the grader's own equality.

`1/2`, `0.5` and `\\frac12` are one vote. Where the grader cannot compare two answers they are the
same only if their text is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rivet.grading import Grader
from rivet.grading.verdict import BadRequest


@dataclass(frozen=True, slots=True)
class Party:
    """Samples that gave the same answer.

    Attributes:
        answer: As the first of them wrote it.
        members: Indices of the samples, ascending.
    """

    answer: str
    members: tuple[int, ...]


async def parties(answers: Sequence[str | None], grader: Grader) -> list[Party]:
    """Group equal answers, the largest group first; among equals the one that came first.

    Args:
        answers: One a sample; None does not vote.
        grader: Says which answers are equal.
    """
    found: list[Party] = []
    for n, answer in enumerate(answers):
        if answer is None:
            continue
        for at, party in enumerate(found):
            if await _same(party.answer, answer, grader):
                found[at] = Party(party.answer, (*party.members, n))
                break
        else:
            found.append(Party(answer, (n,)))
    return sorted(found, key=lambda party: -len(party.members))  # stable


async def _same(first: str, second: str, grader: Grader) -> bool:
    # A blank may count (1 1/2 and 11/2); how many there are does not.
    if first.split() == second.split():
        return True
    return await _accepts(first, second, grader) or await _accepts(second, first, grader)


async def _accepts(gold: str, answer: str, grader: Grader) -> bool:
    """One way only: 0.333333 is right where 1/3 is asked for, and not the other way round."""
    try:
        grade = await grader.grade(f"\\boxed{{{answer}}}", gold)
    except BadRequest:
        return False
    return grade.outcome == "right"
