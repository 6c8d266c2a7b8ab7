"""From a problem and a trajectory to a verdict: the one place that maps them to the grader's terms.

A trajectory's answer is its final answer span; in `plain` mode, where no tags are offered, the
grader reads the whole completion. Faults of the grader are outcomes of their own and carry no
reward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from data.problems import Problem
from rivet.grading.verdict import Grade
from rivet.rewards import outcome_reward
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Trajectory


class Grades(Protocol):
    """What is needed of a grader (see `rivet.grading.Grader`)."""

    async def grade(self, answer: str, gold: str, **arguments: Any) -> Grade:
        """Grade one answer text against a gold."""
        ...


def grading_arguments(problem: Problem) -> dict[str, Any]:
    """Keyword arguments of `Grader.grade` for a problem, besides the answer and the gold."""
    arguments: dict[str, Any] = {"kind": problem.kind}
    if problem.kind == "choice":
        arguments["choices"] = problem.meta.get("choices")
    if problem.kind == "reasoning_gym":
        arguments["entry"] = problem.meta.get("entry")
    return arguments


def answer_text(trajectory: Trajectory, tokenizer: ProtocolTokenizer) -> str | None:
    """Text that the grader reads; None if the trajectory gave no answer."""
    if trajectory.answer is None and trajectory.mode == "plain":
        return tokenizer.decode(trajectory.completion_ids)
    return trajectory.answer


async def grade_trajectory(
    grader: Grades, problem: Problem, trajectory: Trajectory, tokenizer: ProtocolTokenizer
) -> Trajectory:
    """A copy of the trajectory with outcome, reward, and the extracted answer in its info."""
    text = answer_text(trajectory, tokenizer)
    if text is None:
        grade = Grade("no_answer", None, "no closed answer span")
    else:
        grade = await grader.grade(text, problem.answer, **grading_arguments(problem))
    info = trajectory.info | {"extracted": grade.extracted, "reason": grade.reason}
    graded = replace(trajectory, outcome=grade.outcome, info=info)
    return replace(graded, reward=outcome_reward(graded))
