"""One arm in its run folder: warm start, RL, evaluation; goes on where it was killed.

RUN/experts.json      the frozen experts: digests of their weights before and after
RUN/warm/             the policy after the supervised warm start
RUN/trajectories/     the graded rollouts of each step (Stage I's)
RUN/trainer/          the trainer's state, to resume from
RUN/metrics.jsonl     one line a step
RUN/checkpoint/       policy, adapter and tokenizer; config.json names the experts
RUN/collapsed/        the same of a run that the alarm stopped, which is never finished
RUN/results.json      accuracies, interventions, attention, correlations, time
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import wait_for_everyone
from transformers import PrinterCallback, ProgressCallback
from transformers.utils.logging import disable_progress_bar

from data.problems import Problem
from rivet.files import atomic_folder, atomic_write_json, broken_file, is_whole
from rivet.grading import Grader
from rivet.interrupt import interruptible
from rivet.latent.experts import FrozenExpert, weights_digest
from rivet.latent.policy import LatentPolicy, load_policy
from rivet.latent.prompts import LatentPrompts
from rivet.runs import RunDir
from rivet.store import TrajectoryStore
from stages.checkpointing import resume_point, save_controller
from stages.latent.config import LatentConfig
from stages.latent.evaluate import (
    WARM,
    attention_by_family,
    correlations,
    evaluate,
    interventions,
)
from stages.latent.listener import Listener
from stages.latent.source import LatentSource, Sampling
from stages.latent.start import Data, Start, describe, gather, load_start, open_listeners
from stages.latent.trainer import LatentTrainer
from stages.latent.warmup import warm_up
from stages.stage1.callback import Stage1Callback
from stages.stage1.rollouts import StepRollouts
from stages.stage1.training import (
    COLLAPSED,
    STOP_OR_SAVE,
    collapse_error,
    past_collapse,
    refill,
    trainer_arguments,
)

logger = logging.getLogger(__name__)

RESULTS = "results.json"
_MAY_CHANGE = (*STOP_OR_SAVE, "cache", "controls")
_ADVICE = "a smaller learning_rate or adapter_learning_rate"


class FrozenError(RuntimeError):
    """An expert's weights changed during a run."""


def run_arm(config: LatentConfig) -> dict[str, Any]:
    """Run one arm in `output_dir`, or what is left of it.

    Returns:
        The content of `results.json`.

    Raises:
        RunFinishedError: It is finished, `results.json` is whole and `overwrite` is False.
        CollapseError: The alarm stopped it, now or before.
        FrozenError: An expert's weights changed.
        CacheError: A cache holds what an expert would not say.
    """
    assert config.output_dir is not None
    disable_progress_bar()
    # The first process builds the world; the others find it.
    with PartialState().main_process_first():
        data = gather(config)
    with RunDir.open(
        config.output_dir,
        config,
        stage="latent",
        overwrite=config.overwrite,
        may_change=_MAY_CHANGE,
        reopen=not is_whole(Path(config.output_dir) / RESULTS),
    ) as folder:
        started, cpu = time.perf_counter(), time.process_time()
        before = {e.spec.name: weights_digest(e.model) for e in data.experts}
        with PartialState().main_process_first():
            listeners = open_listeners(config, data)
        start = load_start(config, data)
        with Grader() as grader:
            rows = _warm(folder, config, start, data, listeners, grader)
            if not folder.checkpoint.is_dir():
                train(folder, config, start, data.train, listeners[0], grader)
            policy = load_policy(folder.checkpoint)
            torch.nn.Module.to(policy, config.device)
            final = _measure(policy, start.prompts, listeners[1], data.test, grader, config)
        _check_frozen(folder, data.experts, before)
        results = {
            "arm": config.arm,
            "expert": config.expert,
            "seed": config.seed,
            "rows": rows + final["rows"],
            "attention": final["attention"],
            "correlations": correlations(folder.metrics()),
            # Of this process: a run that was killed took more.
            "is_resumed": folder.is_resumed,
            "wall_s": round(time.perf_counter() - started, 1),
            "cpu_s": round(time.process_time() - cpu, 1),
        }
        folder.write_json(RESULTS, results)
        folder.finish({"rows": len(results["rows"]), "cpu_s": results["cpu_s"]})
    return results


