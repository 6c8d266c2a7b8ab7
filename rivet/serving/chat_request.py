"""Reading a chat completion request: every field checked, nothing that matters ignored.

The controller answers one problem, the last user message. Fields of the API that would change the
meaning of the answer and cannot be honoured are refused; those that change nothing are accepted.
"""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from rivet.chat_api import RequestError, check_model, message_texts, read_object
from rivet.serving.options import Content, ServerOptions

MAX_CHOICES = 128
_READ = (
    "model messages stream stream_options n max_tokens max_completion_tokens temperature top_p "
    "seed stop rivet"
).split()
# Accepted and without effect: they carry no wish about the answer.
_WITHOUT_EFFECT = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key reasoning_effort "
    "verbosity parallel_tool_calls".split()
)
# Refused unless they have a value that asks for nothing.
_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request.

    Attributes:
        problem: Text of the last user message.
        ignored_messages: How many messages before it were not used.
        stream: Whether the reply is a stream of events.
        include_usage: Whether a stream ends with a chunk that has the usage.
        n: Choices.
        max_tokens: Tokens of a completion; None takes the checkpoint's limit.
        temperature, top_p, seed: Sampling.
        stop: The message is cut before the first of these; the reasoning is not.
        content: What a message holds.
        shows_trajectory: Whether the extension field holds the segments.
        deadline_s: Seconds that it may take.
    """

    problem: str
    ignored_messages: int
    stream: bool
    include_usage: bool
    n: int
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int
    stop: tuple[str, ...]
    content: Content
    shows_trajectory: bool
    deadline_s: float


def read_chat_request(body: bytes, options: ServerOptions) -> ChatRequest:
    """Read and check the body of a chat completion request.

    Raises:
        RequestError: A field is missing, wrong, unknown or not supported.
    """
    fields = read_object(body)
    check_model(fields, (options.model,))
    _check_names(fields)
    texts = message_texts(fields.get("messages"))
    if not texts[-1].strip():
        raise RequestError(400, "the last message is empty; expected a problem", param="messages")
    extension = _object(fields, "rivet", {"content", "trajectory", "deadline_s"})
    stream_options = _object(fields, "stream_options", {"include_usage", "include_obfuscation"})
    stream = _flag(fields, "stream", False)
    if stream_options and not stream:
        raise RequestError(400, "stream_options needs stream: true", param="stream_options")
    most = min(MAX_CHOICES, options.max_concurrent + options.max_queue)
    seed = _integer(fields, "seed", -(2**63), 2**64 - 1)
    temperature = _number(fields, "temperature", 0.0, lambda x: 0 <= x <= 2, "in [0, 2]")
    top_p = _number(fields, "top_p", 1.0, lambda x: 0 < x <= 1, "in (0, 1]")
    return ChatRequest(
        problem=texts[-1],
        ignored_messages=len(texts) - 1,
        stream=stream,
        include_usage=_flag(stream_options, "include_usage", False),
        n=_integer(fields, "n", 1, most) or 1,
        max_tokens=_max_tokens(fields),
        temperature=temperature,
        top_p=top_p,
        # Without a seed two requests must not be the same sample.
        seed=secrets.randbits(63) if seed is None else seed,
        stop=_stop(fields.get("stop")),
        content=_content(extension, options.content),
        shows_trajectory=_flag(extension, "trajectory", True),
        deadline_s=_number(
            extension,
            "deadline_s",
            options.deadline_s,
            lambda x: 0 < x <= options.deadline_s,
            f"above 0 and at most {options.deadline_s:g}, the server's limit",
        ),
    )


def _check_names(fields: dict[str, Any]) -> None:
    known = {*_READ, *_WITHOUT_EFFECT, *_NOT_SUPPORTED}
    for name, value in fields.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise RequestError(400, f"unknown field {name[:60]!r}{hint}", param=name[:60])
        if name in _NOT_SUPPORTED and value not in _NOT_SUPPORTED[name]:
            raise RequestError(400, f"{name} is not supported", param=name)


def _object(fields: dict[str, Any], name: str, keys: set[str]) -> dict[str, Any]:
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(400, f"{name} must be an object", param=name)
    unknown = sorted(map(str, set(value) - keys))
    if unknown:
        expected = ", ".join(sorted(keys))
        raise RequestError(
            400, f"{name}: unknown key {unknown[0][:60]!r}; expected {expected}", param=name
        )
    return value


def _flag(fields: dict[str, Any], name: str, default: bool) -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(400, f"{name} must be true or false", param=name)
    return value


def _integer(fields: dict[str, Any], name: str, low: int, high: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(400, f"{name} must be an integer from {low} to {high}", param=name)
    return value


def _number(
    fields: dict[str, Any],
    name: str,
    default: float,
    is_allowed: Callable[[float], bool],
    allowed: str,
) -> float:
    value = fields.get(name)
    if value is None:
        return default
    # NaN, which Python's JSON reads, fails every comparison.
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_allowed(value):
        raise RequestError(400, f"{name} must be a number {allowed}", param=name)
    return float(value)


def _max_tokens(fields: dict[str, Any]) -> int | None:
    old = _integer(fields, "max_tokens", 1, 2**31)
    new = _integer(fields, "max_completion_tokens", 1, 2**31)
    if old is not None and new is not None and old != new:
        raise RequestError(
            400, "max_tokens and max_completion_tokens differ; give one", param="max_tokens"
        )
    return old if new is None else new


def _stop(value: Any) -> tuple[str, ...]:
    stop = [value] if isinstance(value, str) else value
    if stop is None:
        return ()
    is_list = isinstance(stop, list) and len(stop) <= 16
    if not is_list or not all(isinstance(text, str) and text for text in stop):
        raise RequestError(
            400, "stop must be a non-empty string or a list of at most 16 of them", param="stop"
        )
    return tuple(stop)


def _content(extension: dict[str, Any], default: Content) -> Content:
    value = extension.get("content")
    if value is None:
        return default
    if value not in get_args(Content):
        expected = ", ".join(get_args(Content))
        raise RequestError(400, f"rivet.content must be one of {expected}", param="rivet")
    return value
