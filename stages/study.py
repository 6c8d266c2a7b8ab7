"""The demo's choices over seeds: which parts of the method matter, with their spread.

    rivet study stages/recipes/study_mini.yaml

Each seed has one warm start; each arm goes on from it, or from a checkpoint of another study:
Stage I with some `expert_loss` (or none at all), collection, and Stage II in some variants; every
checkpoint is evaluated. Arms are processes of one thread each, `jobs` at a time. A killed study
goes on where it was, and one that is given more seeds, arms or variants does what is new; an arm
that fails is named in the results and takes none of the others with it.

    OUTPUT_DIR/seed-1/warm/...                 the warm start of a seed
    OUTPUT_DIR/seed-1/positive/stage1/...      an arm
    OUTPUT_DIR/results.json                    {"rows": [...], "failures": [...], "phases": [...]}
    OUTPUT_DIR/report.html                     tables, plots and paired differences over seeds
    OUTPUT_DIR/{figure.svg,table.md,results.csv}   the same to keep: plots, means, each row
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.results_file import RESULTS_FILE
from eval.study_report import write_study_report
from eval.study_table import table
from rivet.config import parse_config
from rivet.files import atomic_write_json
from rivet.interrupt import terminable
from rivet.runs import RunDir
from stages.pipeline import Pipeline, PipelineConfig, write_experts_file
from stages.study_config import StudyConfig, check_arms, check_starts, check_unchanged

logger = logging.getLogger(__name__)

NO_STAGE1 = "none"
# What may differ when a study goes on: each phase checks its own settings against what is there.
_MAY_GROW = ("jobs", "seeds", "arms", "variants")


def run(config: StudyConfig) -> dict[str, Any]:
    """Run every arm of every seed, or what is left of them.

    Returns:
        The content of `results.json`.

    Raises:
        rivet.config.ConfigError: Settings are wrong, or a checkpoint to start from is missing.
        rivet.runs.RunDirError: The folder holds something else, or a study with other phases.
    """
    from stages.experts import start_miniworld_experts

    check_arms(config)
    check_starts(config)
    folder = Path(config.output_dir)
    if not config.overwrite:
        check_unchanged(config)
    # Reading what is finished takes seconds, and there may be more to do than there was.
    with RunDir.open(
        folder,
        config,
        stage="study",
        overwrite=config.overwrite,
        may_change=_MAY_GROW,
        reopen=True,
    ) as run_dir:
        with start_miniworld_experts() as configs, terminable():
            experts = write_experts_file(folder / "experts.yaml", configs)
            results = _run_units(config, folder, experts)
        atomic_write_json(folder / RESULTS_FILE, results)
        write_study_report(folder)
        if not results["failures"]:
            run_dir.finish({"rows": len(results["rows"])})
    return results


def _run_units(config: StudyConfig, folder: Path, experts: Path) -> dict[str, Any]:
    """Run what is ready, `jobs` at a time, one seed after the other as far as possible."""
    done = _done_before(folder / RESULTS_FILE)
    failures: list[dict[str, Any]] = []
    todo, warm = _units(config), set[int]()
    total = len(todo)
    running: dict[Future[dict[str, Any]], tuple[_Unit, ProcessPoolExecutor]] = {}
    with ExitStack() as pools, _ended_at_ctrl_c():
        while todo or running:
            # Handed out one by one, or all warm starts would run before the first arm.
            ready = [u for u in todo if not u.needs_warm or u.seed in warm]
            for unit in ready[: config.jobs - len(running)]:
                todo.remove(unit)
                # A process each: one that is killed breaks its pool, and with it all that is in it.
                pool = ProcessPoolExecutor(
                    1, mp_context=multiprocessing.get_context("spawn"), initializer=_quiet_worker
                )
                pools.enter_context(pool)
                future = pool.submit(run_unit, config, folder, experts, unit.seed, unit.arm)
                running[future] = unit, pool
                begun = total - len(todo)
                logger.info("seed %d, %s: begins (%d of %d)", unit.seed, unit.called, begun, total)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                unit, pool = running.pop(future)
                pool.shutdown()
                seed, arm, error = unit.seed, unit.arm, future.exception()
                if error is None:
                    logger.info("seed %d, %s: done", seed, unit.called)
                    done[seed, arm] = future.result()
                    warm |= set() if arm else {seed}
                else:
                    why = _KILLED if isinstance(error, BrokenProcessPool) else str(error)
                    why = why or type(error).__name__
                    logger.error("seed %d, %s failed: %s", seed, unit.called, why)
                    failures.append({"seed": seed, "arm": arm or "warm", "error": why})
                    done.pop((seed, arm), None)
                    if not arm:
                        todo = [u for u in todo if u.seed != seed or not u.needs_warm]
                atomic_write_json(folder / RESULTS_FILE, _results(config, done, failures))
    return _results(config, done, failures)


_KILLED = (
    "its process was ended from outside, as a system does that is short of memory; run the study "
    "again, which goes on there, with fewer jobs if that was it"
)


def _done_before(path: Path) -> dict[tuple[int, str], dict[str, list[Any]]]:
    """Rows and phases in the results of an earlier run of this study, by seed and arm.

    An arm or a seed that is not named this time keeps its rows.
    """
    done: dict[tuple[int, str], dict[str, list[Any]]] = {}
    if not path.is_file():
        return done
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        for kind in ("rows", "phases"):
            for item in found[kind]:
                unit = done.setdefault((item["seed"], item["arm"]), {"rows": [], "phases": []})
                unit[kind].append(item)
    except (ValueError, KeyError, TypeError) as error:
        logger.warning(
            "%s: broken (%s); made again from the seeds and arms that are named now", path, error
        )
        return {}
    return done


def _results(
    config: StudyConfig,
    done: Mapping[tuple[int, str], dict[str, list[Any]]],
    failures: list[dict[str, Any]],
) -> dict[str, Any]:
    """The content of `results.json`: seed by seed, arms in their order, others behind them."""
    order = {arm: n for n, arm in enumerate(["", *config.arms])}
    units = sorted(done, key=lambda unit: (unit[0], order.get(unit[1], len(order))))
    return {
        "rows": [row for unit in units for row in done[unit]["rows"]],
        "failures": failures,
        "phases": [phase for unit in units for phase in done[unit]["phases"]],
    }


@dataclass(frozen=True, slots=True)
class _Unit:
    """What one process does: the warm start of a seed (empty `arm`), or an arm."""

    seed: int
    arm: str
    needs_warm: bool = False

    @property
    def called(self) -> str:
        """For people."""
        return self.arm or "warm start"


def _units(config: StudyConfig) -> list[_Unit]:
    """All of them, seed by seed; a warm start that no arm starts from is left out."""
    units: list[_Unit] = []
    for seed in config.seeds:
        arms = [_Unit(seed, arm, start is None) for arm, start in config.starts(seed).items()]
        units += [_Unit(seed, "")] if any(unit.needs_warm for unit in arms) else []
        units += arms
    return units


# Workers report through the parent; their progress bars would overwrite each other.
_QUIET = {"disable_tqdm": True}


def _quiet_worker() -> None:
    import datasets
    import torch
    from transformers.utils import logging as transformers_logging

    os.environ["TQDM_DISABLE"] = "1"
    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_the_study, daemon=True).start()


@contextmanager
def _ended_at_ctrl_c() -> Iterator[None]:
    """Ctrl-C may reach the study alone; its workers would go on to the end of their arms."""
    try:
        yield
    except KeyboardInterrupt:
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise


def _end_with_the_study() -> None:
    """A worker would finish its arm although nobody waits for it; phases resume, so end at once."""
    study = multiprocessing.parent_process()
    assert study is not None
    study.join()
    os._exit(1)


def run_unit(
    config: StudyConfig, folder: Path, experts: Path, seed: int, arm: str
) -> dict[str, Any]:
    """Run a seed's warm start (empty `arm`) or one arm after it; gives its rows and times."""
    settings = PipelineConfig(
        seed=seed,
        size=config.size,
        warmstart=config.warmstart | _QUIET,
        stage1=config.stage1 | _QUIET,
        collect=config.collect,
        solutions=config.solutions,
        stage2=config.stage2 | _QUIET,
        eval=config.eval,
    )
    root = folder / f"seed-{seed}"
    pipeline = Pipeline(root / arm, settings, experts=experts)
    if not arm:
        rows = pipeline.evaluate(pipeline.warmstart(), "warm", config.conditions)
        return _labelled(pipeline, rows, seed, arm, expert_loss=NO_STAGE1)
    start = config.starts(seed)[arm] or root / "warm" / "checkpoint"
    return _run_arm(config, pipeline, start, seed, arm)


