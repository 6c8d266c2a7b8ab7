"""One request to one endpoint: whatever comes back is an `Attempt`, never an exception."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import httpx2  # what the openai client speaks HTTP with
import openai

from rivet.experts.completions import (
    BadReply,
    Usage,
    error_message,
    read_completion,
    retry_after_s,
)
from rivet.experts.config import ExpertConfig
from rivet.experts.connections import Endpoint
from rivet.experts.types import ExpertStatus

logger = logging.getLogger(__name__)

_RETRIED = frozenset({"timeout", "connection", "rate_limited", "server_error", "bad_response"})
# The endpoint works: it answered, if only to refuse this request or to ask for patience.
_HEALTHY = frozenset({"ok", "rejected", "rate_limited"})


@dataclass(frozen=True, slots=True)
class Attempt:
    """What came of one request.

    Attributes:
        status: As in `ExpertReply`.
        text: The reply without the key; empty unless `status` is `ok`.
        detail: For people, redacted.
        usage: What it took, as far as known.
        is_final: Asking again would not help.
        is_healthy: Whether the endpoint works.
        retry_after_s: How long it asked to be left alone, in seconds.
    """

    status: ExpertStatus
    text: str = ""
    detail: str = ""
    usage: Usage = Usage()
    is_final: bool = False
    is_healthy: bool = False
    retry_after_s: float | None = None


async def send(config: ExpertConfig, endpoint: Endpoint, body: Mapping[str, Any]) -> Attempt:
    """Send one request, wait for the whole response, and tell the endpoint's circuit."""
    is_trial = endpoint.circuit.begin()
    endpoint.in_flight += 1
    attempt = None
    try:
        attempt = await _send(config, endpoint, body)
    finally:
        endpoint.in_flight -= 1
        if attempt is None:  # cancelled
            endpoint.circuit.release(is_trial)
        elif attempt.is_healthy:
            endpoint.circuit.succeed(is_trial)
        else:
            endpoint.circuit.fail(is_trial, f"{attempt.status}: {attempt.detail}")
    return attempt


async def _send(config: ExpertConfig, endpoint: Endpoint, body: Mapping[str, Any]) -> Attempt:
    def failed(status: ExpertStatus, detail: str, **values: Any) -> Attempt:
        values = {"is_healthy": status in _HEALTHY, "is_final": status not in _RETRIED} | values
        return Attempt(status, detail=endpoint.redactor.detail(detail), **values)

    try:
        async with asyncio.timeout(config.timeout_s):
            raw = await endpoint.client.chat.completions.with_raw_response.create(**body)
            text, usage = read_completion(cast(httpx2.Response, raw.http_response), body)
        return Attempt("ok", endpoint.redactor.reply(text), usage=usage, is_healthy=True)
    except BadReply as error:
        return failed(
            "bad_response",
            str(error),
            usage=error.usage,
            is_final=error.is_final,
            is_healthy=error.is_healthy,
        )
    except (TimeoutError, openai.APITimeoutError):
        return failed("timeout", f"no complete answer within {config.timeout_s:g} s")
    except openai.APIStatusError as error:
        status = _status_of(error.status_code)
        detail = f"{error.status_code} {error_message(error)}".strip()
        if error.status_code in (401, 403):
            variable = config.key_env
            hint = f"the key in {variable}" if variable else "key_env, which is not set"
            detail = f"{endpoint.redactor.detail(detail)}; check {hint}"
        return failed(status, detail, retry_after_s=retry_after_s(error.response.headers))
    except openai.APIConnectionError as error:
        cause = error.__cause__ or error
        return failed("connection", f"{type(cause).__name__}: {cause}")
    except Exception as error:  # the one boundary around foreign endpoints
        # Where, but not what it says: a message could quote a header.
        place = traceback.extract_tb(error.__traceback__)[-1]
        kind = type(error).__name__
        logger.error("expert %s: %s at %s:%s", config.name, kind, *place[:2])
        return failed("bad_response", f"unreadable response ({kind})")


def _status_of(code: int) -> ExpertStatus:
    if code == 429:
        return "rate_limited"
    if code == 408:
        return "timeout"
    return "server_error" if code >= 500 else "rejected"
