"""vLLM serves an exported folder, and the deployed model answers through it as it does alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rivet import AsyncSolver
from rivet.async_solver import Solution
from rivet.pieces import Piece, merged
from rivet.rollout.vllm_open import server_settings
from rivet.rollout.vllm_process import managed_server
from stages import export
from stages.export import ExportConfig

PROBLEMS = ["Find the GCD of 252, 198.", "What is 345 + 22?", "Calculate 12 * 34."]


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The controller as `rivet export` leaves it."""
    config = ExportConfig(
        checkpoint=str(checkpoint),
        output_dir=str(tmp_path_factory.mktemp("export") / "out"),
        verify_problems=2,
    )
    return export.run(config)


@pytest.fixture(scope="module")
def served(exported: Path) -> Iterator[str]:
    """A vLLM server of the export."""
    with managed_server(server_settings(exported, dtype="float32", max_batch=8)) as running:
        yield running.base_url


async def test_the_deployed_model_gives_the_same_through_vllm(exported: Path, served: str) -> None:
    async with AsyncSolver(exported) as alone, AsyncSolver(exported, vllm=[served]) as through:
        here = await alone.solve_many(PROBLEMS)
        there = await through.solve_many(PROBLEMS)
        *pieces, last = [item async for item in through.stream(PROBLEMS[0])]
    assert [s.trajectory.completion_ids for s in here] == [
        s.trajectory.completion_ids for s in there
    ]
    assert isinstance(last, Solution) and last.pieces == here[0].pieces
    assert merged(p for p in pieces if isinstance(p, Piece)) == list(last.pieces)
    assert len(pieces) > 2
