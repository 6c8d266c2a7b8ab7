"""Evaluate one checkpoint under several conditions, on the mini-world's test set or any JSONL.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from data.problems import Problem
from eval.compare import compare, describe
from eval.conditions import STORE, read_condition, write_condition
from eval.generate import sample
from eval.grade import load_gradable
from eval.runtime import Runtime, open_runtime
from eval.summary import summarise
from eval.table import markdown_table
from rivet.checkpoints import check_checkpoint
from rivet.config import parse_config
from rivet.experts.config import load_experts
from rivet.experts.types import Experts
from rivet.rollout.backend import SamplingParams
from rivet.runs import RunDir
from rivet.store import TrajectoryStore
from rivet.trajectory import MODES, Mode

logger = logging.getLogger(__name__)

# The names that `results.json` promises, first in every row.
_ROW = "checkpoint condition accuracy ci_low ci_high n well_formed route_accuracy".split()


class EvalError(ValueError):
    """An evaluation cannot run as asked; the message says why and what to do."""


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class EvalConfig:
    """Settings of an evaluation."""

    model: str = _setting("", "Checkpoint folder: weights, tokenizer and rivet.json. Required.")
    output_dir: str = _setting("runs/eval", "The run folder.")
    overwrite: bool = _setting(False, "Replace an evaluation that is there.")
    label: str = _setting("", "The checkpoint's name in tables; empty takes it from its folder.")
    conditions: list[Mode] = field(
        default_factory=lambda: ["experts", "local"],
        metadata={"help": "Conditions to evaluate under, in order."},
    )
    problems: str = _setting(
        "miniworld", "Test problems: a .jsonl or .jsonl.gz file, or `miniworld`."
    )
    problems_per_family: int = _setting(100, "Test problems of each mini-world family, at least 1.")
    split: Literal["test", "validation"] = _setting("test", "Split of the mini-world.")
    limit: int | None = _setting(None, "Take the first so many problems only, at least 1.")
    experts: str = _setting(
        "embedded", "An experts.yaml, or `embedded`: the mini-world's own experts, on loopback."
    )
    samples_per_problem: int = _setting(1, "k: samples of each problem, at least 1.")
    temperature: float = _setting(0.0, "Sampling temperature, at least 0; 0 is greedy.")
    top_p: float = _setting(1.0, "Nucleus mass in (0, 1].")
    top_k: int = _setting(0, "Sample from the k most likely tokens only; 0 from all.")
    seed: int = _setting(0, "Seed of the samples.")
    problems_seed: int = _setting(0, "Seed that the mini-world's problems are drawn with.")
    max_completion_length: int | None = _setting(
        None, "Tokens of a whole completion, spliced ones included; null: the checkpoint's limit."
    )
    grading: Literal["reward", "eval"] = _setting(
        "reward", "`reward` reads boxes only; `eval` may fall back to a final `Answer:` line."
    )
    batch_size: int = _setting(96, "Trajectories in flight, at least 1.")
    shard_size: int = _setting(256, "Rows per shard of the store, at least 1.")
    max_attempts: int = _setting(3, "Tries of a row that infrastructure voids, at least 1.")
    max_fault_rate: float = _setting(
        0.1, "Share of attempts that infrastructure may void before the run stops, in [0, 1]."
    )

    def __post_init__(self) -> None:
        unknown = [c for c in self.conditions if c not in MODES]
        if unknown or not self.conditions or len(set(self.conditions)) < len(self.conditions):
            raise ValueError(
                f"conditions is {self.conditions}; expected different ones of {', '.join(MODES)}"
            )
        for name in ("problems_per_family", "samples_per_problem", "batch_size", "shard_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.max_attempts < 1 or (self.limit is not None and self.limit < 1):
            raise ValueError("max_attempts and limit: expected at least 1")
        if not 0 <= self.max_fault_rate <= 1:
            raise ValueError(f"max_fault_rate is {self.max_fault_rate}; expected 0 to 1")
        if self.samples_per_problem > 1 and self.temperature == 0:
            raise ValueError(
                f"samples_per_problem is {self.samples_per_problem} at temperature 0, which gives "
                "the same sample each time; expected a temperature above 0"
            )
        self.sampling()  # checks the rest

    def sampling(self) -> SamplingParams:
        """How the controller samples."""
        return SamplingParams(self.temperature, self.top_p, self.top_k)

    def checkpoint_label(self) -> str:
        """The checkpoint's name in tables: `runs/x/stage1/checkpoint` is `stage1`."""
        path = Path(self.model)
        return self.label or (path.parent.name if path.name == "checkpoint" else path.name)


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
        data.problems.ProblemFileError: The problems file is broken.
        rivet.runs.RunFinishedError: It is finished and `overwrite` is False.
    """
    if not config.model:
        raise EvalError(
            "model is not set; expected a checkpoint folder, such as --model RUN/checkpoint"
        )
    if "experts" in config.conditions and experts is None and config.experts == "embedded":
        raise EvalError(
            "condition `experts` needs experts: give an experts.yaml, leave the condition out, or "
            "use `rivet eval`, which serves the embedded ones"
        )
    check_checkpoint(config.model)
    if "experts" in config.conditions and experts is None:
        load_experts(config.experts)  # before the run folder: its faults are the command's
    problems, competent = load_test_set(config)
    output = Path(config.output_dir)
    with RunDir.open(
        output, config, stage="eval", overwrite=config.overwrite, may_change=_NO_RESULT
    ) as folder:
        rows = asyncio.run(_evaluate(config, experts, problems, competent, output))
        comparisons = _compare_conditions(config, output)
        results = {"rows": rows, "comparisons": comparisons}
        folder.write_json("results.json", results)
        folder.finish({"rows": [{name: row[name] for name in _ROW} for row in rows]})
    return results


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
        if open_experts is not None and "experts" in config.conditions:
            experts = stack.enter_context(open_experts(config.experts))
        results = run(config, experts=experts)
    print(markdown_table(results["rows"]))
    for comparison in results["comparisons"]:
        print(describe(comparison))
    print(f"results: {Path(config.output_dir) / 'results.json'}")
    return 0


def load_test_set(config: EvalConfig) -> tuple[list[Problem], Mapping[str, str]]:
    """The problems, and the expert that knows each family (empty outside the mini-world)."""
    competent: Mapping[str, str] = {}
    if config.problems == "miniworld":
        from data.miniworld.experts import route
        from data.miniworld.tasks import FAMILIES, build_split

        problems = build_split(config.split, config.problems_per_family, config.problems_seed)
        competent = {family: route(family) for family in FAMILIES}
    else:
        problems = load_gradable(config.problems)
    return problems[: config.limit], competent


async def _evaluate(
    config: EvalConfig,
    experts: Experts | None,
    problems: list[Problem],
    competent: Mapping[str, str],
    output: Path,
) -> list[dict[str, Any]]:
    async with AsyncExitStack() as stack:
        if close := getattr(experts, "aclose", None):
            stack.push_async_callback(close)  # its connections belong to this event loop
        runtime = await stack.enter_async_context(
            open_runtime(
                config.model,
                experts=(experts or config.experts) if "experts" in config.conditions else None,
                max_completion_length=config.max_completion_length,
                max_batch=config.batch_size,
                grading=config.grading,
            )
        )
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
        mode=mode,
        sampling=config.sampling(),
        samples_per_problem=config.samples_per_problem,
        seed=config.seed,
        store=TrajectoryStore(folder / STORE),
        shard_size=config.shard_size,
        concurrency=config.batch_size,
        max_attempts=config.max_attempts,
        max_fault_rate=config.max_fault_rate,
        settings=runtime.describe(mode),
        progress=f"{label}/{mode}",
    )
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


def _compare_conditions(config: EvalConfig, output: Path) -> list[dict[str, Any]]:
    """The expert-removal gap, where both of its conditions were evaluated."""
    if not {"experts", "local"} <= set(config.conditions):
        return []
    return [compare(read_condition(output / "experts"), read_condition(output / "local"))]


_DESCRIPTION = "Evaluate a checkpoint with experts, without them, and under ablated conditions."
# Settings that change how a run goes on, but no row of it.
_NO_RESULT = ("batch_size", "shard_size", "max_attempts", "max_fault_rate", "label")

if __name__ == "__main__":
    sys.exit(main())
