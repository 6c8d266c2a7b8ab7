"""What the pool sends, how it spreads and bounds requests, and what it counts."""

from __future__ import annotations

import asyncio
import queue
import threading

import pytest
from misbehaving import completion, http, serving

from rivet.experts.completions import sample_seed
from rivet.experts.config import ExpertConfig, ExpertsFileError
from rivet.experts.connections import _proxy_for
from rivet.experts.pool import ExpertPool


async def test_a_request_carries_what_is_configured(server, config):
    expert = config(system="Be brief.", max_tokens=99, temperature=0.5, send_seed=True, model="m1")
    async with ExpertPool([expert]) as pool:
        reply = await pool.ask("algebra", "solve x", sample_key="p1#0")
    assert (reply.name, reply.status, reply.text) == ("algebra", "ok", "42")
    assert server.requests[0][1] == {
        "model": "m1",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "solve x"},
        ],
        "max_tokens": 99,
        "temperature": 0.5,
        "seed": sample_seed("p1#0"),
    }


async def test_nothing_is_sent_that_is_not_configured(server, config):
    async with ExpertPool([config()]) as pool:
        await pool.ask("algebra", "q", sample_key="p1#0")
    assert set(server.requests[0][1]) == {"model", "messages", "max_tokens"}


def test_sample_seeds_differ_and_are_the_same_everywhere():
    assert sample_seed("p1#0") == 1636079258
    assert len({sample_seed(f"p#{n}") for n in range(1000)}) == 1000
    assert all(0 <= sample_seed(f"p#{n}") < 2**31 for n in range(1000))


async def test_an_unknown_name_is_the_controllers_mistake_and_asks_nobody(server, config):
    async with ExpertPool([config()]) as pool:
        reply = await pool.ask("algbra", "q")
    assert (reply.status, reply.text, reply.is_fault) == ("unknown_expert", "", False)
    assert "algebra" in reply.detail and not server.requests


async def test_usage_is_metered_and_priced(server, config):
    prices = {"usd_per_million_prompt_tokens": 2.0, "usd_per_million_completion_tokens": 8.0}
    async with ExpertPool([config(**prices)]) as pool:
        replies = [await pool.ask("algebra", "q") for _ in range(3)]
        server.behaviours = [http({}, 400)]
        await pool.ask("algebra", "q")
    # 11 tokens in, 7 out.
    assert replies[0].cost_usd == pytest.approx((11 * 2 + 7 * 8) / 1e6)
    total = pool.total()
    assert total == pool.totals["algebra"]
    assert (total.calls, total.attempts) == (4, 4)
    assert dict(total.statuses) == {"ok": 3, "rejected": 1}
    assert (total.prompt_tokens, total.completion_tokens) == (33, 21)
    assert total.cost_usd == pytest.approx(3 * 78 / 1e6)
    assert total.unmetered == 0


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        # "What is 2+3?" has 12 bytes, "a longer reply" 14: a third each, rounded up.
        (None, (4, 5)),
        ([], (4, 5)),
        ({"prompt_tokens": "many", "completion_tokens": True}, (4, 5)),
        ({"completion_tokens": -5}, (4, 5)),
        ({"prompt_tokens": 10**30, "completion_tokens": 0}, (4, 5)),
        ({"prompt_tokens": 11}, (11, 5)),
    ],
)
async def test_tokens_that_nobody_counted_are_estimated_and_flagged(server, config, usage, counted):
    server.behaviours = [http(completion("a longer reply", usage=usage))]
    prices = {"usd_per_million_prompt_tokens": 1.0, "usd_per_million_completion_tokens": 10.0}
    async with ExpertPool([config(**prices)]) as pool:
        reply = await pool.ask("algebra", "What is 2+3?")
    assert (reply.status, reply.is_metered) == ("ok", False)
    assert (reply.prompt_tokens, reply.completion_tokens) == counted
    assert reply.cost_usd == pytest.approx((counted[0] + 10 * counted[1]) / 1e6)
    assert pool.totals["algebra"].unmetered == 1


async def test_no_more_requests_than_allowed_are_under_way(server, config):
    gate = asyncio.Event()

    async def gated(reader, writer):
        await gate.wait()
        writer.write(http(completion()))

    server.behaviours = [gated]
    async with ExpertPool([config(max_concurrency=3)]) as pool:
        tasks = [asyncio.create_task(pool.ask("algebra", str(n))) for n in range(10)]
        while server.in_flight < 3:
            await asyncio.sleep(0.001)
        for _ in range(20):  # a fourth would arrive now
            await asyncio.sleep(0)
        gate.set()
        replies = await asyncio.gather(*tasks)
    assert {reply.status for reply in replies} == {"ok"}
    assert server.peak == 3


