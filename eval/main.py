"""Evaluate one checkpoint under several conditions: the mini-world, benchmarks, or any JSONL.

    OUTPUT_DIR/
      config.json, log.txt, finished.json     the run (`rivet.runs`)
      results.json                            {"rows": [...], "comparisons": [...]}
      CONDITION/                              one folder per condition (`eval.conditions`)

A killed evaluation goes on where it was when the same command is run again; a finished one is not
replaced unless told to. Every sample of every problem is kept as a trajectory.

Run line: `rivet eval stages/recipes/eval_mini.yaml --model runs/mini/stage2/checkpoint`
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.problems import Problem
from eval.compare import compare, describe
from eval.conditions import STORE, read_condition, write_condition
from eval.config import EvalConfig
from eval.generate import sample
from eval.latent import OpenedLatent, check_latent, open_latent
from eval.problem_sets import MiniWorldSplit, load_problem_sets
from eval.ray_shards import listed_experts, open_actors
from eval.ray_worker import RuntimeSpec, backend_settings
from eval.results_file import RESULTS_FILE
from eval.runtime import Runtime, expert_cards, find_model, open_runtime
from eval.sampling_config import NO_RESULT
from eval.summary import summarise
from eval.table import markdown_table
from rivet.checkpoints import CheckpointError, OpenedCheckpoint, check_checkpoint
from rivet.config import parse_config
from rivet.experts.config import load_experts
from rivet.experts.ledger import stop_at_budget
from rivet.experts.types import Experts
from rivet.prompts import PromptBuilder
from rivet.runs import RunDir
from rivet.settings import FILE_NAME, ProtocolSettings
from rivet.store import TrajectoryStore
from rivet.trajectory import Mode, Trajectory

logger = logging.getLogger(__name__)

# The names that `results.json` promises, first in every row.
_ROW = "checkpoint condition accuracy ci_low ci_high n well_formed route_accuracy".split()


class EvalError(ValueError):
    """An evaluation cannot run as asked; the message says why and what to do."""


def run(config: EvalConfig, *, experts: Experts | None = None) -> dict[str, Any]:
    """Evaluate, or go on with an evaluation that was interrupted.

    Args:
        config: What to evaluate.
        experts: Whom the controller may consult; None opens those of `config.experts`.

    Returns:
        The content of `results.json`: `rows`, one per condition, with the promised names and the
        whole summary (`eval.summary`), and `comparisons` between conditions.

    Raises:
        EvalError: No checkpoint, or no experts for the condition that needs them.
        rivet.checkpoints.CheckpointError, rivet.settings.SettingsError: It is no checkpoint.
        rivet.experts.config.ExpertsFileError: The experts file is broken.
        data.problems.ProblemFileError: A problems file is broken.
        data.benchmarks.BenchmarkError: A benchmark is unknown or absent.
        rivet.runs.RunFinishedError: It is finished and `overwrite` is False.
    """
    if not config.model:
        raise EvalError(
            "model is not set; expected a checkpoint folder, such as --model RUN/checkpoint"
        )
    if consults(config) and experts is None and config.experts == "embedded":
        raise EvalError(
            "condition `experts` needs experts: give an experts.yaml, leave the condition out, or "
            "use `rivet eval`, which serves the embedded ones"
        )
    # Everything that can be wrong shows before the run folder is made: faults of the command.
    checkpoint = open_checkpoint(config, experts)
    problems, competent = load_test_set(config)
    if isinstance(checkpoint, OpenedLatent):
        competent = {}  # it names nobody, so it has no route that could be right
    output = Path(config.output_dir)
    with RunDir.open(
        output, config, stage="eval", overwrite=config.overwrite, may_change=_NO_RESULT
    ) as folder:
        with stop_at_budget():
            if config.ray:
                rows = _share_out(config, checkpoint, experts, problems, competent, output)
            else:
                rows = asyncio.run(
                    _evaluate(config, checkpoint, experts, problems, competent, output)
                )
        return finish_run(folder, rows, _compare_conditions(config, checkpoint, output))


def main(
    argv: list[str] | None = None,
    *,
    open_experts: Callable[[str], AbstractContextManager[Experts]] | None = None,
) -> int:
    """Evaluate from a recipe and print the table.

    Args:
        argv: Recipe and overrides; None takes those of the process.
        open_experts: Opens what `config.experts` names, `embedded` included.
    """
    config = parse_config(EvalConfig, argv, prog="rivet eval", description=_DESCRIPTION).config
    with ExitStack() as stack:
        experts = None
        if open_experts is not None and consults(config):
            experts = stack.enter_context(open_experts(config.experts))
        results = run(config, experts=experts)
    show(results, Path(config.output_dir))
    return 0


def show(results: Mapping[str, Any], folder: Path) -> None:
    """Print what an evaluation came to, and where it lies."""
    print(markdown_table(results["rows"]))
    for comparison in results["comparisons"]:
        print(describe(comparison))
    print(f"results: {folder / RESULTS_FILE}")


def consults(config: EvalConfig) -> bool:
    """Whether experts that answer in text are needed; a latent policy names its own.

    Raises:
        CheckpointError: The model cannot be found.
    """
    from rivet.latent.policy import is_latent

    return "experts" in config.conditions and not is_latent(find_model(config.model))


def open_checkpoint(config: EvalConfig, experts: Experts | None = None) -> OpenedCheckpoint:
    """Find and check the model, short of its weights; one without rivet.json is a pretrained one.

    Raises:
        EvalError, LatentEvalError: The conditions or settings are not this kind of model's.
        rivet.latent.experts.ExpertError: It needs an expert that is not there.
        CheckpointError, SettingsError: It is no checkpoint.
        rivet.tokenization.TokenizerError: It has no chat template, or one without use here.
        rivet.experts.config.ExpertsFileError: The experts file is broken.
    """
    from rivet.latent.policy import is_latent

    folder = find_model(config.model)
    if not folder.is_dir():
        raise CheckpointError(
            f"{config.model}: no such folder; expected that of a checkpoint, a run or a pretrained "
            "model, or the name of a model of the Hub, USER/MODEL"
        )
    if is_latent(folder):
        return check_latent(folder, config)
    if config.expert_paths:
        raise EvalError("expert_paths: only a latent policy has frozen experts; expected none")
    opened = check_checkpoint(folder, default=ProtocolSettings())
    if "experts" in config.conditions:
        cards = expert_cards(experts or config.experts)  # reads the file, whoever needs the cards
        if not (folder / FILE_NAME).is_file():
            opened = replace(opened, settings=ProtocolSettings(experts=cards))
    prompts = PromptBuilder(opened.tokenizer, opened.settings)
    for condition in config.conditions:
        prompts.build("", condition)
    return opened


def load_test_set(config: EvalConfig) -> tuple[list[Problem], Mapping[str, str]]:
    """The problems, and the expert that knows each family (empty outside the mini-world)."""
    return load_problem_sets(
        config.problem_sets(),
        mini_world=MiniWorldSplit(
            config.split, config.problems_per_family, config.problems_seed, config.families
        ),
        data_dir=config.data_dir,
        skip=config.skip,
        limit=config.limit,
    )


async def _evaluate(
    config: EvalConfig,
    checkpoint: OpenedCheckpoint,
    experts: Experts | None,
    problems: list[Problem],
    competent: Mapping[str, str],
    output: Path,
) -> list[dict[str, Any]]:
    async with AsyncExitStack() as stack:
        if close := getattr(experts, "aclose", None):
            stack.push_async_callback(close)  # its connections belong to this event loop
        common: dict[str, Any] = {
            "max_completion_length": config.max_completion_length,
            "max_batch": config.batch_size,
            "grading": config.grading,
            "dtype": config.dtype,
            "run_dir": output,
        }
        if isinstance(checkpoint, OpenedLatent):
            opener = open_latent(checkpoint, problems, **common)
        else:
            told = (experts or config.experts) if "experts" in config.conditions else None
            opener = open_runtime(checkpoint, experts=told, sampler=config, **common)
        runtime = await stack.enter_async_context(opener)
        return [
            await _evaluate_condition(config, runtime, problems, competent, mode, output / mode)
            for mode in config.conditions
        ]


async def _evaluate_condition(
    config: EvalConfig,
    runtime: Runtime,
    problems: list[Problem],
    competent: Mapping[str, str],
    mode: Mode,
    folder: Path,
) -> dict[str, Any]:
    label = config.checkpoint_label()
    logger.info("evaluating %s, condition %s, %d problems", label, mode, len(problems))
    trajectories = await sample(
        runtime.engine,
        runtime.grader,
        problems,
        prompts=runtime.prompts,
        store=TrajectoryStore(folder / STORE),
        settings=runtime.describe(mode),
        progress=f"{label}/{mode}",
        **config.how(mode).arguments(),
    )
    return finish_condition(label, trajectories, competent, mode, folder)


def _share_out(
    config: EvalConfig,
    checkpoint: OpenedCheckpoint,
    experts: Experts | None,
    problems: list[Problem],
    competent: Mapping[str, str],
    output: Path,
) -> list[dict[str, Any]]:
    """The same rows from Ray actors."""
    listed = None
    if "experts" in config.conditions:
        listed = listed_experts(experts) if experts else load_experts(config.experts)
    spec = RuntimeSpec(
        checkpoint,
        experts=listed,
        max_completion_length=config.max_completion_length,
        max_batch=config.batch_size,
        grading=config.grading,
        dtype=config.dtype,
        run_dir=output.absolute(),
        sampler=backend_settings(config),
    )
    rows = []
    with open_actors(spec, config.ray) as actors:
        for mode in config.conditions:
            store = TrajectoryStore(output / mode / STORE)
            label = config.checkpoint_label()
            trajectories = actors.sample(
                problems, config.how(mode), store=store, progress=f"{label}/{mode}"
            )
            rows.append(finish_condition(label, trajectories, competent, mode, output / mode))
    return rows


def finish_condition(
    label: str,
    trajectories: list[Trajectory],
    competent: Mapping[str, str],
    mode: Mode,
    folder: Path,
) -> dict[str, Any]:
    """Write what a condition came to; its row of the results.

    Args:
        label: The checkpoint's name in tables.
        trajectories: Graded.
        competent: The expert that knows a family.
        mode: The condition.
        folder: Of the condition.
    """
    summary = summarise(trajectories, competent=competent)
    row = {"checkpoint": label, "condition": mode, **summary}
    row = {name: row[name] for name in _ROW} | row
    write_condition(folder, row, trajectories)
    logger.info(
        "%s, condition %s: accuracy %.1f%% [%.1f, %.1f], well-formed %.1f%%",
        label,
        mode,
        *(100 * row[name] for name in ("accuracy", "ci_low", "ci_high", "well_formed")),
    )
    return row


def finish_run(
    folder: RunDir, rows: list[dict[str, Any]], comparisons: list[dict[str, Any]]
) -> dict[str, Any]:
    """Write the results of all conditions and mark the run finished; the results."""
    results = {"rows": rows, "comparisons": comparisons}
    folder.write_json(RESULTS_FILE, results)
    folder.finish({"rows": [{name: row[name] for name in _ROW} for row in rows]})
    return results


def _compare_conditions(
    config: EvalConfig, checkpoint: OpenedCheckpoint, output: Path
) -> list[dict[str, Any]]:
    """What is lost without experts, where both of its conditions were evaluated."""
    removed = "no-expert" if isinstance(checkpoint, OpenedLatent) else "local"
    if not {"experts", removed} <= set(config.conditions):
        return []
    return [compare(read_condition(output / "experts"), read_condition(output / removed))]


_DESCRIPTION = "Evaluate a checkpoint with experts, without them, and under ablated conditions."
# Settings that change how a run goes on, but no row of it.
_NO_RESULT = (*NO_RESULT, "label", "expert_paths")

if __name__ == "__main__":
    sys.exit(main())
