"""One evaluated condition on disk: what comparison and report read.

trajectories/   the store, with settings.json
scores.json     right and scored samples of every problem
results.json    the summary (`eval.summary`) with checkpoint and condition; written last
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.store_settings import read_store_settings
from eval.summary import scores_by_problem
from rivet.files import atomic_write_json
from rivet.store import TrajectoryStore
from rivet.trajectory import Trajectory

STORE = "trajectories"
_RESULTS = "results.json"
_SCORES = "scores.json"


class ConditionError(ValueError):
    """A folder holds no finished condition of an evaluation."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A finished condition.

    Attributes:
        folder: Where it lies.
        results: Its summary, with `checkpoint` and `condition`.
        scores: `{"problem_id", "source", "samples", "right"}` per problem with a scored sample.
        settings: What the rows were sampled with.
    """

    folder: Path
    results: dict[str, Any]
    scores: list[dict[str, Any]]
    settings: dict[str, Any]

    @property
    def store(self) -> TrajectoryStore:
        """Its trajectories."""
        return TrajectoryStore(self.folder / STORE)


def write_condition(
    folder: Path, results: dict[str, Any], trajectories: Sequence[Trajectory]
) -> None:
    """Write scores, then results, each atomically. The trajectories are in their store already."""
    sources = {t.problem_id: str(t.info.get("source", "")) for t in trajectories}
    scores = [
        {"problem_id": problem, "source": sources[problem], "samples": samples, "right": right}
        for problem, (samples, right) in scores_by_problem(trajectories).items()
    ]
    atomic_write_json(folder / _SCORES, scores)
    atomic_write_json(folder / _RESULTS, results)


def read_condition(folder: str | Path) -> Condition:
    """Read a finished condition.

    Raises:
        ConditionError: There is none, or a file is broken.
    """
    folder = Path(folder)
    results = _read(folder / _RESULTS) if (folder / _RESULTS).is_file() else {}
    if not isinstance(results, dict) or not {"checkpoint", "condition"} <= results.keys():
        inside = sorted(p.parent.name for p in folder.glob(f"*/{_RESULTS}"))
        hint = f"did you mean one of {', '.join(inside)} in it?" if inside else "run `rivet eval`"
        raise ConditionError(f"{folder}: expected the folder of a finished condition: {hint}")
    settings = read_store_settings(folder / STORE)
    if settings is None:
        raise ConditionError(f"{folder}/{STORE}: no settings.json here; evaluate again")
    return Condition(folder, results, _read(folder / _SCORES), settings)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConditionError(f"{path}: cannot be read ({error}); evaluate again") from error
