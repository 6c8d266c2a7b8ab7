"""Rewards: what a verdict is worth, and what has no worth at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rivet.rewards import CostTerm, RewardError, outcome_reward
from rivet.trajectory import ExpertCall, Segment, Trajectory


def trajectory(outcome: str | None, **fields: object) -> Trajectory:
    plain = Trajectory(
        id="p#0@1",
        problem_id="p",
        mode="experts",
        prompt_ids=(1,),
        segments=(Segment("controller", "answer", (2,), (-0.5,)),),
        finish="answer",
        well_formed=True,
        answer="4",
        outcome=outcome,
    )
    return replace(plain, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outcome", "reward"),
    [("right", 1.0), ("wrong", 0.0), ("no_answer", 0.0), ("timeout", None), ("died", None)],
)
def test_each_outcome_has_its_reward(outcome: str, reward: float | None) -> None:
    assert outcome_reward(trajectory(outcome)) == reward


@pytest.mark.parametrize("outcome", ["right", "wrong", None])
def test_an_infrastructure_fault_has_no_reward_whatever_the_outcome(outcome: str | None) -> None:
    assert outcome_reward(trajectory(outcome, fault="expert_timeout")) is None


@pytest.mark.parametrize("outcome", [None, "maybe"])
def test_a_trajectory_without_a_known_verdict_is_refused(outcome: str | None) -> None:
    with pytest.raises(RewardError, match=r"p#0@1.*outcome is .*expected one of right"):
        outcome_reward(trajectory(outcome))


def test_malformed_text_earns_what_its_answer_earns() -> None:
    assert outcome_reward(trajectory("right", well_formed=False)) == 1.0


CALLS = (ExpertCall("a", "ok", cost_usd=0.02), ExpertCall("b", "ok", cost_usd=0.03))


def test_cost_is_taken_off_right_answers_only() -> None:
    cost = CostTerm(per_call=0.1, per_usd=2.0)
    # 2 calls x 0.1 + 0.05 USD x 2 = 0.3
    assert outcome_reward(trajectory("right", expert_calls=CALLS), cost) == pytest.approx(0.7)
    assert outcome_reward(trajectory("wrong", expert_calls=CALLS), cost) == 0.0
    assert outcome_reward(trajectory("died", expert_calls=CALLS), cost) is None


def test_a_dear_right_answer_is_still_worth_more_than_a_wrong_one() -> None:
    cost = CostTerm(per_call=10.0, max_cost=0.4)
    assert outcome_reward(trajectory("right", expert_calls=CALLS), cost) == pytest.approx(0.6)


@pytest.mark.parametrize("bad", [{"per_call": -1}, {"per_usd": -0.1}, {"max_cost": 1.0}])
def test_costs_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected costs >= 0"):
        CostTerm(**bad)
