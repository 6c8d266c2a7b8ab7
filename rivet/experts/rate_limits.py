"""Rate limits of an expert: requests and tokens per minute, as token buckets.

Whoever asks takes what it needs at once, into debt if need be, and is told how long to wait until
the debt is paid: so the order is that of arrival, and nobody polls. The limits are those of one
process; several processes that share a key divide them among themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_MINUTE_S = 60.0
_BURST = 0.1  # share of a minute's allowance that may go at once


class TokenBucket:
    """At most `per_minute` in any minute, of which a tenth may go at once.

    With the burst b and the rate r, any minute sees at most b + 60 r (the first of the burst and
    the last of the minute fall together, hence the one).

    Args:
        per_minute: The limit, at least 1.
    """

    def __init__(self, per_minute: int) -> None:
        self.burst = float(max(1, int(per_minute * _BURST)))
        self.per_s = (per_minute - self.burst + 1) / _MINUTE_S
        self._level = self.burst
        self._at = 0.0

    def take(self, amount: float, now: float) -> float:
        """Take an amount at a time in seconds; gives the seconds to wait before using it."""
        self._fill(now)
        self._level -= amount
        return max(0.0, -self._level / self.per_s)

    def give_back(self, amount: float, now: float) -> None:
        """Return what was taken and not used; a negative amount takes more."""
        self._fill(now)
        self._level = min(self.burst, self._level + amount)

    def _fill(self, now: float) -> None:
        self._level = min(self.burst, self._level + max(0.0, now - self._at) * self.per_s)
        self._at = max(self._at, now)


class RateLimit:
    """Both limits of one expert; either may be off.

    Args:
        requests_per_minute: None is no limit.
        tokens_per_minute: None is no limit.
        clock: Seconds; for tests.
    """

    def __init__(
        self,
        requests_per_minute: int | None,
        tokens_per_minute: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests = TokenBucket(requests_per_minute) if requests_per_minute else None
        self._tokens = TokenBucket(tokens_per_minute) if tokens_per_minute else None
        self._clock = clock

    def reserve(self, tokens: int) -> float:
        """Take one request of so many tokens; gives the seconds to wait before it is sent."""
        now = self._clock()
        waits = [self._requests.take(1, now)] if self._requests else []
        waits += [self._tokens.take(tokens, now)] if self._tokens else []
        return max(waits, default=0.0)

    def settle(self, reserved: int, used: int) -> None:
        """Correct a reservation by the tokens that the request really took."""
        if self._tokens:
            self._tokens.give_back(reserved - used, self._clock())

    def cancel(self, tokens: int) -> None:
        """Give back a reservation of one request of so many tokens that is not sent after all."""
        if self._requests:
            self._requests.give_back(1, self._clock())
        self.settle(tokens, 0)

    async def wait(self, tokens: int) -> None:
        """Wait until one request of so many tokens may be sent. A cancelled wait gives it back."""
        wait_s = self.reserve(tokens)
        if wait_s <= 0:
            return
        try:
            await asyncio.sleep(wait_s)
        except BaseException:
            self.cancel(tokens)
            raise
