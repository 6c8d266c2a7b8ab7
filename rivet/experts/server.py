"""The embedded expert endpoint: an OpenAI-compatible HTTP server around functions or models.

It serves `/v1/models`, `/v1/chat/completions` (with `usage`) and `/health` on the loopback
interface only, so that the demo and the tests talk to experts exactly as they would to a provider.
What the experts are is the caller's business: functions from request text and seed to reply text,
which several threads may call at once and whose `usage` counts words and signs, or chat models
(`rivet.experts.local_model`), which count their own tokens. No streaming.

`rivet.experts.server_process` runs it as a child process.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rivet.chat_api import (
    RequestError,
    check_model,
    message_texts,
    read_body,
    read_object,
    unless_gone,
    until_gone,
)

if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from fastapi.responses import Response

HOST = "127.0.0.1"
MAX_BODY_BYTES = 1_000_000
READY_PREFIX = "listening on port "
_PARENT_POLL_S = 0.25

ExpertFunction = Callable[[str, int], str]


class ServerError(RuntimeError):
    """The embedded server did not come up; the message ends with what it printed."""


# --- the application ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Question:
    """The part of a chat completion request that an expert function sees."""

    model: str
    text: str
    seed: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ChatQuestion:
    """The part of a chat completion request that a chat model sees.

    Attributes:
        messages: Each with `role` and `content`, text only.
        max_tokens: Longest reply; None leaves it to the model.
        temperature, top_p: As asked for; None leaves them to the model.
        seed: 0 if none was sent.
    """

    messages: list[dict[str, str]]
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """What a chat model answers, with its own count of tokens."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str = "stop"


class ChatModel(Protocol):
    """An expert that reads whole conversations, many at the same time."""

    async def complete(self, question: ChatQuestion) -> ChatCompletion:
        """Answer one question, or raise `RequestError`."""
        ...

    async def aclose(self) -> None:
        """Called once, when the server stops."""
        ...


Expert = ExpertFunction | ChatModel