async def test_what_is_never_sent_takes_nothing_from_the_rate_limits(server, config):
    server.behaviours = [http({}, 429, Retry_After="30")]
    # Bursts of 6 requests and 1000 tokens.
    expert = config(requests_per_minute=60, tokens_per_minute=10_000, max_tokens=200)
    async with ExpertPool([expert]) as pool:
        assert (await pool.ask("algebra", "?")).status == "rate_limited"
        for _ in range(5):  # wait for the endpoint, and are cancelled
            task = asyncio.create_task(pool.ask("algebra", "?"))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        (endpoint,) = pool._open()._endpoints.values()
        endpoint.circuit.pause(3600)
        for _ in range(5):
            assert (await pool.ask("algebra", "?")).status == "unavailable"
        assert len(server.requests) == 1
        assert pool._limits["algebra"].reserve(900) == 0.0


async def test_requests_go_to_the_least_loaded_url(server, config):
    gate = asyncio.Event()

    async def gated(reader, writer):
        await gate.wait()
        writer.write(http(completion()))

    async with serving() as other:
        server.behaviours = other.behaviours = [gated]
        async with ExpertPool([config(base_urls=(server.url, other.url))]) as pool:
            tasks = [asyncio.create_task(pool.ask("algebra", str(n))) for n in range(8)]
            while server.in_flight + other.in_flight < 8:
                await asyncio.sleep(0.001)
            assert (server.in_flight, other.in_flight) == (4, 4)
            gate.set()
            await asyncio.gather(*tasks)


async def test_a_retry_goes_to_another_url(server, config):
    async with serving() as other:
        server.behaviours = [http({}, 500)]
        expert = config(base_urls=(server.url, other.url), max_retries=1)
        async with ExpertPool([expert], backoff_s=0.001) as pool:
            replies = [await pool.ask("algebra", str(n)) for n in range(4)]
    assert {(reply.status, reply.attempts) for reply in replies} == {("ok", 2)}
    assert (len(server.requests), len(other.requests)) == (4, 4)


async def test_connections_are_kept_alive(server, config):
    async with ExpertPool([config()]) as pool:
        for n in range(5):
            await pool.ask("algebra", str(n))
        assert len(server.requests) == 5
        (endpoint,) = pool._open()._endpoints.values()
        assert endpoint.in_flight == 0
        assert len(endpoint.client._client._transport._pool.connections) == 1


def test_a_pool_serves_one_event_loop_after_the_other():
    def run_endpoint() -> None:
        async def endpoint() -> None:
            async with serving() as state:
                started.put((state.url, asyncio.get_running_loop(), done))
                await done.wait()

        done = asyncio.Event()
        asyncio.run(endpoint())

    started: queue.Queue = queue.Queue()
    thread = threading.Thread(target=run_endpoint)
    thread.start()
    url, loop, done = started.get(timeout=30)
    pool = ExpertPool([ExpertConfig("algebra", "m", (url,), max_retries=0, max_concurrency=1)])

    async def ask_often() -> list[str]:
        replies = await asyncio.gather(*(pool.ask("algebra", str(n)) for n in range(4)))
        return [reply.status for reply in replies]

    try:
        assert [asyncio.run(ask_often()) for _ in range(2)] == [["ok"] * 4] * 2
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()


async def test_check_asks_every_url_of_every_expert_once_and_says_what_is_wrong(server, config):
    async with serving() as other:
        server.behaviours = [http({"error": {"message": "no model m"}}, 404)]
        experts = [config(base_urls=(server.url, other.url)), config(name="calc", max_retries=9)]
        async with ExpertPool(experts) as pool:
            results = await pool.check()
    assert [(r.expert.name, r.base_url, r.reply.status) for r in results] == [
        ("algebra", server.url, "rejected"),
        ("algebra", other.url, "ok"),
        ("calc", server.url, "rejected"),
    ]
    assert results[0].reply.detail == "404 no model m"
    assert pool.total().calls == 0


def test_two_experts_with_one_name_are_refused():
    expert = ExpertConfig("algebra", "m", ("http://127.0.0.1:9/v1",))
    with pytest.raises(ValueError, match="same name: algebra"):
        ExpertPool([expert, expert])


@pytest.mark.parametrize("value", [None, "", "  ", "two words", "schlüssel"])
def test_a_pool_without_a_usable_key_is_refused_before_anything_is_asked(value):
    environ = {} if value is None else {"ALGEBRA_KEY": value}
    expert = ExpertConfig("algebra", "m", ("http://127.0.0.1:9/v1",), key_env="ALGEBRA_KEY")
    with pytest.raises(ExpertsFileError, match="algebra.*ALGEBRA_KEY") as caught:
        ExpertPool([expert], environ=environ)
    assert "schl" not in str(caught.value) and "words" not in str(caught.value)


def test_this_machine_is_reached_without_a_proxy_and_others_with_it(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    assert _proxy_for("http://api.example/v1") == "http://proxy:3128"
    assert _proxy_for("https://api.example/v1") is None
    for url in ("http://127.0.0.1:8/v1", "http://localhost/v1", "http://inside.example/v1"):
        assert _proxy_for(url) is None
