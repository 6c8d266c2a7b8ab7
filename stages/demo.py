"""The whole method on a laptop: problems become an internalized, exported checkpoint.

    rivet demo [stages/recipes/demo_mini.yaml]

    OUTPUT_DIR/
      config.json, log.txt, finished.json    the run (`rivet.runs`)
      experts.yaml                           the embedded experts, as every phase asks them
      warm/ stage1/ collect/ stage2/         one run folder per phase
      eval/{warm,stage1,stage2}/             evaluations with experts and after their removal
      export/                                the Hugging Face folder
      results.json                           rows, phases, path of the export
      report/report.html                     tables, curves, and every trajectory to look at

An interrupted demo goes on where it was; a finished one is shown again.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.results_file import RESULTS_FILE, read_json, require
from rivet.config import parse_config
from rivet.config_help import to_plain
from rivet.files import atomic_write_json
from rivet.runs import RunDir, RunFinishedError
from stages.pipeline import (
    CONDITIONS,
    Pipeline,
    PipelineConfig,
    check_overrides,
    write_experts_file,
)

logger = logging.getLogger(__name__)

RECIPE = Path(__file__).parent / "recipes" / "demo_mini.yaml"
CHECKPOINTS = {"warm": "warm start", "stage1": "Stage I", "stage2": "Stage II"}


@dataclass
class DemoConfig(PipelineConfig):
    """Settings of the demo."""

    output_dir: str = field(default="runs/demo", metadata={"help": "The run folder."})
    overwrite: bool = field(default=False, metadata={"help": "Start again from nothing."})
    question: str = field(
        default="Find the GCD of 252, 198.",
        metadata={"help": "What the exported checkpoint is asked at the end."},
    )


def run(config: DemoConfig) -> dict[str, Any]:
    """Run every phase, or what is left of an interrupted demo.

    Returns:
        The content of `results.json`.

    Raises:
        rivet.runs.RunFinishedError: It is finished and `overwrite` is False.
    """
    check_overrides(config)
    folder = Path(config.output_dir)
    with RunDir.open(folder, config, stage="demo", overwrite=config.overwrite) as run_dir:
        pipeline, rows = _train_and_evaluate(folder, config)
        export = _export(folder, pipeline)
        answer = _answer_alone(config.question, export, pipeline)
        results = {
            "rows": rows,
            "phases": pipeline.phases.rows(),
            "export": str(export),
            "answer": answer,
        }
        atomic_write_json(folder / RESULTS_FILE, results)
        _report(folder, results, config)
        run_dir.finish({"export": str(export)})
    return results


def _train_and_evaluate(folder: Path, config: DemoConfig) -> tuple[Pipeline, list[dict[str, Any]]]:
    """Warm start, Stage I, collection, Stage II; each checkpoint evaluated in both conditions."""
    from stages.experts import start_miniworld_experts

    rows: list[dict[str, Any]] = []
    with start_miniworld_experts() as experts:
        file = write_experts_file(folder / "experts.yaml", experts)
        pipeline = Pipeline(folder, config, experts=file)
        warm = pipeline.warmstart()
        rows += pipeline.evaluate(warm, "warm")
        stage1 = pipeline.stage1(warm)
        rows += pipeline.evaluate(stage1, "stage1")
        trajectories = pipeline.collect(stage1)
        stage2 = pipeline.stage2(stage1, trajectories)
        rows += pipeline.evaluate(stage2, "stage2")
    return pipeline, rows


def _export(folder: Path, pipeline: Pipeline) -> Path:
    from stages.export import ExportConfig
    from stages.export import run as run_export

    with pipeline.phases.timed("export"):
        return run_export(
            ExportConfig(
                checkpoint=str(folder / "stage2"),
                output_dir=str(folder / "export"),
                name="rivet-mini",
                results=[str(folder / "eval" / "stage2" / "results.json")],
                runs=[str(folder / name) for name in ("warm", "stage1", "collect", "stage2")],
                overwrite=True,
            )
        )


def _answer_alone(question: str, export: Path, pipeline: Pipeline) -> dict[str, Any]:
    """Ask the exported checkpoint. The experts' server has ended: there is nobody to consult."""
    from rivet.solver import Solver

    with pipeline.phases.timed("solve"), Solver(export) as solver:
        solution = solver.solve(question)
    return {"question": question, "answer": solution.answer, "text": solution.text}


