"""Rate limits hold in any minute, in the order of arrival, and give back what was not used."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rivet.experts.rate_limits import RateLimit, TokenBucket


def test_a_tenth_of_a_minute_goes_at_once_and_the_rest_evenly():
    bucket = TokenBucket(60)
    # Burst 6; then 55 more in the minute, one every 60/55 s.
    waits = [bucket.take(1, 0.0) for _ in range(9)]
    assert waits[:6] == [0.0] * 6
    assert waits[6:] == pytest.approx([60 / 55, 120 / 55, 180 / 55])


def test_one_request_a_minute_is_one_every_minute():
    bucket = TokenBucket(1)
    assert [bucket.take(1, 0.0) for _ in range(3)] == pytest.approx([0.0, 60.0, 120.0])


@settings(deadline=None)  # other processes may have the machine
@given(
    st.integers(1, 500),
    st.lists(st.floats(0, 20), min_size=1, max_size=300),
)
def test_no_minute_sees_more_than_the_limit(per_minute, gaps):
    """Whatever the times of asking, by the times of sending."""
    bucket = TokenBucket(per_minute)
    now, sent = 0.0, []
    for gap in gaps:
        now += gap
        sent.append(now + bucket.take(1, now))
    assert sent == sorted(sent), "who asks first goes first"
    for n, first in enumerate(sent):
        assert sum(first <= at < first + 59.999 for at in sent[n:]) <= per_minute


def test_what_was_reserved_and_not_used_is_free_again():
    now = [0.0]
    limit = RateLimit(None, 1000, clock=lambda: now[0])
    # Burst 100, then 901/60 a second.
    assert limit.reserve(100) == 0.0
    assert limit.reserve(50) == pytest.approx(50 * 60 / 901)
    limit.settle(100, 30)  # 70 came back: 20 are left
    assert limit.reserve(20) == 0.0
    limit.settle(20, 60)  # the reply was longer than reserved
    assert limit.reserve(0) == pytest.approx(40 * 60 / 901)


async def test_a_cancelled_wait_gives_its_place_back():
    now = [0.0]
    limit = RateLimit(1, 1000, clock=lambda: now[0])
    await limit.wait(100)
    task = asyncio.create_task(limit.wait(100))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert limit.reserve(0) == pytest.approx(60.0), "one ahead, not two"


async def test_without_limits_nobody_waits():
    limit = RateLimit(None, None)
    assert [limit.reserve(10**9) for _ in range(1000)] == [0.0] * 1000
    await limit.wait(10**9)
