"""The server as a process and over real connections: clients that leave, shutdown, a taken port."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_solver import FakeSolver
from learnt import PROBLEMS
from running_server import running

from rivet.async_solver import AsyncSolver
from rivet.experts.server import ServerError
from rivet.experts.server_process import start_server
from rivet.pieces import Piece
from rivet.serving.options import ServerOptions
from rivet.serving.run import serve

REPO = Path(__file__).parents[3]


def until(condition: Callable[[], Any]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def health(url: str) -> dict[str, Any]:
    """What /health says."""
    with urllib.request.urlopen(f"{url}/health", timeout=60) as response:
        return json.load(response)


def body(problem: str, **fields: Any) -> bytes:
    """A chat request."""
    message = {"role": "user", "content": problem}
    return json.dumps({"model": "m", "messages": [message], **fields}).encode()


@pytest.fixture(scope="module")
def server(learnt_checkpoint: Path) -> Iterator[str]:
    """A server around the tiny checkpoint."""
    with running(AsyncSolver(learnt_checkpoint), max_concurrent=4) as url:
        yield url


def test_the_official_client_gets_answers(server: str) -> None:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["m"]
        for problem, answer in PROBLEMS.items():
            reply = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": problem}], n=2, seed=1, stop=["#"]
            )
            assert [c.message.content for c in reply.choices] == [str(answer)] * 2
            assert reply.choices[0].finish_reason == "stop"
            assert reply.usage is not None and reply.usage.completion_tokens > 20
            extension = reply.choices[0].model_extra["rivet"]
            text = "".join(segment["text"] for segment in extension["segments"])
            assert f"<output>{answer}</output>" in text and extension["well_formed"]


def test_the_official_client_streams(server: str) -> None:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Compute 3 + 4 * 5"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "23"
    segments = [s for c in choices for s in (c.model_extra.get("rivet") or {}).get("segments", [])]
    assert len(segments) > 10 and "".join(s["text"] for s in segments).count("<output>") == 1
    assert choices[-1].finish_reason == "stop" and chunks[-1].usage.total_tokens > 20


def test_the_official_client_understands_refusals(server: str) -> None:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        ask: Any = client.chat.completions.create
        with pytest.raises(openai.BadRequestError, match="temperature must be"):
            ask(model="m", messages=[{"role": "user", "content": "1"}], temperature=-1)
        with pytest.raises(openai.NotFoundError, match="no model 'other'"):
            ask(model="other", messages=[{"role": "user", "content": "1"}])
        with pytest.raises(openai.BadRequestError, match="at most 511"):
            ask(model="m", messages=[{"role": "user", "content": "7 " * 600}])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(stream: bool) -> None:
    solver = FakeSolver()
    solver.go.clear()
    with running(solver, max_concurrent=1, max_queue=0) as url:
        address = url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1]))) as connection:
            sent = body("3 + 4", stream=stream)
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sent)}\r\n"
            )
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + sent)
            until(lambda: health(url)["running"] == 1)
        until(lambda: health(url)["running"] == 0)
    assert solver.ended == 1


def test_a_client_that_does_not_read_loses_its_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rivet.serving.app._READ_S", 0.2)
    long = (Piece("controller", "reasoning", "x" * 16_000_000),)  # more than any socket buffers
    with running(FakeSolver(long), max_concurrent=1, max_queue=0, deadline_s=1) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        data = body("3 + 4", stream=True)
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        with socket.create_connection((host, int(port))) as client:
            client.sendall(head.encode() + data)
            until(lambda: health(url)["waiting"] == 1)  # reserved
            until(lambda: health(url)["waiting"] + health(url)["running"] == 0)


def test_a_stopped_server_finishes_what_it_accepted_and_takes_nothing_new(tmp_path: Path) -> None:
    program = Path(__file__).with_name("fake_solver.py")
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    process = subprocess.Popen(
        [sys.executable, str(program), str(tmp_path / "go")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().removeprefix("listening on port "))
        url = f"http://127.0.0.1:{port}"
        until(lambda: health(url))
        answers: list[Any] = []

        def post() -> None:
            request = urllib.request.Request(
                f"{url}/v1/chat/completions",
                body("3 + 4").replace(b'"m"', b'"fake"'),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                answers.append(json.load(response))

        client = threading.Thread(target=post)
        client.start()
        until(lambda: health(url)["running"] == 1)
        process.send_signal(signal.SIGTERM)

        def is_closed() -> bool:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
            except OSError:
                return True
            return False

        until(is_closed)
        assert client.is_alive() and process.poll() is None
        (tmp_path / "go").touch()
        client.join()
        assert answers[0]["choices"][0]["message"]["content"] == "5, seven"
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.communicate()


# Opens for ever; says when it began and whether it was closed in order.
OPENING = """
import asyncio
import signal
from rivet.serving.options import ServerOptions
from rivet.serving.run import serve

class Opening:
    async def __aenter__(self):
        try:
            print("opening", flush=True)
            await asyncio.sleep(600)
        finally:
            print("closed", flush=True)

    async def __aexit__(self, *_):
        pass

# As from a terminal: what a shell starts in the background ignores Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
serve(Opening, ServerOptions("m"))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_still_opens_can_be_stopped(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", OPENING],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "opening\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert out == "closed\n" and "KeyboardInterrupt" in err and process.returncode != 0
    finally:
        process.kill()
        process.communicate()


def test_a_taken_port_is_named_before_the_model_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"cannot listen on 127.0.0.1:{port} .*--port"):
            serve(lambda: pytest.fail("loaded"), ServerOptions("m"), port=port)


@pytest.mark.slow
def test_the_command_serves_a_checkpoint(learnt_checkpoint: Path) -> None:
    command = [sys.executable, "-m", "stages.cli", "serve", str(learnt_checkpoint), "--port", "0"]
    with start_server([*command, "--name", "m", "--parent_pid", "{parent}"], timeout_s=300) as run:
        with openai.OpenAI(base_url=run.base_url, api_key="none", max_retries=0) as client:
            reply = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "Compute 3 + 4 * 5"}]
            )
        assert reply.choices[0].message.content == "23"
