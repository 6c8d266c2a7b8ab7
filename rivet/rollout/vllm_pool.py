"""Several vLLM servers as one: least loaded first, watched, failing over in flight.

A request is a pure function of its body, so one that is lost with its server is sent to another
whole: the caller sees one result, and what a dead server may have sampled is never seen by anyone.
A server that failed is asked for its health until it is back; before it is used again it gets the
adapter that the others have. With all of them gone the requests wait, for a bounded time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rivet.rollout.backend import BackendError
from rivet.rollout.vllm_server import (
    AdapterMissingError,
    RequestFailedError,
    ServedModel,
    ServerLostError,
    VLLMServer,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A session stays with the server that holds its prefix unless that has this many calls more than
# the least loaded one: a prefill costs less than waiting behind them.
_LOYALTY = 8
_FIRST_PAUSE_S = 0.1  # before a failed request is made again, doubled each time
_MISSED_CHECKS = 3  # failed health checks of a server that answers nothing else either


@dataclass(eq=False)
class _Member:
    """A server and what is known of it."""

    server: VLLMServer
    in_flight: int = 0
    is_up: bool = True
    adapter: str | None = None
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)


class ServerPool:
    """Spreads requests over servers of one model. Use it inside one event loop.

    Args:
        servers: At least one.
        health_interval_s: Between two health checks of a server.
        recovery_s: How long requests wait while no server is up.

    Attributes:
        failovers: Requests that were sent again to another server, or again to the same.
        takes_back: Whether a server that was left out is used again once it is healthy. Not where
            its weights are more than an adapter: it may be a new process with those of its start.
    """

    def __init__(
        self,
        servers: Sequence[VLLMServer],
        *,
        health_interval_s: float = 2.0,
        recovery_s: float = 120.0,
    ) -> None:
        if not servers:
            raise ValueError("no vllm servers; expected at least one url")
        self._members = [_Member(server) for server in servers]
        self._interval_s = health_interval_s
        self._recovery_s = recovery_s
        self._sessions: dict[str, _Member] = {}
        self._adapter: tuple[str, str] | None = None
        self._changed = asyncio.Condition()
        self._watches: list[asyncio.Task[None]] = []
        self.failovers = 0
        self.takes_back = True

    async def open(self) -> ServedModel:
        """Ask every server what it serves, and start to watch them.

        Raises:
            BackendError: One does not answer, or they serve different models.
        """
        served = [await member.server.served_model() for member in self._members]
        for member, model in zip(self._members, served, strict=True):
            if (model.name, model.root) != (served[0].name, served[0].root):
                raise BackendError(
                    f"{member.server.url} serves {model.name} from {model.root}, but "
                    f"{self._members[0].server.url} {served[0].name} from {served[0].root}; "
                    "expected the same model on all servers"
                )
        self._watches = [asyncio.create_task(self._watch(member)) for member in self._members]
        shortest = min(model.max_model_len for model in served)
        return ServedModel(served[0].name, served[0].root, shortest)

    async def close(self) -> None:
        """Stop watching."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)

    async def run(
        self, work: Callable[[VLLMServer], Awaitable[T]], *, session: str | None = None
    ) -> T:
        """Do a piece of work on the best server, and on another one if that is lost meanwhile.

        Args:
            work: A request; it may be made several times, one result counts.
            session: Prefer the server that had the session's last request.

        Raises:
            RequestRefusedError: The request itself is wrong.
            BackendError: No server is up, or each one that was tried failed.
        """
        attempts = len(self._members) + 2
        reason: BackendError | None = None
        avoid: set[_Member] = set()
        for attempt in range(attempts):
            member = await self._pick(session, avoid)
            self.failovers += attempt > 0
            member.in_flight += 1
            try:
                await self._ensure_adapter(member)
                return await self._until_lost(member, work(member.server))
            except AdapterMissingError as error:
                member.adapter, reason = None, error
            except (ServerLostError, RequestFailedError) as error:
                # One bad request, or one broken connection, must not take the server from all
                # others, whose requests are in flight on it.
                reason = error
                avoid.add(member)
                if member.is_up and not await member.server.is_healthy():
                    await self._mark(member, is_up=False, why=str(error))
                await asyncio.sleep(_FIRST_PAUSE_S * 2**attempt)
            finally:
                member.in_flight -= 1
        raise BackendError(f"{attempts} attempts failed, the last one: {reason}") from reason

    def left_out(self) -> list[str]:
        """URLs of the servers that are not used at the moment."""
        return [member.server.url for member in self._members if not member.is_up]

    def release(self, session: str) -> None:
        """Forget where a session was."""
        self._sessions.pop(session, None)

    async def use_adapter(self, name: str, folder: str, *, load: bool = True) -> None:
        """Sample with this adapter from now on.

        Args:
            name: A new one for each version.
            folder: Where the servers see it.
            load: Load it now everywhere; else each server loads it with its next request.

        Raises:
            RequestRefusedError: A server refuses it.
            BackendError: No server is up.
        """
        before, self._adapter = self._adapter, (name, folder)
        if not load:
            return
        ready = 0
        for outcome in await asyncio.gather(
            *(self._load(member, before) for member in self._members if member.is_up),
            return_exceptions=True,
        ):
            if isinstance(outcome, (ServerLostError, RequestFailedError)):
                logger.warning("adapter %s: %s", name, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                ready += 1
        if not ready:
            # Wait for a server as a request would; the adapter goes with it.
            await self.run(_nothing)

    async def on_each(self, work: Callable[[VLLMServer], Awaitable[T]]) -> dict[str, T]:
        """Do a piece of work on every server that is up; url -> result. A lost one is left out.

        Raises:
            BackendError: None of them did it.
        """
        results: dict[str, T] = {}
        for member in self._members:
            if not member.is_up:
                continue
            try:
                await self._ensure_adapter(member)
                results[member.server.url] = await self._until_lost(member, work(member.server))
            except (ServerLostError, RequestFailedError, AdapterMissingError) as error:
                await self._mark(member, is_up=False, why=str(error))
        if not results:
            raise BackendError("no vllm server is up: " + self._names())
        return results

    async def _load(self, member: _Member, before: tuple[str, str] | None) -> None:
        try:
            await self._ensure_adapter(member)
            if before is not None:
                await member.server.unload_adapter(before[0])
        except ServerLostError as error:
            await self._mark(member, is_up=False, why=str(error))
            raise

    async def _ensure_adapter(self, member: _Member) -> None:
        async with member.loading:
            if self._adapter is not None and member.adapter != self._adapter[0]:
                name, folder = self._adapter
                await member.server.load_adapter(name, folder)
                member.adapter = name

    async def _pick(self, session: str | None, avoid: set[_Member]) -> _Member:
        """The least loaded server that is up, or the session's own if it is not much worse.

        One of those that failed at the request already only if there is no other.
        """
        deadline = time.monotonic() + self._recovery_s
        while not (up := [member for member in self._members if member.is_up]):
            left = deadline - time.monotonic()
            if not self.takes_back:
                raise BackendError(f"no vllm server is left: {self._names()}")
            if left <= 0:
                raise BackendError(
                    f"no vllm server is up since {self._recovery_s:g} s: {self._names()}"
                )
            async with self._changed:
                try:
                    await asyncio.wait_for(self._changed.wait(), left)
                except TimeoutError:
                    pass
        up = [member for member in up if member not in avoid] or up
        best = min(up, key=lambda member: member.in_flight)
        mine = self._sessions.get(session) if session is not None else None
        if mine in up and mine.in_flight <= best.in_flight + _LOYALTY:
            best = mine
        if session is not None:
            self._sessions[session] = best
        return best

    async def _until_lost(self, member: _Member, work: Awaitable[T]) -> T:
        """The result of the work, or an error as soon as its server is found dead."""
        task = asyncio.ensure_future(work)
        lost = asyncio.ensure_future(member.lost.wait())
        try:
            await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ServerLostError(f"{member.server.url}: it stopped answering")
        finally:
            lost.cancel()
            task.cancel()
            await asyncio.gather(task, lost, return_exceptions=True)

    async def _watch(self, member: _Member) -> None:
        """Find a server that hangs, and one that is back."""
        missed = 0
        while True:
            if await member.server.is_healthy():
                missed = 0
                if not member.is_up and self.takes_back:
                    await self._mark(member, is_up=True)
            else:
                missed += 1
                # Without another one there is nowhere to go: a busy machine may answer late.
                others = any(m.is_up for m in self._members if m is not member)
                if member.is_up and missed >= _MISSED_CHECKS and others:
                    await self._mark(member, is_up=False, why=f"{missed} health checks failed")
            await asyncio.sleep(self._interval_s)

    async def _mark(self, member: _Member, *, is_up: bool, why: str = "") -> None:
        if member.is_up == is_up:
            return
        member.is_up = is_up
        if is_up:
            logger.info("vllm server %s is back", member.server.url)
            member.lost.clear()
        else:
            logger.warning(
                "vllm server %s is left out%s: %s",
                member.server.url,
                " until it is healthy" if self.takes_back else "",
                why,
            )
            member.adapter = None  # it may come back as a new process
            member.lost.set()
        async with self._changed:
            self._changed.notify_all()

    def _names(self) -> str:
        return ", ".join(member.server.url for member in self._members)


async def _nothing(server: VLLMServer) -> None:
    return None
