"""Rows of a study as checkpoints over seeds: the table, the raw table and paired differences.

A row of `results.json` has a seed, an arm, a checkpoint of it, a variant of Stage II and a
condition. An arm that failed or is still to come on some seeds keeps its place: `-` stands for
such a seed.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.metrics import half_width
from eval.results_file import NUMBER
from eval.table import markdown_cell
from rivet.trajectory import MODES

Row = Mapping[str, Any]

_KEYS = ("seed", "arm", "checkpoint", "stage2", "condition")
_VALUES = "n accuracy ci_low ci_high well_formed route_accuracy fabricated_output_rate".split()
# The form of a row, see `eval.results_file`.
ROW = {
    "seed": int,
    **dict.fromkeys(("arm", "checkpoint", "stage2", "condition"), str),
    **dict.fromkeys((f"{name}?" for name in _VALUES), NUMBER),
    "by?": {"family?": {str: {"value": NUMBER}}},
}


@dataclass(frozen=True, slots=True)
class Metric:
    """A column of the table and a panel of the figure: one number of the rows of a condition."""

    title: str
    condition: str
    name: str = "accuracy"


# In the order shown; one that no row has is left out.
METRICS = (
    Metric("after removal", "local"),
    Metric("with experts", "experts"),
    Metric("route (sampled)", "experts", "route_accuracy"),
    Metric("well-formed after removal", "local", "well_formed"),
    *(Metric(mode, mode) for mode in MODES if mode not in ("local", "experts")),
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint of an arm over seeds.

    Attributes:
        arm: Empty for the warm start.
        stage: `warm`, `stage1` or `stage2`.
        variant: Of Stage II, else `none`.
        color: Index of the arm.
        rows: Seed and condition to the row of results.
    """

    arm: str
    stage: str
    variant: str
    color: int
    rows: dict[tuple[int, str], Row]

    @property
    def label(self) -> str:
        """How tables and plots call it."""
        if not self.arm:
            return "warm start"
        stage = {"stage1": "Stage I", "stage2": f"Stage II {self.variant}"}
        return f"{self.arm}, {stage.get(self.stage, self.stage)}"

    def values(self, metric: Metric) -> dict[int, float]:
        """Seed to value in [0, 1], for the seeds that have one, in their order."""
        found = {
            seed: row.get(metric.name)
            for (seed, condition), row in sorted(self.rows.items())
            if condition == metric.condition
        }
        return {s: float(v) for s, v in found.items() if v is not None and math.isfinite(v)}


def is_row(row: Any) -> bool:
    """Whether something is a row of a study."""
    return isinstance(row, dict) and row.keys() >= set(_KEYS)


def checkpoints_of(rows: Sequence[Row], arms: Sequence[str] = ()) -> list[Checkpoint]:
    """Rows by checkpoint: the warm start, arms in the given order, other arms as they come."""
    order = _order(rows, arms)
    found: dict[tuple[str, str, str], Checkpoint] = {}
    for row in sorted(rows, key=lambda row: order.index(row["arm"])):
        key = (row["arm"], row["checkpoint"], row["stage2"])
        if key not in found:
            found[key] = Checkpoint(*key, color=order.index(row["arm"]), rows={})
        found[key].rows[row["seed"], row["condition"]] = row
    return list(found.values())


def seeds_of(rows: Sequence[Row]) -> list[int]:
    """Every seed that has a row, in order."""
    return sorted({row["seed"] for row in rows})


def metrics_of(checkpoints: Sequence[Checkpoint]) -> list[Metric]:
    """The metrics that some row has."""
    return [m for m in METRICS if any(checkpoint.values(m) for checkpoint in checkpoints)]


def family_accuracies(row: Row) -> dict[str, float]:
    """Accuracy by family, where the row has it."""
    groups = (row.get("by") or {}).get("family") or {}
    return {family: group["value"] for family, group in groups.items()}


