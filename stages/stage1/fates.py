"""What became of every trajectory that was sampled: each has one fate, and the fates add up.

| fate | meaning |
|---|---|
| `used` | trained, with an advantage that is not zero |
| `zero_advantage` | as good as the rest of its group: flat groups, also those that were replaced |
| `void` | neither an answer nor an action, and left out of training for it |
| `fault` | infrastructure failed |
| `late` | given up at its deadline |

Stored as `info["fate"]` of each row; `info["replaced"]` marks groups that others stand in for.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import pyarrow.parquet as pq

from rivet.rollout.types import LATE
from rivet.store import TrajectoryStore
from rivet.trajectory import Trajectory
from stages.stage1.health import fault_of
from stages.stage1.objective import FLAT_SPREAD

Fate = Literal["used", "zero_advantage", "void", "fault", "late"]
FATES: tuple[Fate, ...] = get_args(Fate)


def fate_of(trajectory: Trajectory, *, advantage: float, is_trained: bool, is_void: bool) -> Fate:
    """The fate of one trajectory.

    Args:
        trajectory: Graded.
        advantage: A_i; whatever it is for a fault.
        is_trained: z_i of the objective.
        is_void: Neither an answer nor an action.
    """
    fault = fault_of(trajectory)
    if fault is not None:
        return "late" if fault == LATE else "fault"
    if is_trained and advantage != 0:
        return "used"
    return "void" if is_void and not is_trained else "zero_advantage"


def fate_metrics(fates: Iterable[Fate], replaced: int) -> dict[str, float]:
    """Trajectories of one step by fate, and how many more were sampled and replaced.

    Args:
        fates: Of the step's batch.
        replaced: Trajectories of flat groups that others stand in for.
    """
    counts = Counter(fates)
    return {f"rollout/fate/{fate}": float(counts[fate]) for fate in FATES} | {
        "rollout/fate/replaced": float(replaced)
    }


def funnel(store: TrajectoryStore) -> dict[str, int]:
    """All trajectories of a run, `sampled`, and how many of them had each fate.

    `replaced` are among `zero_advantage`. Rows of runs that kept no fates count as `unknown`.
    """
    counts: Counter[str] = Counter({"sampled": 0} | dict.fromkeys(FATES, 0) | {"replaced": 0})
    for shard in store.shards():
        column = pq.read_table(store.folder / f"{shard}.parquet", columns=["info"])["info"]
        for text in column.to_pylist():
            info = json.loads(text)
            counts["sampled"] += 1
            counts[info.get("fate", "unknown")] += 1
            counts["replaced"] += bool(info.get("replaced"))
    return dict(counts)


def describe_funnel(counts: dict[str, int]) -> str:
    """One line for people: `sampled 640 -> used 400, zero_advantage 200 (64 replaced), ...`."""
    parts = [
        f"{name} {n}" + (f" ({counts['replaced']} replaced)" if name == "zero_advantage" else "")
        for name, n in counts.items()
        if name not in ("sampled", "replaced")
    ]
    return f"sampled {counts['sampled']} -> {', '.join(parts)}"


def is_flat(group: Sequence[Trajectory]) -> bool:
    """Whether a group teaches nothing although nothing failed: its rewards do not differ.

    A group that lost members to faults or deadlines is never flat: sampling another one for it
    would hide that something fails.
    """
    if any(fault_of(trajectory) is not None for trajectory in group):
        return False
    rewards = [trajectory.reward or 0.0 for trajectory in group]
    return max(rewards) - min(rewards) < FLAT_SPREAD
