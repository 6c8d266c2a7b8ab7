"""What is counted over trajectories: every row has one result, faults take part in nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from scripted import completion, trajectory_of

from eval.summary import RESULTS, result_of, scores_by_problem, summarise
from eval.table import markdown_table, results_table
from rivet.grading.verdict import OUTCOMES, Grade
from rivet.rewards import outcome_reward
from rivet.rollout.types import RolloutRequest
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Trajectory, fault_of


@pytest.fixture
def row(tag_tokenizer: ProtocolTokenizer):
    """Makes one graded row."""

    def make(problem: str, index: int, outcome: str | None, **changes: Any) -> Trajectory:
        request = RolloutRequest(
            problem,
            (1, 2),
            mode=changes.pop("mode", "experts"),
            sample_index=index,
            info={"family": changes.pop("family", "gcd"), "source": "toy"}
            | changes.pop("info", {}),
        )
        pieces = completion(changes.pop("expert", "numth"), "6", mode=request.mode)
        defaults: dict[str, Any] = {
            "outcome": outcome,
            "reward": {"right": 1.0, "wrong": 0.0, "no_answer": 0.0}.get(outcome or ""),
        }
        return trajectory_of(tag_tokenizer, request, pieces, **(defaults | changes))

    return make


def test_what_is_a_fault_of_the_grader_voids_a_row_everywhere(row) -> None:
    for outcome in OUTCOMES:
        graded, is_fault = row("a", 0, outcome), Grade(outcome, None, "").is_fault
        assert (fault_of(graded) == f"grader_{outcome}") is is_fault
        assert (outcome_reward(graded) is None) is is_fault
        assert (result_of(graded) == "fault") is is_fault
    assert fault_of(row("a", 0, "right", fault="expert:timeout")) == "expert:timeout"


def test_every_row_has_exactly_one_result(row) -> None:
    broken = {"well_formed": False, "malformed_reason": "text after the answer"}
    rows = [
        row("a", 0, "right"),
        row("a", 1, "right", **broken),
        row("a", 2, "wrong"),
        row("a", 3, "wrong", **broken),
        row("b", 0, "no_answer", well_formed=False, finish="length"),
        row("b", 1, "no_answer", well_formed=False, finish="malformed"),
        row("b", 2, "no_answer"),
        row("b", 3, None, fault="timeout", finish="fault"),
        row("c", 0, "died"),
        row("c", 1, "wrong", **broken, mode="plain"),
    ]
    assert [result_of(t) for t in rows] == [
        "right",
        "right",
        "wrong",
        "malformed",
        "truncated",
        "malformed",
        "no_answer",
        "fault",
        "fault",
        "wrong",
    ]
    summary = summarise(rows)
    assert summary["outcomes"] == {
        "right": 2,
        "wrong": 2,
        "no_answer": 1,
        "malformed": 2,
        "truncated": 1,
        "fault": 2,
    }
    assert sum(summary["outcomes"].values()) == len(rows) and set(summary["outcomes"]) == set(
        RESULTS
    )
    json.dumps(summary, allow_nan=False)


def test_faults_change_no_share(row) -> None:
    scored = [row(p, i, "right" if i else "wrong") for p in "abc" for i in range(2)]
    faulted = [
        row(p, i, None, fault="timeout", finish="fault", well_formed=False)
        for p in "abcd"
        for i in range(2, 5)
    ]
    with_faults, without = summarise(scored + faulted), summarise(scored)
    assert with_faults.pop("outcomes")["fault"] == 12
    without.pop("outcomes")
    assert with_faults == without
    assert scores_by_problem(scored + faulted) == {"a": (2, 1), "b": (2, 1), "c": (2, 1)}


def test_accuracy_pass_and_majority_of_worked_numbers(row) -> None:
    rows = [row("a", i, "right" if i < 3 else "wrong") for i in range(4)]
    rows += [
        row("b", i, "right" if i < 1 else "wrong", info={"extracted": "6" if i < 1 else "7"})
        for i in range(4)
    ]
    summary = summarise(rows)
    assert summary["accuracy"] == 0.5 and summary["n"] == 2 and summary["samples"] == 8
    assert summary["ci_low"] <= 0.5 <= summary["ci_high"]
    assert summary["samples_per_problem"] == 4
    assert list(summary["pass_at_k"]) == ["1", "2", "4"]
    assert summary["pass_at_k"]["1"]["value"] == pytest.approx(0.5)
    assert summary["pass_at_k"]["2"]["value"] == pytest.approx((1 + 0.5) / 2)
    assert summary["pass_at_k"]["4"]["value"] == 1.0
    assert (summary["maj_at_k"]["k"], summary["maj_at_k"]["value"]) == (4, 0.5)


def test_a_column_of_pass_and_majority_has_only_rows_of_its_k(row) -> None:
    rows = [
        {"checkpoint": str(k), "condition": "experts"}
        | summarise([row("a", i, "right") for i in range(k)])
        for k in (4, 8)
    ]
    head, four, eight = (
        re.findall(r"<t[hd](?: [^>]*)?>(.*?)</t", line)
        for line in results_table(rows).split("</tr>")[:3]
    )
    shown = [(a, b) for name, a, b in zip(head, four, eight, strict=True) if "@" in name]
    assert [name for name in head if "@" in name] == ["pass@8 %", "maj@8 %"]
    assert shown == [("-", "100.0"), ("-", "100.0")]


def test_routes_count_the_first_expert_and_silence_is_no_right_route(row) -> None:
    competent = {"gcd": "numth", "sum": "calc"}
    rows = [
        row("a", 0, "right", info={"routes": ["numth", "sage"]}),
        row("b", 0, "right", info={"routes": ["calc"]}),
        row("c", 0, "right", info={"routes": []}),
        row("d", 0, "wrong", info={"routes": ["calc"]}, family="sum"),
        row("e", 0, "wrong", info={"routes": ["sage"]}, family="unknown"),
    ]
    summary = summarise(rows, competent=competent)
    assert summary["route_accuracy"] == 0.5
    assert summary["consulted"] == 0.8
    assert summary["route_shares"] == {"calc": 0.5, "numth": 0.25, "sage": 0.25}
    assert summary["by"]["family"]["sum"]["route_shares"] == {"calc": 1.0}
    assert summarise(rows)["route_accuracy"] is None
    local = summarise([row("a", 0, "right", mode="local", info={"routes": ["numth"]})])
    assert local["route_shares"] == {"numth": 1.0}


def test_usage_is_per_problem_by_author(row) -> None:
    rows = [row("a", 0, "right"), row("a", 1, "right"), row("b", 0, "right")]
    usage = summarise(rows)["usage_per_problem"]
    for author in ("controller", "expert", "environment"):
        tokens = sum(len(s) for s in rows[0].segments if s.author == author)
        assert usage[f"{author}_tokens"] == pytest.approx(3 * tokens / 2)
    assert usage["expert_calls"] == 1.5 and usage["cost_usd"] == pytest.approx(0.0015)


def test_fabricated_outputs_and_failed_programs_are_shares(row) -> None:
    rows = [
        row("a", 0, "no_answer", finish="fabricated_output", well_formed=False),
        row("b", 0, "right"),
        row("c", 0, "right", code_runs=()),
        row("d", 0, "right"),
    ]
    summary = summarise(rows)
    assert summary["fabricated_output_rate"] == 0.25
    assert summary["code_ok"] == 1.0
    assert summary["well_formed"] == 0.75


def test_no_rows_and_only_faults_give_an_empty_summary_without_a_nan() -> None:
    summary = summarise([])
    assert (summary["n"], summary["accuracy"], summary["ci_low"], summary["ci_high"]) == (
        0,
        0,
        0,
        1,
    )
    assert summary["pass_at_k"] == {} and summary["consulted"] is None
    json.dumps(summary, allow_nan=False)


def test_every_key_of_a_row_is_documented(row) -> None:
    text = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text("utf-8")
    table = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    documented = {name for cell in table for name in re.findall(r"`([a-z_]+)`", cell)}
    keys = summarise([row("a", 0, "right")]).keys() | {"checkpoint", "condition"}
    assert keys <= documented


def test_several_benchmarks_get_a_line_each_and_a_mean_in_which_each_counts_the_same() -> None:
    row = {
        "checkpoint": "c",
        "condition": "plain",
        "accuracy": 0.7,
        "ci_low": 0.6,
        "ci_high": 0.8,
        "n": 50,
        "mean_of_sources": {"value": 0.45, "ci": [0.3, 0.6], "n": 50, "sources": 2},
        "by": {
            "source": {
                "gsm8k": {"value": 0.8, "ci": [0.7, 0.9], "n": 40},
                "math-500": {"value": 0.1, "ci": [0.0, 0.4], "n": 10},
            }
        },
    }
    lines = [[c.strip() for c in line.split("|")] for line in markdown_table([row]).splitlines()]
    assert [line[1:6] for line in lines[2:]] == [
        ["c", "plain", "70.0", "60.0 to 80.0", "50"],
        ["", "- gsm8k", "80.0", "70.0 to 90.0", "40"],
        ["", "- math-500", "10.0", "0.0 to 40.0", "10"],
        ["", "- mean of benchmarks", "45.0", "30.0 to 60.0", "50"],
    ]
    assert results_table([row]).count("<tr>") == 5
    assert len(markdown_table([row | {"by": {}}]).splitlines()) == 3
