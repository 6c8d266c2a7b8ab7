"""One Stage I run inside a run folder: resume, train, stop in good order, save.

Over any source of rollouts, so that it can be tested without sampling; `stages.stage1.main` brings
the engine. Which files a run leaves: `stages.checkpointing`.
"""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedModel, PrinterCallback, ProgressCallback

from data.problems import Problem
from rivet.interrupt import interruptible
from rivet.runs import RunDir
from rivet.settings import ProtocolSettings
from rivet.store import TrajectoryStore
from rivet.tokenization import ProtocolTokenizer
from stages.checkpointing import TRAINER, resume_point, save_controller
from stages.stage1.callback import Stage1Callback
from stages.stage1.config import Stage1Config
from stages.stage1.fates import describe_funnel, funnel
from stages.stage1.health import CollapseWatch
from stages.stage1.rollouts import Refill, RolloutSource, StepRollouts
from stages.stage1.trainer import Stage1Trainer

logger = logging.getLogger(__name__)

# Metrics whose mean over the last steps is the run's result.
_RESULTS = (
    "reward/mean",
    "rollout/right",
    "rollout/well_formed",
    "route/accuracy",
    "rollout/fault_rate",
)
_LAST_STEPS = 5
COLLAPSED = "collapsed"
# Settings that decide when a run is stopped or saved, not what it computes.
STOP_OR_SAVE = (
    "collapse_alarm",
    "min_well_formed",
    "max_expert_rise",
    "collapse_patience",
    "max_fault_rate",
    "fault_window",
    "logging_steps",
    "save_steps",
    "save_total_limit",
)
_ADVICE = "a milder expert_loss (positive), a smaller expert_weight or learning_rate"


class Sync(Protocol):
    """Brings the trainer's weights to wherever rollouts are sampled."""

    def attach(self, trainer: Stage1Trainer) -> None:
        """Become a callback of the trainer."""
        ...


class CollapseError(RuntimeError):
    """An alarm stopped the run; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a run begins with.

    Attributes:
        model: The controller, on its device.
        tokenizer: Its tokenizer, padding on the left.
        settings: How it speaks the protocol; saved with the result.
        problems: What is trained on.
        right_experts: Problem id -> the expert that knows it, where that is known.
    """

    model: PreTrainedModel
    tokenizer: ProtocolTokenizer
    settings: ProtocolSettings
    problems: list[Problem]
    right_experts: dict[str, str] = field(default_factory=dict)


def trainer_arguments(config: Stage1Config, folder: RunDir, problems: int) -> Stage1Config:
    """The settings as the trainer takes them: its folder inside the run, and a number of steps."""
    args = copy.copy(config)
    args.output_dir = str(folder.path / TRAINER)
    if args.max_steps <= 0:
        args.max_steps = count_steps(args.num_train_epochs, problems, args.prompts_per_step)
    return args


def count_steps(epochs: float, problems: int, prompts_per_step: int) -> int:
    """Steps of some passes over the problems, each without what does not fill a step."""
    return math.ceil(epochs * (problems // prompts_per_step))


def train(
    folder: RunDir,
    args: Stage1Config,
    start: Start,
    source: RolloutSource,
    sync: Sync | None = None,
) -> Path:
    """Train inside an opened run folder, over any source of rollouts.

    Args:
        folder: The run.
        args: From `trainer_arguments`.
        start: Model, tokenizer, protocol and problems.
        source: Samples what is not stored.
        sync: Brings the weights to where the source samples, before each step.

    Returns:
        The checkpoint folder.
    """
    resume_from = resume_point(folder, args.world_size)
    watch = args.collapse_watch()
    before = past_collapse(folder, watch)
    if before and args.collapse_alarm == "stop" and (folder.path / COLLAPSED).is_dir():
        raise collapse_error(folder, before)
    with interruptible() as stop:
        callback = Stage1Callback(folder, stop, watch, args.collapse_alarm)
        trainer = build_trainer(folder, args, start, source, callback)
        if sync is not None:
            sync.attach(trainer)
        trainer.train(resume_from_checkpoint=resume_from)
        if callback.collapse is not None:
            save_controller(
                folder, folder.path / COLLAPSED, trainer, start.tokenizer, start.settings
            )
            raise collapse_error(folder, callback.collapse)
        if stop.requested and trainer.state.global_step < args.max_steps:
            stop.check(f"step {trainer.state.global_step}")
    save_controller(folder, folder.checkpoint, trainer, start.tokenizer, start.settings)
    fates = funnel(TrajectoryStore(folder.path / "trajectories"))
    logger.info("rollouts: %s", describe_funnel(fates))
    folder.finish({**results(folder), "fates": fates})
    return folder.checkpoint


def past_collapse(folder: RunDir, watch: CollapseWatch) -> str | None:
    """Feed the watch with the steps so far; the step and reason if the last one was a collapse."""
    found = None
    for line in folder.metrics():
        if "alarm" not in line:  # which says again what the step's own line showed
            reason = watch.update(line)
            found = f"step {line['step']}: {reason}" if reason else None
    return found


def collapse_error(folder: RunDir, where: str, advice: str = _ADVICE) -> CollapseError:
    """What a run that collapsed ends with; `advice` is what to try."""
    return CollapseError(
        f"{folder.path}: stopped at {where}. The weights are in {folder.path / COLLAPSED}, the "
        f"curves in metrics.jsonl. Try {advice}; to go on all the same: --collapse_alarm warn"
    )


def build_trainer(
    folder: RunDir,
    args: Stage1Config,
    start: Start,
    source: RolloutSource,
    callback: Stage1Callback,
) -> Stage1Trainer:
    """The trainer over the run's own trajectory store."""
    rollouts = StepRollouts(
        source,
        TrajectoryStore(folder.path / "trajectories"),
        rank=args.process_index,
        world_size=args.world_size,
        refill=refill(args, start.problems),
    )
    trainer = Stage1Trainer(
        model=start.model,
        args=args,
        problems=start.problems,
        rollouts=rollouts,
        tokenizer=start.tokenizer,
        experts=[card.name for card in start.settings.experts],
        right_experts=start.right_experts,
        callbacks=[callback],
    )
    for printing in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(printing)
    return trainer


def refill(args: Stage1Config, problems: list[Problem]) -> Refill | None:
    """What takes the place of flat groups, by the settings."""
    if not args.max_refills:
        return None
    assert args.num_generations is not None
    return Refill(problems, args.num_generations, args.max_refills, args.seed)


def results(folder: RunDir) -> dict[str, float]:
    """Means over the last steps, and how many there were."""
    lines = folder.metrics()
    means: dict[str, float] = {"steps": lines[-1]["step"] if lines else 0}
    for name in _RESULTS:
        values = [v for line in lines[-_LAST_STEPS:] if (v := line.get(name)) is not None]
        if values:
            means[name] = sum(values) / len(values)
    return means
