"""The report of a study: each checkpoint over seeds, as a page, a figure and two small tables.

    write_study_report(folder)

reads `results.json` of a folder of `rivet study`, which may still be running, and writes

    report.html    table, plots, differences paired by seed, families, times, failures, settings
    figure.svg     the plots as a figure of its own
    table.md       the table
    results.csv    a line per seed, checkpoint and condition: what is kept of a study

What the tables hold is in `eval.study_table`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from eval.charts import phase_table
from eval.gather import PHASE, ReportError
from eval.page import cards, page, settings
from eval.plots import Dots, dot_chart, figure
from eval.results_file import CONFIG_FILE, RESULTS_FILE, read_json, require, stage_of
from eval.study_table import (
    ROW,
    Checkpoint,
    Metric,
    Row,
    checkpoints_of,
    describe_cells,
    difference_and_seeds,
    family_accuracies,
    is_row,
    mean_and_seeds,
    metrics_of,
    results_csv,
    seeds_of,
    table,
)
from rivet.files import atomic_write_text
from rivet.trajectory import MODES

_FAILURE = {"seed": int, "arm": str, "error": str}
_RESULTS = {"rows?": [ROW], "failures?": [_FAILURE], "phases?": [PHASE]}
_CONFIG = {"config?": {"seeds?": [int], "arms?": {str: {"stage2?": [str]}}}}

Cell = str | tuple[str, str]  # text, or a number and a fainter line below it


def is_study(folder: Path) -> bool:
    """Whether a folder is that of a study, or holds rows of one, if only of its first seeds."""
    if stage_of(folder) == "study":
        return True
    rows = read_json(folder / RESULTS_FILE).get("rows")
    return isinstance(rows, list) and bool(rows) and all(map(is_row, rows))


def write_study_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page, the figure and the tables of a study.

    Args:
        folder: The study's folder.
        out: Where they go; None: into the study's folder.

    Returns:
        Path of the page.

    Raises:
        ReportError: The folder is not that of a study.
        eval.results_file.ResultsError: Its results or settings are missing, or broken.
    """
    if not is_study(folder):
        raise ReportError(f"{folder}/{RESULTS_FILE}: no results of `rivet study`")
    require(folder / RESULTS_FILE)
    found = read_json(folder / RESULTS_FILE, _RESULTS)
    config = read_json(folder / CONFIG_FILE, _CONFIG)
    asked = config.get("config") or {}
    rows, failures = found.get("rows") or [], found.get("failures") or []
    arms = list(asked.get("arms") or {})
    checkpoints, seeds = checkpoints_of(rows, arms), seeds_of(rows)
    panels = _panels(checkpoints)
    plots = {name: dot_chart(dots, label=name) for name, dots in panels.items()}
    title = f"rivet study: {folder.resolve().name}"
    sections = {
        "Results": _notes(folder, rows, failures, asked) + _means(checkpoints, seeds),
        "Every seed": cards(plots, is_wide=True),
        "Differences": _differences(checkpoints, seeds),
        "Families": _families(checkpoints),
        "Time": _time(found.get("phases") or []),
        "Failures": _failures(failures),
        "Settings": settings(config),
    }
    out = out or folder
    out.mkdir(parents=True, exist_ok=True)
    atomic_write_text(out / "table.md", table(rows, arms) + "\n")
    atomic_write_text(out / "results.csv", results_csv(rows, arms))
    if panels:
        label = f"{title}: each seed and the mean over seeds"
        atomic_write_text(out / "figure.svg", figure(panels, label=label))
    return atomic_write_text(out / "report.html", page(title, sections))


def _panels(checkpoints: Sequence[Checkpoint]) -> dict[str, list[Dots]]:
    """Title to rows of each plot; a checkpoint is where it has values."""
    panels = {}
    for metric in metrics_of(checkpoints):
        title = f"Accuracy: {metric.title}" if metric.name == "accuracy" else metric.title
        panels[title[0].upper() + title[1:]] = [
            Dots(c.label, {f"seed {seed}": v for seed, v in values.items()}, c.color)
            for c in checkpoints
            if (values := c.values(metric))
        ]
    return panels


def _notes(
    folder: Path, rows: Sequence[Row], failures: Sequence[Row], asked: Mapping[str, Any]
) -> str:
    """How to read the table, and what it lacks."""
    notes = [describe_cells(seeds_of(rows)) if rows else "No results yet."]
    notes += [f"Nothing yet of {what}." for what in _missing(rows, failures, asked)]
    if failures:
        notes.append("Something failed: see the failures below.")
    notes.append(
        "Routes are those of sampling at temperature 1; all else as the settings of the evaluation "
        "say. Curves and samples of one arm: rivet report "
        f"{folder.as_posix()}/seed-SEED/ARM"
    )
    return "".join(f'<p class="note">{escape(note)}</p>' for note in notes)


