"""From a problem and a trajectory to a verdict: the one place that maps them to the grader's terms.

A trajectory's answer is its final answer span; in `plain` mode, where no tags are offered, the
engine gives the whole completion for it. Faults of the grader are outcomes of their own and carry
no reward.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from data.problems import Problem, load_problems
from rivet.grading.grader import Grader, Request
from rivet.grading.verdict import BadRequest, Grade, Kind
from rivet.rewards import outcome_reward
from rivet.trajectory import Trajectory

_SHOWN = 200  # faults in one message


class GoldError(ValueError):
    """A problem cannot be graded against: its gold or its choices are unusable."""


class Grades(Protocol):
    """What is needed of a grader; `rivet.grading.Grader` is one."""

    async def grade(
        self,
        answer_text: str,
        gold: str | Mapping[str, Any],
        *,
        kind: Kind = "math",
        choices: Sequence[str] | None = None,
    ) -> Grade:
        """Grade one answer text against a gold."""
        ...


def gold_of(problem: Problem) -> str | Mapping[str, Any]:
    """What the grader compares with: the gold answer, or a Reasoning Gym entry.

    Raises:
        GoldError: A Reasoning Gym problem has no entry.
    """
    if problem.kind != "reasoning_gym":
        return problem.answer
    if "entry" not in problem.meta:
        raise GoldError(f"problem {problem.id}: kind is reasoning_gym; expected meta.entry")
    return problem.meta["entry"]


def load_gradable(path: str | Path) -> list[Problem]:
    """Read a file of problems, each with a gold that can be graded against.

    A gold that cannot be read never pays, whatever is answered, and one of the wrong shape ends the
    run at the first answer to it: both have to show before anything is sampled.

    Raises:
        ProblemFileError: The file is broken.
        GoldError: Golds are unusable; each is named.
    """
    problems = load_problems(path)
    faults = gold_faults(problems)
    if faults:
        shown = [f"{path}: problem {i!r}: {what}" for i, what in list(faults.items())[:_SHOWN]]
        raise GoldError(
            "\n  ".join(shown)
            + f"\n{len(faults)} of {len(problems)} problems cannot be graded; expected golds that "
            "suit their kind: repair or remove these"
        )
    return problems


def gold_faults(problems: Sequence[Problem]) -> dict[str, str]:
    """Problem id -> what makes its gold unusable; those that can be graded are left out."""
    faults: dict[str, str] = {}
    to_parse: list[Problem] = []
    for problem in problems:
        choices = problem.meta.get("choices") if problem.kind == "choice" else None
        try:
            Request("", gold_of(problem), problem.kind, choices).check()
        except GoldError:
            faults[problem.id] = "kind is reasoning_gym, but there is no meta.entry"
        except BadRequest as error:
            faults[problem.id] = str(error)
        else:
            if problem.kind == "math" and not re.fullmatch(r"-?[0-9]{1,100}", problem.answer):
                to_parse.append(problem)
    if to_parse:
        with Grader() as grader:
            found = grader.check_golds([problem.answer for problem in to_parse])
        for problem, what in zip(to_parse, found, strict=True):
            if what:
                faults[problem.id] = f"answer {problem.answer[:60]!r}: {what}"
    return faults


async def grade_answer(grader: Grades, problem: Problem, text: str | None) -> Grade:
    """Grade an answer to a problem; None is no answer.

    Raises:
        GoldError: The problem's gold or choices cannot be graded against.
    """
    if text is None:
        return Grade("no_answer", None, "no closed answer span")
    choices = problem.meta.get("choices") if problem.kind == "choice" else None
    try:
        return await grader.grade(text, gold_of(problem), kind=problem.kind, choices=choices)
    except BadRequest as error:
        raise GoldError(f"problem {problem.id}: cannot be graded: {error}") from error


async def grade_trajectory(grader: Grades, problem: Problem, trajectory: Trajectory) -> Trajectory:
    """A copy of the trajectory with outcome and reward, and in its info what the grader read.

    `answer_source` tells answers in a box from those of a final line, which only `eval` mode reads.
    """
    grade = await grade_answer(grader, problem, trajectory.answer)
    info = trajectory.info | {
        "extracted": grade.extracted,
        "reason": grade.reason,
        "answer_source": grade.source,
    }
    graded = replace(trajectory, outcome=grade.outcome, info=info)
    return replace(graded, reward=outcome_reward(graded))
