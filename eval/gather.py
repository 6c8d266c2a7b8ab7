"""What a run folder holds for a report: results, learning curves, trajectories, a tokenizer."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.conditions import STORE
from eval.results_file import (
    NUMBER,
    RESULTS_FILE,
    ResultsError,
    check_form,
    read_json,
    require,
    stage_of,
)
from rivet.checkpoints import load_tokenizer
from rivet.runs import CONFIG_FILE, FINISHED_FILE
from rivet.store import TrajectoryStore
from rivet.tokenization import ProtocolTokenizer

logger = logging.getLogger(__name__)

# Stages whose finished runs have a results file.
_WITH_RESULTS = ("eval", "demo", "latent", "latent-study", "study")

PHASE = {"name": str, "wall_s": NUMBER, "cpu_s": NUMBER}
_INTERVAL = [NUMBER, NUMBER]
_SHARE = {"value": NUMBER, "ci": _INTERVAL, "n": int}
_ROW = {
    "checkpoint": str,
    "condition": str,
    "accuracy": NUMBER,
    "ci_low": NUMBER,
    "ci_high": NUMBER,
    "n": int,
    "samples_per_problem?": int,
    "well_formed?": NUMBER,
    "well_formed_ci?": _INTERVAL,
    "route_accuracy?": NUMBER,
    "route_accuracy_ci?": _INTERVAL,
    "fabricated_output_rate?": NUMBER,
    "outcomes?": {str: int},
    "by?": {str: {str: _SHARE}},
    "mean_of_sources?": _SHARE,
    "pass_at_k?": {str: _SHARE},
    "maj_at_k?": _SHARE,
    "usage_per_problem?": {str: NUMBER},
}
_DIFFERENCE = {
    **dict.fromkeys(("difference", "ci_low", "ci_high", "p_value"), NUMBER),
    "n": int,
    "is_real": bool,
}
_RESULTS = {
    "rows?": [dict],
    "phases?": [PHASE],
    "comparisons?": [
        {
            **dict.fromkeys(("name", "a", "b"), str),
            **dict.fromkeys(("accuracy_a", "accuracy_b"), NUMBER),
            "overall": _DIFFERENCE,
            "by_source": {str: _DIFFERENCE},
            "unpaired": int,
        }
    ],
}


class ReportError(ResultsError):
    """There is nothing to report on; the message says what was looked for."""


@dataclass(frozen=True, slots=True)
class _Results:
    """What one results file gives to a report.

    Attributes:
        folder: Where it lies, as a reader is told.
        rows: Of evaluations, empty where it has rows of another form.
    """

    folder: str
    rows: list[dict[str, Any]]
    phases: list[dict[str, Any]]
    comparisons: list[dict[str, Any]]


def gather(runs: Sequence[Path], tokenizer: ProtocolTokenizer | None = None) -> dict[str, Any]:
    """Everything under run folders that `write_report` can show, as its arguments.

    Args:
        runs: Run folders. With several, curves and trajectories are named after their run too.
        tokenizer: Reads the trajectories; None takes that of a checkpoint in or behind each run.
            Without one, a run's trajectories are left out.

    Raises:
        ReportError: A run has no results, no curves and no trajectories.
        ResultsError: A file of results is broken, or a finished run lacks its own.
        rivet.checkpoints.CheckpointError: The tokenizer of a run cannot be loaded.
    """
    found: dict[str, Any] = {"curves": {}, "stores": {}, "tokenizer": {}, "weights": {}}
    found["config"] = {}
    results: list[_Results] = []
    for run, name in zip(runs, _names_of(runs), strict=True):
        own = list(_results_of(run, name if len(runs) > 1 else ""))
        results += own
        curves = _named_parts(run, "metrics.jsonl", name, len(runs) > 1)
        stores = _named_parts(run, STORE, name, len(runs) > 1)
        stores = {name: path for name, path in stores.items() if TrajectoryStore(path).shards()}
        if not (any(part.rows for part in own) or curves or stores):
            raise ReportError(
                f"{run}: found no {RESULTS_FILE}, metrics.jsonl or {STORE}/ in it; expected the "
                "folder of a finished or running stage"
            )
        found["curves"] |= curves
        reader = (tokenizer or _find_tokenizer(run)) if stores else None
        if reader is not None:
            found["stores"] |= stores
            found["tokenizer"] |= dict.fromkeys(stores, reader)
            found["weights"] |= _weights_of(run, stores)
        elif stores:
            logger.warning("%s: no checkpoint to read its trajectories with; give --tokenizer", run)
        found["config"][str(run)] = read_json(run / CONFIG_FILE)
    results = _told_apart(results)
    for what in ("rows", "phases", "comparisons"):
        found[what] = [value for part in results for value in getattr(part, what)]
    return found


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of a `metrics.jsonl`; none if it is not there, a torn last line left out."""
    if not path.is_file():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [line for line in lines if isinstance(line, dict)]


