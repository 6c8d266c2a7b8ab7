"""Problems of the latent world: splits that share no operands, short answers, golds that score."""

from __future__ import annotations

import pytest

from data.latentworld import tasks
from data.latentworld.tasks import FAMILIES, HARD, build_splits
from data.problems import Problem
from rivet.grading.reasoning_tasks import decide_reasoning_gym, parse_entry

COUNTS = {"train": 40, "validation": 8, "test": 12}


@pytest.fixture(scope="module")
def splits() -> dict[str, list[Problem]]:
    return build_splits(COUNTS, seed=3)


def key(problem: Problem) -> str:
    """Operands of a problem."""
    return FAMILIES[problem.meta["family"]].key(problem.meta["entry"]["metadata"])


def test_no_operands_are_in_two_splits(splits: dict[str, list[Problem]]) -> None:
    keys = {split: {key(p) for p in problems} for split, problems in splits.items()}
    assert all(keys.values())
    assert not keys["train"] & keys["test"]
    assert not keys["train"] & keys["validation"]
    assert not keys["validation"] & keys["test"]


def test_reordered_sums_and_rewritten_equations_are_one_problem() -> None:
    sums, equations = FAMILIES["sums"].key, FAMILIES["equations"].key
    assert sums({"expression": "3 + 4 - 1 + 8"}) == sums({"expression": "8 + 3 + 4 - 1"})
    assert sums({"expression": "3 + 4 - 1 + 8"}) != sums({"expression": "3 - 4 + 1 + 8"})
    assert equations({"equation": "5*x - 8 = 12"}) == equations({"equation": "5*k - 8 = 12"})


def test_problems_are_distinct_balanced_and_the_same_for_a_seed(
    splits: dict[str, list[Problem]],
) -> None:
    for split, problems in splits.items():
        assert len({p.id for p in problems}) == len(problems) == 4 * COUNTS[split]
        assert [p.meta["family"] for p in problems[:4]] == list(FAMILIES)
    assert build_splits(COUNTS, seed=3) == splits
    assert build_splits(COUNTS, seed=4) != splits


def test_golds_score_and_other_answers_do_not(splits: dict[str, list[Problem]]) -> None:
    for problem in splits["test"]:
        entry = parse_entry(problem.meta["entry"])
        assert decide_reasoning_gym(entry, problem.answer)[0] == "right"
        assert decide_reasoning_gym(entry, str(int(problem.answer) + 1))[0] == "wrong"


def test_answers_of_hard_families_are_numbers_below_a_hundred(
    splits: dict[str, list[Problem]],
) -> None:
    for problem in splits["train"]:
        if problem.meta["family"] in HARD:
            assert 0 <= int(problem.answer) <= 99
        if problem.meta["family"] == "equations":
            assert "x" in problem.problem


@pytest.mark.parametrize(
    ("counts", "families", "message"),
    [
        ({"dev": 1}, ("sums",), "splits"),
        ({"train": 0}, ("sums",), "at least 1"),
        ({"train": 1}, ("chess",), "among primes"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    counts: dict[str, int], families: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_splits(counts, 1, families)  # type: ignore[arg-type]


def test_a_family_that_runs_out_of_problems_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_MAX_DRAWS_PER_PROBLEM", 1)
    with pytest.raises(ValueError, match="primes: no more distinct problems"):
        build_splits({"test": 20}, 1, ("primes",))
