"""Runs the server: opens the port first, then the model, and leaves in good order.

SIGTERM or Ctrl-C stops accepting and finishes every request that was accepted; a second Ctrl-C ends
them. While the model still opens, either ends the server at once.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rivet.async_solver import AsyncSolver
from rivet.experts.server import READY_PREFIX, ServerError
from rivet.interrupt import terminable
from rivet.serving.options import ServerOptions

logger = logging.getLogger(__name__)

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]", "::1")
_PARENT_POLL_S = 0.25


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def name_in_url(host: str) -> str:
    """An address as URLs and the Host header of requests have it."""
    return f"[{host}]" if ":" in host else host


def serve(
    make_solver: Callable[[], AsyncSolver],
    options: ServerOptions,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    parent_pid: int | None = None,
) -> None:
    """Serve until stopped; prints the port once it listens.

    Args:
        make_solver: Loads the solver, after the port is known to be free.
        options: See `ServerOptions`.
        host: Address to listen on.
        port: 0 picks a free one.
        parent_pid: End as soon as this is no longer the parent process.

    Raises:
        ServerError: The port cannot be had.
    """
    listener = _listen(host, port)
    try:
        solver = make_solver()
        with terminable():  # while the solver opens; uvicorn has its own handlers
            asyncio.run(_serve(solver, options, listener, host, parent_pid))
    finally:
        listener.close()


@contextmanager
def _quiet_signals() -> Iterator[None]:
    """uvicorn raises the signal that stopped it once more, when everything is closed in order.

    Outside the main thread neither it nor this takes signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: None) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # With the protocol named, asyncio turns Nagle's algorithm off; else events wait 40 ms.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        raise ServerError(
            f"cannot listen on {host}:{port} ({error}); choose another --port, or 0 for a free one"
        ) from error
    return listener


async def _serve(
    solver: AsyncSolver,
    options: ServerOptions,
    listener: socket.socket,
    host: str,
    parent_pid: int | None,
) -> None:
    import uvicorn

    from rivet.serving.app import build_app

    async with solver:
        listener.listen(512)
        config = uvicorn.Config(
            build_app(solver, options),
            log_level="warning",
            access_log=False,
            lifespan="off",
            backlog=512,
            timeout_keep_alive=60,
            # What was accepted ends by its deadline.
            timeout_graceful_shutdown=int(options.deadline_s) + 5,
            server_header=False,
        )
        server = uvicorn.Server(config)
        watch = asyncio.create_task(_stop_with_parent(server, parent_pid))
        bound = listener.getsockname()[1]
        print(f"{READY_PREFIX}{bound}", flush=True)
        print(f"model {options.model}: http://{name_in_url(host)}:{bound}/ and /v1", flush=True)
        try:
            with _quiet_signals():
                await server.serve(sockets=[listener])
        finally:
            watch.cancel()
    if not server.force_exit:
        logger.info("stopped; every accepted request was answered")


async def _stop_with_parent(server: object, parent_pid: int | None) -> None:
    """Stop the server when its parent has died, also by SIGKILL."""
    while parent_pid is not None and os.getppid() == parent_pid:
        await asyncio.sleep(_PARENT_POLL_S)
    if parent_pid is not None:
        server.should_exit = True  # type: ignore[attr-defined]