def _results_of(run: Path, name: str) -> Iterator[_Results]:
    """Rows, phases and comparisons: the run's own, where it lacks one those of what is in it.

    Args:
        run: The run folder.
        name: What it is called among others; empty if it is alone.
    """
    for path in run.glob(f"**/{FINISHED_FILE}"):
        if stage_of(path.parent) in _WITH_RESULTS:
            require(path.parent / RESULTS_FILE)
    own = run / RESULTS_FILE
    mine = _read_results(own)
    found = {path: _read_results(path) for path in _in_order(run, f"*/**/{RESULTS_FILE}")}
    for what in (what for what in mine if mine[what]):
        for values in found.values():
            values[what] = []
    inside = [path.parent for path, values in found.items() if values["rows"]]
    within = run if name or not inside else os.path.commonpath(inside)
    for path, values in {own: mine, **found}.items():
        folder = Path(os.path.relpath(path.parent, within)).as_posix()
        yield _Results(f"{name}: {folder}".removesuffix(": .") if name else folder, **values)


def _read_results(path: Path) -> dict[str, list[Any]]:
    """The parts of a results file that a report shows; all empty if it is not there."""
    found = read_json(path, _RESULTS)
    values = {what: found.get(what) or [] for what in ("rows", "phases", "comparisons")}
    # Those of evaluations: other runs have rows of another form.
    values["rows"] = [row for row in values["rows"] if "checkpoint" in row and "arm" not in row]
    check_form(path, values, {"rows": [_ROW]})
    return values


def _told_apart(results: Sequence[_Results]) -> list[_Results]:
    """The same, where a checkpoint that several evaluations name is called by their folders.

    A checkpoint may be evaluated greedily and by sampling, and arms of a study name theirs alike.
    """
    evaluations: dict[str, set[int]] = {}
    for number, part in enumerate(results):
        for row in part.rows:
            evaluations.setdefault(row["checkpoint"], set()).add(number)
    ambiguous = {label for label, found in evaluations.items() if len(found) > 1}

    def named(label: str, folder: str) -> str:
        if label not in ambiguous:
            return label
        return folder if label in folder.rsplit("/", 1)[-1] else f"{label} ({folder})"

    def side(text: str, folder: str) -> str:
        label, _, condition = text.rpartition("/")
        return f"{named(label, folder)}/{condition}"

    return [
        _Results(
            part.folder,
            [row | {"checkpoint": named(row["checkpoint"], part.folder)} for row in part.rows],
            part.phases,
            [c | {key: side(c[key], part.folder) for key in ("a", "b")} for c in part.comparisons],
        )
        for part in results
    ]


def _names_of(runs: Sequence[Path]) -> list[str]:
    """As much of the end of each path as tells the runs apart."""
    paths = [run.resolve().parts for run in runs]
    depths = range(1, max(map(len, paths)) + 1)
    named = [["/".join(parts[-depth:]) for parts in paths] for depth in depths]
    return next((names for names in named if len(set(names)) == len(names)), named[-1])


def _in_order(run: Path, pattern: str) -> list[Path]:
    """Files under a run in the order in which their own runs were begun, then by name."""

    def begun(path: Path) -> tuple[str, Path]:
        owners = [folder for folder in path.parents if folder.is_relative_to(run)]
        starts = [read_json(folder / CONFIG_FILE).get("started_at") for folder in owners]
        return next((str(start) for start in starts if start), ""), path

    return sorted(run.glob(pattern), key=begun)


def _named_parts(run: Path, pattern: str, name: str, with_run: bool) -> dict[str, Path]:
    """What lies under a run by the folder it lies in, such as `eval/stage1/local`."""
    parts = {}
    for path in _in_order(run, f"**/{pattern}"):
        inside = path.parent.relative_to(run).as_posix()
        inside = name if inside == "." else inside
        parts[f"{name}: {inside}" if with_run else inside] = path
    return parts


def _weights_of(run: Path, stores: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """What Stage II runs in the folder weighed the tokens of these stores with, by label."""
    weights: dict[str, dict[str, Any]] = {}
    for path in _in_order(run, f"**/{FINISHED_FILE}"):
        table = (read_json(path, {"results?": dict}).get("results") or {}).get("token_weights")
        config = _settings_in(path.parent / CONFIG_FILE)
        source = config.get("trajectories")
        if not isinstance(table, dict) or not isinstance(source, str):
            continue
        for label, store in stores.items():
            if Path(source).resolve() in (store.resolve(), store.parent.resolve()):
                weights.setdefault(label, {})[f"Stage II ({path.parent.name})"] = table
    return weights


def _settings_in(path: Path) -> dict[str, Any]:
    """The settings that a run's `config.json` holds; empty if it is not there, or a model's."""
    return read_json(path, {"config?": dict}).get("config") or {}


def _find_tokenizer(run: Path) -> ProtocolTokenizer | None:
    """The tokenizer of a checkpoint in the run folder, or of the one that it names as its model."""
    for path in sorted(run.glob("**/tokenizer.json")):
        return load_tokenizer(path.parent)
    for path in sorted(run.glob(f"**/{CONFIG_FILE}")):
        model = _settings_in(path).get("model")
        for folder in (Path(model), Path(model) / "checkpoint") if isinstance(model, str) else ():
            if (folder / "tokenizer.json").is_file():
                return load_tokenizer(folder)
    return None
