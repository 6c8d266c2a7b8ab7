"""A real HTTP server that misbehaves on demand, down to the socket, and the faults that it knows.

`FAULTS` maps each fault to what the server does and to the status that a call must end with.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
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


async def hang(reader, writer):
    await reader.read()


async def drip(reader, writer):
    """Send a body that never ends, a byte at a time, for as long as anybody listens."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
    writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"1\r\n \r\n")
        await writer.drain()
        await asyncio.sleep(0.01)


async def flood(reader, writer):
    """Send a body without a stated length that never ends."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
    writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
        await writer.drain()


async def reset_mid_body(reader, writer):
    writer.write(http(completion())[:-20])
    await writer.drain()
    reset(writer)


async def close_mid_body(reader, writer):
    writer.write(http(completion())[:-20])
    await writer.drain()
    writer.close()


async def reset_at_once(reader, writer):
    reset(writer)


TEXT = json.dumps(completion("<answer>\\boxed{42}</answer>")).encode()
FAULTS = {
    "truncated JSON": (http(TEXT[:-30]), "bad_response"),
    "no JSON": (http(b"Service is fine, <b>really</b>"), "bad_response"),
    "empty body": (http(b""), "bad_response"),
    "deeply nested JSON": (http(b"[" * 100_000), "bad_response"),
    "a list": (http([completion()]), "bad_response"),
    "no choices": (http(completion(choices=[])), "bad_response"),
    "choices of another type": (http(completion(choices={"0": "42"})), "bad_response"),
    "a choice that is no object": (http(completion(choices=["42"])), "bad_response"),
    "a message that is no object": (http(completion(choices=[{"message": "4"}])), "bad_response"),
    "no text": (http(completion(None)), "bad_response"),
    "blank text": (http(completion(" \n")), "bad_response"),
    "text of another type": (http(completion([{"text": "42"}])), "bad_response"),
    "an error with status 200": (http({"error": {"message": "no"}}), "bad_response"),
    "HTML": (http(b"<html>42</html>", content_type="text/html"), "bad_response"),
    "JSON said to be text": (http(TEXT, content_type="text/plain"), "bad_response"),
    "no content type": (http(TEXT, content_type=""), "bad_response"),
    "invalid UTF-8": (http(TEXT.replace(b"42", b"\xff\xfe")), "bad_response"),
    "10 MB": (http(completion("4" * 10_000_000)), "bad_response"),
    "an endless body": (flood, "bad_response"),
    "a compressed body": (http(gzip.compress(TEXT), Content_Encoding="gzip"), "bad_response"),
    "a huge error": (http(b"x" * 5_000_000, 500), "bad_response"),
    "429": (http({}, 429), "rate_limited"),
    "500": (http(b"oops", 500, content_type="text/plain"), "server_error"),
    "503": (http({}, 503), "server_error"),
    "408": (http({}, 408), "timeout"),
    "400": (http({"error": {"message": "bad"}}, 400), "rejected"),
    "401": (http({"error": {"message": "no"}}, 401), "rejected"),
    "404": (http({"error": {"message": "no model"}}, 404), "rejected"),
    "reset": (reset_at_once, "connection"),
    "reset in the body": (reset_mid_body, "connection"),
    "closed in the body": (close_mid_body, "connection"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "connection"),
}