def table(rows: Sequence[Row], arms: Sequence[str] = ()) -> str:
    """Mean, standard deviation and each seed's value of every checkpoint, as Markdown; in percent.

    Args:
        rows: Of `results.json`.
        arms: The order of arms; as they come by default.
    """
    checkpoints, seeds = checkpoints_of(rows, arms), seeds_of(rows)
    metrics = metrics_of(checkpoints)
    if not metrics:
        return "No results yet."
    lines = [
        describe_cells(seeds),
        "",
        f"| checkpoint | {' | '.join(metric.title for metric in metrics)} |",
        "|---|" + "---|" * len(metrics),
    ]
    for checkpoint in checkpoints:
        cells = [mean_and_seeds(checkpoint.values(metric), seeds) for metric in metrics]
        shown = [f"{mean} ({each})" if each else mean for mean, each in cells]
        lines.append(f"| {markdown_cell(checkpoint.label)} | {' | '.join(shown)} |")
    return "\n".join(lines)


def results_csv(rows: Sequence[Row], arms: Sequence[str] = ()) -> str:
    """A line per seed, checkpoint and condition, with at most 4 digits; empty: no value.

    Columns: `seed`, `arm` (empty for the warm start), `checkpoint`, `stage2`, `condition`, `n`
    problems, `accuracy` with its 95% interval, other shares, and `family:NAME`, the accuracy on a
    family. All shares are in [0, 1].
    """
    families = sorted({family for row in rows for family in family_accuracies(row)})
    order = _order(rows, arms)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*_KEYS, *_VALUES, *(f"family:{family}" for family in families)])
    for row in sorted(rows, key=lambda row: (row["seed"], order.index(row["arm"]))):
        values = [row.get(name) for name in _VALUES]
        values += [family_accuracies(row).get(family) for family in families]
        writer.writerow([*(row[key] for key in _KEYS), *map(_rounded, values)])
    return file.getvalue()


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> tuple[dict[int, float], float | None]:
    """Differences a - b of the seeds that both have.

    Returns:
        Seed to difference, and half of the 95% interval of their mean (Student's t over seeds);
        None with fewer than 2 seeds.
    """
    found = {seed: value - b[seed] for seed, value in a.items() if seed in b}
    return found, half_width(list(found.values()))


def describe_cells(seeds: Sequence[int]) -> str:
    """What a cell of the table holds."""
    if len(seeds) == 1:
        return f"Percent: seed {seeds[0]}."
    return f"Percent: mean ± standard deviation over seeds (seeds {' / '.join(map(str, seeds))})."


def mean_and_seeds(values: Mapping[int, float], seeds: Sequence[int]) -> tuple[str, str]:
    """Mean with its standard deviation; each seed's value, where the study has several seeds."""
    if not values:
        return "-", ""
    text = f"{100 * statistics.mean(values.values()):.1f}"
    if len(values) > 1:
        text += f" ± {100 * statistics.stdev(values.values()):.1f}"
    return text, _each_seed(values, seeds, ".1f")


def difference_and_seeds(
    a: Checkpoint, b: Checkpoint, metric: Metric, seeds: Sequence[int]
) -> tuple[str, str]:
    """Mean difference a - b in points with its 95% interval; each seed's, where there are more."""
    values, half = paired(a.values(metric), b.values(metric))
    if not values:
        return "-", ""
    mean = statistics.mean(values.values())
    text = f"{100 * mean:+.1f}"
    if half is not None:
        text += f" [{100 * (mean - half):+.1f}, {100 * (mean + half):+.1f}]"
    return text, _each_seed(values, seeds, "+.1f")


def _each_seed(values: Mapping[int, float], seeds: Sequence[int], form: str) -> str:
    if len(seeds) == 1:
        return ""
    return " / ".join(f"{100 * values[s]:{form}}" if s in values else "-" for s in seeds)


def _order(rows: Sequence[Row], arms: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(["", *arms, *(row["arm"] for row in rows)]))


def _rounded(value: Any) -> Any:
    if value is None or not math.isfinite(value):
        return ""
    return round(value, 4) if isinstance(value, float) else value
