"""The verified filter: one test per rule, and a funnel that adds up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, load_dataset
from stage2_world import SETTINGS, faulty, ids_of, trajectories, trajectory

from data.problems import Problem
from rivet.prompts import PromptBuilder
from rivet.settings import ExpertCard, ProtocolSettings
from rivet.store import TrajectoryStore
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Trajectory
from stages.stage2.candidates import COLUMNS, Candidate, problem_counts, read_candidates
from stages.stage2.dataset import DatasetError, read_dataset, write_dataset
from stages.stage2.filter import EvaluationProblems, Filter, FilterRules, shingles
from stages.stage2.objective import AUTHOR_CODES, KIND_CODES

RULES = FilterRules(max_length=150)


@dataclass(frozen=True)
class Filtered:
    kept: tuple[Trajectory, ...]
    funnel: dict[str, Any]


def filter_trajectories(
    trajectories: Sequence[Trajectory], rules: FilterRules, **options: Any
) -> Filtered:
    """All at once; knowing how many there are of each problem changes nothing."""
    passes = Filter(rules, **options)
    kept = tuple(t for t in trajectories if passes(Candidate.of(t)))
    forgetting = Filter(rules, counts=Counter(t.problem_id for t in trajectories), **options)
    assert tuple(t for t in trajectories if forgetting(Candidate.of(t))) == kept
    assert forgetting.funnel == passes.funnel
    return Filtered(kept, passes.funnel)


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


def test_without_verification_wrong_answers_pass_and_faults_do_not(
    tag_tokenizer: ProtocolTokenizer,
) -> None:
    good = trajectory(tag_tokenizer, 1, 2)
    wrong = replace(good, id="w#0@0", problem_id="w", outcome="wrong")
    fault = replace(good, id="f#0@0", problem_id="f", outcome=None, fault="expert:timeout")
    filtered = filter_trajectories([good, wrong, fault], replace(RULES, require_right=False))
    assert ids_of(filtered.kept) == ids_of([good, wrong])


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


def test_a_limit_of_all_keeps_the_first_that_pass(tag_tokenizer: ProtocolTokenizer) -> None:
    good = trajectories(tag_tokenizer, 4)
    bad = replace(good[0], id="w#0@0", problem_id="w", outcome="wrong")
    filtered = filter_trajectories([bad, *good], replace(RULES, max_trajectories=2))
    assert filtered.kept == tuple(good[:2])
    assert filtered.funnel["rules"][-1] == {"rule": "at most 2 in all", "dropped": 2, "kept": 2}


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
        [Problem("e", statement, "1")], PromptBuilder(tag_tokenizer, SETTINGS)
    )
    base = trajectory(tag_tokenizer, 12, 18)
    filtered = filter_trajectories([base], RULES, is_contaminated=check)
    assert bool(filtered.kept) != is_dropped
    if is_dropped:
        assert {"rule": "no evaluation problem", "dropped": 1, "kept": 0} in filtered.funnel[
            "rules"
        ]


@pytest.mark.parametrize("prompt", ["bare", "instruct"])
@pytest.mark.parametrize("mode", ["experts", "no-python", "plain"])
def test_short_evaluation_problems_are_recognised_whoever_the_experts_were(
    tokenizer: ProtocolTokenizer, prompt: Any, mode: Any
) -> None:
    cards = [(ExpertCard(name, f"knows {name}"),) for name in ("algebra", "geometry")]
    ours, theirs = (
        PromptBuilder(tokenizer, ProtocolSettings(prompt=prompt, experts=c)) for c in cards
    )
    check = EvaluationProblems([Problem("e", "What is <think> 12 + 18?", "1")], ours)

    def about(text: str) -> bool:
        ids = np.array(theirs.build(text, mode), np.int32)
        return check(SimpleNamespace(prompt_ids=ids, problem_id=text))  # type: ignore[arg-type]

    assert about("What is <think> 12 + 18?") and about("what IS <think> 12 +\n18?")
    assert not about("What is <think> 12 - 18?")


def test_long_evaluation_problems_are_recognised_by_most_of_their_words(
    tag_tokenizer: ProtocolTokenizer,
) -> None:
    prompts = PromptBuilder(tag_tokenizer, SETTINGS)
    check = EvaluationProblems([Problem("e", LONG, "1")], prompts)
    base = trajectory(tag_tokenizer, 12, 18)
    words = LONG.split()

    def about(text: str) -> bool:
        return check(Candidate.of(replace(base, prompt_ids=prompts.build(text))))

    assert about("Solve: " + " ".join(words[2:19]) + " quickly")
    assert not about("Solve: " + " ".join(words[3:12]) + " quickly")


def write(folder: Path, kept: Sequence[Trajectory], funnel: dict[str, Any]) -> None:
    rows = map(Candidate.of, kept)
    write_dataset(folder, rows, funnel=lambda: funnel, source="runs/collect")


def test_a_store_read_in_columns_gives_what_its_trajectories_give(
    tmp_path: Path, tag_tokenizer: ProtocolTokenizer
) -> None:
    base = trajectories(tag_tokenizer, 5)
    everything = [*base[:3], *faulty(base[0]).values(), replace(base[3], segments=()), *base[4:]]
    store = TrajectoryStore(tmp_path)
    store.write("part-00000", everything[:4])
    store.write("part-00001", everything[4:])
    read = list(read_candidates(store))
    assert len(read) == len(everything)
    for row, t in zip(read, everything, strict=True):
        expected = Candidate.of(t)
        for name in Candidate.__dataclass_fields__:
            assert np.array_equal(getattr(row, name), getattr(expected, name)), (t.id, name)
    assert problem_counts(store) == Counter(t.problem_id for t in everything)
    # Batches of any size cut between rows.
    sizes = [batch.num_rows for batch in store.batches([*COLUMNS], 3)]
    assert sum(sizes) == len(everything) and max(sizes) == 3


def test_shingles_are_the_sets_of_runs_of_five_tokens() -> None:
    a, b = np.arange(12, dtype=np.int32), np.arange(4, 16, dtype=np.int32)
    # 8 runs each; those that begin at 4, 5, 6, 7 are common.
    assert len(shingles(a)) == len(shingles(b)) == 8
    assert len(np.intersect1d(shingles(a), shingles(b))) == 4
    repeated = np.array([1, 2, 1, 2, 1, 2, 1, 2], np.int32)
    assert len(shingles(repeated)) == 2
    assert len(shingles(a[:3])) == len(shingles(a[:0])) == 1


def test_dataset_keeps_ids_authors_and_kinds_of_every_token(
    tmp_path: Path, tag_tokenizer: ProtocolTokenizer
) -> None:
    kept = trajectories(tag_tokenizer, 3)
    filtered = filter_trajectories(kept, RULES)
    write(tmp_path / "dataset", kept, filtered.funnel)
    dataset = read_dataset(tmp_path / "dataset")
    for row, t in zip(dataset, kept, strict=True):
        n = len(t.prompt_ids)
        assert row["input_ids"] == [*t.prompt_ids, *t.completion_ids]
        assert [AUTHOR_CODES[code] for code in row["authors"]] == ["prompt"] * n + t.authors
        assert [KIND_CODES[code] for code in row["kinds"]] == ["prompt"] * n + t.kinds
        assert (row["id"], row["problem_id"], row["routes"]) == (t.id, t.problem_id, [*t.routes])


def test_dataset_folder_loads_with_datasets_and_has_a_card(
    tmp_path: Path, tag_tokenizer: ProtocolTokenizer
) -> None:
    kept = trajectories(tag_tokenizer, 3)
    funnel = filter_trajectories([*kept, kept[0]], RULES).funnel
    write(tmp_path / "dataset", kept, funnel)
    loaded = load_dataset(str(tmp_path / "dataset"), split="train", cache_dir=str(tmp_path / "c"))
    assert isinstance(loaded, Dataset) and len(loaded) == 3
    card = (tmp_path / "dataset" / "README.md").read_text()
    assert "3 trajectories of 3 problems" in card
    assert "| no near-duplicate | 1 | 3 |" in card
    assert "0 controller, 1 expert, 2 environment, 3 prompt" in card


def test_a_missing_dataset_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no such file; expected a Stage II dataset"):
        read_dataset(tmp_path)