def _warm(
    folder: RunDir,
    config: LatentConfig,
    start: Start,
    data: Data,
    listeners: tuple[Listener, Listener],
    grader: Grader,
) -> list[dict[str, Any]]:
    """The warm start into `warm/`, and how good it is; the policy has its weights afterwards.

    It is made where it is missing or cut short.
    """
    target = folder.path / "warm"
    broken = broken_file(target) if folder.is_writer else None
    if broken:
        logger.warning("%s: cut short; the warm start is made again", broken)
    if folder.is_writer and (broken or not (target / "rows.json").is_file()):
        losses = warm_up(start.policy, start.prompts, listeners[0], data.train, config)
        rows = evaluate(
            start.policy.eval(),
            start.prompts,
            listeners[1],
            data.test,
            grader,
            config,
            condition=WARM,
        )
        with atomic_folder(target) as temporary:
            start.policy.save_pretrained(temporary)
            atomic_write_json(temporary / "losses.json", losses)
            atomic_write_json(temporary / "rows.json", rows)
    wait_for_everyone()
    saved = load_policy(target)
    start.policy.load_state_dict(saved.state_dict())
    return json.loads((target / "rows.json").read_text(encoding="utf-8"))


def train(
    folder: RunDir,
    config: LatentConfig,
    start: Start,
    problems: list[Problem],
    listener: Listener,
    grader: Grader,
) -> Path:
    """RL, resuming if the run folder holds a checkpoint of the trainer.

    Returns:
        The checkpoint folder.

    Raises:
        Interrupted: A signal asked to stop; the state is saved.
        CollapseError: The alarm stopped it, now or before.
    """
    args = trainer_arguments(config, folder, len(problems))
    assert isinstance(args, LatentConfig)
    resume_from = resume_point(folder, args.world_size)
    watch = args.collapse_watch()
    before = past_collapse(folder, watch)
    if before and args.collapse_alarm == "stop" and (folder.path / COLLAPSED).is_dir():
        raise collapse_error(folder, before, _ADVICE)
    start.policy.train()
    if not config.train_policy:
        for name, parameter in start.policy.named_parameters():
            parameter.requires_grad_("context_adapter" in name)
    sampling = Sampling(
        args.max_completion_length or 64, args.temperature, args.seed, args.sample_batch_size
    )
    rollouts = StepRollouts(
        LatentSource(start.policy, start.prompts, listener, grader, sampling),
        TrajectoryStore(folder.path / "trajectories"),
        rank=args.process_index,
        world_size=args.world_size,
        refill=refill(args, problems),
    )
    with interruptible() as stop:
        callback = Stage1Callback(folder, stop, watch, args.collapse_alarm)
        trainer = LatentTrainer(
            model=start.policy,
            args=args,
            problems=problems,
            prompts=start.prompts,
            listener=listener,
            rollouts=rollouts,
            tokenizer=start.tokenizer,
            experts=(),
            callbacks=[callback],
        )
        for printing in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(printing)
        trainer.train(resume_from_checkpoint=resume_from)
        if callback.collapse is not None:
            save_controller(
                folder, folder.path / COLLAPSED, trainer, start.tokenizer, start.settings
            )
            raise collapse_error(folder, callback.collapse, _ADVICE)
        if stop.requested and trainer.state.global_step < args.max_steps:
            stop.check(f"step {trainer.state.global_step}")
    save_controller(folder, folder.checkpoint, trainer, start.tokenizer, start.settings)
    wait_for_everyone()
    return folder.checkpoint


def _measure(
    policy: LatentPolicy,
    prompts: LatentPrompts,
    listener: Listener,
    problems: list[Problem],
    grader: Grader,
    config: LatentConfig,
) -> dict[str, Any]:
    """Accuracy as trained and under every intervention, and attention."""
    logger.info("evaluating on %d held-out problems", len(problems))
    given = (policy, prompts, listener, problems, grader, config)
    rows = evaluate(*given)
    for condition, states in interventions(listener, config).items():
        rows += evaluate(*given, condition=condition, states=states)
    return {"rows": rows, "attention": attention_by_family(policy, listener, problems)}


def _check_frozen(folder: RunDir, experts: Sequence[FrozenExpert], before: dict[str, str]) -> None:
    """Say in the run folder what the experts were and that they still are.

    Raises:
        FrozenError: One changed.
    """
    after = {expert.spec.name: weights_digest(expert.model) for expert in experts}
    folder.write_json(
        "experts.json",
        [
            {
                **describe(e),
                "digest_before": before[e.spec.name],
                "digest_after": after[e.spec.name],
            }
            for e in experts
        ],
    )
    changed = [name for name in before if before[name] != after[name]]
    if changed:
        raise FrozenError(f"{folder.path}: the weights of expert {changed[0]} changed in training")
