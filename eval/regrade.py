"""Grade the samples of a finished evaluation again: other rules, or a grader that has changed.

    rivet regrade RUN --out OTHER --grading eval

Nothing is sampled. The result is the folder that an evaluation with this `grading` would have
written: the same trajectories with new verdicts, and `rivet compare` and `rivet report` read it.
Golds may have changed since; statements may not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from data.problems import Problem
from eval.compare import compare
from eval.conditions import STORE, Condition, ConditionError, read_condition
from eval.config import EvalConfig
from eval.generate import FAULTS_SHARD, FaultRateError, info_of
from eval.grade import grade_trajectory
from eval.main import finish_condition, finish_run, load_test_set, show
from eval.results_file import RESULTS_FILE, read_json
from eval.store_settings import FILE_NAME, problems_digest
from rivet.files import atomic_write_json
from rivet.grading import Grader
from rivet.runs import RunDir, RunDirError
from rivet.store import TrajectoryStore
from rivet.trajectory import Trajectory, fault_of

logger = logging.getLogger(__name__)
_SHARD_ROWS = 1024
_COMPARED = {"comparisons?": [{"a": str, "b": str}]}


def main(argv: list[str] | None = None) -> int:
    """Run `rivet regrade`."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="rivet regrade",
        description="Grade the samples of a finished evaluation again.",
    )
    parser.add_argument("run", type=Path, help="folder of a finished evaluation")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--grading", choices=("reward", "eval"), required=True)
    parser.add_argument("--data_dir", "--data-dir", help="where its benchmarks are, if elsewhere")
    parser.add_argument("--overwrite", action="store_true")
    args = parser.parse_args(argv)
    results = regrade(
        args.run, args.out, grading=args.grading, data_dir=args.data_dir, overwrite=args.overwrite
    )
    show(results, args.out)
    return 0


def regrade(
    run: Path, out: Path, *, grading: str, data_dir: str | None = None, overwrite: bool = False
) -> dict[str, Any]:
    """Write an evaluation's conditions with new verdicts.

    Args:
        run: A finished evaluation.
        out: Another folder.
        grading: `reward` or `eval`, see `rivet.grading`.
        data_dir: Where its benchmarks are, if not where they were.
        overwrite: Replace what is in `out`.

    Returns:
        The content of its `results.json`.

    Raises:
        rivet.runs.RunDirError: `run` is no finished evaluation, or `out` is in use or `run` itself.
        ConditionError: A condition is not finished, some of its rows or problems are not there
            any more, or its problems differ in more than their golds.
        FaultRateError: The grader failed for more than the run's `max_fault_rate`.
    """
    source = RunDir.load(run, stage="eval")
    _ = source.results  # refuses an unfinished run
    if out.resolve() == run.resolve():  # to overwrite it would remove the samples
        raise RunDirError(f"{out}: is the run that is graded again; expected another folder")
    known = {field.name for field in fields(EvalConfig)}
    old = {k: v for k, v in source.manifest["config"].items() if k in known}
    old |= {"grading": grading, "output_dir": str(out)}
    config = EvalConfig(**(old if data_dir is None else old | {"data_dir": data_dir}))
    problems, competent = load_test_set(config)
    rows = []
    with (
        RunDir.open(out, config, stage="eval", overwrite=overwrite) as folder,
        Grader(mode=config.grading) as grader,
    ):
        for mode in config.conditions:
            before = read_condition(run / mode)
            rows_before = _load_rows(before)
            asked = _those_asked(problems, rows_before, before)
            graded = asyncio.run(_grade_all(grader, asked, rows_before, config.max_attempts))
            _check_faults(graded, config.max_fault_rate)
            changed = {"problems_digest": problems_digest(asked)}
            _write_store(out / mode / STORE, graded, before.settings | changed, grading)
            label = before.results["checkpoint"]
            routed = {} if before.results.get("route_accuracy") is None else competent
            rows.append(finish_condition(label, graded, routed, mode, out / mode))
        return finish_run(folder, rows, _compare_again(run, out))


def _load_rows(before: Condition) -> list[Trajectory]:
    rows = before.store.load()
    counted = sum((before.results.get("outcomes") or {}).values())
    if counted and len(rows) != counted:
        raise ConditionError(
            f"{before.store.folder}: {len(rows)} rows, but {before.folder / RESULTS_FILE} counts "
            f"{counted}: shards were lost or added; restore them, or evaluate again"
        )
    return rows


