"""Where the trajectories of a step come from: stored ones if there are any, else fresh ones.

A step's graded trajectories are written as one shard before the update that they cause. So after a
kill at any moment the steps since the last checkpoint are trained on the very same rollouts again,
and no expert is asked twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from data.problems import Problem
from rivet.store import StoreError, TrajectoryStore
from rivet.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Asked:
    """One rollout that a step needs.

    Attributes:
        problem: What is to be solved.
        sample_index: Index in the problem's group.
        step: Optimizer step that it is for, from 1.
    """

    problem: Problem
    sample_index: int
    step: int

    @property
    def id(self) -> str:
        """Id of the trajectory that answers it."""
        return f"{self.problem.id}#{self.sample_index}@{self.step}"


class RolloutSource(Protocol):
    """Samples and grades."""

    def sample(self, asked: Sequence[Asked]) -> list[Trajectory]:
        """Trajectories with outcome and reward set, in the order that they were asked for."""
        ...


class StepRollouts:
    """The rollouts of each step, kept in a store.

    Args:
        source: Samples what is not stored.
        store: Folder of the run's trajectories.
        rank: This process, of `world_size`.
        world_size: Processes of the run.
    """

    def __init__(
        self, source: RolloutSource, store: TrajectoryStore, *, rank: int = 0, world_size: int = 1
    ) -> None:
        self._source = source
        self._store = store
        self._suffix = f"-rank{rank:04d}" if world_size > 1 else ""
        self._stored: set[str] = set(store.shards())

    def of_step(self, step: int, asked: Sequence[Asked]) -> tuple[list[Trajectory], bool]:
        """Trajectories of a step in the order asked, and whether they were stored already.

        Raises:
            StoreError: The store holds other rollouts for this step.
        """
        shard = self._shard(step)
        if shard not in self._stored:
            return self._source.sample(asked), False
        trajectories = self._store.read_shard(shard)
        if [t.id for t in trajectories] != [a.id for a in asked]:
            raise StoreError(
                f"{self._store.folder / shard}.parquet: holds other rollouts than step {step} of "
                "this run asks for; expected the folder of the same run with the same settings: "
                "take another output_dir, or overwrite: true"
            )
        return trajectories, True

    def keep(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Write a step's shard, whole or not at all."""
        shard = self._shard(step)
        self._store.write(shard, trajectories)
        self._stored.add(shard)

    def _shard(self, step: int) -> str:
        return f"step-{step:05d}{self._suffix}"


def with_info(
    trajectories: Sequence[Trajectory], values: Mapping[str, Sequence[object]]
) -> list[Trajectory]:
    """Copies with one value each of every named list added to `info`."""
    return [
        replace(t, info=t.info | {name: column[n] for name, column in values.items()})
        for n, t in enumerate(trajectories)
    ]
