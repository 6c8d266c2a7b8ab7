"""Stage II: filter graded trajectories, then train the controller on all of what they hold.

    OUTPUT_DIR/
      config.json, log.txt, metrics.jsonl, finished.json     the run (`rivet.runs`)
      dataset/       the verified trajectories, with a card and the filter's funnel
      trainer/       checkpoints to resume from
      checkpoint/    the result

Run line: `rivet stage2 stages/recipes/stage2_mini.yaml --model runs/stage1/checkpoint
--trajectories runs/collect/trajectories`
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState

from data.problems import Problem, load_problems
from rivet.checkpoints import check_checkpoint
from rivet.config import parse_config
from rivet.prompts import PromptBuilder
from rivet.runs import FINISHED_FILE, RunDir, RunDirError
from rivet.settings import ProtocolSettings
from rivet.store import TrajectoryStore
from rivet.tokenization import ProtocolTokenizer
from stages.checkpointing import load_controller
from stages.stage2.candidates import Candidate, problem_counts, read_candidates
from stages.stage2.config import Stage2Config
from stages.stage2.dataset import FUNNEL_FILE, is_dataset, read_dataset, write_dataset
from stages.stage2.filter import (
    EvaluationProblems,
    Filter,
    FilterRules,
    funnel_text,
)
from stages.stage2.objective import named_weights
from stages.stage2.training import train

logger = logging.getLogger(__name__)

# Held-out problems of each mini-world family that `decontaminate: [miniworld]` stands for.
_MINIWORLD_PER_FAMILY = 100


class Stage2Error(ValueError):
    """Stage II cannot start as asked; the message says why and what to do."""


def run(config: Stage2Config) -> Path:
    """Filter and train, or go on with a run that was interrupted.

    Returns:
        The checkpoint folder.

    Raises:
        Stage2Error: There is no trajectory, some are lost, or none passes the filter.
        rivet.runs.RunFinishedError: It is finished and `overwrite` is False.
        rivet.interrupt.Interrupted: A signal asked to stop; the state is saved.
    """
    assert config.output_dir is not None
    opened = check_checkpoint(config.model)  # before the run folder: its faults are the command's
    settings, tokenizer = opened.settings, opened.tokenizer
    with RunDir.open(
        config.output_dir, config, stage="stage2", overwrite=config.overwrite
    ) as folder:
        with PartialState().main_process_first():
            funnel = prepare_dataset(config, folder, tokenizer, settings)
        dataset = read_dataset(folder.path / "dataset")
        summary = train(
            folder,
            config,
            model=load_controller(config.model, config),
            tokenizer=tokenizer,
            settings=settings,
            objective=config.objective(),
            dataset=dataset,
            peft_config=config.peft(),
        )
        weights = named_weights(config.objective())
        folder.finish({**_results(funnel), **summary, "token_weights": weights})
        return folder.checkpoint


def prepare_dataset(
    config: Stage2Config,
    folder: RunDir,
    tokenizer: ProtocolTokenizer,
    settings: ProtocolSettings,
) -> dict[str, Any]:
    """Filter the store into `dataset/`, unless an interrupted run has done so and it is whole.

    Returns:
        The funnel.
    """
    target = folder.path / "dataset"
    if folder.is_writer and not is_dataset(target):
        store = TrajectoryStore(config.trajectories)
        if not store.shards():
            raise Stage2Error(
                f"{config.trajectories}: no trajectory here; expected parquet shards, as "
                "`rivet collect` writes them"
            )
        _check_is_whole(store)
        logger.info("filtering %s", config.trajectories)
        passes = Filter(
            FilterRules(
                require_right=config.require_right,
                use=config.require_use,
                require_code_ok=config.require_code_ok,
                max_length=config.max_length,
                near_duplicate=config.near_duplicate,
                max_per_problem=config.max_per_problem,
                max_trajectories=config.max_trajectories,
            ),
            is_contaminated=_contamination(config, tokenizer, settings),
            counts=problem_counts(store),
        )
        size = len(tokenizer.token_bytes)
        kept = (_checked(c, size, config) for c in read_candidates(store) if passes(c))
        first = next(kept, None)
        if first is None:
            raise Stage2Error(
                f"{config.trajectories}: no trajectory passes the filter:\n"
                f"{funnel_text(passes.funnel)}\nloosen the rule that dropped them, or collect "
                "with a better controller"
            )
        write_dataset(
            target,
            itertools.chain([first], kept),
            funnel=lambda: passes.funnel,
            source=config.trajectories,
        )
    funnel = json.loads((target / FUNNEL_FILE).read_text(encoding="utf-8"))
    logger.info("what the filter kept:\n%s", funnel_text(funnel))
    return funnel


def _check_is_whole(store: TrajectoryStore) -> None:
    """Refuse what a finished run left in its folder if it is not as many rows as it says.

    A store that lost a shard reads like a smaller one. One that no run made, or that a run is still
    filling, says nothing of how many rows it should have.
    """
    folder = store.folder.resolve().parent
    try:
        made_by = RunDir.load(folder)
    except RunDirError:
        return
    expected = made_by.results.get("rows") if made_by.is_finished else None
    if isinstance(expected, int) and (found := store.count()) != expected:
        raise Stage2Error(
            f"{store.folder}: {found} rows, but {folder / FINISHED_FILE} says {expected}: shards "
            f"were lost or added; restore them, or run the command of {folder} again with "
            "--overwrite true"
        )


def _contamination(
    config: Stage2Config, tokenizer: ProtocolTokenizer, settings: ProtocolSettings
) -> EvaluationProblems | None:
    problems: list[Problem] = []
    for source in config.decontaminate:
        if source == "miniworld":
            from data.miniworld.tasks import build_split

            problems += build_split("test", _MINIWORLD_PER_FAMILY, 0)
        else:
            problems += load_problems(source)
    if not problems:
        return None
    return EvaluationProblems(problems, PromptBuilder(tokenizer, settings))


def _checked(candidate: Candidate, vocabulary: int, config: Stage2Config) -> Candidate:
    """Ids of another tokenizer would train on noise; the cheapest sign is one out of range."""
    largest = int(candidate.completion_ids.max(initial=0))
    if largest >= vocabulary:
        raise Stage2Error(
            f"{config.trajectories}: token id {largest}, but the vocabulary of {config.model} has "
            f"{vocabulary} tokens; expected trajectories that this controller or one of its "
            "ancestors sampled"
        )
    return candidate


def _results(funnel: dict[str, Any]) -> dict[str, Any]:
    return {name: funnel[name] for name in ("read", "kept", "problems", "routes")}


def main(argv: Sequence[str] | None = None) -> int:
    """`rivet stage2 RECIPE.yaml [--name value ...]`; prints the checkpoint's path."""
    parsed = parse_config(
        Stage2Config,
        argv,
        prog="rivet stage2",
        description="Train the controller on verified trajectories, experts' text included.",
    )
    print(run(parsed.config))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