def _run_arm(
    config: StudyConfig, pipeline: Pipeline, start: Path, seed: int, arm: str
) -> dict[str, Any]:
    choices = config.parsed_arms()[arm]
    expert_loss = NO_STAGE1
    rows: list[dict[str, Any]] = []
    if choices.stage1 is not None:
        start = pipeline.stage1(start, **choices.stage1)
        expert_loss = choices.stage1.get("expert_loss", "positive")
        rows += pipeline.evaluate(start, "stage1", config.conditions)
    if choices.stage2:
        if choices.trajectories:
            trajectories = config.trajectories(seed)[arm]
        elif choices.solutions is not None:
            trajectories = pipeline.solutions(start, **choices.solutions)
        else:
            trajectories = pipeline.collect(start, **(choices.collect or {}))
        for variant in choices.stage2:
            name = f"stage2-{variant}"
            checkpoint = pipeline.stage2(start, trajectories, name, **config.variants[variant])
            conditions = config.stage2_conditions or config.conditions
            for row in pipeline.evaluate(checkpoint, name, conditions):
                rows.append(row | {"checkpoint": "stage2", "stage2": variant})
    return _labelled(pipeline, rows, seed, arm, expert_loss=expert_loss)


def _labelled(
    pipeline: Pipeline, rows: list[dict[str, Any]], seed: int, arm: str, *, expert_loss: str
) -> dict[str, Any]:
    labels = {"seed": seed, "arm": arm, "expert_loss": expert_loss}
    return {
        "rows": [{"stage2": "none"} | row | labels for row in rows],
        "phases": [phase | {"seed": seed, "arm": arm} for phase in pipeline.phases.rows()],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """`rivet study RECIPE.yaml [--name value ...]`; prints the table and where the results are."""
    config = parse_config(
        StudyConfig,
        argv,
        prog="rivet study",
        description=(__doc__ or "").splitlines()[0],
        check=check_arms,
    ).config
    results = run(config)
    print(table(results["rows"], list(config.arms)))
    for failure in results["failures"]:
        print(f"failed: seed {failure['seed']}, {failure['arm']}: {failure['error']}")
    for name in ("results.json", "report.html"):
        print(f"{name.split('.')[0]}: {Path(config.output_dir) / name}")
    if results["failures"]:
        print("run the same command again to try what failed once more")
    return 1 if results["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
