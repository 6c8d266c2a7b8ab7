"""The client's end of one slot: its socket, its greeting, and one call's exchange over it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import time
from dataclasses import dataclass, field

from sandbox import wire

_START_S = 60.0  # for a slot to come up: the libraries are imported on a loaded machine
_CHUNK = 256 * 1024

Reply = tuple[wire.ReplyHeader, bytes]


class SlotLost(Exception):
    """The connection to a slot broke before its reply was complete."""


@dataclass(eq=False, slots=True)
class SlotHandle:
    """One slot as the client sees it.

    Attributes:
        number: its name towards the zygote.
        connection: None where each call is a fresh process.
        layers: which walls stand, once the slot has said so.
    """

    number: int
    connection: socket.socket | None
    layers: dict | None = None
    _received: bytearray = field(default_factory=bytearray)

    def close(self) -> None:
        """Close the connection; the slot ends itself."""
        if self.connection is not None:
            self.connection.close()

    def shut(self) -> None:
        """End the connection for the call that is using it, without taking its descriptor."""
        if self.connection is not None:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    def exchange(self, frame: bytes, patience_s: float) -> Reply:
        """Send a request and wait for its reply.

        Raises:
            SlotLost: when the slot ends, or does not answer within `patience_s`.
        """
        connection = self.connection
        assert connection is not None
        end = time.monotonic() + self._patience(patience_s)
        rest = memoryview(frame)
        while rest:
            try:
                rest = rest[connection.send(rest) :]
            except BlockingIOError:
                _wait(connection, select.POLLOUT, end)
        while (reply := self._parse()) is None:
            _wait(connection, select.POLLIN, end)
            self._take(connection.recv(_CHUNK))
        return reply

    async def exchange_async(self, frame: bytes, patience_s: float) -> Reply:
        """Do what `exchange` does, in an event loop; TimeoutError when patience is over."""
        connection, loop = self.connection, asyncio.get_running_loop()
        assert connection is not None
        async with asyncio.timeout(self._patience(patience_s)):
            await loop.sock_sendall(connection, frame)
            while (reply := self._parse()) is None:
                self._take(await loop.sock_recv(connection, _CHUNK))
        return reply

    def _patience(self, patience_s: float) -> float:
        return patience_s if self.layers is not None else patience_s + _START_S

    def _take(self, data: bytes) -> None:
        if not data:
            raise SlotLost("the slot ended in the middle of a call")
        self._received += data

    def _parse(self) -> Reply | None:
        """Return the reply once it is complete; take the greeting off on the way."""
        buffer = self._received
        if self.layers is None:
            if len(buffer) < wire.HELLO.size:
                return None
            _, length = wire.HELLO.unpack_from(buffer)
            end = wire.HELLO.size + length
            if len(buffer) < end:
                return None
            self.layers = json.loads(buffer[wire.HELLO.size : end])
            del buffer[:end]
        if len(buffer) < wire.REPLY.size:
            return None
        header = wire.unpack_reply(bytes(buffer[: wire.REPLY.size]))
        if len(buffer) < wire.REPLY.size + header.body_len:
            return None
        body = bytes(buffer[wire.REPLY.size :])
        buffer.clear()
        return header, body


def _wait(connection: socket.socket, event: int, end: float) -> None:
    poller = select.poll()
    poller.register(connection, event)
    if not poller.poll(max(0.0, end - time.monotonic()) * 1000):
        raise SlotLost("the slot did not answer in time")
