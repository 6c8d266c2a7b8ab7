"""Connections to endpoints: clients, concurrency limits and proxies, and a bound on every body."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast
from urllib.parse import urlsplit

import httpx2  # what the openai client speaks HTTP with
import openai

from rivet.experts.completions import BadReply
from rivet.experts.config import ExpertConfig, api_key

_CONNECT_TIMEOUT_S = 10.0
# Providers quote a rejected key with its middle starred out: the rest is still part of a key.
_KEY_LIKE = re.compile(r"(?i)\b(?:(?:sk|pk|gsk|xai)[-_]\S+|(?:bearer|key)[-_: ]+\S*[\d*]\S*)")


@dataclass(slots=True)
class Endpoint:
    """One base URL with its client."""

    base_url: str
    client: openai.AsyncOpenAI
    key: str = field(repr=False)
    in_flight: int = 0

    def redact(self, text: str) -> str:
        """Remove the key, and what looks like one, from a text for people."""
        if self.key:
            text = text.replace(self.key, "[key]")
        return _KEY_LIKE.sub("[key]", text)


class Connections:
    """Clients and concurrency limits, all bound to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, environ: Mapping[str, str]) -> None:
        self.loop = loop
        self._environ = environ
        self._endpoints: dict[tuple[str, str | None, int], Endpoint] = {}
        self._semaphores: dict[str, asyncio.Semaphore] = {}

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

    def least_loaded(self, config: ExpertConfig, tried: Sequence[str]) -> Endpoint:
        """The base URL tried least often in this call, then the one with the fewest requests."""
        endpoints = [self.endpoint(config, url) for url in config.base_urls]
        return min(endpoints, key=lambda e: (tried.count(e.base_url), e.in_flight))

    def endpoint(self, config: ExpertConfig, base_url: str) -> Endpoint:
        """The client of a base URL; experts with the same URL, key and size limit share it."""
        identity = (base_url, config.key_env, config.max_reply_bytes)
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
            self._endpoints[identity] = Endpoint(base_url, client, key)
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
            raise BadReply(f"content encoding is {encoding[:40]!r}, which was not asked for")
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
