"""Several base URLs: the working one is asked, a failing one is left alone and tried again."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from misbehaving import completion, http, serving

from rivet.experts import call, pool
from rivet.experts.pool import ExpertPool


@pytest.fixture
def closed_url():
    """Nobody listens there."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{unused.getsockname()[1]}/v1"


async def test_a_dead_url_costs_a_few_attempts_and_no_reply(server, config, closed_url):
    expert = config(base_urls=(closed_url, server.url), max_retries=1, circuit_failures=3)
    async with ExpertPool([expert], backoff_s=0.001) as pool:
        replies = [await pool.ask("algebra", str(n)) for n in range(20)]
    assert {reply.status for reply in replies} == {"ok"}
    # Three attempts open its circuit; from then on nobody tries it.
    assert pool.total().attempts == 23


async def test_a_provider_that_asks_for_an_hour_is_no_matter_with_another_one(server, config):
    async with serving() as other:
        server.behaviours = [http({}, 429, Retry_After="3600")]
        expert = config(base_urls=(server.url, other.url), max_retries=1)
        async with ExpertPool([expert], backoff_s=0.001) as pool:
            replies = [await pool.ask("algebra", str(n)) for n in range(10)]
    assert {reply.status for reply in replies} == {"ok"}
    assert len(server.requests) == 1, "one who was told to wait is enough"


async def test_one_who_is_told_to_wait_makes_all_wait(server, config, caplog):
    """A second trajectory does not run into the limit that the first one has met."""
    caplog.set_level("INFO", "rivet.experts.pool")
    asked_at = []

    async def limited(reader, writer):
        asked_at.append(time.monotonic())
        is_early = asked_at[-1] < asked_at[0] + 0.3
        writer.write(http({}, 429, Retry_After="0.3") if is_early else http(completion()))

    server.behaviours = [limited]
    expert = config(max_retries=1, max_concurrency=5)
    async with ExpertPool([expert], backoff_s=0.001) as pool:
        first = asyncio.create_task(pool.ask("algebra", "0"))
        while "attempt 1: rate_limited" not in caplog.text:
            await asyncio.sleep(0.001)
        replies = await asyncio.gather(first, *(pool.ask("algebra", str(n)) for n in range(1, 5)))
    assert {reply.status for reply in replies} == {"ok"}
    assert [reply.attempts for reply in replies] == [2, 1, 1, 1, 1]
    assert all(at >= asked_at[0] + 0.3 for at in asked_at[1:])


async def test_a_circuit_that_is_open_gets_a_single_trial_and_closes_again(server, config):
    server.behaviours = [http({}, 500)] * 2 + [http(completion())]
    expert = config(max_retries=1, circuit_failures=2, circuit_cooldown_s=0.05)
    async with ExpertPool([expert], backoff_s=0.001) as pool:
        assert (await pool.ask("algebra", "?")).status == "server_error"
        gate = asyncio.Event()

        async def gated(reader, writer):
            await gate.wait()
            writer.write(http(completion()))

        server.behaviours = [gated]
        tasks = [asyncio.create_task(pool.ask("algebra", str(n))) for n in range(8)]
        while not server.in_flight:
            await asyncio.sleep(0.001)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert server.in_flight == 1, "seven wait for the outcome of one"
        gate.set()
        replies = await asyncio.gather(*tasks)
    assert {reply.status for reply in replies} == {"ok"}
    assert len(server.requests) == 10


async def test_a_failed_trial_lets_nobody_else_through(server, config, monkeypatch):
    monkeypatch.setattr(call, "PATIENCE_S", 0.4)
    server.behaviours = [http({}, 500)]
    expert = config(max_retries=1, circuit_failures=2, circuit_cooldown_s=0.1)
    async with ExpertPool([expert], backoff_s=0.001) as pool:
        await pool.ask("algebra", "?")
        # Trials at 0.1 s and 0.3 s; the next would come at 0.7 s.
        replies = await asyncio.gather(*(pool.ask("algebra", str(n)) for n in range(8)))
    assert {reply.status for reply in replies} <= {"unavailable", "server_error"}
    assert len(server.requests) <= 2 + 2
    unavailable = [reply for reply in replies if reply.status == "unavailable"]
    assert unavailable and all(reply.is_fault for reply in unavailable)
    assert f"{server.url} failed too often (last: server_error: 500)" in unavailable[0].detail


async def test_a_refusal_does_not_open_a_circuit(server, config):
    server.behaviours = [http({}, 400)]
    async with ExpertPool([config(circuit_failures=1)], backoff_s=0.001) as pool:
        replies = [await pool.ask("algebra", str(n)) for n in range(3)]
    assert [reply.status for reply in replies] == ["rejected"] * 3
    assert len(server.requests) == 3


async def test_an_expert_that_is_slow_to_answer_one_waits_for_no_other(server, config):
    """Experts at one address have limits of their own."""
    gate = asyncio.Event()

    async def gated(reader, writer):
        await gate.wait()
        writer.write(http(completion()))

    server.behaviours = [gated, http(completion())]
    experts = [config(max_concurrency=1), config(name="calc", max_concurrency=1)]
    async with ExpertPool(experts) as pool:
        slow = asyncio.create_task(pool.ask("algebra", "?"))
        while not server.in_flight:
            await asyncio.sleep(0.001)
        assert (await pool.ask("calc", "?")).status == "ok"
        gate.set()
        assert (await slow).status == "ok"


async def test_requests_are_limited_per_minute_over_all_trajectories(server, config, monkeypatch):
    waits = []

    async def sleep(seconds, result=None):
        waits.append(seconds)

    monkeypatch.setattr("rivet.experts.rate_limits.asyncio.sleep", sleep)
    async with ExpertPool([config(requests_per_minute=30)]) as pool:
        await asyncio.gather(*(pool.ask("algebra", str(n)) for n in range(6)))
    monkeypatch.undo()
    # Burst 3, then 28 more in the minute.
    assert [w for w in waits if w > 1] == pytest.approx(
        [60 / 28, 2 * 60 / 28, 3 * 60 / 28], rel=0.05
    )


async def test_tokens_are_limited_by_what_replies_take(server, config):
    expert = config(tokens_per_minute=100_000, max_tokens=1000)
    async with ExpertPool([expert]) as pool:
        for n in range(5):
            await pool.ask("algebra", str(n))
        # Five replies of 18 tokens each; 10 000 may go at once, and time has filled up the rest.
        assert pool._limits["algebra"].reserve(9000) == 0.0
        assert pool._limits["algebra"].reserve(10_000) > 0.0


def test_the_defaults_of_patience_are_a_minute():
    assert call.PATIENCE_S == 60.0 and pool._MAX_BACKOFF_S == 20.0
