"""`--ray` with the real Ray: two local actors, one of them killed; the rows of one process."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from untrained import write_untrained

from rivet.rollout.types import RolloutLimits
from rivet.store import TrajectoryStore
from rivet.trajectory import Trajectory

REPO = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed (rivet[ray])"
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose answers do not matter."""
    return write_untrained(tmp_path_factory.mktemp("model"), RolloutLimits(48))


def command(module: str, model: Path, output: Path, *more: str) -> list[str]:
    """The command of a small collection, or of a small evaluation."""
    size = ["--mode", "local"] if module == "stages.collect" else ["--conditions", "local"]
    return [
        *(sys.executable, "-m", module, "--model", str(model), "--output_dir", str(output)),
        *("--problems_per_family", "16", "--samples_per_problem", "2", "--temperature", "1"),
        *("--shard_size", "16", "--batch_size", "8", "--seed", "3", *size, *more),
    ]


def rows(store: Path) -> list[Trajectory]:
    return sorted(TrajectoryStore(store), key=lambda t: t.id)


def essence(trajectories: list[Trajectory]) -> list[tuple[object, ...]]:
    """What must not depend on who sampled it."""
    return [(t.id, t.seed, t.completion_ids, t.finish, t.outcome) for t in trajectories]


@pytest.mark.parametrize(
    ("module", "store"),
    [("stages.collect", "trajectories"), ("eval.main", "local/trajectories")],
    ids=["collect", "eval"],
)
def test_a_killed_actors_shard_is_run_again_and_the_rows_are_those_of_one_process(
    module: str, store: str, model: Path, tmp_path: Path
) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]),
    }
    environment.pop("RAY_ADDRESS", None)
    alone = tmp_path / "alone"
    subprocess.run(command(module, model, alone), cwd=REPO, env=environment, check=True)
    output = tmp_path / "shared"
    process = subprocess.Popen(
        command(module, model, output, "--ray", "2"),
        cwd=REPO,
        env=environment,
        start_new_session=True,
    )
    try:
        while not (owners := list(output.glob(f"{store}/ray/*/owner.json"))):
            assert process.poll() is None, "the run ended before an actor took a shard"
            time.sleep(0.01)
        os.kill(json.loads(owners[0].read_text())["pid"], signal.SIGKILL)
        assert process.wait() == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    log = (output / "log.txt").read_text()
    assert log.count("another one goes on from") == 1
    sampled = rows(output / store)
    assert len({t.id for t in sampled}) == len(sampled) == 6 * 16 * 2
    assert essence(sampled) == essence(rows(alone / store))
    assert not (output / store / "ray").exists()
    assert (output / "finished.json").exists()
