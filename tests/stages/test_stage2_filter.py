"""The verified filter: one test per rule, and a funnel that adds up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, load_dataset
from stage2_world import SETTINGS, faulty, ids_of, trajectories, trajectory

from data.problems import Problem
from rivet.prompts import PromptBuilder
from rivet.tokenization import ProtocolTokenizer
from stages.stage2.dataset import DatasetError, codes_of, read_dataset, write_dataset
from stages.stage2.filter import EvaluationProblems, FilterRules, filter_trajectories
from stages.stage2.objective import AUTHOR_CODES, KIND_CODES

RULES = FilterRules(max_length=150)


def test_verified_trajectories_pass_in_order(tag_tokenizer: ProtocolTokenizer) -> None:
    good = trajectories(tag_tokenizer, 5)
    filtered = filter_trajectories(good, RULES)
    assert filtered.kept == tuple(good)
    assert filtered.funnel["read"] == filtered.funnel["kept"] == 5


def test_each_rule_drops_what_breaks_it_and_counts_it(tag_tokenizer: ProtocolTokenizer) -> None:
    base = trajectory(tag_tokenizer, 1, 2)
    for rule, broken in faulty(base).items():
        filtered = filter_trajectories([broken], RULES)
        dropped = {r["rule"]: r["dropped"] for r in filtered.funnel["rules"] if r["dropped"]}
        assert not filtered.kept and dropped == {rule: 1}


def test_funnel_adds_up(tag_tokenizer: ProtocolTokenizer) -> None:
    good = trajectories(tag_tokenizer, 4)
    filtered = filter_trajectories([*good, *faulty(good[0]).values(), good[1]], RULES)
    left = filtered.funnel["read"]
    assert left == 12
    for row in filtered.funnel["rules"]:
        left -= row["dropped"]
        assert row["kept"] == left
    assert left == filtered.funnel["kept"] == 4 == filtered.funnel["problems"]
    assert filtered.funnel["routes"] == {"calc": 2, "sage": 2}


def test_near_duplicates_count_within_a_problem_only(tag_tokenizer: ProtocolTokenizer) -> None:
    first = trajectory(tag_tokenizer, 12, 18)
    again = trajectory(tag_tokenizer, 12, 18, sample=1)
    differing = trajectory(tag_tokenizer, 12, 18, sample=2, expert="sage", sentence="Compute it.")
    other = replace(again, id="other#0@0", problem_id="other")
    filtered = filter_trajectories([first, again, differing, other], RULES)
    assert ids_of(filtered.kept) == ids_of([first, differing, other])


def test_near_duplicate_of_one_drops_exact_repetitions_only(
    tag_tokenizer: ProtocolTokenizer,
) -> None:
    first = trajectory(tag_tokenizer, 12, 18)
    again = trajectory(tag_tokenizer, 12, 18, sample=1)
    nearly = trajectory(tag_tokenizer, 12, 18, sample=2, sentence="Just calculate it!")
    filtered = filter_trajectories([first, again, nearly], replace(RULES, near_duplicate=1.0))
    assert ids_of(filtered.kept) == ids_of([first, nearly])


def test_cap_keeps_the_first_of_each_problem(tag_tokenizer: ProtocolTokenizer) -> None:
    samples = [
        trajectory(tag_tokenizer, 12, 18, sample=n, sentence=text)
        for n, text in enumerate(["Compute it.", "from math import gcd", "What is a divisor?"])
    ]
    filtered = filter_trajectories(samples, replace(RULES, max_per_problem=2))
    assert ids_of(filtered.kept) == ids_of(samples[:2])


@pytest.mark.parametrize(
    ("use", "passes"), [("any", True), ("expert", True), ("code", False), ("expert_or_code", True)]
)
def test_use_says_what_a_trajectory_must_have_used(
    tag_tokenizer: ProtocolTokenizer, use: str, passes: bool
) -> None:
    asked_only = replace(trajectory(tag_tokenizer, 1, 2), code_runs=())
    filtered = filter_trajectories([asked_only], replace(RULES, use=use))  # type: ignore[arg-type]
    assert bool(filtered.kept) == passes


LONG = " ".join(f"word{n}" for n in range(20))


@pytest.mark.parametrize(
    ("statement", "is_dropped"),
    [
        ("What is 12 + 18?", True),
        ("what  IS 12 +\n18?", True),
        ("What is 12 - 18?", False),
        ("What is 12 + 18", False),
        (LONG, False),
    ],
)
def test_short_evaluation_problems_are_recognised_when_equal(
    tag_tokenizer: ProtocolTokenizer, statement: str, is_dropped: bool
) -> None:
    check = EvaluationProblems(
        [Problem("e", statement, "1")], PromptBuilder(tag_tokenizer, SETTINGS), tag_tokenizer
    )
    base = trajectory(tag_tokenizer, 12, 18)
    filtered = filter_trajectories([base], RULES, is_contaminated=check)
    assert bool(filtered.kept) != is_dropped
    if is_dropped:
        assert {"rule": "no evaluation problem", "dropped": 1, "kept": 0} in filtered.funnel[
            "rules"
        ]


def test_long_evaluation_problems_are_recognised_by_a_run_of_words(
    tag_tokenizer: ProtocolTokenizer,
) -> None:
    prompts = PromptBuilder(tag_tokenizer, SETTINGS)
    check = EvaluationProblems([Problem("e", LONG, "1")], prompts, tag_tokenizer)
    base = trajectory(tag_tokenizer, 12, 18)
    words = LONG.split()

    def about(text: str) -> bool:
        return check(replace(base, prompt_ids=prompts.build(text)))

    assert about("Solve: " + " ".join(words[3:16]) + " quickly")
    assert not about("Solve: " + " ".join(words[3:15]) + " quickly")


def test_dataset_keeps_ids_authors_and_kinds_of_every_token(
    tmp_path: Path, tag_tokenizer: ProtocolTokenizer
) -> None:
    kept = trajectories(tag_tokenizer, 3)
    filtered = filter_trajectories(kept, RULES)
    write_dataset(tmp_path / "dataset", kept, funnel=filtered.funnel, source="runs/collect")
    dataset = read_dataset(tmp_path / "dataset")
    for row, t in zip(dataset, kept, strict=True):
        n = len(t.prompt_ids)
        assert row["input_ids"] == [*t.prompt_ids, *t.completion_ids]
        assert [AUTHOR_CODES[code] for code in row["authors"]] == ["prompt"] * n + t.authors
        assert [KIND_CODES[code] for code in row["kinds"]] == ["prompt"] * n + t.kinds
        assert (row["id"], row["problem_id"], row["routes"]) == (t.id, t.problem_id, [*t.routes])
    assert np.array_equal(codes_of(kept[0])[0], dataset[0]["input_ids"])


def test_dataset_folder_loads_with_datasets_and_has_a_card(
    tmp_path: Path, tag_tokenizer: ProtocolTokenizer
) -> None:
    kept = trajectories(tag_tokenizer, 3)
    funnel = filter_trajectories([*kept, kept[0]], RULES).funnel
    write_dataset(tmp_path / "dataset", kept, funnel=funnel, source="runs/collect")
    loaded = load_dataset(str(tmp_path / "dataset"), split="train", cache_dir=str(tmp_path / "c"))
    assert isinstance(loaded, Dataset) and len(loaded) == 3
    card = (tmp_path / "dataset" / "README.md").read_text()
    assert "3 trajectories of 3 problems" in card
    assert "| no near-duplicate | 1 | 3 |" in card
    assert "0 controller, 1 expert, 2 environment, 3 prompt" in card


def test_a_missing_dataset_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no such file; expected a Stage II dataset"):
        read_dataset(tmp_path)
