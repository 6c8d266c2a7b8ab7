"""The web application: who may ask what, errors in OpenAI's shape, the page, health and metrics.

Nothing that a user wrote is logged unless `logs_text` says so, and no label of a metric holds it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.staticfiles import StaticFiles

from rivet import __version__
from rivet.chat_api import RequestError, read_body, unless_gone, until_gone
from rivet.serving.chat_request import read_chat_request
from rivet.serving.completions import BUG, Completions, log_bug
from rivet.serving.gate import Full, Gate
from rivet.serving.metrics import Metrics
from rivet.serving.options import ServerOptions
from rivet.serving.replies import Replies

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from rivet.async_solver import AsyncSolver

logger = logging.getLogger(__name__)

PAGE = Path(__file__).with_name("page")
Handler = Callable[[Request], Awaitable[Response]]
_BODY_S = 30.0  # for a client to send its body
_READ_S = 30.0  # for a client to read the rest of its stream, after the deadline
# The page runs its own files only; text of a model can never become a script.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "font-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def build_app(solver: AsyncSolver, options: ServerOptions) -> FastAPI:
    """The application around an open solver."""
    app = FastAPI(title="rivet", openapi_url=None)
    server = _Server(solver, options)
    for path, method, handler, is_open in (
        ("/health", "GET", server.health, True),
        ("/metrics", "GET", server.metrics_text, False),
        ("/v1/models", "GET", server.models, False),
        ("/v1/models/{model:path}", "GET", server.model, False),
        ("/v1/chat/completions", "POST", server.chat, False),
        ("/", "GET", server.page, True),
    ):
        route = path.partition("{")[0].rstrip("/") or "/"
        app.add_route(path, server.guarded(route, handler, is_open=is_open), methods=[method])
    app.mount("/page", _PageFiles(directory=PAGE), name="page")
    app.add_exception_handler(HTTPException, server.no_such_route)
    return app


class _PageFiles(StaticFiles):
    """Files of the page, with its headers."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_PAGE_HEADERS)
        return response


class _EventStream(StreamingResponse):
    """A stream that gives its reserved places back however it ends, also before it began.

    A client that does not read loses the connection after `limit_s`: it must not hold places.
    """

    def __init__(self, events: AsyncGenerator[bytes], held: ExitStack, limit_s: float) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        self._events, self._held, self._limit_s = events, held, limit_s
        self.on_end: Callable[[], None] = _nothing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            logger.warning("a client did not read its stream in %g s; it is cut", self._limit_s)
        finally:
            await self._events.aclose()
            self._held.close()
            self.on_end()


def _nothing() -> None:
    pass


class _Server:
    """Handlers of the routes."""

    def __init__(self, solver: AsyncSolver, options: ServerOptions) -> None:
        self._options = options
        self._gate = Gate(options.max_concurrent, options.max_queue)
        self._metrics = Metrics(self._gate)
        self._completions = Completions(solver, options, self._gate, self._metrics)
        self._started = int(time.time())

    def guarded(self, route: str, handler: Handler, *, is_open: bool) -> Handler:
        """A handler behind the checks, its errors in the API's shape, counted and logged."""

        async def handle(request: Request) -> Response:
            started = time.perf_counter()
            try:
                self._admit(request, is_open=is_open)
                response = await handler(request)
            except RequestError as error:
                response = JSONResponse(error.body, error.status, error.headers)
            except ClientDisconnect:
                response = Response(status_code=499)  # nobody reads it
            except Exception as error:  # the boundary: one request's bug is not everybody's
                log_bug(error, logs_text=self._options.logs_text)
                response = JSONResponse(RequestError(500, BUG).body, 500)

            def count() -> None:
                seconds = time.perf_counter() - started
                self._metrics.request(route, response.status_code, seconds)
                if route.startswith("/v1"):
                    logger.info(
                        "%s %s %d %.3f s", request.method, route, response.status_code, seconds
                    )

            if isinstance(response, _EventStream):
                response.on_end = count
            else:
                count()
            return response

        return handle

    def no_such_route(self, request: Request, error: Exception) -> Response:
        """What no route serves, in the API's shape."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        self._metrics.request("other", status, 0.0)
        refusal = RequestError(status, f"{request.method} {request.url.path[:200]} is not served")
        headers = getattr(error, "headers", None)
        return JSONResponse(refusal.body, status, headers)

    async def health(self, request: Request) -> Response:
        """Whether the server is up, and how busy."""
        return JSONResponse(
            {
                "status": "ok",
                "model": self._options.model,
                "version": __version__,
                "running": self._gate.running,
                "waiting": self._gate.waiting,
            }
        )

    async def metrics_text(self, request: Request) -> Response:
        """Counters for Prometheus."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """The model by its name."""
        name = request.path_params["model"]
        if name != self._options.model:
            raise RequestError(404, f"no model {name[:200]!r}", code="model_not_found")
        return JSONResponse(self._card())

    async def page(self, request: Request) -> Response:
        """The web page."""
        text = (PAGE / "index.html").read_text(encoding="utf-8")
        return Response(text, media_type="text/html", headers=_PAGE_HEADERS)

    async def chat(self, request: Request) -> Response:
        """A chat completion, in one piece or as a stream."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Also what keeps other sites' forms out: browsers ask before they send this type.
            raise RequestError(415, "the body must be sent as application/json")
        try:
            async with asyncio.timeout(_BODY_S):
                body = await read_body(request, self._options.max_body_bytes)
        except TimeoutError as error:
            raise RequestError(408, f"the body did not arrive in {_BODY_S:g} s") from error
        asked = read_chat_request(body, self._options)
        replies = Replies(asked, self._options.model)
        prompt = await self._completions.prompt(asked)
        with ExitStack() as held:
            try:
                held.enter_context(self._gate.reserve(asked.n))
            except Full as error:
                raise self._completions.full() from error
            if asked.stream:
                events = self._completions.stream(asked, prompt, replies)
                return _EventStream(events, held.pop_all(), asked.deadline_s + _READ_S)
            work = self._completions.whole(asked, prompt)
            solutions = await unless_gone(work, until_gone(request))
        if solutions is None:
            raise ClientDisconnect
        return JSONResponse(replies.completion(solutions))

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._options.model,
            "object": "model",
            "created": self._started,
            "owned_by": "rivet",
        }

    def _admit(self, request: Request, *, is_open: bool) -> None:
        """Refuse foreign host names and wrong keys."""
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if self._options.hosts and name.lower() not in self._options.hosts:
            raise RequestError(421, "this host name is not served here; see allowed_hosts")
        if is_open or not self._options.api_key:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(key.strip().encode(), self._options.api_key.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise RequestError(
                401,
                "the key is missing or wrong; send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
