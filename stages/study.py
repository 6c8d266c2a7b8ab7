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

import dataclasses
import logging
import multiprocessing
import os
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.study_report import write_study_report
from eval.study_table import table
from rivet.config import ConfigError, parse_config
from rivet.files import atomic_write_json
from rivet.runs import RunDir
from rivet.trajectory import Mode
from stages.pipeline import (
    CONDITIONS,
    Pipeline,
    PipelineConfig,
    check_overrides,
    write_experts_file,
)

logger = logging.getLogger(__name__)

NO_STAGE1 = "none"
# What may differ when a study goes on: each phase checks its own settings against what is there.
_MAY_GROW = ("jobs", "seeds", "arms", "variants")
_ARM_KEYS = ("start", "stage1", "collect", "solutions", "trajectories", "stage2")


@dataclass
class StudyConfig(PipelineConfig):
    """Settings of a study."""

    output_dir: str = field(default="runs/study", metadata={"help": "The run folder."})
    overwrite: bool = field(default=False, metadata={"help": "Start again from nothing."})
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3], metadata={"help": "One or more."})
    arms: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "help": "Name of each arm: {stage1: settings, collect: settings, stage2: [variants]}; "
            "without stage1 the arm goes from its start to collection. With `solutions: settings` "
            "Stage II learns the experts' own solutions instead of what is collected. With "
            "`start: path` the arm starts from there, with `trajectories: path` Stage II learns "
            "those; `{seed}` in a path stands for the seed."
        },
    )
    start: str = field(
        default="",
        metadata={
            "help": "Checkpoint that arms start from, `{seed}` standing for the seed: "
            "runs/study/seed-{seed}/warm/checkpoint. Empty: a warm start of this study's own."
        },
    )
    variants: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Name of each Stage II variant: its settings."}
    )
    conditions: list[Mode] = field(
        default_factory=lambda: list(CONDITIONS),
        metadata={"help": "Conditions that checkpoints are evaluated under."},
    )
    stage2_conditions: list[Mode] | None = field(
        default=None, metadata={"help": "The same for the checkpoints of Stage II; null: as all."}
    )
    jobs: int = field(
        default_factory=lambda: os.cpu_count() or 1,
        metadata={"help": "Processes at a time, one thread each, at least 1."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.seeds or self.jobs < 1:
            raise ValueError("seeds and jobs: expected at least one seed and one job")
        if not self.arms:
            raise ValueError("arms is empty; expected at least one, as in study_mini.yaml")
        for name, arm in self.arms.items():
            unknown = set(arm) - set(_ARM_KEYS)
            unknown |= set(arm.get("stage2", [])) - set(self.variants)
            if unknown:
                raise ValueError(
                    f"arms: {name}: unknown {', '.join(sorted(unknown))}; expected "
                    f"{', '.join(_ARM_KEYS)}, and variants among "
                    f"{', '.join(self.variants) or 'none'}"
                )
        for seed in self.seeds:
            self.starts(seed)
            self.trajectories(seed)

    def starts(self, seed: int) -> dict[str, Path | None]:
        """Where each arm of a seed starts; None is the study's own warm start.

        Raises:
            ValueError: A path has something else than `{seed}` in braces.
        """
        paths = {name: arm.get("start", self.start) for name, arm in self.arms.items()}
        return {
            name: _of_seed(path, seed, f"arms: {name}: start") if path else None
            for name, path in paths.items()
        }

    def trajectories(self, seed: int) -> dict[str, Path]:
        """What each arm that collects nothing itself has Stage II learn, for a seed.

        Raises:
            ValueError: A path has something else than `{seed}` in braces.
        """
        return {
            name: _of_seed(arm["trajectories"], seed, f"arms: {name}: trajectories")
            for name, arm in self.arms.items()
            if "trajectories" in arm
        }


def _of_seed(path: str, seed: int, where: str) -> Path:
    try:
        return Path(path.format(seed=seed))
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"{where} is {path!r}; expected a path in which {{seed}} stands for the seed"
        ) from error


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
    # Reading what is finished takes seconds, and there may be more to do than there was.
    with RunDir.open(
        folder,
        config,
        stage="study",
        overwrite=config.overwrite,
        may_change=_MAY_GROW,
        reopen=True,
    ) as run_dir:
        with start_miniworld_experts() as configs:
            experts = write_experts_file(folder / "experts.yaml", configs)
            results = _run_units(config, folder, experts)
        atomic_write_json(folder / "results.json", results)
        write_study_report(folder)
        if not results["failures"]:
            run_dir.finish({"rows": len(results["rows"])})
    return results


def check_arms(config: StudyConfig) -> None:
    """Check the settings of every phase, arm and variant before the first one starts.

    Raises:
        rivet.config.ConfigError: Any of them is wrong; all faults at once, each with its arm.
    """
    check_overrides(config)  # alone first: every arm would repeat what is wrong with the phases
    layers = [
        (f"arms: {name}", {p: arm[p] for p in ("stage1", "collect", "solutions") if p in arm})
        for name, arm in config.arms.items()
    ]
    layers += [(f"variants: {name}", {"stage2": own}) for name, own in config.variants.items()]
    faults: list[str] = []
    for where, own in layers:
        merged = {phase: getattr(config, phase) | settings for phase, settings in own.items()}
        try:
            check_overrides(dataclasses.replace(config, **merged))
        except ConfigError as error:
            faults += [f"{where}: {fault}" for fault in error.faults]
    if faults:
        raise ConfigError(faults)


def check_starts(config: StudyConfig) -> None:
    """Check that the checkpoints and trajectories that arms take from elsewhere are there.

    Raises:
        rivet.config.ConfigError: Some are not.
    """
    faults: set[str] = set()
    for seed in config.seeds:
        for what, paths in (
            ("start", config.starts(seed).values()),
            ("trajectories", config.trajectories(seed).values()),
        ):
            faults |= {
                f"{what}: {path}: no such folder; expected one of a run that has ended (rivet "
                "study)"
                for path in paths
                if path is not None and not path.is_dir()
            }
    if faults:
        raise ConfigError(sorted(faults))


def _run_units(config: StudyConfig, folder: Path, experts: Path) -> dict[str, Any]:
    """Run what is ready, `jobs` at a time, one seed after the other as far as possible."""
    rows: list[dict[str, Any]] = []
    phases: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    todo, warm = _units(config), set[int]()
    running: dict[Future[dict[str, Any]], tuple[int, str]] = {}
    with ProcessPoolExecutor(
        config.jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_quiet_worker
    ) as pool:
        while todo or running:
            # Handed out one by one: a queue of the pool would run all warm starts first.
            ready = [u for u in todo if not u.needs_warm or u.seed in warm]
            for unit in ready[: config.jobs - len(running)]:
                todo.remove(unit)
                future = pool.submit(run_unit, config, folder, experts, unit.seed, unit.arm)
                running[future] = (unit.seed, unit.arm)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                seed, arm = running.pop(future)
                error = future.exception()
                if error is not None:
                    logger.error("seed %d, %s failed: %s", seed, arm or "warm start", error)
                    failures.append({"seed": seed, "arm": arm or "warm", "error": str(error)})
                    if not arm:
                        todo = [u for u in todo if u.seed != seed or not u.needs_warm]
                    continue
                unit_results = future.result()
                rows += unit_results["rows"]
                phases += unit_results["phases"]
                logger.info("seed %d, %s is done", seed, arm or "warm start")
                if not arm:
                    warm.add(seed)
                atomic_write_json(
                    folder / "results.json", {"rows": rows, "failures": failures, "phases": phases}
                )
    order = ["", *config.arms]
    rows.sort(key=lambda row: (row["seed"], order.index(row["arm"])))
    return {"rows": rows, "failures": failures, "phases": phases}


@dataclass(frozen=True, slots=True)
class _Unit:
    """What one process does: the warm start of a seed (empty `arm`), or an arm."""

    seed: int
    arm: str
    needs_warm: bool = False


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
    import torch

    os.environ["TQDM_DISABLE"] = "1"
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_the_study, daemon=True).start()


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
    choices = config.arms[arm]
    expert_loss = NO_STAGE1
    rows: list[dict[str, Any]] = []
    if "stage1" in choices:
        start = pipeline.stage1(start, **choices["stage1"])
        expert_loss = choices["stage1"].get("expert_loss", "positive")
        rows += pipeline.evaluate(start, "stage1", config.conditions)
    if choices.get("stage2"):
        if "trajectories" in choices:
            trajectories = config.trajectories(seed)[arm]
        elif "solutions" in choices:
            trajectories = pipeline.solutions(start, **choices["solutions"])
        else:
            trajectories = pipeline.collect(start, **choices.get("collect", {}))
        for variant in choices["stage2"]:
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
