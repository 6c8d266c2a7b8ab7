"""Outcome rewards: 1 for a right answer, 0 for a wrong or missing one, none where nothing is known.

There is no bonus for format or for code that runs: a controller that can earn reward without being
right learns to do that instead. A cost may be taken off right answers only, and never so much that
a dear right answer is worth less than `1 - max_cost`, hence never less than a wrong one.
"""

from __future__ import annotations

from dataclasses import dataclass

from rivet.trajectory import Trajectory

_REWARDS: dict[str, float | None] = {
    "right": 1.0,
    "wrong": 0.0,
    "no_answer": 0.0,
    # The grader failed: that says nothing about the answer.
    "timeout": None,
    "died": None,
}


class RewardError(ValueError):
    """A reward was asked of a trajectory that has no verdict."""


@dataclass(frozen=True, slots=True)
class CostTerm:
    """What consulting costs, taken off the reward of right answers. The default takes nothing.

    Attributes:
        per_call: Reward taken off per consultation, at least 0.
        per_usd: Reward taken off per US dollar that the consultations cost, at least 0.
        max_cost: At most this is taken off, in [0, 1).
    """

    per_call: float = 0.0
    per_usd: float = 0.0
    max_cost: float = 0.5

    def __post_init__(self) -> None:
        if self.per_call < 0 or self.per_usd < 0 or not 0 <= self.max_cost < 1:
            raise ValueError(f"expected costs >= 0 and max_cost in [0, 1), got {self}")

    def of(self, trajectory: Trajectory) -> float:
        """Cost of a trajectory's consultations, in [0, max_cost]."""
        calls = trajectory.expert_calls
        cost = self.per_call * len(calls) + self.per_usd * sum(call.cost_usd for call in calls)
        return min(cost, self.max_cost)


def outcome_reward(trajectory: Trajectory, cost: CostTerm | None = None) -> float | None:
    """Reward of a graded trajectory, in [0, 1]; None if a fault or a failed grader voids it.

    Args:
        trajectory: With its outcome set, unless its infrastructure failed.
        cost: Taken off right answers; None takes nothing.

    Raises:
        RewardError: It has neither a fault nor a known outcome.
    """
    if trajectory.fault is not None:
        return None
    if trajectory.outcome not in _REWARDS:
        raise RewardError(
            f"trajectory {trajectory.id}: outcome is {trajectory.outcome!r}; expected one of "
            f"{', '.join(_REWARDS)}: grade it before asking for its reward"
        )
    reward = _REWARDS[trajectory.outcome]
    return reward - cost.of(trajectory) if cost is not None and reward else reward
