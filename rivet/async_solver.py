"""The deployed model in an event loop: one checkpoint answers problems, without any expert.

The rollout engine in `local` mode: the controller writes requests and replies itself, the sandbox
runs the Python in them. `rivet.solver` has the same for callers without an event loop.
"""

from __future__ import annotations

import asyncio
import difflib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar, Unpack

from rivet.checkpoints import Dtype, load_model, load_tokenizer
from rivet.hub import local_checkpoint
from rivet.pieces import Piece, PieceReader, pieces_of
from rivet.prompts import PromptBuilder
from rivet.rollout.backend import SamplingParams
from rivet.rollout.types import RolloutRequest, rollout_seed
from rivet.settings import ProtocolSettings
from rivet.trajectory import Trajectory
from rivet.voting import Party, parties

if TYPE_CHECKING:
    from rivet.grading import Grader
    from rivet.rollout.backend import Backend
    from rivet.rollout.engine import RolloutEngine

T = TypeVar("T")
OnPiece = Callable[[Piece], None]


class SolverError(RuntimeError):
    """The solver could not work: an infrastructure fault, or it is closed."""


class ProblemError(ValueError):
    """A text that cannot be asked: empty, or longer than the model reads."""


class Ask(TypedDict, total=False):
    """How a problem is asked; every key may be left out.

    Attributes:
        temperature: 0, the default, is greedy.
        top_p: Nucleus mass in (0, 1]; default 1.
        seed: Fixes the sampling at a temperature above 0; default 0.
        sample_index: Another number gives another sample; default 0.
        max_completion_length: Tokens of this completion, at most the checkpoint's limit.
    """

    temperature: float
    top_p: float
    seed: int
    sample_index: int
    max_completion_length: int


def _check(problem: object, ask: Mapping[str, Any]) -> None:
    """Refuse what would be ignored or answered with nothing; `SamplingParams` checks the rest."""
    if not isinstance(problem, str):
        raise TypeError(f"problem is a {type(problem).__name__}; expected text")
    for name, value in ask.items():
        if name not in Ask.__annotations__:
            near = difflib.get_close_matches(name, Ask.__annotations__, n=1)
            hint = (
                f"did you mean {near[0]}?" if near else f"known: {', '.join(Ask.__annotations__)}"
            )
            raise TypeError(f"unknown setting {name!r}; {hint}")
        if name in ("seed", "sample_index") and not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}; expected an integer")
    length = ask.get("max_completion_length")
    if length is not None and length < 1:
        raise ValueError(f"max_completion_length is {length}; expected at least 1")


@dataclass(frozen=True, slots=True)
class Solution:
    """What came of one problem.

    Attributes:
        problem: As asked.
        answer: Content of the box of the final answer, None if there is none.
        trajectory: The whole attempt, token by token.
        pieces: The completion as text, in order.
    """

    problem: str
    answer: str | None
    trajectory: Trajectory
    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        """The completion as text."""
        return "".join(piece.text for piece in self.pieces)

    def outcome(self) -> dict[str, Any]:
        """How the attempt ended, as JSON types."""
        trajectory = self.trajectory
        return {
            "answer": self.answer,
            "finish": trajectory.finish,
            "well_formed": trajectory.well_formed,
            "malformed_reason": trajectory.malformed_reason,
            "code_runs": [
                {"author": run.author, "status": run.status} for run in trajectory.code_runs
            ],
        }


@dataclass(frozen=True, slots=True)
class Vote:
    """What several samples of one problem agree on.

    Attributes:
        answer: That of the largest party, None if no sample has an answer.
        parties: Samples with equal answers, the largest party first.
        solutions: All samples.
    """

    answer: str | None
    parties: tuple[Party, ...]
    solutions: tuple[Solution, ...]


