"""The embedded server speaks the API: to the official client, and to those who get it wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import openai
import pytest

from rivet.experts.server import MAX_BODY_BYTES, READY_PREFIX, ServerError, build_app
from rivet.experts.server_process import start_server

# The child of these tests: two functions, one of which fails.
CHILD = """
import sys
from rivet.experts.server import run_server

def echo(text, seed):
    return f"{text} [{seed}]"

def broken(text, seed):
    raise ValueError("a detail of the inside")

run_server({"echo": echo, "broken": broken}, parent_pid=int(sys.argv[1]))
"""
COMMAND = [sys.executable, "-c", CHILD, "{parent}"]


@pytest.fixture(scope="module")
def running():
    with start_server(COMMAND) as server:
        yield server


def ask(messages="hello there", **fields):
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return {"model": "echo", "messages": messages} | fields


def test_the_official_client_gets_a_completion_with_usage(running):
    with openai.OpenAI(base_url=running.base_url, api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["echo", "broken"]
        done = client.chat.completions.create(**ask(seed=7))
    assert done.choices[0].message.content == "hello there [7]"
    assert done.choices[0].finish_reason == "stop"
    usage = done.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 5, 7)


def test_the_official_client_gets_its_own_errors(running):
    with openai.OpenAI(base_url=running.base_url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="expected one of echo, broken"):
            client.chat.completions.create(**ask(model="gpt"))
        with pytest.raises(openai.BadRequestError, match="streaming"):
            client.chat.completions.create(**ask(stream=True))
        with pytest.raises(openai.InternalServerError, match="broken failed: ValueError") as error:
            client.chat.completions.create(**ask(model="broken"))
    assert "inside" not in str(error.value)


def test_the_last_message_is_the_request_and_parts_of_text_are_joined(running):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": [{"type": "text", "text": "th"}, {"text": "ree"}]},
    ]
    done = httpx.post(f"{running.base_url}/chat/completions", json=ask(messages)).json()
    assert done["choices"][0]["message"]["content"] == "three [0]"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"", 400, None),
        (b"{", 400, None),
        (b"\xff\xff", 400, None),
        (b"[" * 50_000, 400, None),
        (b"[]", 400, None),
        (b"{}", 400, "model"),
        (ask(model=5), 400, "model"),
        (ask(model="x"), 404, "model"),
        (ask([]), 400, "messages"),
        (ask({"role": "user"}), 400, "messages"),
        (ask(["hi"]), 400, "messages[0]"),
        (ask([{"content": "hi"}]), 400, "messages[0]"),
        (ask([{"role": "user"}]), 400, "messages[0].content"),
        (ask([{"role": "user", "content": [{"image_url": "x"}]}]), 400, "messages[0].content"),
        (ask([{"role": "assistant", "content": "hi"}]), 400, "messages"),
        (ask(n=2), 400, "n"),
        (ask(seed="x"), 400, "seed"),
        (ask(seed=True), 400, "seed"),
        (ask(stream=True), 400, "stream"),
        (b" " * (MAX_BODY_BYTES + 1), 413, None),
    ],
)
def test_a_malformed_request_gets_an_openai_style_error(running, body, status, param):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(f"{running.base_url}/chat/completions", content=raw)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert error["type"] == "invalid_request_error" and error["message"]


@pytest.mark.parametrize(("method", "path"), [("GET", "/nothing"), ("GET", "/chat/completions")])
def test_an_unknown_route_gets_an_openai_style_error(running, method, path):
    response = httpx.request(method, running.base_url + path)
    assert response.status_code in (404, 405)
    assert "not served here" in response.json()["error"]["message"]


def test_it_listens_on_the_loopback_interface_only(running):
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if os.path.exists(table):
            rows = [line.split() for line in open(table).readlines()[1:]]
            listening += [row[1] for row in rows if row[3] == "0A"]
    ours = [address for address in listening if int(address.split(":")[1], 16) == running.port]
    if listening:
        assert ours == [f"0100007F:{running.port:04X}"]
    assert httpx.get(f"http://127.0.0.1:{running.port}/health").json() == {"status": "ok"}


def test_it_is_gone_after_the_block():
    with start_server(COMMAND) as server:
        httpx.get(f"http://127.0.0.1:{server.port}/health").raise_for_status()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{server.port}/health")


def test_it_ends_when_its_parent_is_killed():
    parent = (
        "import sys, time; from rivet.experts.server_process import start_server\n"
        f"with start_server({COMMAND!r}) as server:\n"
        "    print(server.port, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    try:
        port = int(process.stdout.readline())
        httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
        process.send_signal(signal.SIGKILL)
        process.wait()
    finally:
        process.kill()
        process.stdout.close()
    assert _closes(port)


def test_a_command_that_fails_is_reported_with_what_it_printed():
    with pytest.raises(ServerError, match="code 3 before it answered:\nno such thing"):
        code = "import sys; print('no such thing', file=sys.stderr); sys.exit(3)"
        with start_server([sys.executable, "-c", code]):
            pass


def test_a_command_that_never_listens_is_ended_and_reported():
    code = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"
    with pytest.raises(ServerError, match="within 5 s:\n") as caught:
        with start_server([sys.executable, "-c", code], timeout_s=5):
            pass
    pid = int(str(caught.value).split("pid ")[1])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_port_that_is_taken_is_an_error_that_says_what_to_do():
    from rivet.experts.server import run_server

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ServerError, match="choose another --port"):
            run_server({}, port=taken.getsockname()[1])


def test_the_ready_line_is_only_believed_once_the_server_answers():
    """A program that prints the line and does not serve is not ready."""
    code = f"import time; print('{READY_PREFIX}9', flush=True); time.sleep(600)"
    with pytest.raises(ServerError, match="did not answer"):
        with start_server([sys.executable, "-c", code], timeout_s=0.5):
            pass


async def test_functions_answer_at_the_same_time():
    """Each of two calls waits for the other to be there."""
    both = threading.Barrier(2, timeout=20)

    def meet(text, seed):
        both.wait()
        return text

    transport = httpx.ASGITransport(build_app({"echo": meet}))
    async with httpx.AsyncClient(transport=transport, base_url="http://local") as client:
        asked = [client.post("/v1/chat/completions", json=ask()) for _ in range(2)]
        assert [reply.status_code for reply in await asyncio.gather(*asked)] == [200] * 2


def test_many_clients_are_answered(running):
    statuses = []

    def one():
        url = f"{running.base_url}/chat/completions"
        statuses.append(httpx.post(url, json=ask()).status_code)

    threads = [threading.Thread(target=one) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 16


class Endless:
    """A chat model that never answers."""

    ended = False

    async def complete(self, question):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.ended = True
            raise

    async def aclose(self):
        pass


async def test_a_question_ends_with_the_client_that_asked_it():
    model = Endless()
    body = json.dumps(ask(model="endless")).encode()
    arriving = iter(
        [
            {"type": "http.request", "body": body, "more_body": False},
            {"type": "http.disconnect"},  # the client's time is up
        ]
    )

    async def receive():
        return next(arriving)

    async def send(message):
        pass

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    app = build_app({"endless": model})
    await asyncio.wait_for(app({**scope, "query_string": b""}, receive, send), timeout=60)
    assert model.ended


def _closes(port: int) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return True
        time.sleep(0.02)
    return False
