"""Chat completions as they are sent and read: the body of a request, and what a response holds.

A response is foreign: anything that is not a chat completion with text is a `BadReply`.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2  # what the openai client speaks HTTP with
import openai

from rivet.experts.config import ExpertConfig


class BadReply(Exception):
    """A response that is no chat completion. `is_final`: asking again would not help."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


@dataclass(slots=True)
class Usage:
    """Tokens that a provider has metered so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, usage: Any) -> None:
        """Add a provider's `usage`, as far as it is one."""
        if isinstance(usage, dict):
            self.prompt_tokens += _count(usage.get("prompt_tokens"))
            self.completion_tokens += _count(usage.get("completion_tokens"))


def _count(value: Any) -> int:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_count else 0


def request_body(config: ExpertConfig, request: str, sample_key: str) -> dict[str, Any]:
    """Arguments of a chat completion that asks an expert."""
    messages = [{"role": "system", "content": config.system}] if config.system else []
    messages.append({"role": "user", "content": request})
    body: dict[str, Any] = {
        "model": config.model,
        "messages": messages,
        "max_tokens": config.max_tokens,
    }
    if config.temperature is not None:
        body["temperature"] = config.temperature
    if config.send_seed and sample_key:
        body["seed"] = sample_seed(sample_key)
    return body


def sample_seed(sample_key: str) -> int:
    """The `seed` of a sample, in [0, 2**31): the same in every process."""
    digest = hashlib.blake2b(sample_key.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def read_completion(response: httpx2.Response, usage: Usage) -> str:
    """Text of a chat completion; meters its usage first, since a useless reply costs too.

    Raises:
        BadReply: It is none, or has no text.
    """
    media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise BadReply(f"content type is {media_type[:60]!r}, expected application/json")
    try:
        body = json.loads(response.content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadReply(f"body is not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise BadReply(f"body of {len(response.content)} bytes is not valid JSON") from error
    if not isinstance(body, dict):
        raise BadReply(f"body is {type(body).__name__}, expected an object")
    usage.add(body.get("usage"))
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        raise BadReply("no choices in the response")
    choice = choices[0] if isinstance(choices[0], dict) else {}
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise BadReply(f"no text in the response (finish_reason {choice.get('finish_reason')!r})")
    # JSON can spell lone surrogates, which no UTF-8 file can hold.
    return text.encode("utf-8", "replace").decode("utf-8")


def error_message(error: openai.APIStatusError) -> str:
    """The provider's own words, shortened. Redacted by the caller."""
    body = error.body
    message = body.get("message") if isinstance(body, dict) else body
    return " ".join(message.split())[:300] if isinstance(message, str) else ""


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that `Retry-After` asks for, as a number or as a date; None if it does not."""
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
