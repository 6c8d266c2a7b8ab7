"""Rollouts for callers without an event loop, such as a trainer: a loop in its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from rivet.rollout.engine import RolloutEngine
from rivet.rollout.types import RolloutRequest
from rivet.trajectory import Trajectory

T = TypeVar("T")


class EngineRunner:
    """Keeps an engine open in a background thread and runs rollouts on it.

    `with EngineRunner(open_engine) as runner: trajectories = runner.run(requests)`

    Args:
        open_engine: Gives an async context manager around an engine and all that it needs; it is
            entered and left in the background loop.
    """

    def __init__(self, open_engine: Callable[[], AbstractAsyncContextManager[RolloutEngine]]):
        self._open_engine = open_engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rivet-rollouts", daemon=True
        )
        self._context: AbstractAsyncContextManager[RolloutEngine] | None = None
        self._engine: RolloutEngine | None = None

    def __enter__(self) -> EngineRunner:
        self._thread.start()
        try:
            self._engine = self.call(self._enter())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exc_info: Any) -> None:
        try:
            if self._context is not None:
                self.call(self._context.__aexit__(*exc_info))
        finally:
            self._stop()

    @property
    def engine(self) -> RolloutEngine:
        """The engine; use it from coroutines passed to `call` only."""
        if self._engine is None:
            raise RuntimeError("the runner is not open; use it in a `with` statement")
        return self._engine

    def run(
        self,
        requests: Sequence[RolloutRequest],
        *,
        on_done: Callable[[Trajectory], None] | None = None,
        max_in_flight: int = 1024,
    ) -> list[Trajectory]:
        """Sample trajectories, in the order of the requests; see `RolloutEngine.rollouts`.

        `on_done` is called in the background thread.
        """
        return self.call(
            self.engine.rollouts(requests, on_done=on_done, max_in_flight=max_in_flight)
        )

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run any coroutine in the background loop and wait; Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _enter(self) -> RolloutEngine:
        self._context = self._open_engine()
        return await self._context.__aenter__()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
