"""The deployed model as a Python object: one checkpoint answers problems, without any expert.

    with Solver("exports/controller") as solver:
        print(solver.solve("What is the gcd of 84 and 36?").answer)

The rollout engine in `local` mode: the controller writes requests and replies itself, the sandbox
runs the Python in them. Nothing leaves the machine. Calls are synchronous; the engine lives in an
event loop of its own thread, so they also work inside a notebook.
"""

from __future__ import annotations

import asyncio
import codecs
import itertools
import threading
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rivet.checkpoints import Dtype, find_checkpoint, load_model, load_tokenizer
from rivet.prompts import PromptBuilder
from rivet.rollout.backend import SamplingParams
from rivet.rollout.types import RolloutRequest, rollout_seed
from rivet.settings import ProtocolSettings
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Author, Kind, Trajectory

if TYPE_CHECKING:
    from rivet.rollout.engine import RolloutEngine

T = TypeVar("T")


class SolverError(RuntimeError):
    """The solver could not work: an infrastructure fault, or it is closed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of text with one author and one kind."""

    author: Author
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Solution:
    """What came of one problem.

    Attributes:
        problem: As asked.
        answer: Content of the box of the final answer, None if there is none.
        trajectory: The whole attempt, token by token.
        pieces: The completion as text, in order. Text of the environment is escaped where it
            would read as a tag.
    """

    problem: str
    answer: str | None
    trajectory: Trajectory
    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        """The completion as text."""
        return "".join(piece.text for piece in self.pieces)


class Solver:
    """Solves problems with one checkpoint.

    Args:
        checkpoint: Checkpoint, export or run folder.
        device: Where the model goes; None takes a GPU if there is one.
        dtype: Number format; `auto` keeps that of the weights.
        max_completion_length: Tokens of a completion; None takes the checkpoint's limit.
        max_batch: Problems that `solve_many` works on at the same time.

    Raises:
        CheckpointError: The folder is no checkpoint, or a broken one.
        SettingsError: Its `rivet.json` is missing or of another version.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        device: str | None = None,
        dtype: Dtype = "auto",
        max_completion_length: int | None = None,
        max_batch: int = 16,
    ) -> None:
        folder = find_checkpoint(checkpoint)
        settings = ProtocolSettings.load(folder)
        if max_completion_length is not None:
            limits = replace(settings.limits, max_completion_length=max_completion_length)
            settings = replace(settings, limits=limits)
        self.settings = settings
        self.tokenizer = load_tokenizer(folder)
        self._prompts = PromptBuilder(self.tokenizer, settings)
        model = load_model(folder, dtype=dtype)
        self._numbers = itertools.count()
        self._stack = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rivet-solver", daemon=True
        )
        self._thread.start()
        try:
            self._engine = self._wait(self._open(model, device, max_batch))
        except BaseException:
            self.close()
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
            self._wait(self._stack.aclose())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def solve(
        self,
        problem: str,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        sample_index: int = 0,
    ) -> Solution:
        """Solve one problem.

        Args:
            problem: Plain text; nothing in it is taken for a control token.
            temperature: 0 is greedy.
            top_p: Nucleus mass in (0, 1].
            seed: Fixes the sampling at a temperature above 0.
            sample_index: Another number gives another sample.

        Raises:
            SolverError: The backend or the sandbox failed.
        """
        sampling = SamplingParams(temperature, top_p)
        return self._wait(self._solve(problem, sampling, seed, sample_index))

    def solve_many(
        self,
        problems: Sequence[str],
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[Solution]:
        """Solve problems together, in batches; solutions come in the order of the problems."""
        sampling = SamplingParams(temperature, top_p)

        async def all_of_them() -> list[Solution]:
            return await asyncio.gather(
                *(self._solve(problem, sampling, seed, n) for n, problem in enumerate(problems))
            )

        return self._wait(all_of_them())

    async def _open(self, model: Any, device: str | None, max_batch: int) -> RolloutEngine:
        import torch

        from rivet.rollout.engine import RolloutEngine
        from rivet.rollout.local import LocalBackend
        from sandbox import PythonSandbox

        box = await self._stack.enter_async_context(PythonSandbox())
        backend = await self._stack.enter_async_context(
            LocalBackend(
                model,
                self.tokenizer,
                max_batch=max_batch,
                device=device or ("cuda" if torch.cuda.is_available() else None),
            )
        )
        return RolloutEngine(backend, self.tokenizer, self.settings, experts=None, sandbox=box)

    async def _solve(
        self, problem: str, sampling: SamplingParams, seed: int, sample_index: int
    ) -> Solution:
        trajectory = await self._engine.rollout(
            RolloutRequest(
                problem_id=f"problem-{next(self._numbers)}",  # the engine's name for the attempt
                prompt_ids=self._prompts.build(problem, "local"),
                mode="local",
                sampling=sampling,
                seed=rollout_seed(seed, 0, problem, sample_index),
                sample_index=sample_index,
            )
        )
        if trajectory.fault is not None:
            raise SolverError(
                f"the attempt was lost to an infrastructure fault ({trajectory.fault}); ask again"
            )
        return Solution(
            problem,
            boxed_answer(trajectory),
            trajectory,
            tuple(pieces_of(trajectory, self.tokenizer)),
        )

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the solver's thread; Ctrl-C cancels it."""
        if self._loop.is_closed():
            work.close()
            raise SolverError("the solver is closed; make a new one")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def boxed_answer(trajectory: Trajectory) -> str | None:
    """Content of the last box of a trajectory's answer, None if there is none."""
    from rivet.grading.extract import last_box

    return None if trajectory.answer is None else last_box(trajectory.answer).answer


def pieces_of(trajectory: Trajectory, tokenizer: ProtocolTokenizer) -> list[Piece]:
    """The completion as text by segment; characters cut by a segment's end go to the next."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = []
    last = len(trajectory.segments) - 1
    for n, segment in enumerate(trajectory.segments):
        text = decoder.decode(tokenizer.bytes_of(segment.ids), final=n == last)
        pieces.append(Piece(segment.author, segment.kind, text))
    return pieces
