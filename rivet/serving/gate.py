"""How many completions run and wait: a bounded queue before a bounded number of places."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class Full(Exception):
    """No place, and no room to wait for one."""


class Gate:
    """Admits completions in the order in which they came.

    Args:
        places: How many may run at the same time.
        room: How many may wait.
    """

    def __init__(self, places: int, room: int) -> None:
        self._places = asyncio.Semaphore(places)
        self._most = places + room
        self._inside = 0  # running or waiting
        self.running = 0

    @property
    def waiting(self) -> int:
        """Completions that wait for a place."""
        return self._inside - self.running

    @contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Hold room for the completions of one request.

        Raises:
            Full: There is not enough.
        """
        if self._inside + count > self._most:
            raise Full
        self._inside += count
        try:
            yield
        finally:
            self._inside -= count

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for one of the reserved completions to be let in, and hold its place."""
        async with self._places:
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1
