"""What a run folder holds for a report: results, learning curves, trajectories, a tokenizer."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.conditions import STORE
from rivet.store import TrajectoryStore
from rivet.tokenization import ProtocolTokenizer

logger = logging.getLogger(__name__)


class ReportError(ValueError):
    """There is nothing to report on; the message says what was looked for."""


def gather(runs: Sequence[Path], tokenizer: ProtocolTokenizer | None = None) -> dict[str, Any]:
    """Everything under run folders that `write_report` can show, as its arguments.

    Args:
        runs: Run folders. With several, curves and trajectories are named after their run too.
        tokenizer: Reads the trajectories; None takes that of a checkpoint in or behind each run.
            Without one, a run's trajectories are left out.

    Raises:
        ReportError: A run has no results, no curves and no trajectories.
    """
    found: dict[str, Any] = {"rows": [], "phases": [], "comparisons": []}
    found |= {"curves": {}, "stores": {}, "tokenizer": {}, "weights": {}, "config": {}}
    for run in runs:
        results = _results_of(run)
        for name, values in results.items():
            found[name] += values
        curves = _named_parts(run, "metrics.jsonl", len(runs) > 1)
        stores = _named_parts(run, STORE, len(runs) > 1)
        stores = {name: path for name, path in stores.items() if TrajectoryStore(path).shards()}
        if not (results["rows"] or curves or stores):
            raise ReportError(
                f"{run}: found no results.json, metrics.jsonl or {STORE}/ in it; expected the "
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
        found["config"][str(run)] = read_json(run / "config.json")
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


def _results_of(run: Path) -> dict[str, list[Any]]:
    """Rows, phases and comparisons: the run's own, where it lacks one those of what is in it."""
    own = read_json(run / "results.json")
    parts = [read_json(path) for path in _in_order(run, "*/**/results.json")]
    results: dict[str, list[Any]] = {}
    for name in ("rows", "phases", "comparisons"):
        inner = [value for part in parts for value in part.get(name) or []]
        results[name] = list(own.get(name) or inner)
    # Those of evaluations: other runs have rows of another form.
    results["rows"] = [row for row in results["rows"] if {"checkpoint", "condition"} <= row.keys()]
    return results


def _in_order(run: Path, pattern: str) -> list[Path]:
    """Files under a run in the order in which their own runs were begun, then by name."""

    def begun(path: Path) -> tuple[str, Path]:
        owners = [folder for folder in path.parents if folder.is_relative_to(run)]
        starts = [read_json(folder / "config.json").get("started_at") for folder in owners]
        return next((str(start) for start in starts if start), ""), path

    return sorted(run.glob(pattern), key=begun)


def _named_parts(run: Path, pattern: str, with_run: bool) -> dict[str, Path]:
    """What lies under a run by the folder it lies in, such as `eval/stage1/local`."""
    parts = {}
    for path in _in_order(run, f"**/{pattern}"):
        inside = path.parent.relative_to(run).as_posix()
        inside = run.resolve().name if inside == "." else inside
        parts[f"{run.resolve().name}: {inside}" if with_run else inside] = path
    return parts


def _weights_of(run: Path, stores: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """What Stage II runs in the folder weighed the tokens of these stores with, by label."""
    weights: dict[str, dict[str, Any]] = {}
    for path in _in_order(run, "**/finished.json"):
        table = (read_json(path).get("results") or {}).get("token_weights")
        config = read_json(path.parent / "config.json").get("config") or {}
        source = config.get("trajectories")
        if not isinstance(table, dict) or not isinstance(source, str):
            continue
        for label, store in stores.items():
            if Path(source).resolve() in (store.resolve(), store.parent.resolve()):
                weights.setdefault(label, {})[f"Stage II ({path.parent.name})"] = table
    return weights


def read_json(path: Path) -> dict[str, Any]:
    """Content of a JSON file that holds an object; empty if it is not there or holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _find_tokenizer(run: Path) -> ProtocolTokenizer | None:
    """The tokenizer of a checkpoint in the run folder, or of the one that it names as its model."""
    for path in sorted(run.glob("**/tokenizer.json")):
        return ProtocolTokenizer.from_pretrained(path.parent)
    for path in sorted(run.glob("**/config.json")):
        model = (read_json(path).get("config") or {}).get("model")
        for folder in (Path(model), Path(model) / "checkpoint") if isinstance(model, str) else ():
            if (folder / "tokenizer.json").is_file():
                return ProtocolTokenizer.from_pretrained(folder)
    return None
