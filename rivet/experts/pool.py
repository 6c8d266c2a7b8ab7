"""The expert pool: asks experts behind OpenAI-compatible endpoints and meters what it costs.

Whatever an endpoint does, `ask` returns: a reply, or a typed fault without text
(`rivet.experts.types`). Retries are ours, with jitter and `Retry-After`, and prefer another base
URL. Keys are read from the environment when a client is built, sent in the `Authorization` header,
and kept out of every message, log line and repr.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import httpx2  # what the openai client speaks HTTP with
import openai

from rivet.experts.completions import (
    BadReply,
    Usage,
    error_message,
    read_completion,
    request_body,
    retry_after_s,
)
from rivet.experts.config import ExpertConfig, check_keys
from rivet.experts.connections import Connections, Endpoint
from rivet.experts.types import ExpertReply, ExpertStatus

logger = logging.getLogger(__name__)

_MAX_BACKOFF_S = 20.0
# A provider that asks for more patience than this is treated as unavailable.
_MAX_RETRY_AFTER_S = 60.0
_RETRIED = frozenset({"timeout", "connection", "rate_limited", "server_error", "bad_response"})
_CHECK_QUESTION = "What is 17 + 25? Answer with a short Python program that prints it."


@dataclass(slots=True)
class ExpertTotals:
    """What one expert, or the pool, has been asked and has cost so far.

    Attributes:
        calls: Questions, whatever came of them.
        attempts: Requests sent, retries included.
        statuses: Calls by final status.
        prompt_tokens, completion_tokens: As metered by the providers, failed attempts included.
        cost_usd: By the configured prices.
        unmetered: Replies that came without a usable `usage`.
        latency_s: Sum over calls.
    """

    calls: int = 0
    attempts: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    unmetered: int = 0
    latency_s: float = 0.0

    def add(self, reply: ExpertReply) -> None:
        """Count one finished call."""
        self.calls += 1
        self.attempts += reply.attempts
        self.statuses[reply.status] += 1
        self.prompt_tokens += reply.prompt_tokens
        self.completion_tokens += reply.completion_tokens
        self.cost_usd += reply.cost_usd
        self.unmetered += reply.status == "ok" and not reply.completion_tokens
        self.latency_s += reply.latency_s


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one endpoint answered to one question. `reply.detail` says what is wrong."""

    expert: ExpertConfig
    base_url: str
    reply: ExpertReply


class ExpertsUnavailableError(RuntimeError):
    """An endpoint does not answer, so a run that needs it does not start."""


