"""One question on its way: what was tried, what it took, and the reply that comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rivet.experts.attempt import Attempt
from rivet.experts.cache import CachedReply
from rivet.experts.completions import Usage, prompt_estimate
from rivet.experts.config import ExpertConfig
from rivet.experts.types import ExpertReply

# A call waits so long, all in all, for endpoints that asked for patience or failed too often.
PATIENCE_S = 60.0


@dataclass(slots=True)
class Call:
    """One question on its way.

    Attributes:
        config: Whom it is put to.
        body: What is sent.
        last: What came of the last attempt.
        usage: What all attempts took.
        tried: Base URLs of the attempts, in order.
        patience_s: Seconds that it may still wait for an endpoint.
    """

    config: ExpertConfig
    body: Mapping[str, Any]
    last: Attempt = Attempt("connection")
    usage: Usage = Usage()
    tried: list[str] = field(default_factory=list)
    patience_s: float = field(default_factory=lambda: PATIENCE_S)

    @property
    def reserved_tokens(self) -> int:
        """What a rate limit must have room for: the prompt and the longest reply."""
        if self.config.tokens_per_minute is None:
            return 0
        return prompt_estimate(self.body) + self.config.max_tokens

    def give_up(self, why: str) -> None:
        """No endpoint may be asked in time."""
        detail = f"nobody to ask within {PATIENCE_S:g} s: {why}"
        if self.tried and self.last.status == "rate_limited":
            self.last = replace(self.last, detail=f"{self.last.detail}; {detail}")
        else:
            self.last = Attempt("unavailable", detail=detail)

    def reply(self, latency_s: float) -> ExpertReply:
        """What the call ends with."""
        usage = self.usage
        return ExpertReply(
            name=self.config.name,
            status=self.last.status,
            text=self.last.text,
            detail=self.last.detail,
            latency_s=latency_s,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cost_usd=self.config.cost_usd(usage.prompt_tokens, usage.completion_tokens),
            attempts=len(self.tried),
            is_metered=usage.is_metered,
        )


def cached_reply(config: ExpertConfig, kept: CachedReply) -> ExpertReply:
    """A reply that was recorded before; nobody is asked, and its price is the one of then."""
    return ExpertReply(
        name=config.name,
        status="ok",
        text=kept.text,
        prompt_tokens=kept.prompt_tokens,
        completion_tokens=kept.completion_tokens,
        cost_usd=config.cost_usd(kept.prompt_tokens, kept.completion_tokens),
        attempts=0,
        is_metered=kept.is_metered,
        is_cached=True,
    )
