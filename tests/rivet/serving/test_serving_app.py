"""The server's promises, held with a solver that answers when it is told to."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_solver import PIECES, FakeSolver

from rivet.config import ConfigError
from rivet.serving.app import build_app
from rivet.serving.options import ServerOptions
from rivet.serving.run import LOOPBACK_NAMES
from stages.serve import ServeConfig, options_of

AS_JSON = {"Content-Type": "application/json"}
SURROGATES = rb'{"model": "m", "messages": [], "\ud800": 1}'
KEY = {"Authorization": "Bearer s3cret"}


@asynccontextmanager
async def client(solver: FakeSolver, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application in this process."""
    app = build_app(solver, ServerOptions("m", **options))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as opened:
        yield opened


def ask(problem: str = "3 + 4", **fields: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": "m", "messages": [{"role": "user", "content": problem}], **fields}


async def until(condition: Any) -> None:
    """Let the event loop run until something holds."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


def events(text: str) -> list[Any]:
    """Values of a stream of events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def post(http: httpx.AsyncClient, body: Any, **kwargs: Any) -> httpx.Response:
    """A chat request, sent."""
    return await http.post("/v1/chat/completions", json=body, **kwargs)


async def test_the_answer_is_the_message_and_the_attempt_rides_along() -> None:
    solver = FakeSolver()
    async with client(solver) as http:
        body = (await post(http, ask(n=2, seed=5, max_tokens=7, temperature=1))).json()
    assert [c["message"]["content"] for c in body["choices"]] == ["5, seven"] * 2
    assert [c["index"] for c in body["choices"]] == [0, 1]
    first = body["choices"][0]
    assert first["finish_reason"] == "stop" and first["rivet"]["answer"] == "5, seven"
    assert [s["text"] for s in first["rivet"]["segments"]] == [p.text for p in PIECES]
    assert first["rivet"]["segments"][2]["author"] == "environment"
    assert first["rivet"]["code_runs"] == [{"author": "controller", "status": "ok"}]
    # The prompt counts once, every completion counts.
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}
    assert body["rivet"] == {"seed": 5, "ignored_messages": 0}
    settings = {"temperature": 1.0, "top_p": 1.0, "seed": 5, "max_completion_length": 7}
    assert [a for _, a in solver.asked] == [{**settings, "sample_index": n} for n in (0, 1)]


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({}, "5, seven"),
        ({"rivet": {"content": "boxed"}}, r"It is \boxed{5, seven}."),
        ({"rivet": {"content": "completion"}}, "Add them.print(3 + 4)77"),
        ({"stop": [" seven", ","]}, "5"),
        ({"stop": "5"}, ""),
    ],
)
async def test_a_request_chooses_what_the_message_holds(fields: Any, content: str) -> None:
    async with client(FakeSolver()) as http:
        body = (await post(http, ask(**fields))).json()
        streamed = events((await post(http, ask(**fields, stream=True))).text)
    assert body["choices"][0]["message"]["content"] == content
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in streamed]
    assert "".join(deltas) == content


async def test_a_stream_carries_pieces_then_the_message_then_the_end() -> None:
    async with client(FakeSolver()) as http:
        response = await post(http, ask(stream=True, stream_options={"include_usage": True}))
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert isinstance(chunks[0]["rivet"]["seed"], int)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    segments = [s for c in chunks[1:5] for s in c["choices"][0]["rivet"]["segments"]]
    assert [s["text"] for s in segments] == [p.text for p in PIECES]
    assert chunks[5]["choices"][0]["delta"] == {"content": "5, seven"}
    assert chunks[6]["choices"][0]["finish_reason"] == "stop"
    assert chunks[6]["choices"][0]["rivet"]["finish"] == "answer"
    assert chunks[7]["choices"] == [] and chunks[7]["usage"]["total_tokens"] == 9


async def test_the_trajectory_can_be_left_out() -> None:
    async with client(FakeSolver()) as http:
        body = (await post(http, ask(rivet={"trajectory": False}))).json()
        stream = await post(http, ask(stream=True, rivet={"trajectory": False}))
    assert "segments" not in body["choices"][0]["rivet"]
    assert len(events(stream.text)) == 3


