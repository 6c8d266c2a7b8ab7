"""The expert pool: asks experts behind OpenAI-compatible endpoints and meters what it costs.

Whatever an endpoint does, `ask` returns: a reply, or a typed fault without text
(`rivet.experts.types`). The way of a question:

    recorded reply?  -> budget of the run -> a place (concurrency) -> rate limits
    -> the least loaded base URL that works -> request -> booked -> again, elsewhere if possible

Retries are ours, with jitter and `Retry-After`. Keys are read from the environment when a client is
built, sent in the `Authorization` header, and kept out of every reply, message, log line and store.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rivet.experts.attempt import send
from rivet.experts.cache import CachedReply, ReplyCache
from rivet.experts.call import Call, cached_reply
from rivet.experts.completions import request_body
from rivet.experts.config import ExpertConfig, ExpertList, check_keys
from rivet.experts.connections import Connections, Endpoint
from rivet.experts.ledger import BudgetExceededError, Ledger, Spent
from rivet.experts.rate_limits import RateLimit
from rivet.experts.totals import ExpertTotals
from rivet.experts.types import ExpertReply, call_number

logger = logging.getLogger(__name__)

_MAX_BACKOFF_S = 20.0
_CHECK_QUESTION = "What is 17 + 25? Answer with a short Python program that prints it."
_SHOWN_FAULTS = 3


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
        experts: The experts; names must differ. One of `load_experts` brings its budget and cache.
        environ: Where key variables are looked up; the process's environment by default.
        backoff_s: Seconds before the first retry, doubled for each further one, jittered.

    Attributes:
        totals: What each expert was asked in this process and has cost.

    Raises:
        ExpertsFileError: A key variable is not set, or holds no key; or there is no record to
            replay.
        DatabaseError: The cache cannot be used.
        ValueError: Two experts have the same name.
    """

    def __init__(
        self,
        experts: Sequence[ExpertConfig],
        *,
        environ: Mapping[str, str] | None = None,
        backoff_s: float = 0.5,
    ) -> None:
        self._experts = experts if isinstance(experts, ExpertList) else ExpertList(experts)
        self._configs = {config.name: config for config in experts}
        if len(self._configs) != len(experts):
            names = Counter(config.name for config in experts)
            twice = ", ".join(name for name, count in names.items() if count > 1)
            raise ValueError(f"experts with the same name: {twice}; expected different names")
        self._environ = os.environ if environ is None else environ
        cache = self._experts.cache
        self._cache = None
        if cache.mode != "off":
            self._cache = ReplyCache(cache, self._experts.cache_path)
        if cache.mode != "replay":
            check_keys(experts, self._environ)
        self._backoff_s = backoff_s
        self._jitter = random.Random()
        self._limits = {
            c.name: RateLimit(c.requests_per_minute, c.tokens_per_minute) for c in experts
        }
        self._ledger: Ledger | None = None
        if self._experts.budget.is_limited:
            self.keep_ledger(None)
        self._connections: Connections | None = None
        self._is_unchecked = False  # endpoints that nobody has asked yet, until one is needed
        self._told: Counter[tuple[str, str]] = Counter()
        self._told_calls = 0
        self.totals: dict[str, ExpertTotals] = {name: ExpertTotals() for name in self._configs}

    def __repr__(self) -> str:
        return f"ExpertPool({', '.join(self._configs)})"

    async def __aenter__(self) -> ExpertPool:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections, and log what was asked. The pool can be used again."""
        total = self.total()
        if total.calls > self._told_calls:
            logger.info("experts: %s", total)
            if self._ledger is not None:
                logger.info("experts: this run so far: %s", self._ledger.total())
        self._told_calls = total.calls
        connections, self._connections = self._connections, None
        if connections is not None:
            await connections.aclose()

    def keep_ledger(self, folder: Path | None) -> None:
        """Book what is spent in a run's folder and go on from what is booked there.

        Nothing is kept where nothing costs anything and no limit is set.

        Args:
            folder: Of the run; None counts in this process only.

        Raises:
            DatabaseError: The ledger cannot be used.
        """
        budget = self._experts.budget
        if budget.is_limited or any(config.has_price for config in self.configs):
            if self._ledger is not None:
                self._ledger.close()
            self._ledger = Ledger(folder, budget, source=str(self._experts.path or ""))

    @property
    def names(self) -> tuple[str, ...]:
        """Names that the controller may write in `<expert name="...">`."""
        return tuple(self._configs)

    @property
    def listed(self) -> ExpertList:
        """What it was opened with, for a pool in another process."""
        return self._experts

    @property
    def configs(self) -> tuple[ExpertConfig, ...]:
        """The experts as configured, without any key."""
        return tuple(self._configs.values())

    def total(self) -> ExpertTotals:
        """Totals over all experts."""
        return ExpertTotals.sum(self.totals.values())

    def spent(self) -> dict[str, Spent]:
        """What the run has spent on each expert, by its ledger; empty where none is kept."""
        return {} if self._ledger is None else self._ledger.by_expert()

    async def ask(self, name: str, request: str, *, sample_key: str = "") -> ExpertReply:
        """Ask one expert; never raises for what an endpoint does.

        Args:
            name: Which expert.
            request: The controller's request, plain text.
            sample_key: Distinguishes repeated samples of one request; becomes the `seed` where
                the expert is configured with `send_seed`.

        Raises:
            BudgetExceededError: The run has spent what it may.
            ExpertsUnavailableError: The first reply that is not recorded is needed, and an
                endpoint does not answer.
            DatabaseError: Cache or ledger cannot be written, on a full disk for instance.
        """
        config = self._configs.get(name)
        if config is None:
            known = ", ".join(self._configs)
            detail = f"no expert {name!r}; configured: {known}"
            return ExpertReply(name, "unknown_expert", detail=detail, attempts=0)
        started = time.monotonic()
        most = self._experts.budget.max_calls_per_trajectory
        if most is not None and call_number(sample_key) >= most:
            detail = f"max_calls_per_trajectory is {most}"
            reply = ExpertReply(name, "budget", detail=detail, attempts=0)
        else:
            body = request_body(config, request, sample_key)
            reply = self._recorded(config, body, sample_key) or await self._ask(
                config, body, sample_key
            )
        reply = replace(reply, latency_s=time.monotonic() - started)
        self.totals[name].add(reply)
        if reply.is_fault:
            self._tell(reply)
        return reply

    async def check(self) -> list[CheckResult]:
        """Ask every endpoint of every expert one question, once, all at the same time."""

        async def one(config: ExpertConfig, base_url: str) -> CheckResult:
            call = Call(config, request_body(config, _CHECK_QUESTION, ""))
            started = time.monotonic()
            await self._attempt(call, self._open().endpoint(config, base_url))
            return CheckResult(config, base_url, call.reply(time.monotonic() - started))

        pairs = [(config, url) for config in self.configs for url in config.base_urls]
        return list(await asyncio.gather(*(one(config, url) for config, url in pairs)))

    async def preflight(self) -> None:
        """Ask every endpoint one question, as a run does before it starts.

        A replayed run asks nobody. Where replies are recorded already, nobody is asked before the
        first one that is not.

        Raises:
            ExpertsUnavailableError: One does not answer; the message names each and says why.
            BudgetExceededError: The run has spent what it may; not before the first reply that is
                not recorded.
        """
        if self._cache is not None and (self._cache.is_replay or not self._cache.is_empty):
            self._is_unchecked = not self._cache.is_replay
            return
        await self._check_all()

    async def _check_all(self) -> None:
        if self._ledger is not None:
            self._ledger.check(is_retry=False)
        failed = [result for result in await self.check() if result.reply.status != "ok"]
        if failed:
            lines = [f"{r.reply.name} at {r.base_url}: {r.reply.detail}" for r in failed]
            raise ExpertsUnavailableError(
                "experts do not answer:\n  " + "\n  ".join(lines) + "\nexpected every endpoint to "
                "answer before a run starts; see `rivet experts check`"
            )

    # --- one call -------------------------------------------------------------------------------

    def _recorded(
        self, config: ExpertConfig, body: Mapping[str, Any], sample_key: str
    ) -> ExpertReply | None:
        """The recorded reply, a fault if only recorded ones count, or None: ask."""
        if self._cache is None:
            return None
        kept = self._cache.get(config.name, body, sample_key)
        if kept is not None:
            return cached_reply(config, kept)
        if not self._cache.is_replay:
            return None
        request = " ".join(body["messages"][-1]["content"].split())[:80]
        detail = (
            f"{self._cache.path} has no reply of {config.name} (model {config.model}) to "
            f"{request!r} for sample {sample_key!r}; expected one that a run with cache mode "
            "record left there: same settings, seed and checkpoint"
        )
        return ExpertReply(config.name, "not_recorded", detail=detail, attempts=0)

    async def _ask(
        self, config: ExpertConfig, body: Mapping[str, Any], sample_key: str
    ) -> ExpertReply:
        """Put a question to a provider, and keep the reply."""
        if self._is_unchecked:
            await self._open().once(self._check_all)
            self._is_unchecked = False
        connections = self._open()
        try:
            with connections.under_way():
                return await self._pay(config, body, sample_key)
        except BudgetExceededError:
            # Whoever asked cancels the rest of the batch: first let come in what is paid for.
            await connections.idle()
            if self._ledger is not None:
                self._ledger.begin_call(config.name)  # refuses again, and tells what has come in
            raise

    async def _pay(
        self, config: ExpertConfig, body: Mapping[str, Any], sample_key: str
    ) -> ExpertReply:
        if self._ledger is not None:
            self._ledger.begin_call(config.name)
        call = Call(config, body)
        while not await self._try_once(call):
            pass
        reply = call.reply(0.0)
        if self._cache is None or reply.status != "ok":
            return reply
        usage = (reply.prompt_tokens, reply.completion_tokens, reply.is_metered)
        kept = self._cache.put(config.name, body, sample_key, CachedReply(reply.text, *usage))
        return replace(reply, text=kept.text)

    async def _try_once(self, call: Call) -> bool:
        """Make one attempt; wait if there is another to make. True if the call is over."""
        config = call.config
        async with self._open().semaphore(config):
            endpoint = await self._wait_for_turn(call)
            if endpoint is None:
                return True
            await self._attempt(call, endpoint)
        if call.last.status == "ok":
            return True
        pause_s = self._pause_s(call, endpoint)
        if call.last.is_final or len(call.tried) > config.max_retries:
            return True
        logger.info(
            "expert %s: attempt %d: %s (%s); next in %.1f s",
            *(config.name, len(call.tried), call.last.status, call.last.detail, pause_s),
        )
        await asyncio.sleep(pause_s)
        return False

    async def _wait_for_turn(self, call: Call) -> Endpoint | None:
        """Wait for the rate limits and an endpoint; None if the call gives up, sending nothing."""
        config, connections = call.config, self._open()
        limit = self._limits[config.name]
        await limit.wait(call.reserved_tokens)
        try:
            before = time.monotonic()
            endpoint = await connections.wait_for_endpoint(config, call.tried, call.patience_s)
            call.patience_s -= time.monotonic() - before
            if endpoint is None:
                limit.cancel(call.reserved_tokens)
                call.give_up(connections.why_none(config))
            elif call.tried and self._ledger is not None:
                self._ledger.check(is_retry=True)
        except BaseException:
            limit.cancel(call.reserved_tokens)
            raise
        return endpoint

    def _pause_s(self, call: Call, endpoint: Endpoint) -> float:
        """Seconds until the next attempt; an endpoint that is busy is left alone by everybody."""
        backoff_s = min(_MAX_BACKOFF_S, self._backoff_s * 2 ** (len(call.tried) - 1))
        backoff_s *= self._jitter.uniform(0.5, 1.0)
        if call.last.status == "rate_limited":
            asked_s = call.last.retry_after_s
            endpoint.circuit.pause(backoff_s if asked_s is None else asked_s)
        elif call.last.retry_after_s is not None:
            endpoint.circuit.pause(call.last.retry_after_s)
        other = self._open().least_loaded(call.config, call.tried)
        is_elsewhere = other is not None and other is not endpoint
        # Not all at the same moment, also where another base URL takes over at once.
        return 0.1 * backoff_s if is_elsewhere or call.last.retry_after_s else backoff_s

    async def _attempt(self, call: Call, endpoint: Endpoint) -> None:
        """Send one request, and book what came of it before anybody goes on with it."""
        call.tried.append(endpoint.base_url)
        try:
            call.last = await send(call.config, endpoint, call.body)
        finally:
            self._open().tell_waiters()
        last, usage = call.last, call.last.usage
        call.usage += usage
        used = usage.tokens
        if not used and last.status == "timeout":
            used = call.reserved_tokens  # it may have been working all the time
        self._limits[call.config.name].settle(call.reserved_tokens, used)
        if self._ledger is not None:
            self._ledger.add(
                call.config.name,
                Spent(
                    attempts=1,
                    prompt_tokens=usage.prompt_tokens,
                    completion_tokens=usage.completion_tokens,
                    usd=call.config.cost_usd(usage.prompt_tokens, usage.completion_tokens),
                    unmetered=int(last.status == "ok" and not usage.is_metered),
                ),
            )
        if last.status == "ok" and not usage.is_metered:
            self._tell_once(call.config.name, "reports no usage: its tokens are estimated")

    def _tell(self, reply: ExpertReply) -> None:
        """Log a fault, unless many like it were logged."""
        self._told[reply.name, reply.status] += 1
        count = self._told[reply.name, reply.status]
        if count <= _SHOWN_FAULTS or str(count).strip("0") == "1":
            number = f" (number {count})" if count > 1 else ""
            logger.warning("expert %s: %s%s: %s", reply.name, reply.status, number, reply.detail)

    def _tell_once(self, name: str, text: str) -> None:
        self._told[name, text] += 1
        if self._told[name, text] == 1:
            logger.warning("expert %s %s", name, text)

    def _open(self) -> Connections:
        """Connections that belong to the running event loop."""
        loop = asyncio.get_running_loop()
        if self._connections is None or self._connections.loop is not loop:
            self._connections = Connections(loop, self._environ)
        return self._connections
