"""The one sampling loop: problems in, graded trajectories in a store, resumable at any moment.

Collection, evaluation and the demo all sample through `sample`. What callers rely on:

- A row's id and seed follow from the problem, the sample index and the run seed alone, so a run
  that is killed and started again ends with the same set of rows, none twice, none lost. Rows are
  written as whole shards (`part-00000`, ...); what was in flight is sampled again.
- Infrastructure faults (a trajectory with `fault`, a grader that timed out or died) are run again
  up to `max_attempts` times, counted, and never scored. Rows that stay faulted wait in the shard
  `faults`, which the next run of the same command samples again first. Above `max_fault_rate` the
  run stops and says why.
- `settings.json` beside the shards records what the rows depend on; a store that was started with
  other settings is refused.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from tqdm import tqdm

from data.problems import Problem
from eval.grade import Grades, grade_trajectory
from eval.store_settings import check_store_settings, sampling_settings
from rivet.experts.ledger import BudgetExceededError
from rivet.prompts import PromptBuilder
from rivet.protocol import parse
from rivet.rollout.backend import SamplingParams
from rivet.rollout.types import RolloutRequest, check_prompts, rollout_seed
from rivet.store import TrajectoryStore
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Mode, Trajectory, fault_of

FAULTS_SHARD = "faults"
_MIN_ATTEMPTS = 32  # below this many attempts a fault rate says little


class SamplingError(RuntimeError):
    """Sampling cannot go on or cannot start; the message says why and what to do."""


class FaultRateError(SamplingError):
    """Too many trajectories failed by infrastructure; finished rows are kept in the store."""


class Rollouts(Protocol):
    """What `sample` needs of the rollout engine."""

    async def rollout(self, request: RolloutRequest) -> Trajectory:
        """Sample one trajectory; infrastructure faults come back as `Trajectory.fault`."""
        ...


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How rows are sampled: arguments of `sample` that a command's settings give."""

    mode: Mode
    sampling: SamplingParams
    samples_per_problem: int = 1
    seed: int = 0
    shard_size: int = 256
    concurrency: int = 256
    max_attempts: int = 3
    max_fault_rate: float = 0.1

    def arguments(self) -> dict[str, Any]:
        """For `sample(..., **spec.arguments())`."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(slots=True)
class Job:
    """One row to sample."""

    problem: Problem
    request: RolloutRequest
    faults: list[str] = field(default_factory=list)  # of the attempts so far
    ungraded: Trajectory | None = None  # sampled, but the grader failed: graded again only


async def sample(
    engine: Rollouts,
    grader: Grades,
    problems: Sequence[Problem],
    *,
    prompts: PromptBuilder,
    mode: Mode,
    sampling: SamplingParams,
    store: TrajectoryStore,
    samples_per_problem: int = 1,
    seed: int = 0,
    step: int = 0,
    shard_size: int = 256,
    concurrency: int = 256,
    max_attempts: int = 3,
    max_fault_rate: float = 0.1,
    settings: Mapping[str, Any] | None = None,
    skip: Collection[str] = frozenset(),
    progress: str | None = "sampling",
) -> list[Trajectory]:
    """Sample and grade every problem, k samples each; rows already in the store are skipped.

    Args:
        engine: Samples one trajectory at a time, many at once.
        grader: Grades answers.
        problems: With unique ids.
        prompts: Builds the prompts, for the controller that `engine` samples from.
        mode: Condition to sample under.
        sampling: How the controller samples.
        store: Where rows go; rows that are there already are not sampled again.
        samples_per_problem: k.
        seed: Run seed; each row's own seed follows from it (see `rollout_seed`).
        step: Optimizer step that the rows belong to, part of their ids.
        shard_size: Rows per shard: what a kill can lose at most, besides those in flight.
        concurrency: Trajectories in flight.
        max_attempts: Tries per row before an infrastructure fault is left standing.
        max_fault_rate: Share of faulted attempts, in [0, 1], above which the run stops.
        settings: What else the rows depend on (checkpoint, limits, experts, ...), JSON-able.
        skip: Ids of rows that lie elsewhere: neither sampled nor given back.
        progress: Label of the progress bar; None for no bar.

    Returns:
        All rows but those to `skip`, ordered by problem and sample index, faulted ones included.

    Raises:
        StoreSettingsError: The store was started with other settings.
        FaultRateError: Infrastructure faults above `max_fault_rate`.
        SamplingError: Bad arguments, or rows in the store that this run would not sample.
        GoldError: A problem cannot be graded against.
        BudgetExceededError: The budget for experts is spent; finished rows are in the store.
    """
    if min(samples_per_problem, shard_size, concurrency, max_attempts) < 1:
        raise SamplingError(
            "expected samples_per_problem, shard_size, concurrency and max_attempts of at least "
            f"1, got {samples_per_problem}, {shard_size}, {concurrency} and {max_attempts}"
        )
    jobs = plan(problems, prompts, mode, sampling, samples_per_problem, seed, step)
    check_prompts(
        {job.problem.id: len(job.request.prompt_ids) for job in jobs.values()},
        getattr(engine, "max_context", None),
    )
    check_store_settings(
        store.folder,
        sampling_settings(
            problems,
            [job.request.prompt_ids for job in jobs.values()],
            mode=mode,
            sampling=sampling,
            samples_per_problem=samples_per_problem,
            seed=seed,
            step=step,
        )
        | {"settings": dict(settings or {})},
        has_rows=bool(store.shards()),
    )
    done = _resume(store, jobs)
    jobs = {row_id: job for row_id, job in jobs.items() if row_id not in skip}
    run = _Run(engine, grader, prompts.tokenizer, store, done, shard_size, max_attempts)
    run.max_fault_rate = max_fault_rate
    pending = deque(job for row_id, job in jobs.items() if row_id not in done)
    with tqdm(
        total=len(jobs),
        initial=len(done.keys() & jobs.keys()),
        desc=progress,
        unit="row",
        disable=progress is None,
        file=sys.stderr,
        mininterval=0.2 if sys.stderr.isatty() else 10.0,  # a log file wants few lines
        dynamic_ncols=True,
    ) as bar:
        run.bar = bar
        await run.drain(pending, concurrency)
    if missing := jobs.keys() - run.rows.keys():
        raise SamplingError(
            f"{len(missing)} of {len(jobs)} rows were cancelled by the engine or the grader, such "
            f"as {min(missing)}; the others are kept: run the same command to go on"
        )
    return [run.rows[row_id] for row_id in jobs]


def plan(
    problems: Sequence[Problem],
    prompts: PromptBuilder,
    mode: Mode,
    sampling: SamplingParams,
    samples_per_problem: int,
    seed: int,
    step: int,
) -> dict[str, Job]:
    """Every row of the run by its id, problem after problem."""
    jobs: dict[str, Job] = {}
    for problem in problems:
        prompt_ids = prompts.build(problem.problem, mode)
        for index in range(samples_per_problem):
            request = RolloutRequest(
                problem_id=problem.id,
                prompt_ids=prompt_ids,
                mode=mode,
                sampling=sampling,
                seed=rollout_seed(seed, step, problem.id, index),
                step=step,
                sample_index=index,
                info=info_of(problem),
            )
            if request.id in jobs:
                raise SamplingError(f"problem id {problem.id!r} occurs twice; expected unique ids")
            jobs[request.id] = Job(problem, request)
    return jobs


def info_of(problem: Problem) -> dict[str, Any]:
    """What a row keeps of its problem: the gold and the small labels in its meta."""
    labels = {k: v for k, v in problem.meta.items() if isinstance(v, (str, int, float, bool))}
    return labels | {"source": problem.source, "kind": problem.kind, "gold": problem.answer}


def _resume(store: TrajectoryStore, jobs: Mapping[str, Job]) -> dict[str, Trajectory]:
    """Rows that are there already; those that were left faulted are dropped, to run again."""
    # Dropped before anything is sampled: a kill then leaves rows missing, never doubled.
    (store.folder / f"{FAULTS_SHARD}.parquet").unlink(missing_ok=True)
    done: dict[str, Trajectory] = {}
    for trajectory in store:
        if trajectory.id in done or trajectory.id not in jobs:
            what = "twice" if trajectory.id in done else "but is none of this run's rows"
            raise SamplingError(
                f"{store.folder}: row {trajectory.id} is there {what}; expected a folder that "
                "this command wrote: use another one, or remove it to sample again"
            )
        done[trajectory.id] = trajectory
    return done


class _Run:
    """One run of the loop: what is done, what waits to be written, what went wrong."""

    def __init__(
        self,
        engine: Rollouts,
        grader: Grades,
        tokenizer: ProtocolTokenizer,
        store: TrajectoryStore,
        done: dict[str, Trajectory],
        shard_size: int,
        max_attempts: int,
    ) -> None:
        self.engine = engine
        self.grader = grader
        self.tokenizer = tokenizer
        self.store = store
        self.rows = dict(done)
        self.shard_size = shard_size
        self.max_attempts = max_attempts
        self.max_fault_rate = 1.0
        self.bar: Any = None
        self.buffer: list[Trajectory] = []
        self.left_faulted: list[Trajectory] = []
        self.attempts = 0
        self.faults: Counter[str] = Counter()
        self.right = sum(t.outcome == "right" for t in done.values())
        taken = [int(s.removeprefix("part-")) for s in store.shards() if s.startswith("part-")]
        self.next_shard = max(taken, default=-1) + 1

    async def drain(self, pending: deque[Job], concurrency: int) -> None:
        """Work through the queue; whatever happens, finished rows are written."""

        over_budget: list[BudgetExceededError] = []

        async def work() -> None:
            while pending and not over_budget:
                try:
                    await self._attempt(pending.popleft(), pending)
                except BudgetExceededError as error:
                    # No row comes of it. The others finish: what they were told is paid for.
                    over_budget.append(error)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(pending))):
                    group.create_task(work())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self._flush()
            if self.left_faulted:
                self.store.write(FAULTS_SHARD, self.left_faulted)
        if over_budget:
            raise over_budget[0]
        if len(self.left_faulted) > self.max_fault_rate * len(self.rows):
            raise self._too_many_faults()

    async def _attempt(self, job: Job, pending: deque[Job]) -> None:
        trajectory = job.ungraded or await self.engine.rollout(job.request)
        self.attempts += 1
        if trajectory.fault is None:
            job.ungraded = trajectory
            trajectory = await self._grade(job, trajectory)
        fault = fault_of(trajectory)
        if fault is not None:
            job.faults.append(fault)
            self.faults[fault] += 1
            if (
                self.attempts >= _MIN_ATTEMPTS
                and self.faults.total() > self.max_fault_rate * self.attempts
            ):
                raise self._too_many_faults()
            if len(job.faults) < self.max_attempts:
                pending.append(job)  # behind the others, to give what failed time to recover
                return
        self._finish(job, trajectory, is_faulted=fault is not None)

    async def _grade(self, job: Job, trajectory: Trajectory) -> Trajectory:
        routes = [
            span.expert
            for span in parse(self.tokenizer, trajectory.completion_ids, trajectory.authors).spans
            if span.name == "expert" and span.author == "controller"
        ]
        trajectory = replace(trajectory, info=trajectory.info | {"routes": routes})
        return await grade_trajectory(self.grader, job.problem, trajectory)

    def _finish(self, job: Job, trajectory: Trajectory, *, is_faulted: bool) -> None:
        if job.faults:
            trajectory = replace(trajectory, info=trajectory.info | {"faults": job.faults})
        self.rows[trajectory.id] = trajectory
        self.right += trajectory.outcome == "right"
        if is_faulted:
            self.left_faulted.append(trajectory)
        else:
            self.buffer.append(trajectory)
            if len(self.buffer) >= self.shard_size:
                self._flush()
        scored = len(self.rows) - len(self.left_faulted)
        self.bar.set_postfix_str(
            f"right {self.right / max(scored, 1):.1%}, faults {self.faults.total()}", refresh=False
        )
        self.bar.update()

    def _flush(self) -> None:
        if self.buffer:
            self.store.write(f"part-{self.next_shard:05d}", self.buffer)
            self.next_shard += 1
            self.buffer = []

    def _too_many_faults(self) -> FaultRateError:
        kinds = ", ".join(f"{name} {count}" for name, count in self.faults.most_common())
        return FaultRateError(
            f"{self.faults.total()} of {self.attempts} attempts failed by infrastructure "
            f"({kinds}), above max_fault_rate {self.max_fault_rate:g}; no such row is scored and "
            f"{len(self.rows) - len(self.left_faulted)} finished rows are kept in "
            f"{self.store.folder}: repair what failed and run the same command to go on"
        )
