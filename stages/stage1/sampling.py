"""Sampling for Stage I: the rollout engine over the trainer's own model, then the grader.

The engine lives in a background event loop. Its model object is the trainer's, so there are no
weights to copy; cached states are dropped before each step, because the update in between has
changed the weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

from transformers import PreTrainedModel

from data.miniworld.experts import EXPERTS
from data.problems import Problem
from eval.grade import Grades, grade_trajectory
from rivet.experts.config import ExpertConfig
from rivet.experts.pool import ExpertPool
from rivet.grading import Grader
from rivet.prompts import PromptBuilder
from rivet.rewards import CostTerm, outcome_reward
from rivet.rollout.backend import SamplingParams
from rivet.rollout.engine import RolloutEngine
from rivet.rollout.local import LocalBackend
from rivet.rollout.runner import EngineRunner
from rivet.rollout.types import RolloutRequest, rollout_seed
from rivet.settings import ProtocolSettings
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Trajectory
from sandbox import PythonSandbox
from stages.stage1.rollouts import Asked

_MAX_IN_FLIGHT = 1024


class EngineSource:
    """Samples and grades the rollouts of a step; implements `RolloutSource`.

    Args:
        runner: Holds the open engine over the trainer's model.
        grader: Grades.
        prompts: Builds prompts.
        temperature: Of the sampling, above 0.
        seed: Of the run.
        cost: Taken off the reward of right answers.
    """

    def __init__(
        self,
        runner: EngineRunner,
        *,
        grader: Grades,
        prompts: PromptBuilder,
        temperature: float,
        seed: int,
        cost: CostTerm,
    ) -> None:
        self._runner = runner
        self._grader = grader
        self._prompts = prompts
        self._sampling = SamplingParams(temperature=temperature)
        self._seed = seed
        self._cost = cost

    def sample(self, asked: Sequence[Asked]) -> list[Trajectory]:
        """Trajectories with outcome and reward set, in the order that they were asked for."""
        return self._runner.call(self._sample(asked))

    async def _sample(self, asked: Sequence[Asked]) -> list[Trajectory]:
        backend = self._runner.engine.backend
        assert isinstance(backend, LocalBackend)
        backend.reset()
        gate = asyncio.Semaphore(_MAX_IN_FLIGHT)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(one, gate)) for one in asked]
        return [task.result() for task in tasks]

    async def _one(self, asked: Asked, gate: asyncio.Semaphore) -> Trajectory:
        async with gate:
            trajectory = await self._runner.engine.rollout(self._request(asked))
        if trajectory.fault is None:
            trajectory = await grade_trajectory(
                self._grader, asked.problem, trajectory, self._prompts.tokenizer
            )
        return replace(trajectory, reward=outcome_reward(trajectory, self._cost))

    def _request(self, asked: Asked) -> RolloutRequest:
        problem = asked.problem
        info = {"family": problem.meta.get("family", ""), "gold": problem.answer}
        return RolloutRequest(
            problem_id=problem.id,
            prompt_ids=self._prompts.build(problem.problem, "experts"),
            mode="experts",
            sampling=self._sampling,
            seed=rollout_seed(self._seed, asked.step, problem.id, asked.sample_index),
            step=asked.step,
            sample_index=asked.sample_index,
            info=info | {"source": problem.source},
        )


@contextmanager
def engine_source(
    model: PreTrainedModel,
    tokenizer: ProtocolTokenizer,
    settings: ProtocolSettings,
    experts: Sequence[ExpertConfig],
    *,
    batch_size: int,
    temperature: float,
    seed: int,
    cost: CostTerm,
) -> Iterator[EngineSource]:
    """Open sandbox, experts, grader and engine around the trainer's model.

    Args:
        model: The controller, on its device already.
        tokenizer: Its tokenizer.
        settings: How it speaks the protocol.
        experts: Whom it may consult; each is asked one question first.
        batch_size: Rollouts of a step, sampled at the same time.
        temperature: Of the sampling.
        seed: Of the run.
        cost: Taken off the reward of right answers.

    Raises:
        rivet.experts.pool.ExpertsUnavailableError: An expert does not answer.
    """

    @asynccontextmanager
    async def open_engine() -> AsyncIterator[RolloutEngine]:
        async with (
            PythonSandbox() as sandbox,
            ExpertPool(experts) as pool,
            LocalBackend(model, tokenizer, max_batch=batch_size) as backend,
        ):
            await pool.preflight()
            yield RolloutEngine(backend, tokenizer, settings, experts=pool, sandbox=sandbox)

    with Grader() as grader, EngineRunner(open_engine) as runner:
        yield EngineSource(
            runner,
            grader=grader,
            prompts=PromptBuilder(tokenizer, settings),
            temperature=temperature,
            seed=seed,
            cost=cost,
        )


def right_experts(problems: Sequence[Problem], names: Sequence[str]) -> dict[str, str]:
    """Problem id -> the expert that knows it, for problems of the mini-world's families."""
    by_family = {f: e.name for e in EXPERTS.values() for f in e.families if e.name in names}
    families = {p.id: str(p.meta.get("family", "")) for p in problems}
    return {i: by_family[family] for i, family in families.items() if family in by_family}
