"""Collection: graded trajectories of a controller over training problems, for Stage II.

A thin wrapper over `eval.generate.sample`, which says what may be relied on when a run is killed:
the same rows, none twice, none lost; faults sampled again up to a limit and never scored.

    OUTPUT_DIR/
      config.json, log.txt, finished.json     the run (`rivet.runs`)
      trajectories/                           the store, one row per problem and sample

Run line: `rivet collect stages/recipes/collect_mini.yaml --model runs/stage1/checkpoint`
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.problems import Problem
from eval.generate import sample
from eval.ray_shards import listed_experts, open_actors
from eval.ray_worker import RuntimeSpec, backend_settings
from eval.runtime import open_runtime
from eval.sampling_config import NO_RESULT, SamplingConfig
from rivet.checkpoints import check_checkpoint
from rivet.config import parse_config, setting
from rivet.experts.config import load_experts
from rivet.experts.ledger import stop_at_budget
from rivet.experts.types import Experts
from rivet.runs import RunDir
from rivet.store import TrajectoryStore
from rivet.trajectory import Mode, Trajectory
from stages.experts import open_experts
from stages.training_problems import TrainingProblems

logger = logging.getLogger(__name__)

STORE = "trajectories"


@dataclass
class CollectConfig(TrainingProblems, SamplingConfig):
    """Settings of a collection."""

    model: str = setting("", "Checkpoint folder: weights, tokenizer and rivet.json. Required.")
    output_dir: str = setting("runs/collect", "The run folder.")
    overwrite: bool = setting(False, "Replace a collection that is there.")
    limit: int | None = setting(None, "Take the first so many problems only, at least 1.")
    mode: Mode = setting("experts", "Condition to sample under.")
    temperature: float = setting(0.8, "Sampling temperature, above 0.")
    batch_size: int = setting(128, "Trajectories in flight, at least 1.")

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model is not set; expected a checkpoint folder (rivet stage1)")
        if self.temperature <= 0:
            raise ValueError(
                f"temperature is {self.temperature}; expected above 0: what is collected is to vary"
            )
        self.check_problems()
        self.check_sampling()
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit is {self.limit}; expected at least 1, or null")


def run(config: CollectConfig, *, experts: Experts | None = None) -> Path:
    """Collect, or go on with a collection that was interrupted.

    Args:
        config: What to sample.
        experts: Whom the controller may consult; None opens those of `config.experts`.

    Returns:
        The folder of the trajectory store.

    Raises:
        eval.generate.FaultRateError: Infrastructure faults above `max_fault_rate`.
        rivet.interrupt.Interrupted: The budget for experts is spent; finished rows are kept.
        rivet.runs.RunFinishedError: It is finished and `overwrite` is False.
    """
    problems = config.read_problems(config.problems_seed)[: config.limit]
    if config.mode == "experts" and experts is None and config.experts != "embedded":
        load_experts(config.experts)  # before the run folder: its faults are the command's
    with RunDir.open(
        config.output_dir,
        config,
        stage="collect",
        overwrite=config.overwrite,
        may_change=NO_RESULT,
    ) as folder:
        store = TrajectoryStore(folder.path / STORE)
        with stop_at_budget():
            if config.ray:
                trajectories = _share_out(config, experts, problems, store, folder.path)
            else:
                trajectories = asyncio.run(_collect(config, experts, problems, store, folder.path))
        results = summary(trajectories)
        logger.info("collected %s", ", ".join(f"{k} {v}" for k, v in results.items()))
        folder.finish(results)
        return store.folder


def summary(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Counts of the rows by outcome; faulted ones are counted apart."""
    outcomes = Counter(
        "fault" if t.fault is not None else t.outcome or "ungraded" for t in trajectories
    )
    return {
        "rows": len(trajectories),
        "verified": sum(t.is_verified for t in trajectories),
        "outcomes": dict(sorted(outcomes.items())),
    }


async def _collect(
    config: CollectConfig,
    experts: Experts | None,
    problems: Sequence[Problem],
    store: TrajectoryStore,
    run_dir: Path,
) -> list[Trajectory]:
    async with AsyncExitStack() as stack:
        asked = experts if config.mode == "experts" else None
        if config.mode == "experts" and asked is None:
            pool = stack.enter_context(open_experts(config.experts))
            asked = await stack.enter_async_context(pool)
        runtime = await stack.enter_async_context(
            open_runtime(
                config.model,
                experts=asked,
                max_completion_length=config.max_completion_length,
                max_batch=config.batch_size,
                sampler=config,
                run_dir=run_dir,
            )
        )
        return await sample(
            runtime.engine,
            runtime.grader,
            problems,
            prompts=runtime.prompts,
            store=store,
            settings=runtime.describe(config.mode),
            progress="collecting",
            **config.how(config.mode).arguments(),
        )


def _share_out(
    config: CollectConfig,
    experts: Experts | None,
    problems: Sequence[Problem],
    store: TrajectoryStore,
    run_dir: Path,
) -> list[Trajectory]:
    """The same rows from Ray actors."""
    with ExitStack() as stack:
        listed = None
        if config.mode == "experts":
            pool = experts or stack.enter_context(open_experts(config.experts))
            listed = listed_experts(pool)
        spec = RuntimeSpec(
            check_checkpoint(config.model),
            experts=listed,
            max_completion_length=config.max_completion_length,
            max_batch=config.batch_size,
            sampler=backend_settings(config),
            run_dir=run_dir.absolute(),
        )
        actors = stack.enter_context(open_actors(spec, config.ray))
        return actors.sample(problems, config.how(config.mode), store=store, progress="collecting")


def main(argv: Sequence[str] | None = None) -> int:
    """`rivet collect RECIPE.yaml [--name value ...]`; prints the store's folder."""
    parsed = parse_config(
        CollectConfig,
        argv,
        prog="rivet collect",
        description="Sample and grade trajectories over training problems, for Stage II.",
    )
    print(run(parsed.config))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
