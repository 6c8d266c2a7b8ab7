"""A real HTTP server that misbehaves on demand, and one that behaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

Behaviour = bytes | Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


def completion(text: Any = "42", **fields: Any) -> dict[str, Any]:
    """The body of a chat completion."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
    return {"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage} | fields


def http(
    body: Any, status: int = 200, content_type: str = "application/json", **headers: str
) -> bytes:
    """A whole response; what is not bytes is sent as JSON."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(raw)}"]
    lines += [f"Content-Type: {content_type}"] if content_type else []
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw


def reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with RST."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class Misbehaving:
    """Answers request after request with the next behaviour; the last one repeats."""

    def __init__(self) -> None:
        self.behaviours: list[Behaviour] = [http(completion())]
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.in_flight = 0
        self.peak = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in head.split("\r\n")[1:])
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.requests.append((headers, json.loads(body)))
                behaviour = self.behaviours[0]
                if len(self.behaviours) > 1:
                    self.behaviours.pop(0)
                self.in_flight += 1
                self.peak = max(self.peak, self.in_flight)
                try:
                    if isinstance(behaviour, bytes):
                        writer.write(behaviour)
                    else:
                        await behaviour(reader, writer)
                    await writer.drain()
                finally:
                    self.in_flight -= 1
        writer.close()


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Misbehaving]:
    """A misbehaving server on a free port."""
    state = Misbehaving()
    server = await asyncio.start_server(state.handle, "127.0.0.1", 0)
    state.port = server.sockets[0].getsockname()[1]
    try:
        yield state
    finally:
        server.close()