def _report(folder: Path, results: dict[str, Any], config: DemoConfig) -> Path:
    from eval.compare import compare_evaluations
    from eval.report import write_report
    from rivet.tokenization import ProtocolTokenizer

    stores = {
        f"{checkpoint}, {condition}": folder / "eval" / checkpoint / condition / "trajectories"
        for checkpoint in CHECKPOINTS
        for condition in CONDITIONS
    } | {"Stage I, training": folder / "stage1" / "trajectories"}
    return write_report(
        folder / "report",
        rows=results["rows"],
        phases=results["phases"],
        curves={title: folder / name / "metrics.jsonl" for name, title in CHECKPOINTS.items()},
        stores=stores,
        tokenizer=ProtocolTokenizer.from_pretrained(results["export"]),
        comparisons=compare_evaluations([folder / "eval" / c for c in CHECKPOINTS]),
        config=to_plain(config),
        title="rivet demo",
    )


def results_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Accuracy with and without experts, routing and form per stage, with 95% intervals."""
    table = Table(title="held-out problems, % [95% interval]")
    for column in ("checkpoint", "with experts", "after removal", "route", "well-formed"):
        table.add_column(column, justify="left" if column == "checkpoint" else "right")
    by_key = {(row["checkpoint"], row["condition"]): row for row in rows}
    for checkpoint, title in CHECKPOINTS.items():
        experts, local = by_key[checkpoint, "experts"], by_key[checkpoint, "local"]
        table.add_row(
            title,
            _percent(experts["accuracy"], (experts["ci_low"], experts["ci_high"])),
            _percent(local["accuracy"], (local["ci_low"], local["ci_high"])),
            _percent(experts["route_accuracy"], experts["route_accuracy_ci"]),
            _percent(local["well_formed"], local["well_formed_ci"]),
        )
    return table


def _percent(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None or interval is None:
        return "-"
    return f"{100 * value:.1f} [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"


def show(folder: Path, results: dict[str, Any]) -> None:
    """Print what the demo ends with."""
    console = Console(width=None if Console().is_terminal else 110, highlight=False)
    console.print(results_table(results["rows"]))
    times = ", ".join(f"{p['name']} {p['wall_s']:.0f} s" for p in results["phases"])
    total = sum(p["wall_s"] for p in results["phases"])
    console.print(f"time: {total:.0f} s ({times})")
    answer = results["answer"]
    console.print(f"asked alone: {answer['question']}  ->  {answer['answer']}", markup=False)
    for title, path in (
        ("report", folder / "report" / "report.html"),
        ("trajectories", folder / "collect" / "trajectories"),
        ("checkpoint", Path(results["export"])),
        ("settings", folder / "config.json"),
    ):
        console.print(f"{title + ':':<14}{path}", soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """`rivet demo [RECIPE.yaml] [--name value ...]`; prints the table and where everything is."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0].startswith("-") and "--config" not in arguments:
        arguments = [str(RECIPE), *arguments]
    config = parse_config(
        DemoConfig,
        arguments,
        prog="rivet demo",
        description=__doc__.splitlines()[0],
        check=check_overrides,
    ).config
    folder = Path(config.output_dir)
    try:
        results = run(config)
    except RunFinishedError:
        logger.info("%s is finished; --overwrite true runs it again", folder)
        require(folder / RESULTS_FILE)
        results = read_json(folder / RESULTS_FILE, {"rows": [dict]})
    show(folder, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