async def test_without_an_answer_the_message_is_empty_and_says_why() -> None:
    async with client(FakeSolver()) as http:
        choice = (await post(http, ask("endless"))).json()["choices"][0]
    assert choice["message"]["content"] == "" and choice["finish_reason"] == "length"
    assert choice["rivet"]["answer"] is None and choice["rivet"]["finish"] == "length"


async def test_a_full_server_refuses_and_says_when_to_come_back() -> None:
    solver = FakeSolver()
    solver.go.clear()
    async with client(solver, max_concurrent=1, max_queue=1) as http:
        first = asyncio.create_task(post(http, ask()))
        second = asyncio.create_task(post(http, ask()))
        await until(lambda: len(solver.asked) == 1)
        health = {"running": 0}
        while (health["running"], health.get("waiting")) != (1, 1):
            await asyncio.sleep(0)
            health = (await http.get("/health")).json()
        refused = await post(http, ask())
        streamed = await post(http, ask(stream=True))
        assert [refused.status_code, streamed.status_code] == [429, 429]
        assert int(refused.headers["retry-after"]) >= 1
        assert "1 completions run and 1 wait" in refused.json()["error"]["message"]
        assert len(solver.asked) == 1  # the second waits
        solver.go.set()
        assert [(await first).status_code, (await second).status_code] == [200, 200]
        assert (await post(http, ask())).status_code == 200
        health = (await http.get("/health")).json()
    assert (health["running"], health["waiting"]) == (0, 0)


async def test_a_deadline_ends_an_attempt_and_frees_its_place() -> None:
    solver = FakeSolver()
    solver.go.clear()
    async with client(solver, max_concurrent=1, max_queue=0) as http:
        late = await post(http, ask(rivet={"deadline_s": 0.05}))
        assert late.status_code == 504 and "within 0.05 s" in late.json()["error"]["message"]
        assert solver.ended == 1
        chunks = events((await post(http, ask(stream=True, rivet={"deadline_s": 0.05}))).text)
        assert chunks[-1]["error"]["code"] == "deadline_exceeded"
        solver.go.set()
        assert (await post(http, ask())).status_code == 200


async def test_a_fault_of_the_infrastructure_is_never_an_answer() -> None:
    async with client(FakeSolver()) as http:
        lost = await post(http, ask("fault"))
        chunks = events((await post(http, ask("fault", stream=True))).text)
        metrics = (await http.get("/metrics")).text
    assert lost.status_code == 503 and lost.json()["error"]["code"] == "infrastructure_fault"
    assert chunks[-1]["error"]["type"] == "server_error"
    assert 'rivet_completions_total{finish="fault"} 2.0' in metrics


async def test_a_bug_is_a_500_in_the_same_shape_and_costs_one_request() -> None:
    async with client(FakeSolver()) as http:
        broken = await post(http, ask("bug 4711"))
        assert broken.status_code == 500 and "4711" not in broken.text
        assert "error" in events((await post(http, ask("bug", stream=True))).text)[-1]
        assert (await post(http, ask())).status_code == 200


async def test_what_the_model_cannot_read_is_the_clients_error() -> None:
    async with client(FakeSolver()) as http:
        response = await post(http, ask("too long"))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("method", "path", "kwargs", "status"),
    [
        ("GET", "/v1/none", {}, 404),
        ("GET", "/v1/chat/completions", {}, 405),
        ("GET", "/v1/models/other", {}, 404),
        ("POST", "/v1/chat/completions", {"content": b"{}"}, 415),
        ("POST", "/v1/chat/completions", {"json": {"model": "m"}}, 400),
        ("POST", "/v1/chat/completions", {"json": ask("x" * 3000)}, 413),
        ("GET", "/health", {"headers": {"Host": "evil.example"}}, 421),
        ("GET", "/page/../app.py", {}, 404),
        ("POST", "/v1/chat/completions", {"content": SURROGATES, "headers": AS_JSON}, 400),
    ],
)
async def test_wrong_requests_get_a_4xx_in_the_apis_shape(
    method: str, path: str, kwargs: Any, status: int
) -> None:
    options = {"max_body_bytes": 2000, "hosts": ("127.0.0.1", "localhost")}
    async with client(FakeSolver(), **options) as http:
        response = await http.request(method, path, **kwargs)
    assert response.status_code == status
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "0:0:0:0:0:0:0:1"])
async def test_a_server_takes_requests_to_the_address_that_it_listens_on(host: str) -> None:
    options = options_of(ServeConfig("m", host=host))
    shown = f"[{host}]" if ":" in host else host
    async with client(FakeSolver(), hosts=options.hosts) as http:
        for name, status in ((shown, 200), ("localhost", 200), ("evil.example", 421)):
            response = await http.get("/health", headers={"Host": f"{name}:8000"})
            assert response.status_code == status


