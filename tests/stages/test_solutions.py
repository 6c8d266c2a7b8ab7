"""Experts' own solutions: laid out as the controller's turn, run, graded, ready for Stage II."""

from __future__ import annotations

from pathlib import Path

import pytest
from untrained import write_untrained

from data.miniworld.experts import EXPERTS, route
from data.miniworld.tasks import build_split
from data.problems import Problem
from rivet.config import load_config
from rivet.experts.ledger import read_spent
from rivet.interrupt import Interrupted
from rivet.rollout.types import RolloutLimits
from rivet.runs import RunFinishedError
from rivet.store import TrajectoryStore
from rivet.trajectory import Trajectory
from stages.experts import start_miniworld_experts
from stages.solutions import SolutionsConfig, question_for, run
from stages.stage2.candidates import Candidate
from stages.stage2.filter import Filter, FilterRules


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose answers do not matter."""
    return write_untrained(tmp_path_factory.mktemp("checkpoint"), RolloutLimits())


def test_every_expert_answers_and_who_knows_the_family_is_right(
    checkpoint: Path, tmp_path: Path
) -> None:
    config = load_config(
        SolutionsConfig,
        None,
        model=str(checkpoint),
        output_dir=str(tmp_path / "run"),
        problems_per_family=1,
    )
    rows = TrajectoryStore(run(config)).load()
    assert len(rows) == 6 * len(EXPERTS)
    for row in rows:
        assert row.fault is None and row.well_formed and len(row.code_runs) == 1
        assert {s.author for s in row.segments} == {"controller", "environment"}
        assert not {"request", "reply", "route"} & set(row.kinds), "no decision and no reply"
        assert not row.expert_calls
        if row.info["expert"] == route(row.info["family"]):
            assert row.outcome == "right"
        elif row.info["expert"] != "sage":
            assert row.outcome == "wrong"
    # Stage II keeps the verified ones, whoever wrote them.
    passes = Filter(FilterRules(use="code", max_per_problem=4, near_duplicate=1.0))
    kept = [row for row in rows if passes(Candidate.of(row))]
    assert 6 <= len(kept) <= 12 and all(row.outcome == "right" for row in kept)
    with pytest.raises(RunFinishedError):
        run(config)


def test_a_spent_budget_stops_the_run_which_goes_on_when_it_is_raised(
    checkpoint: Path, tmp_path: Path
) -> None:
    with start_miniworld_experts() as configs:
        url = configs[0].base_urls[0]

        def solutions(max_calls: int) -> list[Trajectory]:
            path = tmp_path / "experts.yaml"
            path.write_text(
                f"budget: {{max_calls: {max_calls}}}\n"
                f"experts:\n  - {{name: calc, model: calc, base_url: '{url}'}}\n"
            )
            config = SolutionsConfig(
                model=str(checkpoint),
                output_dir=str(tmp_path / "run"),
                problems_per_family=1,
                experts=str(path),
                batch_size=1,
            )
            return TrajectoryStore(run(config)).load()

        with pytest.raises(Interrupted, match="max_calls is 4"):
            solutions(4)
        assert sum(s.calls for s in read_spent(tmp_path / "run").values()) == 4
        assert len(solutions(20)) == 6
        # What was paid for before the stop is counted on.
        assert 6 <= sum(s.calls for s in read_spent(tmp_path / "run").values()) <= 10


def test_an_expert_is_asked_the_problem_itself_outside_the_mini_world() -> None:
    assert question_for(Problem("p", "What is 1 + 1?", "2")) == "What is 1 + 1?"
    mini = build_split("train", 1, 0)[0]
    assert question_for(mini) != mini.problem


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="model is not set"):
        SolutionsConfig()
    with pytest.raises(ValueError, match="limit is 0; expected at least 1"):
        SolutionsConfig(model="m", limit=0)
    with pytest.raises(ValueError, match=r"max_fault_rate is 1.5; expected 0 to 1"):
        SolutionsConfig(model="m", max_fault_rate=1.5)
