"""What experts have been asked in this process and have cost, call by call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rivet.experts.types import ExpertReply


@dataclass(slots=True)
class ExpertTotals:
    """What one expert, or the pool, has been asked and has cost so far.

    Attributes:
        calls: Questions, whatever came of them.
        cached: Those of them that were answered from the record; nothing below counts them.
        attempts: Requests sent, retries included.
        statuses: Calls by final status.
        prompt_tokens, completion_tokens: As metered by the providers or estimated, failed attempts
            included.
        cost_usd: By the configured prices.
        unmetered: Replies that came without a usable `usage`.
        latency_s: Sum over calls.
    """

    calls: int = 0
    cached: int = 0
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
        self.statuses[reply.status] += 1
        if reply.is_cached:
            self.cached += 1
            return
        self.attempts += reply.attempts
        self.prompt_tokens += reply.prompt_tokens
        self.completion_tokens += reply.completion_tokens
        self.cost_usd += reply.cost_usd
        self.unmetered += reply.status == "ok" and not reply.is_metered
        self.latency_s += reply.latency_s

    def __str__(self) -> str:
        tokens = self.prompt_tokens + self.completion_tokens
        parts = [f"{self.calls} calls", f"{tokens} tokens", f"${self.cost_usd:.4f}"]
        if self.cached:
            parts.insert(1, f"{self.cached} from the record")
        if self.unmetered:
            parts.append(f"{self.unmetered} replies without usage, estimated")
        failed = {name: n for name, n in self.statuses.items() if name != "ok"}
        parts += [f"{name} {n}" for name, n in sorted(failed.items())]
        return ", ".join(parts)

    @classmethod
    def sum(cls, parts: Iterable[ExpertTotals]) -> ExpertTotals:
        """Totals over several experts."""
        total = cls()
        for part in parts:
            total.calls += part.calls
            total.cached += part.cached
            total.attempts += part.attempts
            total.statuses += part.statuses
            total.prompt_tokens += part.prompt_tokens
            total.completion_tokens += part.completion_tokens
            total.cost_usd += part.cost_usd
            total.unmetered += part.unmetered
            total.latency_s += part.latency_s
        return total
