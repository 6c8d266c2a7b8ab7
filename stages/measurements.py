"""Measured results for a model card: read from what `rivet eval` and `rivet demo` wrote.

A card must not carry another model's numbers. Where an evaluation kept the digest of the weights
that it sampled from, the digest is held against the checkpoint that is exported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.conditions import STORE
from eval.runtime import weights_fingerprint
from eval.store_settings import read_store_settings
from rivet.runs import RunDir, RunDirError


class ResultsError(ValueError):
    """A results file cannot be used; the message names the file and the row."""


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One measurement: accuracy in [0, 1] with its 95% interval over `n` problems."""

    benchmark: str
    condition: str
    accuracy: float
    ci_low: float
    ci_high: float
    n: int
    checkpoint: str = ""
    well_formed: float | None = None

    def __post_init__(self) -> None:
        shares = (self.accuracy, self.ci_low, self.ci_high)
        if not all(isinstance(share, int | float) and 0 <= share <= 1 for share in shares):
            raise ValueError(f"accuracy and its interval must lie in [0, 1], got {shares}")
        if not isinstance(self.n, int) or self.n < 1:
            raise ValueError(f"n must be a count of problems, got {self.n!r}")


def read_results(path: Path, *, benchmark: str = "", checkpoint: str = "") -> list[ResultRow]:
    """Rows of a results file: `{"rows": [{"condition", "accuracy", "ci_low", ...}]}`.

    Args:
        path: The file.
        benchmark: What was measured on, where neither a row nor the run says.
        checkpoint: Take only rows of this one; empty takes all, which must be of one.

    Returns:
        The rows; of a measurement on several sets (`by.source`) one for each set.

    Raises:
        ResultsError: The file or a row is not as expected, no row is of the checkpoint, or rows are
            of several and none was named.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(
            f'{path}: cannot be read ({error!r}); expected JSON with "rows", as `rivet eval` and '
            "`rivet demo` write"
        ) from error
    found = [part for n, row in enumerate(rows, 1) for part in _parts(path, n, row, benchmark)]
    chosen = [row for row in found if not checkpoint or row.checkpoint == checkpoint]
    there = ", ".join(sorted({row.checkpoint for row in found}))
    if found and not chosen:
        raise ResultsError(f"{path}: no row of checkpoint {checkpoint!r}; it has {there}")
    if len({row.checkpoint for row in chosen}) > 1:
        raise ResultsError(
            f"{path}: rows of several checkpoints ({there}), and a card has those of one; expected "
            "one of them as results_checkpoint"
        )
    return chosen


def check_measured_on(path: Path, rows: list[ResultRow], weights: Path) -> None:
    """Refuse results that an evaluation measured on other weights.

    Args:
        path: The results file.
        rows: Its rows.
        weights: The checkpoint folder.

    Raises:
        ResultsError: The evaluation's store names other weights.
    """
    for row in rows:
        settings = read_store_settings(path.parent / row.condition / STORE) or {}
        measured = settings.get("weights")
        if measured is not None and measured != weights_fingerprint(weights):
            raise ResultsError(
                f"{path}: condition {row.condition} was measured on other weights than those of "
                f"{weights}; evaluate this checkpoint"
            )


def _parts(path: Path, n: int, row: Any, benchmark: str) -> list[ResultRow]:
    """One row of the file; where it was measured on several sets, a row for each of them."""
    try:
        whole = ResultRow(
            benchmark=str(row.get("benchmark") or benchmark or _benchmark_of_run(path)),
            condition=row["condition"],
            accuracy=row["accuracy"],
            ci_low=row["ci_low"],
            ci_high=row["ci_high"],
            n=row["n"],
            checkpoint=str(row.get("checkpoint", "")),
            well_formed=row.get("well_formed"),
        )
        sets = row.get("by", {}).get("source", {})
        if len(sets) < 2:
            return [whole]
        return [
            replace(
                whole,
                benchmark=name or whole.benchmark,
                accuracy=part["value"],
                ci_low=part["ci"][0],
                ci_high=part["ci"][1],
                n=part["n"],
                well_formed=None,  # known of all of them together
            )
            for name, part in sets.items()
        ]
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise ResultsError(f"{path}: row {n}: {error!r}") from error


def _benchmark_of_run(path: Path) -> str:
    """The problems that a results file is about, from the run folder that it lies in."""
    try:
        manifest = RunDir.load(path.parent).manifest
    except RunDirError as error:
        raise ValueError("names no benchmark; set --benchmark") from error
    settings = manifest["config"]
    problems = settings.get("problems", "miniworld")
    names = [problems] if isinstance(problems, str) else problems
    if names == ["miniworld"]:
        return f"rivet mini-world, {settings.get('split', 'test')} split"
    return ", ".join(Path(name).name for name in names)
