"""Every request that is not as it should be is refused with a 4xx that says why."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rivet.chat_api import RequestError
from rivet.serving.chat_request import read_chat_request
from rivet.serving.options import ServerOptions

OPTIONS = ServerOptions("m", max_concurrent=4, max_queue=4, deadline_s=60)
GOOD = {"model": "m", "messages": [{"role": "user", "content": "1 + 1"}]}


def read(**changes: Any) -> Any:
    """The good request with other fields, read."""
    return read_chat_request(json.dumps({**GOOD, **changes}).encode(), OPTIONS)


def test_a_plain_request_is_greedy_and_whole() -> None:
    request = read()
    assert (request.problem, request.n, request.temperature, request.top_p) == ("1 + 1", 1, 0, 1)
    assert request.max_tokens is None and request.deadline_s == 60 and not request.stream
    assert read().seed != read().seed  # without a seed no two samples are the same


def test_every_field_is_read() -> None:
    request = read(
        stream=True,
        stream_options={"include_usage": True},
        n=3,
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        seed=-7,
        stop="x",
        rivet={"content": "boxed", "trajectory": False, "deadline_s": 5},
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "2 +"}, {"text": " 2"}]},
        ],
    )
    assert (request.problem, request.ignored_messages) == ("2 + 2", 1)
    assert (request.stream, request.include_usage, request.n) == (True, True, 3)
    assert (request.max_tokens, request.temperature, request.top_p) == (9, 0.5, 0.9)
    assert (request.seed, request.stop) == (-7, ("x",))
    assert (request.content, request.shows_trajectory, request.deadline_s) == ("boxed", False, 5)


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    read(user="u", metadata={}, tools=[], tool_choice="auto", logprobs=False, presence_penalty=0)
    read(response_format={"type": "text"}, max_tokens=5, max_completion_tokens=5, seed=None)


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"model": "gpt"}, "model", "no model 'gpt'; expected one of m"),
        ({"model": None}, "model", "non-empty string"),
        ({"messages": []}, "messages", "non-empty list"),
        ({"messages": "hi"}, "messages", "non-empty list"),
        ({"messages": [1]}, "messages[0]", "object with a role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "must be text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "must be text",
        ),
        ({"messages": [{"role": "user", "content": " "}]}, "messages", "is empty"),
        ({"messages": [{"role": "assistant", "content": "1"}]}, "messages", "the user's"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"stream": True, "stream_options": {"usage": 1}}, "stream_options", "unknown key"),
        ({"n": 0}, "n", "from 1 to 8"),
        ({"n": 9}, "n", "from 1 to 8"),
        ({"n": True}, "n", "integer"),
        ({"n": 1.5}, "n", "integer"),
        ({"max_tokens": 0}, "max_tokens", "from 1"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ"),
        ({"temperature": -1}, "temperature", "[0, 2]"),
        ({"temperature": float("nan")}, "temperature", "[0, 2]"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"temperature": 10**400}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "(0, 1]"),
        ({"seed": "1"}, "seed", "integer"),
        ({"seed": 2**80}, "seed", "integer"),
        ({"stop": ""}, "stop", "non-empty"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": {"a": 1}}, "stop", "non-empty"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"logprobs": True}, "logprobs", "not supported"),
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"rivet": 1}, "rivet", "an object"),
        ({"rivet": {"contents": 1}}, "rivet", "expected content, deadline_s, trajectory"),
        ({"rivet": {"content": "all"}}, "rivet", "answer, boxed, completion"),
        ({"rivet": {"content": []}}, "rivet", "answer, boxed, completion"),
        ({"rivet": {"deadline_s": 61}}, "deadline_s", "at most 60"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(**changes)
    error = caught.value.body["error"]
    assert 400 <= caught.value.status < 500 and error["type"] == "invalid_request_error"
    assert error["param"] == param and message in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'"text"', b"null"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        read_chat_request(body, OPTIONS)
    assert caught.value.status == 400
