"""What lives in a Ray actor of a sharded sampling run: one engine, one sandbox, one grader.

An actor opens the checkpoint once and then samples shard after shard with the one sampling loop,
each into a store of its own, so that whoever takes over a shard goes on where this one stopped.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from data.problems import Problem
from eval.generate import SampleSpec, sample
from eval.runtime import Runtime, open_runtime
from rivet.checkpoints import Dtype, OpenedCheckpoint
from rivet.experts.config import ExpertConfig
from rivet.files import atomic_write_json
from rivet.rollout.backend_settings import BackendSettings
from rivet.store import TrajectoryStore
from rivet.trajectory import Mode

OWNER_FILE = "owner.json"


@dataclass(frozen=True, slots=True)
class RuntimeSpec:
    """What an actor opens; see `eval.runtime.open_runtime`.

    Attributes:
        experts: As configured, keys by the name of their variable; None without any.
    """

    checkpoint: OpenedCheckpoint
    experts: list[ExpertConfig] | None = None
    max_completion_length: int | None = None
    max_batch: int = 96
    grading: Literal["reward", "eval"] = "reward"
    dtype: Dtype = "auto"
    run_dir: Path | None = None
    sampler: BackendSettings | None = None


def backend_settings(config: BackendSettings) -> BackendSettings:
    """The part of a command's settings that says what samples."""
    return BackendSettings(**{f.name: getattr(config, f.name) for f in fields(BackendSettings)})


class ShardWorker:
    """Samples shards, one at a time. Ray makes an actor of it.

    Args:
        spec: What to open.
    """

    def __init__(self, spec: RuntimeSpec) -> None:
        self._spec = spec
        self._stack = AsyncExitStack()
        self._runtime: Runtime | None = None

    async def describe(self, mode: Mode) -> tuple[dict[str, Any], int | None]:
        """What rows depend on besides problem, prompt and sampling, and the longest context."""
        runtime = await self._open()
        return runtime.describe(mode), getattr(runtime.engine, "max_context", None)

    async def run(
        self, problems: Sequence[Problem], folder: Path, how: SampleSpec, skip: Collection[str]
    ) -> int:
        """Sample rows of some problems into the store in a folder, and say how many they are.

        Args:
            problems: Of the rows.
            folder: Where they go.
            how: As for `eval.generate.sample`.
            skip: Ids of rows that lie elsewhere.

        Raises:
            What `eval.generate.sample` raises.
        """
        runtime = await self._open()
        folder.mkdir(parents=True, exist_ok=True)
        owner = {"pid": os.getpid(), "host": socket.gethostname()}
        atomic_write_json(folder / OWNER_FILE, owner)
        rows = await sample(
            runtime.engine,
            runtime.grader,
            problems,
            prompts=runtime.prompts,
            store=TrajectoryStore(folder),
            settings=runtime.describe(how.mode),
            skip=skip,
            progress=None,
            # Small shards: what a lost actor has sampled of this one is not lost with it.
            **replace(how, shard_size=max(1, how.shard_size // 8)).arguments(),
        )
        return len(rows)

    async def close(self) -> None:
        """Close the engine, the sandbox and the grader."""
        await self._stack.aclose()

    async def _open(self) -> Runtime:
        if self._runtime is None:
            spec, pool = self._spec, None
            if spec.experts is not None:
                from rivet.experts.pool import ExpertPool  # slow to import

                pool = await self._stack.enter_async_context(ExpertPool(spec.experts))
            self._runtime = await self._stack.enter_async_context(
                open_runtime(
                    spec.checkpoint,
                    experts=pool,
                    max_completion_length=spec.max_completion_length,
                    max_batch=spec.max_batch,
                    grading=spec.grading,
                    dtype=spec.dtype,
                    run_dir=spec.run_dir,
                    sampler=spec.sampler,
                )
            )
        return self._runtime
