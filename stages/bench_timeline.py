"""The picture of `stages.bench_rollouts`: one line a trajectory, who it is with when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLOURS = {"sampling": "#2563eb", "expert": "#f59e0b"}
_TITLES = {
    "rivet": "rivet: every trajectory goes on as soon as its own reply is there",
    "lock_step": "turns in lock step, all calls of a turn at once",
    "trl": "TRL 1.16, tools=[...]: turns in lock step, one trajectory's calls after another's",
}


def draw(arms: Mapping[str, Sequence[tuple[int, str, float, float]]], path: str | Path) -> None:
    """Draw arms below one another on one time axis.

    Args:
        arms: Name -> spans (row, `sampling` or `expert`, from, to), in seconds.
        path: A .png or .svg file.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10, 2.6 * len(arms) + 0.8), layout="constrained")
    axes: Any = figure.subplots(len(arms), 1, sharex=True, squeeze=False)
    for axis, (name, spans) in zip(axes[:, 0], arms.items(), strict=True):
        ends: dict[int, float] = {}
        for row, _, _, end in spans:
            ends[row] = max(end, ends.get(row, 0.0))
        place = {row: n for n, row in enumerate(sorted(ends, key=lambda row: ends[row]))}
        for what, colour in _COLOURS.items():
            for row, kind, start, end in spans:
                if kind == what:
                    axis.broken_barh([(start, end - start)], (place[row], 0.9), color=colour)
        last = max(ends.values(), default=0.0)
        axis.axvline(last, color="#111827", linewidth=0.8)
        axis.set_title(f"{_TITLES.get(name, name)}: {last:.1f} s", fontsize=9, loc="left")
        axis.set_ylabel("trajectory")
        axis.set_ylim(0, max(len(place), 1))
    axes[-1, 0].set_xlabel("seconds")
    figure.legend(
        handles=[Patch(color=colour, label=what) for what, colour in _COLOURS.items()],
        loc="outside lower right",
        ncols=2,
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
