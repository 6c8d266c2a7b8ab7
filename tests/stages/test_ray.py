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

from data.miniworld.dialogues import tokenizer_corpus
from data.miniworld.experts import EXPERTS
from rivet.rollout.types import RolloutLimits
from rivet.settings import ExpertCard, ProtocolSettings
from rivet.store import TrajectoryStore
from rivet.trajectory import Trajectory
from stages.mini_controller import build_model, build_tokenizer

REPO = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed (rivet[ray])"
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained mini controller as a checkpoint folder."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(tokenizer_corpus(300), words=list(EXPERTS))
    build_model(tokenizer, seed=0, hidden_size=32, num_hidden_layers=1).save_pretrained(folder)
    tokenizer.hf.save_pretrained(folder)
    ProtocolSettings(
        prompt="bare",
        after_tag="",
        experts=tuple(ExpertCard(name) for name in EXPERTS),
        limits=RolloutLimits(max_completion_length=48),
    ).save(folder)
    return folder


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
