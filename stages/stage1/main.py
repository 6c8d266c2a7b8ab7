"""Stage I: reinforcement learning of the controller with experts at hand.

    rivet stage1 stages/recipes/stage1_mini.yaml --model runs/warmstart/checkpoint

    run/trajectories/step-00012   the graded rollouts of step 12, written before its update
    run/trainer/checkpoint-N      the trainer's state, for resuming
    run/metrics.jsonl             one line a step
    run/checkpoint                the result: weights, tokenizer, rivet.json
    run/collapsed                 the weights of a run that an alarm stopped, to look at

A run that was killed or interrupted goes on with the same command: from the last checkpoint,
through the stored rollouts, to the parameters that it would have had.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import PartialState

from data.problems import Problem
from rivet.checkpoints import OpenedCheckpoint, check_checkpoint
from rivet.config import ConfigError, parse_config
from rivet.experts.config import ExpertConfig, load_experts
from rivet.experts.ledger import stop_at_budget
from rivet.rollout.backend_settings import MAY_CHANGE
from rivet.runs import RunDir
from rivet.settings import ExpertCard
from stages.checkpointing import load_controller
from stages.experts import start_miniworld_experts
from stages.stage1.config import Stage1Config
from stages.stage1.sampling import engine_source, right_experts
from stages.stage1.servers import open_servers, weight_sync
from stages.stage1.training import STOP_OR_SAVE, Start, train, trainer_arguments

logger = logging.getLogger(__name__)

_MAY_CHANGE = (*MAY_CHANGE, "canary_tolerance", *STOP_OR_SAVE)


def run(config: Stage1Config) -> Path:
    """Train, or go on training.

    Args:
        config: Settings; `output_dir` is the run folder.

    Returns:
        The checkpoint folder.

    Raises:
        CollapseError: The run lost the protocol.
        FaultRateError: Experts, sandbox or grader fail too often.
        ExpertsUnavailableError: An expert does not answer before the first step.
        Interrupted: A signal asked to stop, and the step is saved; or the budget for experts is
            spent, and the step under way is left out.
    """
    assert config.output_dir is not None
    # What can be wrong with the input is found before anything is written or started.
    problems = read_problems(config)
    opened = check_checkpoint(config.model)
    listed: list[ExpertConfig] | None = []
    if config.mode == "experts":
        listed = None if config.experts == "embedded" else load_experts(config.experts)
    with RunDir.open(
        config.output_dir,
        config,
        stage="stage1",
        overwrite=config.overwrite,
        may_change=_MAY_CHANGE,
    ) as folder:
        # The others open the ledger in the folder, which the writer may still be emptying.
        PartialState().wait_for_everyone()
        args = trainer_arguments(config, folder, len(problems))
        with stop_at_budget(), open_experts(listed) as experts:
            start = load_start(args, opened, problems, experts)
            with (
                open_servers(args, start) as urls,
                engine_source(
                    start.model,
                    start.tokenizer,
                    start.settings,
                    experts,
                    batch_size=args.per_device_train_batch_size * args.gradient_accumulation_steps,
                    temperature=args.temperature,
                    seed=args.seed,
                    cost=args.cost(),
                    vllm_urls=urls,
                    mode=args.mode,
                    deadline_s=args.rollout_deadline_s,
                    problems=problems,
                    run_dir=folder.path,
                ) as source,
            ):
                sync = weight_sync(args, folder, start, source, urls)
                return train(folder, args, start, source, sync)


def read_problems(config: Stage1Config) -> list[Problem]:
    """Training problems of the mini-world, or of a file.

    Raises:
        ProblemFileError: The file is broken.
        ConfigError: There are fewer than one step takes, or they cannot be balanced.
    """
    problems = config.read_problems(config.seed)
    if config.balance and not any(config.balance in p.meta for p in problems):
        known = sorted({key for p in problems for key in p.meta})
        raise ConfigError(
            [
                f"balance: {config.balance}: no problem of {config.problems} has it in its meta; "
                f"expected one of {', '.join(known) or 'none, for they have no meta'}"
            ]
        )
    if len(problems) < config.prompts_per_step:
        raise ConfigError(
            [
                f"problems: {config.problems} holds {len(problems)}; expected at least "
                f"{config.prompts_per_step}, what one step takes"
            ]
        )
    return problems


def load_start(
    args: Stage1Config,
    opened: OpenedCheckpoint,
    problems: list[Problem],
    experts: Sequence[ExpertConfig],
) -> Start:
    """Load the controller; it may name the experts that this run has."""
    settings, tokenizer = opened.settings, opened.tokenizer
    limits = settings.limits
    if args.max_completion_length is not None:
        limits = replace(limits, max_completion_length=args.max_completion_length)
    args.max_completion_length = limits.max_completion_length
    # Without experts at hand the controller keeps the ones that it knows.
    cards = tuple(ExpertCard(expert.name, expert.skill) for expert in experts) or settings.experts
    tokenizer.hf.padding_side = "left"  # as GRPOTrainer expects
    model = load_controller(args.model, args)
    # The engine samples from this very object, so it goes to its device first.
    torch.nn.Module.to(model, args.device)
    return Start(
        model,
        tokenizer,
        replace(settings, experts=cards, limits=limits),
        problems,
        right_experts(problems, [card.name for card in cards]),
    )


@contextlib.contextmanager
def open_experts(listed: list[ExpertConfig] | None) -> Iterator[list[ExpertConfig]]:
    """The experts that were listed; without a list the mini-world's own, served meanwhile."""
    if listed is not None:
        yield listed
        return
    logger.info("starting the mini-world's experts")
    with start_miniworld_experts() as configs:
        yield configs


def main(argv: Sequence[str] | None = None) -> int:
    """`rivet stage1 RECIPE.yaml [--name value ...]`; prints the checkpoint's path."""
    parsed = parse_config(
        Stage1Config,
        argv,
        prog="rivet stage1",
        description="Stage I: expert-augmented reinforcement learning of the controller.",
    )
    print(run(parsed.config))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
