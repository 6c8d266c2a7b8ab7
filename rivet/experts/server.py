"""The embedded expert endpoint: an OpenAI-compatible HTTP server around plain functions.

It serves `/v1/models`, `/v1/chat/completions` (with `usage`) and `/health` on the loopback
interface only, so that the demo and the tests talk to experts exactly as they would to a provider.
What the experts are is the caller's business: functions from request text and seed to reply text.
Token counts in `usage` are words and signs, not those of any tokenizer. No streaming.

`rivet.experts.server_process` runs it as a child process.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


class RequestError(Exception):
    """A request that the API refuses, as OpenAI would put it."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str = ""):
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {
                "message": message,
                "type": "server_error" if status >= 500 else "invalid_request_error",
                "param": param,
                "code": code or None,
            }
        }


# --- the application ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Question:
    """The part of a chat completion request that an expert function sees."""

    model: str
    text: str
    seed: int
    prompt_tokens: int


def build_app(experts: Mapping[str, ExpertFunction]) -> FastAPI:
    """The web application that serves expert functions under their names as models."""
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    app = FastAPI(title="rivet experts", openapi_url=None)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        rows = [{"id": name, "object": "model", "owned_by": "rivet"} for name in experts]
        return JSONResponse({"object": "list", "data": rows})

    async def chat_completions(request: Request) -> Response:
        try:
            question = read_question(await _read_body(request), experts)
            return JSONResponse(answer_question(question, experts[question.model]))
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


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def read_question(body: bytes, known: Mapping[str, Any]) -> Question:
    """Read and check the body of a chat completion request.

    Raises:
        RequestError: The body is no JSON object, or a field is missing, wrong or not supported.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError(400, "the body must be a JSON object")
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise RequestError(400, "model must be a non-empty string", param="model")
    if model not in known:
        names = ", ".join(known)
        raise RequestError(
            404,
            f"no model {model!r}; expected one of {names}",
            param="model",
            code="model_not_found",
        )
    if fields.get("stream"):
        raise RequestError(400, "streaming is not supported", param="stream")
    if fields.get("n") not in (None, 1):
        raise RequestError(400, "n must be 1", param="n")
    seed = fields.get("seed")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise RequestError(400, "seed must be an integer", param="seed")
    texts = _message_texts(fields.get("messages"))
    return Question(model, texts[-1], seed or 0, sum(map(count_tokens, texts)))


def _message_texts(messages: Any) -> list[str]:
    """Texts of the messages, the last one being the user's."""
    if not isinstance(messages, list) or not messages:
        raise RequestError(400, "messages must be a non-empty list", param="messages")
    texts = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(400, f"{where} must be an object with a role", param=where)
        content = message.get("content")
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, dict) else None for part in content]
            content = (
                None if not all(isinstance(p, str) for p in parts) else "".join(map(str, parts))
            )
        if not isinstance(content, str):
            raise RequestError(400, f"{where}.content must be text", param=f"{where}.content")
        texts.append(content)
    if messages[-1]["role"] != "user":
        raise RequestError(400, "the last message must be the user's", param="messages")
    return texts


def answer_question(question: Question, expert: ExpertFunction) -> dict[str, Any]:
    """Ask an expert function and put its reply into a chat completion.

    Raises:
        RequestError: The function failed.
    """
    try:
        text = expert(question.text, question.seed)
    except Exception as error:  # the one boundary around foreign functions
        raise RequestError(500, f"{question.model} failed: {type(error).__name__}") from error
    completion_tokens = count_tokens(text)
    return {
        "id": f"chatcmpl-{time.monotonic_ns():x}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": question.model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": question.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": question.prompt_tokens + completion_tokens,
        },
    }


def count_tokens(text: str) -> int:
    """Number of words and signs in a text."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def run_server(
    experts: Mapping[str, ExpertFunction], *, port: int = 0, parent_pid: int | None = None
) -> None:
    """Serve until the process is stopped; prints the port once it listens.

    Args:
        experts: Functions by name.
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

    asyncio.run(serve())


async def _stop_with_parent(server: Any, parent_pid: int | None) -> None:
    """Stop the server when its parent has died, also by SIGKILL."""
    while parent_pid is not None and os.getppid() == parent_pid:
        await asyncio.sleep(_PARENT_POLL_S)
    if parent_pid is not None:
        server.should_exit = server.force_exit = True
