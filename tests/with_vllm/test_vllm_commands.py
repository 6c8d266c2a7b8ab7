"""Evaluation and collection through vLLM: the same rows as through the local backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval.config import EvalConfig
from eval.main import run as run_eval
from rivet.async_solver import AsyncSolver
from rivet.rollout.backend import BackendError
from rivet.store import TrajectoryStore
from rivet.trajectory import Trajectory
from stages import collect


def evaluated(checkpoint: Path, folder: Path, **changes: Any) -> list[Trajectory]:
    """Greedy rollouts of a few problems under two conditions."""
    values: dict[str, Any] = {
        "model": str(checkpoint),
        "output_dir": str(folder),
        "conditions": ["local", "no-expert"],
        "problems_per_family": 2,
        "temperature": 0.0,
        "batch_size": 16,
    }
    run_eval(EvalConfig(**(values | changes)))
    stores = sorted(path.parent for path in folder.rglob("*.parquet"))
    return sorted(
        (t for store in dict.fromkeys(stores) for t in TrajectoryStore(store).load()),
        key=lambda t: (t.mode, t.id),
    )


def test_a_greedy_evaluation_gives_the_same_tokens_through_either_backend(
    server: str, checkpoint: Path, tmp_path: Path
) -> None:
    here = evaluated(checkpoint, tmp_path / "local")
    there = evaluated(checkpoint, tmp_path / "vllm", backend="vllm", vllm_urls=[server])
    assert len(here) == len(there) == 24
    assert [t.completion_ids for t in here] == [t.completion_ids for t in there]
    assert [(t.finish, t.outcome) for t in here] == [(t.finish, t.outcome) for t in there]


def test_a_collection_asks_the_experts_between_two_calls_of_the_server(
    server: str, checkpoint: Path, tmp_path: Path
) -> None:
    config = collect.CollectConfig(
        model=str(checkpoint),
        output_dir=str(tmp_path / "run"),
        problems_per_family=1,
        samples_per_problem=2,
        backend="vllm",
        vllm_urls=[server],
    )
    rows = TrajectoryStore(collect.run(config)).load()
    assert len(rows) == 12 and all(t.fault is None for t in rows)


def test_a_recipe_without_urls_starts_a_server_of_its_own(
    server: str, checkpoint: Path, tmp_path: Path
) -> None:
    changes = {"backend": "vllm", "conditions": ["local"], "problems_per_family": 1}
    own = evaluated(checkpoint, tmp_path / "own", **changes)
    given = evaluated(checkpoint, tmp_path / "given", vllm_urls=[server], **changes)
    assert [t.completion_ids for t in own] == [t.completion_ids for t in given]


def test_a_server_of_other_weights_is_refused(
    server: str, checkpoint: Path, tmp_path: Path
) -> None:
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + torch.tensor(1.0)
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BackendError, match=f"expected {other}"):
        evaluated(other, tmp_path / "run", backend="vllm", vllm_urls=[server])


async def test_the_solver_answers_alike_through_either_backend(
    server: str, checkpoint: Path
) -> None:
    problem = "What is 12 + 30?"
    async with AsyncSolver(checkpoint, vllm=[server]) as there, AsyncSolver(checkpoint) as here:
        one, other = await there.solve(problem), await here.solve(problem)
    assert one.trajectory.completion_ids == other.trajectory.completion_ids
