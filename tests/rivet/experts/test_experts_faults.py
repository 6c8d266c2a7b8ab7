"""Whatever an endpoint does is a typed status with no text, and never an exception."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from email.utils import formatdate

import pytest
from misbehaving import FAULTS, completion, drip, hang, http

from rivet.experts.pool import ExpertPool


@pytest.mark.parametrize("fault", list(FAULTS))
async def test_a_fault_is_a_typed_status_without_text(server, config, fault):
    server.behaviours, expected = [FAULTS[fault][0]], FAULTS[fault][1]
    async with ExpertPool([config()]) as pool:
        reply = await pool.ask("algebra", "solve x + 1 = 2")
    assert (reply.status, reply.text, reply.attempts) == (expected, "", 1)
    assert reply.is_fault and reply.detail


@pytest.mark.parametrize("behaviour", [hang, drip], ids=["silence", "slow drip"])
async def test_no_complete_answer_in_time_is_a_timeout(server, config, behaviour):
    server.behaviours = [behaviour]
    async with ExpertPool([config(timeout_s=0.2)]) as pool:
        reply = await pool.ask("algebra", "?")
    assert (reply.status, reply.text) == ("timeout", "")
    assert "0.2 s" in reply.detail


async def test_a_refused_connection_is_a_connection_fault(config):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
    async with ExpertPool([config(base_urls=(url,))]) as pool:
        reply = await pool.ask("algebra", "?")
    assert (reply.status, reply.text) == ("connection", "")


async def test_a_redirect_is_not_followed(server, config):
    server.behaviours = [http(b"", 302, Location="http://127.0.0.1:1/v1")]
    async with ExpertPool([config()]) as pool:
        reply = await pool.ask("algebra", "?")
    assert (reply.status, len(server.requests)) == ("rejected", 1)


@pytest.mark.parametrize("fault", ["500", "429", "truncated JSON", "reset in the body", "no HTTP"])
async def test_a_burst_of_faults_is_survived_by_retrying(server, config, fault):
    server.behaviours = [FAULTS[fault][0]] * 3 + [http(completion("done"))]
    async with ExpertPool([config(max_retries=3)], backoff_s=0.01) as pool:
        reply = await pool.ask("algebra", "?")
    assert (reply.status, reply.text, reply.attempts) == ("ok", "done", 4)
    assert reply.detail == ""


async def test_retries_end_at_the_limit(server, config):
    server.behaviours = [http({}, 500)]
    async with ExpertPool([config(max_retries=2)], backoff_s=0.01) as pool:
        reply = await pool.ask("algebra", "?")
    assert (reply.status, reply.attempts, len(server.requests)) == ("server_error", 3, 3)


@pytest.mark.parametrize("fault", ["400", "401", "404", "10 MB"])
async def test_what_would_fail_again_is_not_retried(server, config, fault):
    server.behaviours = [FAULTS[fault][0], http(completion())]
    async with ExpertPool([config(max_retries=3)], backoff_s=0.01) as pool:
        reply = await pool.ask("algebra", "?")
    assert reply.attempts == 1 and reply.is_fault


@pytest.mark.parametrize("form", ["seconds", "date"])
async def test_a_retry_never_comes_earlier_than_retry_after_asks(server, config, form):
    # A date has whole seconds, so it can be as little as one second away when it says two.
    value, at_least_s = ("0.4", 0.4) if form == "seconds" else (None, 0.9)
    started = time.monotonic()
    value = value or formatdate(time.time() + 2, usegmt=True)
    server.behaviours = [http({}, 429, Retry_After=value), http(completion())]
    async with ExpertPool([config(max_retries=1)], backoff_s=0.001) as pool:
        reply = await pool.ask("algebra", "?")
    assert (reply.status, reply.attempts) == ("ok", 2)
    assert time.monotonic() - started >= at_least_s


async def test_retry_after_of_the_last_attempt_holds_for_the_next_question(server, config):
    server.behaviours = [http({}, 429, Retry_After="0.4"), http(completion())]
    async with ExpertPool([config(max_retries=0)], backoff_s=0.001) as pool:
        assert (await pool.ask("algebra", "?")).status == "rate_limited"
        started = time.monotonic()
        assert (await pool.ask("algebra", "?")).status == "ok"
    assert time.monotonic() - started >= 0.3


async def test_a_provider_that_asks_for_an_hour_is_given_up(server, config):
    server.behaviours = [http({}, 429, Retry_After="3600"), http(completion())]
    async with ExpertPool([config(max_retries=5)]) as pool:
        reply = await pool.ask("algebra", "?")
    assert (reply.status, reply.attempts) == ("rate_limited", 1)
    assert "60 s" in reply.detail


async def test_an_unreadable_retry_after_is_ignored(server, config):
    server.behaviours = [http({}, 429, Retry_After="soon"), http(completion())]
    async with ExpertPool([config(max_retries=1)], backoff_s=0.001) as pool:
        assert (await pool.ask("algebra", "?")).status == "ok"


async def test_a_useless_reply_is_paid_for(server, config):
    server.behaviours = [http(completion(None)), http(completion("ok"))]
    prices = {"usd_per_million_prompt_tokens": 1.0, "usd_per_million_completion_tokens": 10.0}
    async with ExpertPool([config(max_retries=1, **prices)], backoff_s=0.001) as pool:
        reply = await pool.ask("algebra", "?")
    # Two responses of 11 and 7 tokens each.
    assert (reply.prompt_tokens, reply.completion_tokens) == (22, 14)
    assert reply.cost_usd == pytest.approx((22 * 1.0 + 14 * 10.0) / 1e6)


async def test_lone_surrogates_do_not_reach_the_caller(server, config):
    server.behaviours = [http(b'{"choices": [{"message": {"content": "a\\ud800b"}}]}')]
    async with ExpertPool([config()]) as pool:
        reply = await pool.ask("algebra", "?")
    assert (reply.status, reply.text) == ("ok", "a?b")


async def test_a_cancelled_question_stays_cancelled_and_frees_its_place(server, config):
    server.behaviours = [hang, http(completion())]
    async with ExpertPool([config(max_concurrency=1)]) as pool:
        task = asyncio.create_task(pool.ask("algebra", "?"))
        while not server.in_flight:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await pool.ask("algebra", "?")).status == "ok"


KEY = "sk-Zq7wmVeryPrivate0123"


@pytest.mark.parametrize("fault", ["401", "500", "429", "no HTTP", "no JSON", "reset", "echo"])
async def test_a_key_is_sent_and_appears_nowhere_else(server, config, fault, caplog, capfd):
    caplog.set_level("DEBUG")
    echo = {"error": {"message": f"Incorrect API key provided: Bearer {KEY}.", "code": KEY}}
    server.behaviours = [http(echo, 401) if fault == "echo" else FAULTS[fault][0]]
    expert = config(key_env="ALGEBRA_KEY", max_retries=1)
    async with ExpertPool([expert], environ={"ALGEBRA_KEY": KEY}, backoff_s=0.001) as pool:
        reply = await pool.ask("algebra", "?")
        checks = await pool.check()
        shown = repr([pool, pool.configs, pool.totals, reply, checks, vars(pool._open())])
    assert server.requests[0][0]["authorization"] == f"Bearer {KEY}"
    assert all(KEY not in json.dumps(body) for _, body in server.requests)
    printed = "".join(capfd.readouterr())
    for text in (shown.replace(repr(pool._environ), ""), caplog.text, printed):
        assert KEY not in text and "VeryPrivate" not in text


async def test_an_unauthorized_answer_names_the_variable(server, config):
    server.behaviours = [http({"error": {"message": "nope"}}, 401)]
    expert = config(key_env="ALGEBRA_KEY")
    async with ExpertPool([expert], environ={"ALGEBRA_KEY": KEY}) as pool:
        reply = await pool.ask("algebra", "?")
    assert reply.detail == "401 nope; check the key in ALGEBRA_KEY"


@pytest.mark.parametrize(
    "message",
    ["Incorrect API key provided: sk-Zq7w****0123.", "bad key: ****0123", f"Bearer {KEY} is bad"],
)
async def test_a_key_that_a_provider_quotes_starred_out_is_withheld(server, config, message):
    server.behaviours = [http({"error": {"message": message}}, 401)]
    expert = config(key_env="ALGEBRA_KEY")
    async with ExpertPool([expert], environ={"ALGEBRA_KEY": KEY}) as pool:
        reply = await pool.ask("algebra", "?")
    assert "[key]" in reply.detail
    assert "0123" not in reply.detail and "Zq7w" not in reply.detail


async def test_openais_own_variables_are_not_sent_to_other_providers(server, config, monkeypatch):
    for name in ("API_KEY", "ADMIN_KEY", "ORG_ID", "PROJECT_ID"):
        monkeypatch.setenv(f"OPENAI_{name}", KEY)
    async with ExpertPool([config()]) as pool:
        assert (await pool.ask("algebra", "?")).status == "ok"
    assert KEY not in str(server.requests)
