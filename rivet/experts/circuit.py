"""Circuit breaker of one endpoint: leaves it alone while it fails, and tries it again carefully.

    closed     requests go through; so many failures in a row open it
    open       nothing is sent for a cooldown
    half-open  one request goes through on trial: its success closes the circuit, its failure opens
               it again for twice as long

A pause is apart from that: the endpoint works, and said when it wants to be asked again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Literal

_MAX_COOLDOWN_S = 60.0


class Circuit:
    """The state of one endpoint.

    Every `begin` is followed by one of `succeed`, `fail` and `release`, with what it returned.

    Args:
        failures: In a row, to open it.
        cooldown_s: Of the first opening; doubled after each failed trial, up to 60 s.
        clock: Seconds; for tests.
    """

    def __init__(
        self, failures: int, cooldown_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = failures
        self._first_cooldown_s = cooldown_s
        self._clock = clock
        self._failures = 0
        self._cooldown_s = cooldown_s
        self._open_until: float | None = None
        self._paused_until = -math.inf
        self._is_on_trial = False
        self.last_failure = ""

    @property
    def state(self) -> Literal["closed", "open", "half-open"]:
        """Which of the three states it is in."""
        if self._open_until is None:
            return "closed"
        return "half-open" if self._clock() >= self._open_until else "open"

    def ready_in(self) -> float:
        """Seconds until a request may be sent; 0 is now, inf is after the trial under way."""
        now = self._clock()
        wait_s = max(0.0, self._paused_until - now)
        if self._open_until is not None:
            wait_s = max(wait_s, self._open_until - now)
            if self._is_on_trial:
                return math.inf
        return wait_s

    def begin(self) -> bool:
        """A request is sent. True if it is the one on trial."""
        if self._open_until is None:
            return False
        self._is_on_trial = True
        return True

    def succeed(self, is_trial: bool) -> None:
        """It was answered, if only by a refusal of this one request."""
        self.release(is_trial)
        self._failures = 0
        self._open_until = None
        self._cooldown_s = self._first_cooldown_s

    def fail(self, is_trial: bool, why: str) -> None:
        """It was not, or by nonsense."""
        self.release(is_trial)
        self.last_failure = why
        self._failures += 1
        if is_trial:
            self._cooldown_s = min(_MAX_COOLDOWN_S, 2 * self._cooldown_s)
        elif self._open_until is not None or self._failures < self._limit:
            return  # sent before the circuit opened, or not yet enough
        self._open_until = self._clock() + min(_MAX_COOLDOWN_S, self._cooldown_s)

    def release(self, is_trial: bool) -> None:
        """It was given up before anything was known; a trial is free for the next one."""
        if is_trial:
            self._is_on_trial = False

    def pause(self, seconds: float) -> None:
        """Send nothing for so long: the endpoint asked for it."""
        self._paused_until = max(self._paused_until, self._clock() + seconds)
