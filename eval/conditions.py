"""One evaluated condition on disk: what comparison and report read.

trajectories/   the store, with settings.json
scores.json     right and scored samples of every problem
results.json    the summary (`eval.summary`) with checkpoint and condition; written last
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.results_file import NUMBER, RESULTS_FILE, ResultsError, check_form, read_json, require
from eval.store_settings import read_store_settings
from eval.summary import scores_by_problem
from rivet.files import atomic_write_json
from rivet.store import TrajectoryStore
from rivet.trajectory import Trajectory

STORE = "trajectories"
_SCORES = "scores.json"
_RESULT = {"checkpoint": str, "condition": str, "accuracy": NUMBER, "outcomes?": {str: int}}
_SCORE = {"problem_id": str, "source": str, "samples": int, "right": int}
_NAMED = 4  # of the conditions in a folder that is none


class ConditionError(ResultsError):
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
    atomic_write_json(folder / RESULTS_FILE, results)


def read_condition(folder: str | Path) -> Condition:
    """Read a finished condition.

    Raises:
        ConditionError: There is none.
        ResultsError: A file of it is missing, broken or of another form.
    """
    folder = Path(folder)
    results = read_json(folder / RESULTS_FILE)
    if "condition" not in results:
        raise ConditionError(
            f"{folder}: expected the folder of a finished condition: {_hint(folder)}"
        )
    check_form(folder / RESULTS_FILE, results, _RESULT)
    require(folder / _SCORES)
    settings = read_store_settings(folder / STORE)
    if settings is None:
        raise ConditionError(f"{folder}/{STORE}: no settings.json here; evaluate again")
    return Condition(folder, results, read_json(folder / _SCORES, [_SCORE]), settings)


def _hint(folder: Path) -> str:
    inside = sorted(path.parent.relative_to(folder) for path in folder.glob(f"*/**/{_SCORES}"))
    if not inside:
        return "run `rivet eval`"
    more = f" ({len(inside)} in all)" if len(inside) > _NAMED else ""
    return f"did you mean one of {', '.join(map(str, inside[:_NAMED]))}{more} in it?"
