"""A solver that answers when it is told to, so that tests of the server need no model.

As a program it serves itself: `python fake_solver.py FILE` holds every answer until FILE exists.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rivet.async_solver import ProblemError, Solution, SolverError
from rivet.pieces import Piece
from rivet.trajectory import CodeRun, Segment, Trajectory

PIECES = (
    Piece("controller", "reasoning", "Add them."),
    Piece("controller", "code", "print(3 + 4)"),
    Piece("environment", "output", "7"),
    Piece("controller", "answer", "7"),
)


def solution(
    problem: str,
    *,
    finish: Any = "answer",
    pieces: tuple[Piece, ...] = PIECES,
    answer: str | None = None,
    **ask: Any,
) -> Solution:
    """A solved problem, made by hand; the answer is the length of the problem."""
    answer = (answer or f"{len(problem)}, seven") if finish == "answer" else None
    trajectory = Trajectory(
        id="p#0@0",
        problem_id="p",
        mode="local",
        prompt_ids=(1, 2, 3),
        segments=(
            Segment("controller", "answer", (1,) * 5),
            Segment("environment", "output", (2,)),
        ),
        finish=finish,
        well_formed=finish == "answer",
        answer=None if answer is None else f"It is \\boxed{{{answer}}}.",
        code_runs=(CodeRun("controller", "ok"),),
        info=dict(ask),
    )
    return Solution(problem, answer, trajectory, pieces)


class FakeSolver:
    """Has what the server uses of a solver.

    Attributes:
        go: Answers are held until it is set.
        asked: Problem and settings of every attempt.
        ended: How many attempts were cancelled.
    """

    def __init__(self, pieces: tuple[Piece, ...] = PIECES, answer: str | None = None) -> None:
        self._pieces, self._answer = pieces, answer
        self.go = asyncio.Event()
        self.go.set()
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.ended = 0

    async def __aenter__(self) -> FakeSolver:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def prompt(self, problem: str) -> tuple[int, ...]:
        """A prompt; some problems are too long for it."""
        if "too long" in problem:
            raise ProblemError("the problem has 9 tokens; the model reads at most 8")
        return (1, 2, 3)

    async def solve(
        self,
        problem: str,
        *,
        on_piece: Callable[[Piece], None] | None = None,
        prompt_ids: tuple[int, ...] | None = None,
        **ask: Any,
    ) -> Solution:
        """Answer; the problem says how."""
        self.asked.append((problem, ask))
        try:
            for piece in self._pieces:
                if on_piece is not None:
                    on_piece(piece)
            await self.go.wait()
        except asyncio.CancelledError:
            self.ended += 1
            raise
        if "fault" in problem:
            raise SolverError("the attempt was lost to an infrastructure fault; ask again")
        if "bug" in problem:
            raise KeyError(problem)
        finish = "length" if "endless" in problem else "answer"
        return solution(problem, finish=finish, pieces=self._pieces, answer=self._answer, **ask)


async def _open_when(file: Path, solver: FakeSolver) -> None:
    while not file.exists():
        await asyncio.sleep(0.02)
    solver.go.set()


class HeldSolver(FakeSolver):
    """Answers once a file exists."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    async def __aenter__(self) -> FakeSolver:
        self.go.clear()
        self._task = asyncio.create_task(_open_when(self._file, self))
        return self


if __name__ == "__main__":
    from rivet.serving.options import ServerOptions
    from rivet.serving.run import serve

    serve(lambda: HeldSolver(Path(sys.argv[1])), ServerOptions("fake"))  # type: ignore[arg-type,return-value]
