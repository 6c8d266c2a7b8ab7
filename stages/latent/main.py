"""Latent collaboration: a policy learns by RL to use the hidden states of frozen experts.

    rivet latent stages/recipes/latent_mini.yaml

    OUTPUT_DIR/full/          the run of the arm (`stages.latent.run`)
    OUTPUT_DIR/shuffled/      and of each of its controls
    OUTPUT_DIR/results.json   all of them, those of earlier commands as well
    OUTPUT_DIR/report.html    accuracies, attention, entropy and reward

An interrupted command goes on where it was; a finished arm is not run again.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.latent_report import write_latent_report
from eval.results_file import RESULTS_FILE, read_json, stage_of
from rivet.config import ConfigError, parse_config
from rivet.files import atomic_write_json
from rivet.runs import FINISHED_FILE, RunDirError, RunFinishedError
from stages.latent.config import LatentConfig, arm_folder

logger = logging.getLogger(__name__)


def run(config: LatentConfig) -> list[dict[str, Any]]:
    """Run the arm and its controls, or what is left of them.

    Returns:
        The results of each, in order, and then of other arms that are finished in the folder.

    Raises:
        ConfigError: A control cannot have these settings; nothing has started.
        RunDirError: The folder is the run of one stage.
    """
    assert config.output_dir is not None
    folder = Path(config.output_dir)
    arms, faults = [], []
    for arm in [config.arm, *config.controls]:
        try:
            expert = config.expert if arm == config.arm else ""
            arms.append(with_arm(config, folder, arm=arm, expert=expert))
        except ValueError as error:
            faults.append(f"controls: {arm}: {error}")
    if faults:
        raise ConfigError(faults)
    if (folder / "config.json").is_file():
        raise RunDirError(
            f"{folder}: a run folder already, whose results would be lost; expected a folder for "
            "the arms: choose another"
        )
    done: list[dict[str, Any]] = []
    others = _finished(folder, besides=[arm_folder(arm_config) for arm_config in arms])
    for arm_config in arms:
        done.append(finished_or_run(arm_config))
        atomic_write_json(folder / RESULTS_FILE, {"arms": done + others})
    write_latent_report(folder)
    return done + others


def _finished(folder: Path, *, besides: Sequence[str]) -> list[dict[str, Any]]:
    """Results of the arms that other commands have finished in a folder."""
    return [
        read_json(path)
        for path in sorted(folder.glob(f"*/{RESULTS_FILE}"))
        if path.parent.name not in besides
        and path.with_name(FINISHED_FILE).is_file()
        and stage_of(path.parent) == "latent"
    ]


def with_arm(config: LatentConfig, folder: Path, **changes: Any) -> LatentConfig:
    """The settings of one arm, checked again, in its own folder."""
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.init}
    # TRL derives one of these from the other and refuses both.
    given["generation_batch_size"] = None
    made = type(config)(**{**given, "controls": [], "output_dir": str(folder / "x"), **changes})
    made.output_dir = str(folder / arm_folder(made))
    return made


def finished_or_run(config: LatentConfig) -> dict[str, Any]:
    """Results of an arm, which is run if it is not finished."""
    from stages.latent.run import run_arm

    try:
        return run_arm(config)
    except RunFinishedError:
        logger.info("%s is finished", config.output_dir)
        return read_json(Path(str(config.output_dir)) / RESULTS_FILE)


def arms_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Accuracy of every arm and condition by family, in percent."""
    families = list(dict.fromkeys(r["family"] for x in results for r in x["rows"]))
    table = Table(title="held-out problems, greedy accuracy, %")
    for name in ("arm", "condition"):
        table.add_column(name)
    for family in families:
        table.add_column(family, justify="right")
    for result in results:
        conditions = list(dict.fromkeys(row["condition"] for row in result["rows"]))
        for condition in conditions:
            cells = {r["family"]: r for r in result["rows"] if r["condition"] == condition}
            values = [_cell(cells.get(family)) for family in families]
            table.add_row(name_of(result), condition, *values)
    return table


def name_of(result: Mapping[str, Any]) -> str:
    """An arm with its expert."""
    return f"one-expert: {result['expert']}" if result.get("expert") else str(result["arm"])


def _cell(row: Mapping[str, Any] | None) -> str:
    return "-" if row is None else f"{100 * row['accuracy']:.1f}"


def main(argv: Sequence[str] | None = None) -> int:
    """`rivet latent RECIPE.yaml [--name value ...]`; prints the arms."""
    config = parse_config(
        LatentConfig,
        argv,
        prog="rivet latent",
        description="Latent collaboration: a policy learns to use frozen experts' hidden states.",
    ).config
    results = run(config)
    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    console.print(arms_table(results))
    for result in results:
        print(f"{name_of(result)}: {result['cpu_s']:.0f} CPU s, {result['wall_s']:.0f} s")
    print(f"results: {Path(str(config.output_dir)) / RESULTS_FILE}")
    print(f"report:  {Path(str(config.output_dir)) / 'report.html'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