def _those_asked(
    problems: Sequence[Problem], rows: Sequence[Trajectory], before: Condition
) -> list[Problem]:
    """The problems of some rows as they are now; says so where their golds are others."""
    info = {t.problem_id: t.info for t in rows}
    missing = sorted(info.keys() - {problem.id for problem in problems})
    if missing:
        raise ConditionError(
            f"{before.folder}: {len(missing)} problems, such as {missing[0]}, are not in the sets "
            "that the run names; expected them unchanged"
        )
    now = [problem for problem in problems if problem.id in info]
    then = [
        replace(p, answer=info[p.id].get("gold", p.answer), kind=info[p.id].get("kind", p.kind))
        for p in now
    ]
    if before.settings.get("problems_digest") not in (problems_digest(now), problems_digest(then)):
        raise ConditionError(
            f"{before.folder}: its problems are not those that were asked, in the same order; "
            "expected no change but of their golds: restore the sets, or evaluate again"
        )
    others = [p.id for p, was in zip(now, then, strict=True) if p != was]
    if others:
        logger.warning("%d problems, such as %s, have another gold now", len(others), others[0])
    return now


async def _grade_all(
    grader: Grader, problems: Sequence[Problem], rows: Sequence[Trajectory], max_attempts: int
) -> list[Trajectory]:
    """Rows with new verdicts, ordered by problem and sample index."""
    order = {problem.id: n for n, problem in enumerate(problems)}
    rows = sorted(rows, key=lambda t: (order[t.problem_id], t.sample_index))
    return await asyncio.gather(
        *(_grade_one(grader, problems[order[t.problem_id]], t, max_attempts) for t in rows)
    )


async def _grade_one(
    grader: Grader, problem: Problem, trajectory: Trajectory, max_attempts: int
) -> Trajectory:
    """A row with a new verdict; a grader that fails is asked again, as in `eval.generate`."""
    info = trajectory.info | info_of(problem)
    faults = [f for f in info.pop("faults", []) if not f.startswith("grader_")]
    graded = trajectory = replace(trajectory, info=info)
    for _ in range(max_attempts if trajectory.fault is None else 0):
        graded = await grade_trajectory(grader, problem, trajectory)
        if (fault := fault_of(graded)) is None:
            break
        faults.append(fault)
    return replace(graded, info=graded.info | {"faults": faults}) if faults else graded


def _check_faults(rows: Sequence[Trajectory], max_rate: float) -> None:
    faults = Counter(fault for t in rows if (fault := fault_of(t)) is not None)
    if faults.total() > max_rate * len(rows):
        kinds = ", ".join(f"{name} {count}" for name, count in faults.most_common())
        raise FaultRateError(
            f"{faults.total()} of {len(rows)} rows are left without a verdict ({kinds}), above "
            f"max_fault_rate {max_rate:g}: repair what failed and run the same command again"
        )


def _compare_again(run: Path, out: Path) -> list[dict[str, Any]]:
    """The comparisons that an evaluation made between its conditions, of the new verdicts."""
    made = read_json(run / RESULTS_FILE, _COMPARED).get("comparisons") or []
    conditions = [[c[side].rpartition("/")[2] for side in "ab"] for c in made]
    return [compare(*(read_condition(out / name) for name in pair)) for pair in conditions]


def _write_store(
    folder: Path, rows: Sequence[Trajectory], settings: Mapping[str, Any], grading: str
) -> None:
    store = TrajectoryStore(folder)
    for shard in store.shards():  # of an attempt that was stopped
        (folder / f"{shard}.parquet").unlink()
    if faulted := [t for t in rows if fault_of(t) is not None]:
        store.write(FAULTS_SHARD, faulted)
    rows = [t for t in rows if fault_of(t) is None]
    for number, start in enumerate(range(0, len(rows), _SHARD_ROWS)):
        store.write(f"part-{number:05d}", rows[start : start + _SHARD_ROWS])
    changed = json.loads(json.dumps(settings))
    changed.setdefault("settings", {})["grading"] = grading
    atomic_write_json(folder / FILE_NAME, changed)


if __name__ == "__main__":
    sys.exit(main())
