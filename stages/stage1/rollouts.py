"""Where the trajectories of a step come from: stored ones if there are any, else fresh ones.

A step's graded trajectories are written as one shard before the update that they cause. So after a
kill at any moment the steps since the last checkpoint are trained on the very same rollouts again,
and no expert is asked twice.

A group whose rewards are all equal teaches nothing; with `Refill` another problem takes its place,
at most so many times, and the group itself is kept in the shard behind the batch.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from data.problems import Problem
from rivet.store import StoreError, TrajectoryStore
from rivet.trajectory import Trajectory
from stages.stage1.fates import Fate

_REPLACED: Fate = "zero_advantage"


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

    def sample_until_mixed(
        self, groups: Sequence[Sequence[Sequence[Asked]]]
    ) -> list[list[list[Trajectory]]]:
        """Sample each group's first choice, and its next one while what came is flat.

        Args:
            groups: For each group of the batch its choices, each a whole group.

        Returns:
            For each group the choices that were sampled; the last one is to be used.
        """
        ...


@dataclass(frozen=True, slots=True)
class Refill:
    """Other problems for flat groups.

    Attributes:
        problems: To choose from.
        group_size: G, trajectories of one problem.
        max_refills: Problems that may be tried for one flat group, at least 1. So at most
            1 + max_refills times the batch is sampled.
        seed: Of the run.
    """

    problems: Sequence[Problem]
    group_size: int
    max_refills: int
    seed: int

    def choices(self, step: int, asked: Sequence[Asked], rank: int) -> list[list[list[Asked]]]:
        """For each group that was asked for, itself and what may take its place.

        Groups that straddle processes have no choice. Nothing here depends on the order in which
        groups finish, so a step that is sampled again asks for the same.
        """
        size = self.group_size
        rng = random.Random(f"{self.seed}\x1frefill\x1f{step}\x1f{rank}")
        order = rng.sample(range(len(self.problems)), len(self.problems))
        taken = {one.problem.id for one in asked}
        spare = (self.problems[n] for n in order if self.problems[n].id not in taken)
        groups: list[list[list[Asked]]] = []
        for group in _split(asked):
            choices = [group]
            if len(group) == size:
                # Indices of their own: another process may have asked for the same problem.
                indices = range(size * (1 + rank), size * (2 + rank))
                choices += [
                    [Asked(problem, index, step) for index in indices]
                    for _, problem in zip(range(self.max_refills), spare, strict=False)
                ]
            groups.append(choices)
        return groups


def _split(asked: Sequence[Asked]) -> list[list[Asked]]:
    """Runs of rows of one problem."""
    groups: list[list[Asked]] = []
    for one in asked:
        if groups and groups[-1][0].problem.id == one.problem.id:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


class StepRollouts:
    """The rollouts of each step, kept in a store.

    Args:
        source: Samples what is not stored.
        store: Folder of the run's trajectories.
        rank: This process, of `world_size`.
        world_size: Processes of the run.
        refill: What takes the place of flat groups; None leaves them in.
    """

    def __init__(
        self,
        source: RolloutSource,
        store: TrajectoryStore,
        *,
        rank: int = 0,
        world_size: int = 1,
        refill: Refill | None = None,
    ) -> None:
        self._source = source
        self._store = store
        self._rank = rank
        self._refill = refill
        self._replaced: list[Trajectory] = []
        self._suffix = f"-rank{rank:04d}-of-{world_size:04d}" if world_size > 1 else ""
        self._stored: set[str] = set(store.shards())
        expected = f"{world_size:04d}" if world_size > 1 else ""
        for shard in self._stored:
            if shard.partition("-of-")[2] != expected:
                raise StoreError(
                    f"{store.folder / shard}.parquet: written by a run with another number of "
                    f"processes than {world_size}, so its steps cannot be trained again: start as "
                    "many, or take another output_dir"
                )

    def of_step(self, step: int, asked: Sequence[Asked]) -> tuple[list[Trajectory], bool]:
        """Trajectories of a step in the order asked, and whether they were stored already.

        Raises:
            StoreError: The store holds other rollouts for this step.
        """
        shard = self._shard(step)
        if shard not in self._stored:
            return self._sample(step, asked), False
        rows = self._store.read_shard(shard)
        self._replaced = [t for t in rows if t.info.get("replaced")]
        batch = rows[: len(rows) - len(self._replaced)]
        ids = {t.id for t in rows}
        is_same = len(batch) == len(asked) and all(
            t.id == a.id or (self._refill is not None and a.id in ids)
            for t, a in zip(batch, asked, strict=True)
        )
        if not is_same:
            raise StoreError(
                f"{self._store.folder / shard}.parquet: holds other rollouts than step {step} of "
                "this run asks for; expected the folder of the same run with the same settings: "
                "take another output_dir, or overwrite: true"
            )
        return batch, True

    @property
    def replaced(self) -> int:
        """Trajectories of the last step that others stand in for."""
        return len(self._replaced)

    def keep(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Write a step's shard, whole or not at all; replaced groups go behind the batch."""
        shard = self._shard(step)
        self._store.write(shard, [*trajectories, *self._replaced])
        self._stored.add(shard)

    def _sample(self, step: int, asked: Sequence[Asked]) -> list[Trajectory]:
        self._replaced = []
        if self._refill is None:
            return self._source.sample(asked)
        batch: list[Trajectory] = []
        for tried in self._source.sample_until_mixed(self._refill.choices(step, asked, self._rank)):
            batch += tried[-1]
            self._replaced += [
                replace(t, info=t.info | {"fate": _REPLACED, "replaced": True})
                for group in tried[:-1]
                for t in group
            ]
        return batch

    def _shard(self, step: int) -> str:
        return f"step-{step:05d}{self._suffix}"


def segment_weights(trajectories: Sequence[Trajectory], weights: Tensor) -> list[list[float]]:
    """The weight of each segment's tokens in the loss, for whoever looks at a trajectory later.

    One number a segment says all: tokens of one author and kind in one trajectory weigh the same
    before the factors that depend on current probabilities.

    Args:
        trajectories: The batch.
        weights: From `token_weights`, shape (B*G, T).
    """
    found = []
    for trajectory, row in zip(trajectories, weights.tolist(), strict=True):
        starts = itertools.accumulate((len(s) for s in trajectory.segments[:-1]), initial=0)
        found.append([float(f"{row[n]:.4g}") for n in starts] if trajectory.segments else [])
    return found


def with_info(
    trajectories: Sequence[Trajectory], values: Mapping[str, Sequence[object]]
) -> list[Trajectory]:
    """Copies with one value each of every named list added to `info`."""
    return [
        replace(t, info=t.info | {name: column[n] for name, column in values.items()})
        for n, t in enumerate(trajectories)
    ]