def test_an_address_that_others_reach_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "  ")
    for variable in ("MY_KEY", "UNSET_KEY", ""):
        with pytest.raises(ConfigError, match=r"host: 0\.0\.0\.0 can be reached by others"):
            ServeConfig("m", host="0.0.0.0", api_key_env=variable)
        assert ServeConfig("m", api_key_env=variable).api_key == ""
    monkeypatch.setenv("MY_KEY", "s3cret\n")
    assert options_of(ServeConfig("m", host="0.0.0.0", api_key_env="MY_KEY")) == ServerOptions(
        "m", api_key="s3cret", hosts=()
    )


def test_the_server_is_told_what_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIVET_API_KEY", "s3cret")
    config = ServeConfig(
        "exports/m",
        name="controller",
        allowed_hosts=["Math.Example"],
        max_concurrent=3,
        max_queue=0,
        deadline_s=7.0,
        max_body_bytes=99,
        content="boxed",
        log_text=True,
    )
    assert options_of(config) == ServerOptions(
        "controller",
        max_concurrent=3,
        max_queue=0,
        deadline_s=7.0,
        max_body_bytes=99,
        content="boxed",
        api_key="s3cret",
        hosts=(*LOOPBACK_NAMES, "127.0.0.1", "math.example"),
        logs_text=True,
    )
    assert options_of(replace(config, name="")).model == "m"


async def test_with_a_key_only_health_and_the_page_are_open() -> None:
    async with client(FakeSolver(), api_key="s3cret") as http:
        for path in ("/v1/models", "/metrics", "/v1/models/m"):
            assert (await http.get(path)).status_code == 401
            assert (await http.get(path, headers=KEY)).status_code == 200
        for wrong in ("Bearer", "Bearer other", "Basic s3cret", "Bearer s3cret\u00e9"):
            headers = {"Authorization": wrong.encode()}
            refused = await post(http, ask(), headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert (await post(http, ask(), headers=KEY)).status_code == 200
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/")).status_code == 200


async def test_models_and_metrics_say_what_is_there() -> None:
    async with client(FakeSolver()) as http:
        await post(http, ask())
        models = (await http.get("/v1/models")).json()
        one = (await http.get("/v1/models/m")).json()
        metrics = (await http.get("/metrics")).text
    assert [card["id"] for card in models["data"]] == ["m"] and one == models["data"][0]
    for line in (
        'rivet_requests_total{route="/v1/chat/completions",status="200"} 1.0',
        'rivet_completions_total{finish="answer"} 1.0',
        'rivet_tokens_total{source="sampled"} 5.0',
        'rivet_tokens_total{source="environment"} 1.0',
        'rivet_programs_total{status="ok"} 1.0',
        "rivet_running 0.0",
    ):
        assert line in metrics


@pytest.mark.parametrize("logs_text", [False, True])
async def test_text_of_users_is_logged_only_when_asked_for(
    logs_text: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with client(FakeSolver(), logs_text=logs_text) as http:
        for problem in ("secret words", "secret fault", "secret bug", "secret too long"):
            await post(http, ask(problem))
            await post(http, ask(problem, stream=True))
        await post(http, ask("secret words", temprature=1))
    log = "\n".join(caplog.handler.format(r) for r in caplog.records if r.name.startswith("rivet"))
    assert "/v1/chat/completions 200" in log and "KeyError" in log
    assert ("secret" in log) is logs_text


async def test_the_page_may_run_its_own_scripts_only() -> None:
    async with client(FakeSolver()) as http:
        page = await http.get("/")
        katex = await http.get("/page/katex/katex.min.js")
    assert page.status_code == katex.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "http://" not in page.text and "https://" not in page.text
