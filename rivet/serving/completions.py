"""Answers chat requests with a solver: places, deadline, stream, and what is counted and logged."""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

from rivet.async_solver import Ask, AsyncSolver, ProblemError, Solution, SolverError, all_of
from rivet.chat_api import RequestError
from rivet.pieces import Piece, merged
from rivet.rollout.backend import BackendError
from rivet.serving.chat_request import ChatRequest
from rivet.serving.gate import Gate
from rivet.serving.metrics import Metrics
from rivet.serving.options import ServerOptions
from rivet.serving.replies import DONE, Replies, error_event

logger = logging.getLogger(__name__)

BUG = "the server has a bug; its log has the traceback"

Prompt = tuple[int, ...]
_Arrival = tuple[int, Piece | Solution]


class Completions:
    """Runs chat requests on one solver.

    Args:
        solver: Open.
        options: Of the server.
        gate: Its places.
        metrics: Where completions are counted.
    """

    def __init__(
        self, solver: AsyncSolver, options: ServerOptions, gate: Gate, metrics: Metrics
    ) -> None:
        self._solver, self._options = solver, options
        self._gate, self._metrics = gate, metrics
        self._mean_s = 1.0  # of a completion, for Retry-After

    async def prompt(self, request: ChatRequest) -> Prompt:
        """The prompt of a request; long ones are encoded beside the event loop.

        Raises:
            RequestError: The model cannot read it.
        """
        try:
            return await asyncio.to_thread(self._solver.prompt, request.problem)
        except ProblemError as error:
            raise RequestError(
                400, str(error), param="messages", code="context_length_exceeded"
            ) from error

    def full(self) -> RequestError:
        """The refusal of a request that finds no room."""
        rounds = (self._gate.waiting + self._gate.running) / self._options.max_concurrent
        wait_s = max(1, min(60, math.ceil(rounds * self._mean_s)))
        return RequestError(
            429,
            f"the server is full: {self._gate.running} completions run and {self._gate.waiting} "
            f"wait; ask again in {wait_s} s",
            code="server_full",
            headers={"Retry-After": str(wait_s)},
        )

    async def whole(self, request: ChatRequest, prompt: Prompt) -> list[Solution]:
        """All choices of a request.

        Raises:
            RequestError: An infrastructure fault, or the deadline has passed.
        """
        async with self._deadline(request):
            return await all_of(self._one(request, prompt, n) for n in range(request.n))

    async def stream(
        self, request: ChatRequest, prompt: Prompt, replies: Replies
    ) -> AsyncGenerator[bytes]:
        """Events of a streamed reply; an error becomes an event, for the status has been sent."""
        try:
            async for chunk in self._events(request, prompt, replies):
                yield chunk
        except RequestError as error:
            logger.warning("a stream ended with an error: %s", error)
            yield error_event(error)
        except Exception as error:  # the boundary: one request's bug is not everybody's
            log_bug(error, logs_text=self._options.logs_text)
            yield error_event(RequestError(500, BUG))
        yield DONE

    async def _events(
        self, request: ChatRequest, prompt: Prompt, replies: Replies
    ) -> AsyncIterator[bytes]:
        arrived: asyncio.Queue[_Arrival | None] = asyncio.Queue()
        done: dict[int, Solution] = {}

        async def one(index: int) -> None:
            def show(piece: Piece) -> None:
                arrived.put_nowait((index, piece))

            on_piece = show if request.shows_trajectory else None
            arrived.put_nowait((index, await self._one(request, prompt, index, on_piece)))

        async def every() -> None:
            try:
                async with self._deadline(request):
                    await all_of(one(n) for n in range(request.n))
            finally:
                arrived.put_nowait(None)

        task = asyncio.ensure_future(every())
        try:
            for n in range(request.n):
                yield replies.opening(n)
            while (arrival := await arrived.get()) is not None:
                index, item = arrival
                if isinstance(item, Solution):
                    done[index] = item
                    yield replies.ending(index, item)
                else:
                    yield replies.pieces(index, merged([item]))
            await task
            if request.include_usage:
                yield replies.usage([done[n] for n in range(request.n)])
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _one(
        self,
        request: ChatRequest,
        prompt: Prompt,
        index: int,
        on_piece: Callable[[Piece], None] | None = None,
    ) -> Solution:
        loop = asyncio.get_running_loop()
        ask: Ask = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "sample_index": index,
        }
        if request.max_tokens is not None:
            ask["max_completion_length"] = request.max_tokens
        async with self._gate.place():
            started = loop.time()
            try:
                solution = await self._solver.solve(
                    request.problem, on_piece=on_piece, prompt_ids=prompt, **ask
                )
            except (SolverError, BackendError) as error:
                self._metrics.fault()
                raise RequestError(503, str(error), code="infrastructure_fault") from error
        self._mean_s += 0.1 * (loop.time() - started - self._mean_s)
        self._metrics.trajectory(solution.trajectory)
        if self._options.logs_text:
            logger.info("problem %r answer %r", request.problem, solution.answer)
        return solution

    @asynccontextmanager
    async def _deadline(self, request: ChatRequest) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(request.deadline_s):
                yield
        except TimeoutError as error:
            raise RequestError(
                504,
                f"no answer within {request.deadline_s:g} s, waiting included; ask again, or with "
                "a lower max_tokens",
                code="deadline_exceeded",
            ) from error


def log_bug(error: Exception, *, logs_text: bool) -> None:
    """Log where a bug showed; its message, which may quote a user, only if that is wanted."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    what = f"{type(error).__name__}: {error}" if logs_text else type(error).__name__
    logger.error("a request met a bug of the server, %s:\n%s", what, frames)
