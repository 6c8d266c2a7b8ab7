"""Collection: graded rows in a store, the same after a kill, ready for Stage II."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from untrained import write_untrained

from data.miniworld.tasks import build_split
from rivet.config import load_config
from rivet.experts.config import ExpertsFileError
from rivet.rollout.backend import SamplingParams
from rivet.rollout.engine import RolloutEngine
from rivet.rollout.types import RolloutLimits, RolloutRequest
from rivet.runs import RunFinishedError
from rivet.store import TrajectoryStore
from rivet.trajectory import Trajectory
from stages.collect import CollectConfig, run, summary

COUNT = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose answers do not matter."""
    return write_untrained(tmp_path_factory.mktemp("model"), RolloutLimits(24))


def settings_of(model: Path, output: Path, **overrides: Any) -> dict[str, Any]:
    return {
        "model": str(model), "output_dir": str(output), "problems_per_family": 8, "limit": COUNT,
        "shard_size": 4, "batch_size": 8, "seed": 3, **overrides,
    }  # fmt: skip


def rows(folder: Path) -> list[Trajectory]:
    return sorted(TrajectoryStore(folder / "trajectories"), key=lambda t: t.id)


@pytest.fixture(scope="module")
def collected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed collection with the embedded experts."""
    output = tmp_path_factory.mktemp("runs") / "collect"
    store = run(load_config(CollectConfig, None, **settings_of(model, output)))
    assert store == output / "trajectories"
    return output


def test_every_problem_is_sampled_once_and_graded(collected: Path) -> None:
    sampled = rows(collected)
    problems = build_split("train", 8, 0)[:COUNT]
    assert [t.id for t in sampled] == sorted(f"{p.id}#0@0" for p in problems)
    assert all(t.fault is None and t.outcome is not None for t in sampled)
    assert all(t.mode == "experts" for t in sampled)
    results = json.loads((collected / "finished.json").read_text())["results"]
    assert results["rows"] == COUNT == sum(results["outcomes"].values())


def test_rows_depend_on_seed_and_problem_alone(
    collected: Path, model: Path, tmp_path: Path
) -> None:
    settings = settings_of(model, tmp_path / "again", batch_size=3, shard_size=100)
    run(load_config(CollectConfig, None, **settings))
    assert [t.completion_ids for t in rows(tmp_path / "again")] == [
        t.completion_ids for t in rows(collected)
    ]


def test_the_controller_samples_as_the_settings_say(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SamplingParams] = []
    rollout = RolloutEngine.rollout

    async def noted(engine: RolloutEngine, request: RolloutRequest) -> Trajectory:
        asked.append(request.sampling)
        return await rollout(engine, request)

    monkeypatch.setattr(RolloutEngine, "rollout", noted)
    settings = settings_of(model, tmp_path / "run", temperature=0.7, top_p=0.9, top_k=5, limit=3)
    run(load_config(CollectConfig, None, **settings))
    assert asked == 3 * [SamplingParams(0.7, 0.9, 5)]


def test_finished_collection_is_not_replaced_unless_told(collected: Path, model: Path) -> None:
    with pytest.raises(RunFinishedError, match="--overwrite true"):
        run(load_config(CollectConfig, None, **settings_of(model, collected)))


def test_faults_are_counted_apart_and_never_as_wrong(collected: Path) -> None:
    first, second, *_ = rows(collected)
    faulty = replace(first, fault="expert:timeout", outcome=None)
    right = replace(second, outcome="right", well_formed=True)
    assert summary([faulty, right]) == {
        "rows": 2,
        "verified": 1,
        "outcomes": {"fault": 1, "right": 1},
    }


def test_training_problems_are_not_those_of_the_test_split(model: Path, tmp_path: Path) -> None:
    config = load_config(CollectConfig, None, **settings_of(model, tmp_path, limit=None))
    trained = {p.id for p in config.read_problems(config.problems_seed)}
    assert len(trained) == 48 and not trained & {p.id for p in build_split("test", 100, 0)}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model": ""}, "model is not set"),
        ({"temperature": 0.0}, "temperature is 0.0; expected above 0"),
        ({"samples_per_problem": 0}, "samples_per_problem is 0; expected at least 1"),
        ({"top_p": 0.0}, r"top_p in \(0, 1\]"),
        ({"max_fault_rate": 2.0}, "max_fault_rate is 2.0; expected 0 to 1"),
        ({"temprature": 0.5}, "temperature"),
    ],
)
def test_bad_settings_fail_before_anything_starts(
    model: Path, tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(CollectConfig, None, **{**settings_of(model, tmp_path / "run"), **overrides})
    assert not (tmp_path / "run").exists()


def test_a_broken_experts_file_is_refused_before_the_run_folder(
    model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "experts.yaml"
    file.write_text("experts:\n- {name: a, skill: s, base_url: 'http://127.0.0.1:9/v1'}\n")
    settings = settings_of(model, tmp_path / "run", experts=str(file))
    with pytest.raises(ExpertsFileError, match=r"experts\.yaml:2: .*model: missing"):
        run(CollectConfig(**settings))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_killed_collection_ends_with_the_same_rows(
    collected: Path, model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    command = [sys.executable, "-m", "stages.collect"]
    for name, value in settings_of(model, output).items():
        command += [f"--{name}", str(value)]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=root, env=environment, start_new_session=True)
    while process.poll() is None and not list((output / "trajectories").glob("part-*.parquet")):
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (output / "finished.json").exists()
    subprocess.run(command, cwd=root, env=environment, check=True)
    before, after = rows(collected), rows(output)
    assert [(t.id, t.completion_ids, t.outcome) for t in after] == [
        (t.id, t.completion_ids, t.outcome) for t in before
    ]