def _missing(rows: Sequence[Row], failures: Sequence[Row], asked: Mapping[str, Any]) -> list[str]:
    """Arms of each seed that the settings ask for and that have neither rows nor failed."""
    there = {(row["seed"], row["arm"]) for row in [*rows, *failures]}
    missing = []
    for seed in asked.get("seeds") or []:
        names = [
            name
            for name, arm in (asked.get("arms") or {}).items()
            if ("stage1" in arm or arm.get("stage2")) and (seed, name) not in there
        ]
        if names:
            missing.append(f"seed {seed}: {', '.join(names)}")
    return missing


def _means(checkpoints: Sequence[Checkpoint], seeds: Sequence[int]) -> str:
    metrics = metrics_of(checkpoints)
    body: list[list[Cell]] = [
        [c.label, *(mean_and_seeds(c.values(metric), seeds) for metric in metrics)]
        for c in checkpoints
    ]
    return _table(["checkpoint"], [metric.title for metric in metrics], body)


def _differences(checkpoints: Sequence[Checkpoint], seeds: Sequence[int]) -> str:
    """Other arms against the first one, and within each arm what follows its first checkpoint."""
    metrics = metrics_of(checkpoints)
    arms: dict[str, list[Checkpoint]] = {}
    for checkpoint in checkpoints:
        if checkpoint.arm:
            arms.setdefault(checkpoint.arm, []).append(checkpoint)
    first, *others = arms or [""]
    against = [(c, _counterpart(c, arms[first])) for arm in others for c in arms[arm]]
    within = [(c, own[0]) for own in arms.values() for c in own[1:]]
    parts = _pairs(f"Against {first}", against, metrics, seeds)
    parts += _pairs("Within an arm, against its first checkpoint", within, metrics, seeds)
    if not parts:
        return ""
    return (
        '<p class="note">Points, paired by seed: mean difference with its 95% interval over seeds '
        "(Student's t, from 2 seeds), and each seed's difference.</p>" + parts
    )


def _counterpart(checkpoint: Checkpoint, baseline: Sequence[Checkpoint]) -> Checkpoint:
    """The same stage and variant of the baseline; where it has none, what the baseline ends in."""
    of = (checkpoint.stage, checkpoint.variant)
    return next((c for c in baseline if (c.stage, c.variant) == of), baseline[-1])


def _pairs(
    title: str,
    pairs: Sequence[tuple[Checkpoint, Checkpoint]],
    metrics: Sequence[Metric],
    seeds: Sequence[int],
) -> str:
    body: list[list[Cell]] = [
        [a.label, b.label, *(difference_and_seeds(a, b, metric, seeds) for metric in metrics)]
        for a, b in pairs
    ]
    return _table(["checkpoint", "minus"], [m.title for m in metrics], body, title)


def _families(checkpoints: Sequence[Checkpoint]) -> str:
    """A table per condition: mean over seeds of each checkpoint and family."""
    parts = ""
    for condition in MODES:
        found = {
            c.label: [family_accuracies(r) for (_, of), r in c.rows.items() if of == condition]
            for c in checkpoints
        }
        families = sorted({name for rows in found.values() for row in rows for name in row})
        body: list[list[Cell]] = []
        for label, rows in found.items():
            values = [[row[name] for row in rows if name in row] for name in families]
            if any(values):
                body.append([label, *((_mean(each), "") for each in values)])
        parts += _table(["checkpoint"], families, body, f"Accuracy, {condition}: %, mean of seeds")
    return parts


def _mean(values: Sequence[float]) -> str:
    return f"{100 * statistics.mean(values):.1f}" if values else "-"


def _time(phases: Sequence[Row]) -> str:
    """Each phase's seconds, summed over seeds and arms."""
    totals: dict[str, dict[str, Any]] = {}
    for phase in phases:
        name = phase["name"]
        total = totals.setdefault(name, {"name": name, "wall_s": 0.0, "cpu_s": 0.0})
        for key in ("wall_s", "cpu_s"):
            total[key] += phase[key]
    if not totals:
        return ""
    return (
        '<p class="note">Summed over seeds and arms. Those that ran side by side took less than '
        f"the sum of their wall times.</p>{phase_table(list(totals.values()))}"
    )


def _failures(failures: Sequence[Row]) -> str:
    lines = [f"seed {each['seed']}, {each['arm']}: {each['error']}" for each in failures]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<div class="card"><ul>{items}</ul></div>' if items else ""


def _table(
    heads: Sequence[str], numbers: Sequence[str], rows: Sequence[Sequence[Cell]], title: str = ""
) -> str:
    """A table with its title, every text escaped here; nothing without rows."""
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    head += "".join(f'<th class="num">{escape(name)}</th>' for name in numbers)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    heading = f'<h3 class="part">{escape(title)}</h3>' if title else ""
    return (
        f'{heading}<div class="card scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return f"<td>{escape(cell)}</td>"
    number, below = cell
    line = f'<br><span class="note">{escape(below)}</span>' if below else ""
    return f'<td class="num">{escape(number)}{line}</td>'
