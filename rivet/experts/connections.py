"""Connections to endpoints: clients, circuits, concurrency limits and proxies; bounded bodies."""

from __future__ import annotations

import asyncio
import logging
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast
from urllib.parse import urlsplit

import httpx2  # what the openai client speaks HTTP with
import openai

from rivet.experts.circuit import Circuit
from rivet.experts.completions import BadReply
from rivet.experts.config import ExpertConfig, api_key
from rivet.experts.redact import Redactor

_CONNECT_TIMEOUT_S = 10.0
# What these log includes headers and reason phrases as the endpoint wrote them.
_TALKATIVE = ("openai", "httpx2", "httpcore2")


@dataclass(slots=True)
class Endpoint:
    """One base URL with its client and its health."""

    base_url: str
    client: openai.AsyncOpenAI = field(repr=False)
    circuit: Circuit
    redactor: Redactor
    in_flight: int = 0


class Connections:
    """Clients and concurrency limits, all bound to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, environ: Mapping[str, str]) -> None:
        self.loop = loop
        self._environ = environ
        self._endpoints: dict[tuple[str, str | None, int, int, float], Endpoint] = {}
        self._semaphores: dict[str, asyncio.Semaphore] = {}
        self._changed = asyncio.Event()
        self._first: asyncio.Future[None] | None = None
        self._under_way = 0
        self._idle = asyncio.Event()
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.WARNING)

    async def aclose(self) -> None:
        """Close them; those of another event loop are dropped, since only it could."""
        if self.loop is asyncio.get_running_loop():
            for endpoint in self._endpoints.values():
                await endpoint.client.close()

    def semaphore(self, config: ExpertConfig) -> asyncio.Semaphore:
        """Bounds the requests of an expert that are under way."""
        if config.name not in self._semaphores:
            self._semaphores[config.name] = asyncio.Semaphore(config.max_concurrency)
        return self._semaphores[config.name]

    def least_loaded(self, config: ExpertConfig, tried: Sequence[str]) -> Endpoint | None:
        """Of the base URLs that may be asked now, the one tried least often in this call, then the
        one with the fewest requests under way; None if there is none.
        """
        ready = [e for e in self._all(config) if e.circuit.ready_in() <= 0]
        if not ready:
            return None
        return min(ready, key=lambda e: (tried.count(e.base_url), e.in_flight))

    async def wait_for_endpoint(
        self, config: ExpertConfig, tried: Sequence[str], patience_s: float
    ) -> Endpoint | None:
        """As `least_loaded`, but waits until one may be asked; None if none may be in time."""
        deadline = self.loop.time() + patience_s
        while (endpoint := self.least_loaded(config, tried)) is None:
            wait_s = min(e.circuit.ready_in() for e in self._all(config))
            left_s = deadline - self.loop.time()
            # A trial under way (inf) may end at any moment.
            if left_s <= 0 or left_s < wait_s < float("inf"):
                return None
            try:
                async with asyncio.timeout(min(wait_s, left_s)):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return endpoint

    def tell_waiters(self) -> None:
        """An attempt is over: whoever waits for an endpoint looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Around a question that is put to a provider, until its reply is kept."""
        self._under_way += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        if self._under_way:
            await self._idle.wait()

    async def once(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do something a single time, however many ask for it; all of them get its outcome."""
        if self._first is None:
            self._first = self.loop.create_task(work())
        await asyncio.shield(self._first)

    def why_none(self, config: ExpertConfig) -> str:
        """Why no base URL may be asked, for people."""
        reasons = []
        for endpoint in self._all(config):
            if endpoint.circuit.state == "closed":
                reasons.append(f"{endpoint.base_url} asked to be left alone")
            else:
                last = endpoint.circuit.last_failure
                reasons.append(f"{endpoint.base_url} failed too often (last: {last})")
        return "; ".join(reasons)

    def _all(self, config: ExpertConfig) -> list[Endpoint]:
        return [self.endpoint(config, url) for url in config.base_urls]

    def endpoint(self, config: ExpertConfig, base_url: str) -> Endpoint:
        """A base URL with its client; experts with the same URL, key and bounds share it."""
        identity = (
            base_url,
            config.key_env,
            config.max_reply_bytes,
            config.circuit_failures,
            config.circuit_cooldown_s,
        )
        if identity not in self._endpoints:
            key = api_key(config, self._environ)
            timeout = httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S)
            http = httpx2.AsyncClient(
                transport=_BoundedTransport(base_url, config.max_reply_bytes),
                # Compressed bodies would slip a large text past the size limit.
                headers={"Accept-Encoding": "identity"},
                follow_redirects=False,
                timeout=timeout,
            )
            # "none": the client insists on a key, and endpoints without one ignore it.
            client = openai.AsyncOpenAI(
                base_url=base_url,
                api_key=key or "none",
                max_retries=0,
                timeout=timeout,
                http_client=http,
            )
            # The client fills these from OpenAI's own variables, whoever is being asked.
            client.organization = client.project = client.admin_api_key = None
            circuit = Circuit(config.circuit_failures, config.circuit_cooldown_s)
            self._endpoints[identity] = Endpoint(base_url, client, circuit, Redactor(key))
        return self._endpoints[identity]


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    """HTTP that stops reading a body, also that of an error, at a size limit."""

    def __init__(self, base_url: str, max_bytes: int) -> None:
        super().__init__(
            verify=_ssl_context(),
            proxy=_proxy_for(base_url),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=100),
        )
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        encoding = response.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            await response.aclose()
            raise BadReply(f"content encoding is {encoding!r}, which was not asked for")
        response.stream = _BoundedStream(
            cast(httpx2.AsyncByteStream, response.stream), self._max_bytes
        )
        return response


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._stream:
            size += len(chunk)
            if size > self._max_bytes:
                raise BadReply(f"body is larger than {self._max_bytes} bytes", is_final=True)
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


@cache
def _ssl_context() -> Any:
    return httpx2.create_ssl_context()


def _proxy_for(base_url: str) -> str | None:
    """The proxy that the environment names for a URL; none for this machine itself."""
    parts = urlsplit(base_url)
    host = parts.hostname or ""
    is_here = host in ("localhost", "::1") or host.startswith("127.")
    if is_here or urllib.request.proxy_bypass(host):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")
