"""Problems in the grader's terms, with the real grader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted import completion, trajectory_of

from data.miniworld.tasks import build_split
from data.problems import Problem
from eval.grade import GoldError, grade_answer, grade_trajectory, load_gradable
from rivet.grading import Grader
from rivet.rollout.types import RolloutRequest


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    """One grader for all tests here."""
    with Grader(workers=1) as opened:
        yield opened


async def test_every_family_of_the_mini_world_pays_its_gold_and_no_other_answer(grader) -> None:
    for problem in build_split("validation", 2, seed=3):
        right = await grade_answer(grader, problem, f"\\boxed{{{problem.answer}}}")
        wrong = await grade_answer(grader, problem, f"\\boxed{{{problem.answer}1}}")
        assert (right.outcome, wrong.outcome) == ("right", "wrong"), problem


async def test_choices_reach_the_grader(grader) -> None:
    problem = Problem("q", "Which?", "B", "toy", "choice", {"choices": ["3", "4", "5", "6"]})
    assert (await grade_answer(grader, problem, "\\boxed{B}")).outcome == "right"
    assert (await grade_answer(grader, problem, "\\boxed{A}")).outcome == "wrong"


async def test_a_trajectory_gets_outcome_reward_and_what_was_read(grader, tag_tokenizer) -> None:
    problem = Problem("q", "gcd?", "6")
    for answer, outcome, reward in [("6", "right", 1.0), ("7", "wrong", 0.0)]:
        row = trajectory_of(tag_tokenizer, RolloutRequest("q", (1,)), completion("numth", answer))
        graded = await grade_trajectory(grader, problem, row)
        assert (graded.outcome, graded.reward) == (outcome, reward)
        assert graded.info["extracted"] == answer and graded.info["reason"]
        assert graded.info["answer_source"] == "box"
    unfinished = trajectory_of(
        tag_tokenizer, RolloutRequest("q", (1,)), completion("numth", "6")[:1], ends=False
    )
    graded = await grade_trajectory(grader, problem, unfinished)
    assert (graded.outcome, graded.reward) == ("no_answer", 0.0)


async def test_what_cannot_be_graded_against_names_the_problem(grader) -> None:
    with pytest.raises(GoldError, match=r"problem q: .*meta\.entry"):
        await grade_answer(grader, Problem("q", "?", "6", "", "reasoning_gym"), "\\boxed{6}")
    with pytest.raises(GoldError, match="problem q: cannot be graded"):
        await grade_answer(grader, Problem("q", "?", "Paris", "", "choice"), "\\boxed{B}")


def test_golds_that_cannot_be_graded_against_are_found_before_a_run(tmp_path: Path) -> None:
    rows = [
        {"id": "good", "problem": "p", "answer": "7"},
        {"id": "cut", "problem": "p", "answer": "\\frac{"},
        {
            "id": "letters",
            "problem": "p",
            "answer": "E",
            "kind": "choice",
            "meta": {"choices": "x"},
        },
        {"id": "entry", "problem": "p", "answer": "1", "kind": "reasoning_gym"},
        {"id": "shape", "problem": "p", "answer": "1", "kind": "reasoning_gym"}
        | {"meta": {"entry": {"answer": "1"}}},
    ]
    path = tmp_path / "golds.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(GoldError, match="4 of 5 problems cannot be graded") as error:
        load_gradable(path)
    assert all(f"golds.jsonl: problem {row['id']!r}: " in str(error.value) for row in rows[1:])
    path.write_text(json.dumps(rows[0]) + "\n")
    assert [p.id for p in load_gradable(path)] == ["good"]