class ExpertPool:
    """Implements `rivet.experts.types.Experts` over HTTP.

    Use it in one event loop at a time; in a new one it opens new connections.

    Args:
        configs: The experts; names must differ.
        environ: Where key variables are looked up; the process's environment by default.
        backoff_s: Seconds before the first retry, doubled for each further one, jittered.

    Raises:
        ExpertsFileError: A key variable is not set, or holds no key.
        ValueError: Two experts have the same name.
    """

    def __init__(
        self,
        configs: Sequence[ExpertConfig],
        *,
        environ: Mapping[str, str] | None = None,
        backoff_s: float = 0.5,
    ) -> None:
        self._configs = {config.name: config for config in configs}
        if len(self._configs) != len(configs):
            names = Counter(config.name for config in configs)
            twice = ", ".join(name for name, count in names.items() if count > 1)
            raise ValueError(f"experts with the same name: {twice}; expected different names")
        self._environ = os.environ if environ is None else environ
        check_keys(configs, self._environ)
        self._backoff_s = backoff_s
        self._jitter = random.Random()
        self._connections: Connections | None = None
        self.totals: dict[str, ExpertTotals] = {name: ExpertTotals() for name in self._configs}

    def __repr__(self) -> str:
        return f"ExpertPool({', '.join(self._configs)})"

    async def __aenter__(self) -> ExpertPool:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections. The pool can be used again."""
        connections, self._connections = self._connections, None
        if connections is not None:
            await connections.aclose()

    @property
    def names(self) -> tuple[str, ...]:
        """Names that the controller may write in `<expert name="...">`."""
        return tuple(self._configs)

    @property
    def configs(self) -> tuple[ExpertConfig, ...]:
        """The experts as configured, without any key."""
        return tuple(self._configs.values())

    def total(self) -> ExpertTotals:
        """Totals over all experts."""
        total = ExpertTotals()
        for part in self.totals.values():
            total.calls += part.calls
            total.attempts += part.attempts
            total.statuses += part.statuses
            total.prompt_tokens += part.prompt_tokens
            total.completion_tokens += part.completion_tokens
            total.cost_usd += part.cost_usd
            total.unmetered += part.unmetered
            total.latency_s += part.latency_s
        return total

    async def ask(self, name: str, request: str, *, sample_key: str = "") -> ExpertReply:
        """Ask one expert; never raises for what an endpoint does.

        Args:
            name: Which expert.
            request: The controller's request, plain text.
            sample_key: Distinguishes repeated samples of one request; becomes the `seed` where
                the expert is configured with `send_seed`.
        """
        config = self._configs.get(name)
        if config is None:
            known = ", ".join(self._configs)
            detail = f"no expert {name!r}; configured: {known}"
            return ExpertReply(name, "unknown_expert", detail=detail, attempts=0)
        started = time.monotonic()
        call = _Call(config)
        while not await self._try_once(call, request, sample_key):
            pass
        reply = call.reply(time.monotonic() - started)
        self.totals[name].add(reply)
        return reply

    async def check(self) -> list[CheckResult]:
        """Ask every endpoint of every expert one question, once, all at the same time."""

        async def one(config: ExpertConfig, base_url: str) -> CheckResult:
            call = _Call(config)
            started = time.monotonic()
            endpoint = self._open().endpoint(config, base_url)
            await self._attempt(call, endpoint, _CHECK_QUESTION, "")
            return CheckResult(config, base_url, call.reply(time.monotonic() - started))

        pairs = [(config, url) for config in self.configs for url in config.base_urls]
        return list(await asyncio.gather(*(one(config, url) for config, url in pairs)))

    async def preflight(self) -> None:
        """Ask every endpoint one question, as a run does before it starts.

        Raises:
            ExpertsUnavailableError: One does not answer; the message names each and says why.
        """
        failed = [result for result in await self.check() if result.reply.status != "ok"]
        if failed:
            lines = [f"{r.reply.name} at {r.base_url}: {r.reply.detail}" for r in failed]
            raise ExpertsUnavailableError(
                "experts do not answer:\n  " + "\n  ".join(lines) + "\nexpected every endpoint to "
                "answer before a run starts; see `rivet experts check`"
            )

    # --- one call -------------------------------------------------------------------------------

    async def _try_once(self, call: _Call, request: str, sample_key: str) -> bool:
        """Make one attempt; wait if there is another to make. True if the call is over."""
        config, connections = call.config, self._open()
        async with connections.semaphore(config):
            endpoint = connections.least_loaded(config, call.tried)
            call.tried.append(endpoint.base_url)
            await self._attempt(call, endpoint, request, sample_key)
        if call.status == "ok" or call.is_final or call.attempts > config.max_retries:
            return True
        pause_s = self._pause_s(call)
        if pause_s is None:
            call.detail += f"; asked to wait longer than {_MAX_RETRY_AFTER_S:g} s"
            return True
        logger.info(
            "expert %s: attempt %d: %s (%s); next in %.1f s",
            *(config.name, call.attempts, call.status, call.detail, pause_s),
        )
        await asyncio.sleep(pause_s)
        return False

    def _pause_s(self, call: _Call) -> float | None:
        """Seconds until the next attempt, or None to give up."""
        backoff_s = min(_MAX_BACKOFF_S, self._backoff_s * 2 ** (call.attempts - 1))
        backoff_s *= self._jitter.uniform(0.5, 1.0)
        if call.retry_after_s is None:
            return backoff_s
        if call.retry_after_s > _MAX_RETRY_AFTER_S:
            return None
        # Never earlier than asked, and not all at the same moment.
        return call.retry_after_s + self._jitter.uniform(0.0, 0.1) * backoff_s

    async def _attempt(
        self, call: _Call, endpoint: Endpoint, request: str, sample_key: str
    ) -> None:
        """Send one request and record in `call` what came of it."""
        call.attempts += 1
        call.retry_after_s = None
        endpoint.in_flight += 1
        try:
            async with asyncio.timeout(call.config.timeout_s):
                raw = await endpoint.client.chat.completions.with_raw_response.create(
                    **request_body(call.config, request, sample_key)
                )
                response = cast(httpx2.Response, raw.http_response)
                call.text = read_completion(response, call.usage)
                call.finish("ok")
        except BadReply as error:
            call.finish("bad_response", str(error), is_final=error.is_final)
        except (TimeoutError, openai.APITimeoutError):
            call.finish("timeout", f"no complete answer within {call.config.timeout_s:g} s")
        except openai.APIStatusError as error:
            self._record_refusal(call, error, endpoint)
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            call.finish("connection", endpoint.redact(f"{type(cause).__name__}: {cause}"))
        except Exception as error:  # the one boundary around foreign endpoints
            # Where, but not what it says: a message could quote a header.
            place = traceback.extract_tb(error.__traceback__)[-1]
            kind = type(error).__name__
            logger.error("expert %s: %s at %s:%s", call.config.name, kind, *place[:2])
            call.finish("bad_response", f"unreadable response ({type(error).__name__})")
        finally:
            endpoint.in_flight -= 1

    def _record_refusal(
        self, call: _Call, error: openai.APIStatusError, endpoint: Endpoint
    ) -> None:
        code = error.status_code
        detail = endpoint.redact(f"{code} {error_message(error)}").strip()
        if code in (401, 403):
            variable = call.config.key_env
            hint = f"the key in {variable}" if variable else "key_env, which is not set"
            detail += f"; check {hint}"
        status: ExpertStatus = "rejected"
        if code == 429:
            status = "rate_limited"
        elif code >= 500:
            status = "server_error"
        elif code == 408:
            status = "timeout"
        call.retry_after_s = retry_after_s(error.response.headers)
        call.finish(status, detail, is_final=status == "rejected")

    def _open(self) -> Connections:
        """Connections that belong to the running event loop."""
        loop = asyncio.get_running_loop()
        if self._connections is None or self._connections.loop is not loop:
            self._connections = Connections(loop, self._environ)
        return self._connections


@dataclass(slots=True)
class _Call:
    """One question on its way."""

    config: ExpertConfig
    status: ExpertStatus = "connection"
    text: str = ""
    detail: str = ""
    attempts: int = 0
    usage: Usage = field(default_factory=Usage)
    is_final: bool = False
    retry_after_s: float | None = None
    tried: list[str] = field(default_factory=list)

    def finish(self, status: ExpertStatus, detail: str = "", *, is_final: bool = False) -> None:
        self.status, self.detail = status, detail
        self.is_final = is_final or status not in _RETRIED

    def reply(self, latency_s: float) -> ExpertReply:
        price = self.config
        cost = self.usage.prompt_tokens * price.usd_per_million_prompt_tokens
        cost += self.usage.completion_tokens * price.usd_per_million_completion_tokens
        return ExpertReply(
            name=self.config.name,
            status=self.status,
            text=self.text if self.status == "ok" else "",
            detail=self.detail,
            latency_s=latency_s,
            prompt_tokens=self.usage.prompt_tokens,
            completion_tokens=self.usage.completion_tokens,
            cost_usd=cost / 1e6,
            attempts=self.attempts,
        )
