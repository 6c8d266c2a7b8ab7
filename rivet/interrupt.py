"""Ctrl-C and SIGTERM: finish the step, save, say how to resume.

A stage runs its steps inside `with interruptible() as stop:` and calls `stop.check(...)` once each
step's result is on disk. The first signal lets the step finish; a second one raises
KeyboardInterrupt at once, which costs at most the step, since every write is atomic. Two signals
within a second are one request: Slurm signals a launcher and its processes, and the launcher passes
on what it got.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

_SAME_REQUEST_S = 1.0


class Interrupted(KeyboardInterrupt):
    """A stage stopped in good order; the message says after what. The same command resumes it."""


class Stop:
    """Whether the user asked to stop."""

    def __init__(self) -> None:
        self.requested = False

    def check(self, done: str) -> None:
        """Leave if a stop was requested.

        Args:
            done: What is safe on disk, such as `step 12`.

        Raises:
            Interrupted: A stop was requested.
        """
        if self.requested:
            raise Interrupted(f"stopped after {done}")


@contextmanager
def interruptible() -> Iterator[Stop]:
    """Handle SIGINT and SIGTERM in the body. Outside the main thread it changes nothing."""
    stop = Stop()
    first = 0.0
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if stop.requested:
            if time.monotonic() - first >= _SAME_REQUEST_S:
                raise KeyboardInterrupt
            return
        stop.requested, first = True, time.monotonic()
        logger.warning(
            "%s: stopping when this step is saved; once more to stop now",
            signal.Signals(number).name,
        )

    before: dict[int, Any] = {n: signal.signal(n, on_signal) for n in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def terminable() -> Iterator[None]:
    """Take SIGTERM in the body as Ctrl-C is taken, so that what is half-written is cleared up.

    Outside the main thread it changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
