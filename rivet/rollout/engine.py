"""The rollout engine: one coroutine a trajectory, over a backend, experts and a sandbox.

A trajectory goes on as soon as its own expert or program has answered; nobody waits for the
slowest. The controller samples until it closes a request or a program, the engine splices in the
reply or the output, and so on until the end of the turn. Whatever fails outside the controller
(an expert, the sandbox, the backend) ends the trajectory with a typed `fault` and never looks like
a wrong answer; what the controller gets wrong itself ends it as `malformed`, `fabricated_output`,
`budget` or `length`. A trajectory that is not done at its deadline is given up and marked late, so
that a group shrinks rather than waits.

In `experts` mode a request is intercepted at `</expert>`. In every other mode the controller goes
on to write the reply itself; its programs run wherever it wrote them, except in `no-python` and
`plain`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rivet.experts.types import ExpertReply, Experts, sample_key
from rivet.protocol import STOP_EXPERT, STOP_OUTPUT, STOP_PYTHON, Scanner, Span, split_reply
from rivet.rollout.backend import Backend, BackendError
from rivet.rollout.live import Live, OnTokens
from rivet.rollout.splice import Splice, Splicer
from rivet.rollout.types import LATE, RolloutLimits, RolloutRequest, Sandbox, check_prompts
from rivet.settings import ProtocolSettings
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Author, CodeRun, ExpertCall, Finish, Mode, Trajectory
from sandbox import SandboxError

logger = logging.getLogger(__name__)

_STOPS: dict[Mode, tuple[str, ...]] = {
    "experts": (STOP_EXPERT, STOP_PYTHON, STOP_OUTPUT),
    "local": (STOP_PYTHON, STOP_OUTPUT),
    "no-expert": (STOP_PYTHON, STOP_OUTPUT, "<expert "),
    "no-python": (STOP_OUTPUT, "<python>"),
    "plain": (),
}
_FORBIDDEN: dict[Mode, str] = {"no-expert": "<expert ", "no-python": "<python>"}


class RolloutEngine:
    """Samples trajectories.

    Args:
        backend: Samples from the controller.
        tokenizer: The controller's.
        settings: How the controller speaks the protocol.
        experts: Whom it may consult; needed in `experts` mode only.
        sandbox: Where programs run; not needed in `no-python` and `plain` mode.
        limits: Bounds of a trajectory. Default: those of the settings.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: ProtocolTokenizer,
        settings: ProtocolSettings,
        *,
        experts: Experts | None = None,
        sandbox: Sandbox | None = None,
        limits: RolloutLimits | None = None,
    ) -> None:
        self.backend = backend
        self.tokenizer = tokenizer
        self.settings = settings
        self.experts = experts
        self.sandbox = sandbox
        self.limits = limits or settings.limits
        self.splicer = Splicer(tokenizer, settings.style)
        self._numbers = itertools.count()
        self._banned = {
            mode: tuple(
                i
                for i, piece in enumerate(tokenizer.token_bytes)
                if piece.startswith(tag.strip().encode())
            )
            for mode, tag in _FORBIDDEN.items()
        }

    @property
    def max_context(self) -> int | None:
        """Tokens that the backend takes, prompt included; None if it does not say."""
        return getattr(self.backend, "max_context", None)

    def banned_ids(self, mode: Mode) -> tuple[int, ...]:
        """Tokens that open what a mode forbids, where the vocabulary has such tokens."""
        return self._banned.get(mode, ())

    async def rollout(
        self, request: RolloutRequest, *, on_tokens: OnTokens | None = None
    ) -> Trajectory:
        """Sample one trajectory; infrastructure faults come back as `Trajectory.fault`.

        Args:
            request: What to sample.
            on_tokens: Called with every run of tokens of the completion as it comes, in order: one
                token at a time from a backend that streams, else what each call sampled.

        Raises:
            ValueError: The mode needs experts or a sandbox and the engine has none.
            PromptTooLongError: The prompt fills the backend's context: the problem's fault.
        """
        check_prompts({request.problem_id: len(request.prompt_ids)}, self.max_context)
        if request.mode == "experts" and self.experts is None:
            raise ValueError("mode `experts` needs experts; pass RolloutEngine(experts=...)")
        if request.mode not in ("no-python", "plain") and self.sandbox is None:
            raise ValueError(
                f"mode `{request.mode}` runs programs; pass RolloutEngine(sandbox=...)"
            )
        session = f"{request.id}/{next(self._numbers)}"
        rollout = _Rollout(self, request, session, Live(on_tokens, self.backend))
        try:
            return await rollout.run()
        finally:
            await self.backend.release(session)

    async def rollouts(
        self,
        requests: Sequence[RolloutRequest],
        *,
        on_done: Callable[[Trajectory], None] | None = None,
        max_in_flight: int = 1024,
    ) -> list[Trajectory]:
        """Sample many trajectories at once.

        Args:
            requests: What to sample.
            on_done: Called with each trajectory as it ends, in the order in which they end.
            max_in_flight: At most this many at the same time.

        Returns:
            Trajectories in the order of the requests.
        """
        gate = asyncio.Semaphore(max_in_flight)

        async def one(request: RolloutRequest) -> Trajectory:
            async with gate:
                trajectory = await self.rollout(request)
            if on_done is not None:
                on_done(trajectory)
            return trajectory

        tasks = [asyncio.create_task(one(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:  # after an exception: end the others and let them release their sessions
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(eq=False)
class _End(Exception):
    """Ends a trajectory from wherever it is."""

    finish: Finish
    reason: str = ""
    fault: str | None = None


class _Rollout:
    """The state of one trajectory under way."""

    def __init__(
        self, engine: RolloutEngine, request: RolloutRequest, session: str, live: Live
    ) -> None:
        self._engine = engine
        self._request = request
        self._session = session
        self._live = live
        self._limits = engine.limits
        self._splicer = engine.splicer
        self._scanner = Scanner(engine.tokenizer)
        self._context = list(request.prompt_ids)
        # A backend with a shorter context ends the trajectory there: `length`, not a fault.
        room = engine.max_context
        self._left = engine.limits.max_completion_length
        if request.max_completion_length is not None:
            self._left = min(self._left, request.max_completion_length)
        if room is not None:
            self._left = min(self._left, room - len(request.prompt_ids))
        self._closed = 0  # closed spans that have been dealt with
        self._calls: list[ExpertCall] = []
        self._runs: list[CodeRun] = []

    async def run(self) -> Trajectory:
        """Sample to the end, or to the deadline: what is awaited then is cancelled."""
        deadline = asyncio.timeout(self._request.deadline_s)
        try:
            async with deadline:
                while True:
                    await self._sample()
                    await self._act()
        except _End as end:
            return self._trajectory(end)
        except TimeoutError:
            if not deadline.expired():  # somebody else's
                raise
            return self._trajectory(_End("fault", fault=LATE))

    async def _sample(self) -> None:
        """Let the controller write on until something is to be done."""
        if self._left < 1:
            raise _End("length")
        request = self._request
        try:
            generation = await self._engine.backend.generate(
                self._context,
                stop=_STOPS[request.mode],
                max_new_tokens=self._left,
                sampling=request.sampling,
                seed=request.seed,
                banned_ids=self._engine.banned_ids(request.mode),
                session=self._session,
                **self._live.watch(),
            )
        except BackendError as error:
            logger.warning("rollout %s: the backend failed: %s", request.id, error)
            raise _End("fault", fault="backend:error") from error
        self._append("controller", generation.ids, generation.logprobs)
        if generation.finish_reason == "unknown_token":
            raise _End("malformed", "a token that the tokenizer does not have")
        self._check_forbidden()

    def _append(
        self, author: Author, ids: Sequence[int], logprobs: Sequence[float] | None = None
    ) -> None:
        self._live.append(ids, author)
        self._scanner.feed(ids, author, logprobs)
        self._context.extend(ids)
        self._left -= len(ids)

    def _check_forbidden(self) -> None:
        """End the trajectory if it opened a tag that its mode forbids."""
        tag = _FORBIDDEN.get(self._request.mode)
        if tag is None:
            return
        name = tag.strip("<> ")
        span = self._scanner.current
        is_opening = span is None and f"{tag.strip()} " in f"{self._scanner.trailing} "
        if is_opening or (span is not None and span.name == name):
            raise _End("malformed", f"<{name}> in {self._request.mode} mode")

    async def _act(self) -> None:
        """Do what the last sampled tokens ask for."""
        scanner = self._scanner
        if self._request.mode == "plain":
            if scanner.ended:
                raise _End("eos")
            return
        current = scanner.current
        if current is not None and current.name == "output" and current.author == "controller":
            raise _End("fabricated_output")
        span = self._newly_closed()
        if span is not None:
            if scanner.last_closed is not span or scanner.ended:
                raise _End("malformed", f"text glued behind </{span.name}>")
            if span.name == "expert":
                await self._consult(span)
            else:
                await self._execute(span)
        elif scanner.ended:
            raise _End("eos" if scanner.answer() is None else "answer")

    def _newly_closed(self) -> Span | None:
        """The request or program of the controller that was closed since the last call."""
        intercepted = {"python"} if self._request.mode != "experts" else {"python", "expert"}
        closed = [
            span
            for span in self._scanner.spans
            if span.is_closed and span.name in intercepted and span.author == "controller"
        ]
        fresh, self._closed = closed[self._closed :], len(closed)
        return fresh[-1] if fresh else None

    async def _consult(self, span: Span) -> None:
        """Ask an expert and splice its reply."""
        request = self._scanner.text(span).strip()
        if not request:
            raise _End("malformed", "<expert> holds no request")
        if len(self._calls) >= self._limits.max_expert_calls:
            raise _End("budget")
        splice = Splice()
        splice.add("expert", self._splicer.gap(self._context[-1]))
        splice.add("expert", self._splicer.open_reply(span.expert))
        if len(splice) + len(self._splicer.close_reply()) > self._left:
            raise _End("length")  # before anything is paid
        reply = await self._ask(span.expert, request)
        await self._lay_out(reply.text, splice)
        splice.add("expert", self._splicer.close_reply())
        self._put(splice)

    async def _ask(self, name: str, request: str) -> ExpertReply:
        assert self._engine.experts is not None
        key = sample_key(self._request.seed, self._request.id, len(self._calls))
        reply = await self._engine.experts.ask(name, request, sample_key=key)
        self._calls.append(
            ExpertCall(
                reply.name,
                reply.status,
                reply.latency_s,
                reply.prompt_tokens,
                reply.completion_tokens,
                reply.cost_usd,
            )
        )
        if reply.status == "unknown_expert":
            raise _End("malformed", f"there is no expert named {name}")
        if reply.status == "budget":
            raise _End("budget")
        if reply.status != "ok":
            raise _End("fault", fault=f"expert:{reply.status}")
        return reply

    async def _lay_out(self, text: str, splice: Splice) -> None:
        """Put a reply's text, its programs and what they print into a splice."""
        left = self._limits.max_reply_length
        for kind, piece in split_reply(text):
            ids, is_cut = self._splicer.foreign(piece, left)
            is_cut |= kind == "code" and len(self._runs) >= self._limits.max_code_runs
            if kind == "code" and not is_cut:
                splice.add("expert", self._splicer.program(piece))
                splice.extend(await self._run(piece, "expert"))
            elif kind == "code":
                # Half a program, or one too many, must not run: the reply ends there and says so.
                splice.add("expert", self._splicer.marker())
            else:
                splice.add("expert", ids)
            if is_cut:
                return
            left -= len(ids)

    async def _execute(self, span: Span) -> None:
        """Run a program of the controller and splice what it prints."""
        splice = Splice()
        splice.add("environment", self._splicer.gap(self._context[-1]))
        if len(splice) + len(self._splicer.output("", 0)) > self._left:
            raise _End("length")
        splice.extend(await self._run(self._scanner.text(span).strip("\n"), "controller"))
        self._put(splice)

    async def _run(self, code: str, author: Author) -> Splice:
        """Run a program; the splice of its output."""
        assert self._engine.sandbox is not None
        if len(self._runs) >= self._limits.max_code_runs:
            raise _End("budget")
        try:
            result = await self._engine.sandbox.run(code)
        except SandboxError as error:
            logger.warning("rollout %s: the sandbox failed: %s", self._request.id, error)
            raise _End("fault", fault="sandbox:failure") from error
        self._runs.append(CodeRun(author, result.status, result.duration_s))
        if result.status == "sandbox_failure":
            raise _End("fault", fault="sandbox:failure")
        return self._splicer.output(result.text(), self._limits.max_output_length)

    def _put(self, splice: Splice) -> None:
        """Append a splice whole, or end the trajectory if it does not fit."""
        if len(splice) > self._left:
            raise _End("length")
        for author, ids in splice.runs:
            self._append(author, ids)

    def _trajectory(self, end: _End) -> Trajectory:
        request, scanner = self._request, self._scanner
        finish, answer, reason = end.finish, scanner.answer(), end.reason or scanner.problem()
        if request.mode == "plain":
            eos_ids = self._engine.tokenizer.eos_ids
            written = [i for i in self._context[len(request.prompt_ids) :] if i not in eos_ids]
            answer = self._engine.tokenizer.decode(written) or None
            reason = "" if scanner.ended else "no end of turn"
            finish = "answer" if finish == "eos" and answer is not None else finish
        return Trajectory(
            id=request.id,
            problem_id=request.problem_id,
            mode=request.mode,
            prompt_ids=tuple(request.prompt_ids),
            segments=scanner.segments(),
            finish=finish,
            well_formed=not reason,
            malformed_reason=reason,
            answer=answer,
            fault=end.fault,
            expert_calls=tuple(self._calls),
            code_runs=tuple(self._runs),
            seed=request.seed,
            step=request.step,
            sample_index=request.sample_index,
            info=dict(request.info),
        )