def build_app(experts: Mapping[str, Expert]) -> FastAPI:
    """The web application that serves experts under their names as models."""
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse, Response
    from starlette.exceptions import HTTPException

    app = FastAPI(title="rivet experts", openapi_url=None)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        rows = [{"id": name, "object": "model", "owned_by": "rivet"} for name in experts]
        return JSONResponse({"object": "list", "data": rows})

    async def chat_completions(request: Request) -> Response:
        try:
            fields = read_object(await read_body(request, MAX_BODY_BYTES))
            question = read_question(fields, experts)
            expert = experts[question.model]
            if callable(expert):
                # In a thread: a function that takes its time keeps nobody else waiting.
                return JSONResponse(await asyncio.to_thread(answer_question, question, expert))
            work = expert.complete(read_chat_question(fields, question.seed))
            # A client that gave up asks again: the model must not go on with the first question.
            reply = await unless_gone(work, until_gone(request))
            if reply is None:
                return Response(status_code=499)  # nobody reads it
            return JSONResponse(completion_body(question.model, reply))
        except RequestError as error:
            return JSONResponse(error.body, status_code=error.status)

    def no_such_route(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        message = f"{request.method} {request.url.path} is not served here"
        return JSONResponse(RequestError(status, message).body, status_code=status)

    # Plain routes: parsing the body by hand costs a fraction of a model's validation per call.
    app.add_route("/health", health, methods=["GET"])
    app.add_route("/v1/models", models, methods=["GET"])
    app.add_route("/v1/chat/completions", chat_completions, methods=["POST"])
    app.add_exception_handler(HTTPException, no_such_route)
    return app


def read_question(fields: dict[str, Any], known: Mapping[str, Any]) -> Question:
    """Read and check the body of a chat completion request.

    Raises:
        RequestError: A field is missing, wrong or not supported.
    """
    model = check_model(fields, known)
    if fields.get("stream"):
        raise RequestError(400, "streaming is not supported", param="stream")
    if fields.get("n") not in (None, 1):
        raise RequestError(400, "n must be 1", param="n")
    seed = fields.get("seed")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise RequestError(400, "seed must be an integer", param="seed")
    texts = message_texts(fields.get("messages"))
    return Question(model, texts[-1], seed or 0, sum(map(count_tokens, texts)))


def read_chat_question(fields: dict[str, Any], seed: int) -> ChatQuestion:
    """The rest of what a chat model needs, from a body that `read_question` has passed.

    Raises:
        RequestError: A field is wrong.
    """
    texts = message_texts(fields["messages"])
    return ChatQuestion(
        [{"role": m["role"], "content": t} for m, t in zip(fields["messages"], texts, strict=True)],
        _max_tokens(fields),
        _number(fields, "temperature", 0.0, 100.0),
        _number(fields, "top_p", 1e-6, 1.0),
        seed,
    )


def _max_tokens(fields: dict[str, Any]) -> int | None:
    name = "max_tokens" if fields.get("max_completion_tokens") is None else "max_completion_tokens"
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError(400, f"{name} must be an integer of at least 1", param=name)
    return value


def _number(fields: dict[str, Any], name: str, low: float, high: float) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(400, f"{name} must be a number from {low:g} to {high:g}", param=name)
    return float(value)


def answer_question(question: Question, expert: ExpertFunction) -> dict[str, Any]:
    """Ask an expert function and put its reply into a chat completion.

    Raises:
        RequestError: The function failed.
    """
    try:
        text = expert(question.text, question.seed)
    except Exception as error:  # the one boundary around foreign functions
        raise RequestError(500, f"{question.model} failed: {type(error).__name__}") from error
    reply = ChatCompletion(text, question.prompt_tokens, count_tokens(text))
    return completion_body(question.model, reply)


def completion_body(model: str, reply: ChatCompletion) -> dict[str, Any]:
    """A chat completion as OpenAI writes it."""
    message = {"role": "assistant", "content": reply.text}
    return {
        "id": f"chatcmpl-{time.monotonic_ns():x}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": reply.finish_reason}],
        "usage": {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.completion_tokens,
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        },
    }


def count_tokens(text: str) -> int:
    """Number of words and signs in a text."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def run_server(
    experts: Mapping[str, Expert], *, port: int = 0, parent_pid: int | None = None
) -> None:
    """Serve until the process is stopped; prints the port once it listens.

    Args:
        experts: Functions and models by name.
        port: 0 picks a free one.
        parent_pid: End as soon as this is no longer the parent process.

    Raises:
        ServerError: The port cannot be had.
    """
    import uvicorn

    # With the protocol named, asyncio turns Nagle's algorithm off; else each reply waits 40 ms.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ServerError(
            f"cannot listen on {HOST}:{port} ({error}); choose another --port, or 0 for a free one"
        ) from error
    listener.listen(512)
    config = uvicorn.Config(
        build_app(experts),
        log_level="warning",
        access_log=False,
        lifespan="off",
        backlog=512,
        timeout_keep_alive=60,
    )
    server = uvicorn.Server(config)

    async def serve() -> None:
        watch = asyncio.create_task(_stop_with_parent(server, parent_pid))
        bound = listener.getsockname()[1]
        print(f"{READY_PREFIX}{bound}", flush=True)
        print(f"base_url http://{HOST}:{bound}/v1, models {', '.join(experts)}", flush=True)
        try:
            await server.serve(sockets=[listener])
        finally:
            watch.cancel()
            for expert in experts.values():
                if not callable(expert):
                    await expert.aclose()

    asyncio.run(serve())


async def _stop_with_parent(server: Any, parent_pid: int | None) -> None:
    """Stop the server when its parent has died, also by SIGKILL."""
    while parent_pid is not None and os.getppid() == parent_pid:
        await asyncio.sleep(_PARENT_POLL_S)
    if parent_pid is not None:
        server.should_exit = server.force_exit = True
