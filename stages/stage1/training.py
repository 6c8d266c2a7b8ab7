"""One Stage I run inside a run folder: resume, train, stop in good order, save.

Over any source of rollouts, so that it can be tested without sampling; `stages.stage1.main` brings
the engine. A checkpoint of the trainer counts once it is whole (`stages.stage2.training`).
"""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedModel, PrinterCallback, ProgressCallback

from data.problems import Problem
from rivet.files import atomic_folder
from rivet.interrupt import interruptible
from rivet.runs import RunDir
from rivet.settings import ProtocolSettings
from rivet.store import TrajectoryStore
from rivet.tokenization import ProtocolTokenizer
from stages.stage1.callback import Stage1Callback
from stages.stage1.config import Stage1Config
from stages.stage1.rollouts import RolloutSource, StepRollouts
from stages.stage1.trainer import Stage1Trainer
from stages.stage2.training import last_checkpoint

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
    args.output_dir = str(folder.path / "trainer")
    if args.max_steps <= 0:
        args.max_steps = math.ceil(args.num_train_epochs * (problems // args.prompts_per_step))
    return args


def train(folder: RunDir, args: Stage1Config, start: Start, source: RolloutSource) -> Path:
    """Train inside an opened run folder, over any source of rollouts.

    Args:
        folder: The run.
        args: From `trainer_arguments`.
        start: Model, tokenizer, protocol and problems.
        source: Samples what is not stored.

    Returns:
        The checkpoint folder.
    """
    resume_from = last_checkpoint(Path(str(args.output_dir)), clean=folder.is_writer)
    folder.trim_metrics(0 if resume_from is None else int(resume_from.rpartition("-")[2]))
    watch = args.collapse_watch()
    for line in folder.metrics():
        watch.update(line)
    with interruptible() as stop:
        callback = Stage1Callback(folder, stop, watch, args.collapse_alarm)
        trainer = build_trainer(folder, args, start, source, callback)
        if resume_from is not None:
            logger.info("resuming from %s", resume_from)
        trainer.train(resume_from_checkpoint=resume_from)
        if callback.collapse is not None:
            save(folder, folder.path / "collapsed", trainer, start)
            raise CollapseError(
                f"{folder.path}: stopped at {callback.collapse}. The weights are in "
                f"{folder.path / 'collapsed'}, the curves in metrics.jsonl. Try a milder "
                "expert_loss (positive), a smaller expert_weight or learning_rate; to go on all "
                "the same: --collapse_alarm warn"
            )
        if stop.requested and trainer.state.global_step < args.max_steps:
            stop.check(f"step {trainer.state.global_step}")
    save(folder, folder.checkpoint, trainer, start)
    folder.finish(results(folder))
    return folder.checkpoint


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


def save(folder: RunDir, target: Path, trainer: Stage1Trainer, start: Start) -> None:
    """Write weights, tokenizer and `rivet.json`, whole or not at all."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    state = None
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if not folder.is_writer:
        return
    with atomic_folder(target) as temporary:
        model.save_pretrained(temporary, state_dict=state)
        start.tokenizer.hf.save_pretrained(temporary)
        start.settings.save(temporary)


def results(folder: RunDir) -> dict[str, float]:
    """Means over the last steps, and how many there were."""
    lines = folder.metrics()
    means: dict[str, float] = {"steps": lines[-1]["step"] if lines else 0}
    for name in _RESULTS:
        values = [v for line in lines[-_LAST_STEPS:] if (v := line.get(name)) is not None]
        if values:
            means[name] = sum(values) / len(values)
    return means
