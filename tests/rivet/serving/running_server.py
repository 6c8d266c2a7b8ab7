"""A server in a thread of the test."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rivet.serving.options import ServerOptions
from rivet.serving.run import _serve


@contextmanager
def running(solver: Any, **options: Any) -> Iterator[str]:
    """Serve in a thread; gives the address."""
    listener = socket.create_server(("127.0.0.1", 0))
    loop = asyncio.new_event_loop()
    work = _serve(solver, ServerOptions("m", **options), listener, "127.0.0.1", None)
    thread = threading.Thread(target=lambda: loop.run_until_complete(_swallow(work)))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        thread.join()
        loop.close()


async def _swallow(work: Any) -> None:
    try:
        await work
    except asyncio.CancelledError:
        pass