class AsyncSolver:
    """Solves problems with one checkpoint, in the event loop that opens it.

    `async with AsyncSolver(...) as solver: await solver.solve(problem)`. Up to `max_batch` calls
    are sampled together, the others wait for a place.

    Args:
        checkpoint: Checkpoint, export or run folder, or the name of a model on the Hub.
        vllm: Base URLs of vLLM servers that hold the weights; empty loads them here.
        device: Where the model goes; None takes a GPU if there is one.
        dtype: Number format; `auto` keeps that of the weights.
        max_completion_length: Tokens of a completion; None takes the checkpoint's limit.
        max_batch: Problems that the model of this process works on at the same time.

    Raises:
        CheckpointError: The folder is no checkpoint, or a broken one.
        SettingsError: Its `rivet.json` is missing or of another version.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        vllm: Sequence[str] = (),
        device: str | None = None,
        dtype: Dtype = "auto",
        max_completion_length: int | None = None,
        max_batch: int = 16,
    ) -> None:
        folder = local_checkpoint(checkpoint)
        settings = ProtocolSettings.load(folder)
        if max_completion_length is not None:
            limits = replace(settings.limits, max_completion_length=max_completion_length)
            settings = replace(settings, limits=limits)
        self.settings = settings
        self.tokenizer = load_tokenizer(folder)
        self._prompts = PromptBuilder(self.tokenizer, settings)
        self._folder, self._vllm = folder, tuple(vllm)
        self._model = None if self._vllm else load_model(folder, dtype=dtype)
        self._device, self._max_batch = device, max_batch
        self._numbers = itertools.count()
        self._stack = AsyncExitStack()
        self._engine: RolloutEngine | None = None
        self._max_prompt: int | None = None
        self._grader: Grader | None = None

    async def __aenter__(self) -> Self:
        from rivet.rollout.engine import RolloutEngine
        from sandbox import PythonSandbox

        try:
            box = await self._stack.enter_async_context(PythonSandbox())
            backend = await self._open_backend()
            room = getattr(backend, "max_context", None)
            self._max_prompt = None if room is None else room - 1
            self._engine = RolloutEngine(
                backend, self.tokenizer, self.settings, experts=None, sandbox=box
            )
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._engine = None
        await self._stack.aclose()

    def prompt(self, problem: str) -> tuple[int, ...]:
        """Prompt ids of a problem, shape (n,).

        Raises:
            ProblemError: It is empty, or leaves the model no room for an answer.
        """
        if not problem.strip():
            raise ProblemError("the problem is empty; expected text")
        ids = self._prompts.build(problem, "local")
        if self._max_prompt is not None and len(ids) > self._max_prompt:
            raise ProblemError(
                f"the problem has {len(ids)} tokens, prompt included; the model reads at most "
                f"{self._max_prompt}"
            )
        return ids

    async def solve(
        self,
        problem: str,
        *,
        on_piece: OnPiece | None = None,
        prompt_ids: tuple[int, ...] | None = None,
        **ask: Unpack[Ask],
    ) -> Solution:
        """Solve one problem.

        Args:
            problem: Plain text; nothing in it is taken for a control token.
            on_piece: Called with each piece of the completion as it comes. Neighbours may share
                author and kind: they continue one another.
            prompt_ids: What `prompt` gave for it, where that is known already.
            **ask: See `Ask`.

        Raises:
            ProblemError: The problem cannot be asked.
            SolverError: The backend or the sandbox failed, or the solver is not open.
            TypeError, ValueError: A setting is unknown or out of range.
        """
        if self._engine is None:
            raise SolverError("the solver is not open; ask inside `async with AsyncSolver(...)`")
        _check(problem, ask)
        # Lone surrogates, as JSON and file names may have them, are no text.
        problem = problem.encode("utf-8", "replace").decode("utf-8")
        sample_index = ask.get("sample_index", 0)
        request = RolloutRequest(
            problem_id=f"problem-{next(self._numbers)}",  # the engine's name for the attempt
            prompt_ids=self.prompt(problem) if prompt_ids is None else prompt_ids,
            mode="local",
            sampling=SamplingParams(ask.get("temperature", 0.0), ask.get("top_p", 1.0)),
            seed=rollout_seed(ask.get("seed", 0), 0, problem, sample_index),
            sample_index=sample_index,
            max_completion_length=ask.get("max_completion_length"),
        )
        reader = PieceReader(self.tokenizer)

        def show(pieces: list[Piece]) -> None:
            for piece in pieces:
                on_piece(piece)  # type: ignore[misc]

        if on_piece is None:
            trajectory = await self._engine.rollout(request)
        else:
            trajectory = await self._engine.rollout(
                request, on_tokens=lambda ids, author: show(reader.feed(ids, author))
            )
            show(reader.finish())
        if trajectory.fault is not None:
            raise SolverError(
                f"the attempt was lost to an infrastructure fault ({trajectory.fault}); ask again"
            )
        pieces = tuple(pieces_of(trajectory, self.tokenizer))
        return Solution(problem, boxed_answer(trajectory), trajectory, pieces)

    async def stream(self, problem: str, **ask: Unpack[Ask]) -> AsyncIterator[Piece | Solution]:
        """Solve one problem; gives each piece as it comes and at last the `Solution`.

        Leaving the loop early ends the attempt.
        """
        arrived: asyncio.Queue[Piece | None] = asyncio.Queue()
        task = asyncio.ensure_future(self.solve(problem, on_piece=arrived.put_nowait, **ask))
        task.add_done_callback(lambda _: arrived.put_nowait(None))
        try:
            while (piece := await arrived.get()) is not None:
                yield piece
            yield await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def solve_many(
        self,
        problems: Sequence[str],
        *,
        on_done: Callable[[int, Solution], None] | None = None,
        **ask: Unpack[Ask],
    ) -> list[Solution]:
        """Solve problems together; solutions come in the order of the problems.

        Args:
            problems: What to solve.
            on_done: Called with the index and the solution of each, in the order they are done.
            **ask: See `Ask`; a problem that comes again is asked with the next `sample_index`.
        """
        seen: Counter[str] = Counter()

        async def one(n: int, problem: str) -> Solution:
            this: Ask = {**ask, "sample_index": ask.get("sample_index", 0) + seen[problem]}
            seen[problem] += 1
            solution = await self.solve(problem, **this)
            if on_done is not None:
                on_done(n, solution)
            return solution

        return await all_of(one(n, problem) for n, problem in enumerate(problems))

    async def vote(self, problem: str, samples: int, **ask: Unpack[Ask]) -> Vote:
        """Sample a problem several times and take the answer that most samples agree on.

        Args:
            problem: What to solve.
            samples: How many, at least 1.
            **ask: See `Ask`; a temperature of 0 gives the same sample every time.
        """
        if samples < 1:
            raise ValueError(f"samples is {samples}; expected at least 1")
        return await self.count(await self.solve_many([problem] * samples, **ask))

    async def count(self, solutions: Sequence[Solution]) -> Vote:
        """The vote of samples of one problem."""
        from rivet.grading import Grader

        if self._grader is None:
            self._grader = self._stack.enter_context(Grader(workers=1))
        found = await parties([solution.answer for solution in solutions], self._grader)
        return Vote(found[0].answer if found else None, tuple(found), tuple(solutions))

    async def _open_backend(self) -> Backend:
        import torch

        from rivet.rollout.local import LocalBackend

        if self._vllm:
            from rivet.rollout.vllm_open import open_vllm

            return await self._stack.enter_async_context(
                open_vllm(self._folder, self.tokenizer, urls=self._vllm)
            )
        assert self._model is not None
        return await self._stack.enter_async_context(
            LocalBackend(
                self._model,
                self.tokenizer,
                max_batch=self._max_batch,
                max_completion_length=self.settings.limits.max_completion_length,
                device=self._device or ("cuda" if torch.cuda.is_available() else None),
            )
        )


async def all_of(work: Iterator[Awaitable[T]]) -> list[T]:
    """Results of all, in order; the first failure ends the others and is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def boxed_answer(trajectory: Trajectory) -> str | None:
    """Content of the last box of a trajectory's answer, None if there is none."""
    from rivet.grading.extract import last_box

    return None if trajectory.answer is None else last_box(trajectory.answer).answer
