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

# More is no number of tokens, and would not fit into a database.
_MOST_TOKENS = 10**9
# A token of prose is about four bytes long, one of mathematics or code about three.
_BYTES_PER_TOKEN = 3


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that were taken.

    Attributes:
        prompt_tokens, completion_tokens: By the provider's count, or by our estimate.
        is_metered: False if a part is an estimate.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_metered: bool = True

    @property
    def tokens(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.is_metered and other.is_metered,
        )


class BadReply(Exception):
    """A response that is no chat completion.

    Its message may quote the response: to be redacted and cut by whoever shows it.

    Attributes:
        is_final: Asking again would not help.
        is_healthy: It is a completion, only one without text: the endpoint works.
        usage: What it took all the same.
    """

    def __init__(
        self,
        message: str,
        *,
        is_final: bool = False,
        is_healthy: bool = False,
        usage: Usage | None = None,
    ) -> None:
        super().__init__(message)
        self.is_final = is_final
        self.is_healthy = is_healthy
        self.usage = usage or Usage()


def estimate_tokens(text: str) -> int:
    """Tokens of a text where nobody counts them: a third of its bytes, rather more than less."""
    return -(-len(text.encode("utf-8", "replace")) // _BYTES_PER_TOKEN)


def prompt_estimate(body: Mapping[str, Any]) -> int:
    """Estimated tokens of a request's messages."""
    return sum(estimate_tokens(message["content"]) for message in body["messages"])


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


def read_completion(response: httpx2.Response, request: Mapping[str, Any]) -> tuple[str, Usage]:
    """Text of a chat completion, and what it took: a useless reply costs too.

    Args:
        response: The whole response.
        request: The body that it answers; its length is estimated if the provider does not say.

    Raises:
        BadReply: It is none, or has no text.
    """
    media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise BadReply(f"content type is {media_type!r}, expected application/json")
    try:
        body = json.loads(response.content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadReply(f"body is not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise BadReply(f"body of {len(response.content)} bytes is not valid JSON") from error
    if not isinstance(body, dict):
        raise BadReply(f"body is {type(body).__name__}, expected an object")
    prompt, completion = _counts(body.get("usage"))
    spent = Usage(prompt or 0, completion or 0, prompt is not None and completion is not None)
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        raise BadReply("no choices in the response", usage=spent)
    choice = choices[0] if isinstance(choices[0], dict) else {}
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise BadReply(
            f"no text in the response (finish_reason {choice.get('finish_reason')!r})",
            is_healthy=isinstance(message, dict),
            usage=spent,
        )
    if not spent.is_metered:
        spent = Usage(
            prompt_estimate(request) if prompt is None else prompt,
            estimate_tokens(text) if completion is None else completion,
            is_metered=False,
        )
    # JSON can spell lone surrogates, which no UTF-8 file can hold.
    return text.encode("utf-8", "replace").decode("utf-8"), spent


def _counts(usage: Any) -> tuple[int | None, int | None]:
    """Tokens of prompt and reply as a provider's `usage` has them, None where it does not."""
    if not isinstance(usage, dict):
        return None, None
    return _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))


def _count(value: Any) -> int | None:
    # No text has no tokens: a zero is a count that nobody made.
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST_TOKENS
    return value if is_count else None


def error_message(error: openai.APIStatusError) -> str:
    """The provider's own words, to be redacted and cut by whoever shows them."""
    body = error.body
    message = body.get("message") if isinstance(body, dict) else body
    return message if isinstance(message, str) else ""


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that `Retry-After` asks for, as a number or as a date; None if it does not."""
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
