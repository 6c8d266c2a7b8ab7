"""The deployed model as a Python object: one checkpoint answers problems, without any expert.

    with Solver("exports/controller") as solver:
        print(solver.solve("What is the gcd of 84 and 36?").answer)

The rollout engine in `local` mode: the controller writes requests and replies itself, the sandbox
runs the Python in them. Nothing leaves the machine. `Solver` runs
`rivet.async_solver.AsyncSolver` in a thread of its own, so its plain calls also work inside a
notebook.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from rivet.async_solver import (
    Ask,
    AsyncSolver,
    OnPiece,
    ProblemError,
    Solution,
    SolverError,
    Vote,
)
from rivet.pieces import Piece

__all__ = ["Piece", "ProblemError", "Solution", "Solver", "SolverError", "Vote"]

T = TypeVar("T")


class Solver:
    """`AsyncSolver` for callers without an event loop: the same arguments, plain calls.

    Safe to call from several threads.
    """

    def __init__(self, checkpoint: str | Path, **options: Any) -> None:
        self._solver = AsyncSolver(checkpoint, **options)
        self.settings, self.tokenizer = self._solver.settings, self._solver.tokenizer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rivet-solver", daemon=True
        )
        self._thread.start()
        try:
            self._wait(self._solver.__aenter__())
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the sandbox and the thread. Closing twice is fine."""
        if self._loop.is_closed():
            return
        try:
            self._wait(self._solver.__aexit__())
        finally:
            self._stop()

    def prompt(self, problem: str) -> tuple[int, ...]:
        """Prompt ids of a problem; see `AsyncSolver.prompt`."""
        return self._solver.prompt(problem)

    def solve(
        self, problem: str, *, on_piece: OnPiece | None = None, **ask: Unpack[Ask]
    ) -> Solution:
        """Solve one problem; see `AsyncSolver.solve`. `on_piece` is called in another thread."""
        return self._wait(self._solver.solve(problem, on_piece=on_piece, **ask))

    def solve_many(
        self,
        problems: Sequence[str],
        *,
        on_done: Callable[[int, Solution], None] | None = None,
        **ask: Unpack[Ask],
    ) -> list[Solution]:
        """Solve problems together; see `AsyncSolver.solve_many`."""
        return self._wait(self._solver.solve_many(problems, on_done=on_done, **ask))

    def vote(self, problem: str, samples: int, **ask: Unpack[Ask]) -> Vote:
        """Let samples vote; see `AsyncSolver.vote`."""
        return self._wait(self._solver.vote(problem, samples, **ask))

    def count(self, solutions: Sequence[Solution]) -> Vote:
        """The vote of samples of one problem."""
        return self._wait(self._solver.count(solutions))

    def stream(self, problem: str, **ask: Unpack[Ask]) -> Iterator[Piece | Solution]:
        """Solve one problem; gives each piece as it comes and at last the `Solution`."""
        arrived: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        future = self._submit(self._solver.solve(problem, on_piece=arrived.put, **ask))
        future.add_done_callback(lambda _: arrived.put(None))
        try:
            while (piece := arrived.get()) is not None:
                yield piece
            yield future.result()
        finally:
            future.cancel()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop.is_closed():
            work.close()
            raise SolverError("the solver is closed; make a new one")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the solver's thread; Ctrl-C cancels it."""
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
