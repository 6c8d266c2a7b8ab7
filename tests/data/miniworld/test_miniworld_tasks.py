"""Claims about the mini-world's problems: split by operands, deterministic, graded by their set."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

import pytest

from data.miniworld.tasks import FAMILIES, build_split, operand_key, request_for, split_of
from data.problems import Problem, load_problems


@pytest.fixture(scope="module")
def splits() -> dict[str, list[Problem]]:
    return {
        "train": build_split("train", 300, 1),
        "test": build_split("test", 100, 2),
        "validation": build_split("validation", 20, 3),
    }


def test_every_prefix_is_balanced_over_the_families(splits):
    families = [problem.meta["family"] for problem in splits["test"]]
    assert families == list(FAMILIES) * 100


def test_no_operands_are_shared_by_two_splits_or_repeated_in_one(splits):
    keys = [
        operand_key(problem.meta["family"], request_for(problem).split(" ", 1)[1])
        for problems in splits.values()
        for problem in problems
    ]
    assert len(set(keys)) == len(keys) == 6 * 420


def test_the_same_seed_gives_the_same_problems_and_another_seed_gives_others(splits):
    assert build_split("validation", 20, 3) == splits["validation"]
    assert build_split("validation", 20, 4) != splits["validation"]


def test_a_longer_split_starts_with_the_shorter_one(splits):
    assert build_split("validation", 10, 3) == splits["validation"][:60]


@pytest.mark.parametrize(
    ("family", "one", "other"),
    [
        ("gcd", "12, 18", "18, 12"),
        ("lcm", "90, 100", "100, 90"),
        ("products", "12 * 345", "345 * 12"),
        ("chain_sum", "12 + 34 - 56", "34 - 56 + 12"),
        ("simple_equations", "3*x + 5 = 11", "5 + 3*y = 11"),
        ("simple_equations", "8 - 5*m = -212", "5*x - 8 = 212"),
        ("simple_equations", "8 - 4*m = 0", "4*x - 8 = 0"),
    ],
)
def test_rewritten_operands_are_one_problem(family, one, other):
    assert operand_key(family, one) == operand_key(family, other)


@pytest.mark.parametrize(
    ("family", "one", "other"),
    [
        ("chain_sum", "12 - 34", "34 - 12"),
        ("simple_equations", "3*x - 5 = 11", "3*x + 5 = 11"),
        ("simple_equations", "3*x - 5 = 11", "3*x - 5 = -11"),
        ("fraction_simplification", "2/3", "3/2"),
        ("gcd", "12, 18", "12, 19"),
    ],
)
def test_other_operands_are_another_problem(family, one, other):
    assert operand_key(family, one) != operand_key(family, other)


def test_each_operand_key_belongs_to_one_split_in_the_stated_shares():
    counts = {"train": 0, "test": 0, "validation": 0}
    for n in range(10_000):
        counts[split_of(f"gcd/{n}")] += 1
    assert abs(counts["train"] - 7000) < 200
    assert abs(counts["test"] - 2000) < 200


def test_operands_stay_in_the_ranges_of_their_family(splits):
    for problem in splits["train"]:
        family, numbers = problem.meta["family"], _numbers(request_for(problem))
        if family == "chain_sum":
            assert 2 <= len(numbers) <= 3 and all(10 <= n <= 999 for n in numbers)
        elif family == "products":
            assert len(numbers) == 2 and all(10 <= n <= 999 for n in numbers)
        elif family == "gcd":
            assert len(numbers) == 2 and all(10 <= n <= 999 for n in numbers)
        elif family == "lcm":
            assert len(numbers) == 2 and all(10 <= n <= 300 for n in numbers)
        elif family == "simple_equations":
            assert 1 <= int(problem.answer) <= 50
            assert re.search("[a-z]", request_for(problem).split(" ", 1)[1])
        else:
            top, bottom = map(int, problem.answer.split("/"))
            assert 1 <= top <= bottom <= 99
            assert numbers[0] % top == 0 and 2 <= numbers[0] // top <= 10


def test_the_statement_holds_the_operands_as_the_request_copies_them(splits):
    for problem in splits["train"]:
        assert request_for(problem).split(" ", 1)[1] in problem.problem
        assert len(problem.problem) < 80


def test_every_gold_scores_one_with_the_scorer_of_its_data_set(splits):
    from reasoning_gym import create_dataset

    scorers = {name: create_dataset(name, seed=1, size=1) for name in FAMILIES}
    for problem in splits["test"]:
        scorer, entry = scorers[problem.meta["dataset"]], problem.meta["entry"]
        assert scorer.score_answer(problem.answer, entry) == 1.0
        assert scorer.score_answer(problem.answer + "7", entry) < 1.0


def test_problems_survive_a_jsonl_file(splits, tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(asdict(p)) + "\n" for p in splits["validation"]))
    assert load_problems(path) == splits["validation"]


@pytest.mark.parametrize(("split", "count"), [("dev", 1), ("train", 0)])
def test_a_bad_argument_is_refused(split, count):
    with pytest.raises(ValueError, match="expected"):
        build_split(split, count, 0)


def test_asking_for_more_problems_than_there_are_names_the_family(monkeypatch):
    monkeypatch.setattr("data.miniworld.tasks._MAX_DRAWS_PER_PROBLEM", 2)
    with pytest.raises(ValueError, match="chain_sum: only .* ask for fewer"):
        build_split("validation", 50, 0)


def test_a_foreign_problem_has_no_request():
    with pytest.raises(ValueError, match="p1: no mini-world problem"):
        request_for(Problem("p1", "1 + 1?", "2"))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_a_family_has_the_same_problems_whichever_others_are_drawn_beside_it() -> None:
    everything = build_split("train", 5, 1)
    some = build_split("train", 5, 1, ["lcm", "chain_sum"])
    assert some == [p for p in everything if p.meta["family"] in ("lcm", "chain_sum")]


@pytest.mark.parametrize("families", [["lmc"], ["lcm", "lcm"]])
def test_unknown_and_repeated_families_are_refused(families: list[str]) -> None:
    with pytest.raises(ValueError, match="expected different ones of chain_sum, products"):
        build_split("train", 5, 1, families)
