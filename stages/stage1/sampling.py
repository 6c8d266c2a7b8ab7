"""Sampling for Stage I: the rollout engine over the trainer's own model, then the grader.

The engine lives in a background event loop. The local backend's model object is the trainer's, so
there are no weights to copy; cached states are dropped before each step, because the update in
between has changed the weights. vLLM servers get them by `stages.stage1.weight_sync`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel

from data.miniworld.experts import EXPERTS
from data.problems import Problem
from eval.grade import Grades, grade_trajectory
from rivet.experts.config import ExpertConfig
from rivet.experts.pool import ExpertPool
from rivet.grading import Grader
from rivet.prompts import PromptBuilder
from rivet.rewards import CostTerm, outcome_reward
from rivet.rollout.backend import Backend, SamplingParams
from rivet.rollout.engine import RolloutEngine
from rivet.rollout.local import LocalBackend
from rivet.rollout.runner import EngineRunner
from rivet.rollout.types import RolloutRequest, check_prompts, rollout_seed
from rivet.rollout.vllm_backend import VLLMBackend
from rivet.settings import ProtocolSettings
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Mode, Trajectory
from sandbox import PythonSandbox
from stages.stage1.fates import is_flat
from stages.stage1.rollouts import Asked

_MAX_IN_FLIGHT = 1024

T = TypeVar("T")


class EngineSource:
    """Samples and grades the rollouts of a step; implements `RolloutSource`.

    Args:
        runner: Holds the open engine over the trainer's model.
        grader: Grades.
        prompts: Builds prompts.
        temperature: Of the sampling, above 0.
        seed: Of the run.
        cost: Taken off the reward of right answers.
        mode: Condition to sample under.
        deadline_s: Seconds that one rollout may take before it is given up as late; None: any.
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
        mode: Mode = "experts",
        deadline_s: float | None = None,
    ) -> None:
        self._runner = runner
        self._grader = grader
        self._prompts = prompts
        self._sampling = SamplingParams(temperature=temperature)
        self._seed = seed
        self._cost = cost
        self._mode: Mode = mode
        self._deadline_s = deadline_s

    @property
    def backend(self) -> Backend:
        """What samples; use it from coroutines passed to `call` only."""
        return self._runner.engine.backend

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the engine's event loop and wait."""
        return self._runner.call(coroutine)

    def sample(self, asked: Sequence[Asked]) -> list[Trajectory]:
        """Trajectories with outcome and reward set, in the order that they were asked for."""
        (tried,) = self._runner.call(self._sample([[asked]]))
        return tried[-1]

    def sample_until_mixed(
        self, groups: Sequence[Sequence[Sequence[Asked]]]
    ) -> list[list[list[Trajectory]]]:
        """See `RolloutSource`; a group goes on to its next choice without waiting for others."""
        return self._runner.call(self._sample(groups))

    def check_prompts(self, problems: Sequence[Problem]) -> None:
        """Refuse problems that no rollout could answer, before anything is sampled.

        Raises:
            rivet.rollout.types.PromptTooLongError: A prompt fills the controller's context.
        """
        limit = self._runner.engine.max_context
        build = self._prompts.build
        check_prompts({p.id: len(build(p.problem, self._mode)) for p in problems}, limit)

    async def _sample(
        self, groups: Sequence[Sequence[Sequence[Asked]]]
    ) -> list[list[list[Trajectory]]]:
        backend = self._runner.engine.backend
        if isinstance(backend, LocalBackend):
            backend.reset()
        gate = asyncio.Semaphore(_MAX_IN_FLIGHT)
        tried = await _all([self._until_mixed(choices, gate) for choices in groups])
        if isinstance(backend, LocalBackend):
            await backend.idle()  # late rollouts leave the model within a step, the trainer's own
        return tried

    async def _until_mixed(
        self, choices: Sequence[Sequence[Asked]], gate: asyncio.Semaphore
    ) -> list[list[Trajectory]]:
        tried: list[list[Trajectory]] = []
        for group in choices:
            tried.append(await _all([self._one(one, gate) for one in group]))
            if not is_flat(tried[-1]):
                break
        return tried

    async def _one(self, asked: Asked, gate: asyncio.Semaphore) -> Trajectory:
        async with gate:
            trajectory = await self._runner.engine.rollout(self._request(asked))
        if trajectory.fault is None:
            trajectory = await grade_trajectory(self._grader, asked.problem, trajectory)
        return replace(trajectory, reward=outcome_reward(trajectory, self._cost))

    def _request(self, asked: Asked) -> RolloutRequest:
        problem = asked.problem
        info = {"family": problem.meta.get("family", ""), "gold": problem.answer}
        return RolloutRequest(
            problem_id=problem.id,
            prompt_ids=self._prompts.build(problem.problem, self._mode),
            mode=self._mode,
            sampling=self._sampling,
            seed=rollout_seed(self._seed, asked.step, problem.id, asked.sample_index),
            step=asked.step,
            sample_index=asked.sample_index,
            deadline_s=self._deadline_s,
            info=info | {"source": problem.source},
        )


async def _all(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all, or the first error once all have ended.

    Not a task group: once the budget for experts is spent, the others finish all the same, because
    what they were told is paid for and recorded.
    """
    results: list[T] = []
    for result in await asyncio.gather(*coroutines, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results


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
    vllm_urls: Sequence[str] = (),
    mode: Mode = "experts",
    deadline_s: float | None = None,
    problems: Sequence[Problem] = (),
    run_dir: Path | None = None,
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
        vllm_urls: Servers that sample; empty: the model itself does.
        mode: Condition to sample under; only `experts` asks them.
        deadline_s: Seconds that one rollout may take before it is given up as late; None: any.
        problems: What will be asked for; their prompts are checked first.
        run_dir: Where what is spent on experts is booked; None books nothing.

    Raises:
        rivet.rollout.types.PromptTooLongError: A prompt fills the controller's context.
        rivet.experts.pool.ExpertsUnavailableError: An expert does not answer.
        rivet.experts.ledger.BudgetExceededError: The budget for experts is spent.
    """

    def open_backend() -> LocalBackend | VLLMBackend:
        if vllm_urls:
            return VLLMBackend(vllm_urls, tokenizer)
        length = settings.limits.max_completion_length
        return LocalBackend(model, tokenizer, max_batch=batch_size, max_completion_length=length)

    @asynccontextmanager
    async def open_engine() -> AsyncIterator[RolloutEngine]:
        async with (
            PythonSandbox() as sandbox,
            ExpertPool(experts) as pool,
            open_backend() as backend,
        ):
            if run_dir is not None:
                pool.keep_ledger(run_dir)
            await pool.preflight()
            yield RolloutEngine(backend, tokenizer, settings, experts=pool, sandbox=sandbox)

    with Grader() as grader, EngineRunner(open_engine) as runner:
        source = EngineSource(
            runner,
            grader=grader,
            prompts=PromptBuilder(tokenizer, settings),
            temperature=temperature,
            seed=seed,
            cost=cost,
            mode=mode,
            deadline_s=deadline_s,
        )
        source.check_prompts(problems)
        yield source


def right_experts(problems: Sequence[Problem], names: Sequence[str]) -> dict[str, str]:
    """Problem id -> the expert that knows it, for problems of the mini-world's families."""
    by_family = {f: e.name for e in EXPERTS.values() for f in e.families if e.name in names}
    families = {p.id: str(p.meta.get("family", "")) for p in problems}
    return {i: by_family[family] for i, family in families.items() if family in by_family}
