"""The OpenAI chat API as our servers read it: bodies, messages, refusals in its error shape.

Also what a server does about clients that leave before they are answered.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from fastapi import Request

T = TypeVar("T")


class RequestError(Exception):
    """A request that the API refuses, as OpenAI would put it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str = "",
        headers: dict[str, str] | None = None,
    ) -> None:
        # JSON can spell lone surrogates, which no reply can hold.
        message = message.encode("utf-8", "replace").decode("utf-8")
        param = None if param is None else param.encode("utf-8", "replace").decode("utf-8")
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.body = {
            "error": {
                "message": message,
                "type": "server_error" if status >= 500 else "invalid_request_error",
                "param": param,
                "code": code or None,
            }
        }


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request, of a bounded size.

    Raises:
        RequestError: It is larger.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise RequestError(413, f"the body is larger than {max_bytes} bytes")
    return bytes(body)


def read_object(body: bytes) -> dict[str, Any]:
    """A body as a JSON object.

    Raises:
        RequestError: It is none.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError(400, "the body must be a JSON object")
    return fields


def message_texts(messages: Any) -> list[str]:
    """Texts of the messages, the last one being the user's.

    Raises:
        RequestError: They are no messages, or hold something else than text.
    """
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


def check_model(fields: dict[str, Any], known: Any) -> str:
    """The model that a request names.

    Raises:
        RequestError: It names none, or one that is not served here.
    """
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
    return model


async def unless_gone(work: Awaitable[T], gone: Awaitable[None]) -> T | None:
    """The result of `work`; None, and `work` is ended, if the client goes away before."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(gone)
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def until_gone(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
