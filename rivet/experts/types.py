"""What asking an expert gives: a reply, or a typed fault. A fault never carries text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

ExpertStatus = Literal[
    "ok",
    "unknown_expert",  # the controller asked for a name that is not configured: its own mistake
    "budget",  # the trajectory or the run may not spend more
    "timeout",
    "connection",
    "rate_limited",
    "server_error",
    "bad_response",  # an answer that is no chat completion: malformed, empty, too large
    "rejected",  # the endpoint refused the request: 4xx other than 429
]

FAULTS: frozenset[str] = frozenset(
    {"timeout", "connection", "rate_limited", "server_error", "bad_response", "rejected"}
)


@dataclass(frozen=True, slots=True)
class ExpertReply:
    """The outcome of one consultation, after retries.

    Attributes:
        name: The expert that was asked.
        status: `ok`, or why there is no text.
        text: The reply, raw and untrusted; empty unless `status` is `ok`.
        detail: For people: what happened, without any credential.
        latency_s: Seconds from the question to the outcome, retries included.
        prompt_tokens, completion_tokens: As metered by the provider, 0 if it did not say.
        cost_usd: Price of the call by the configured rates.
        attempts: Requests that were sent.
    """

    name: str
    status: ExpertStatus
    text: str = ""
    detail: str = ""
    latency_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    attempts: int = 1

    @property
    def is_fault(self) -> bool:
        """True if the infrastructure failed, which voids the trajectory."""
        return self.status in FAULTS


class Experts(Protocol):
    """Whom the rollout engine asks."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names that the controller may write in `<expert name="...">`."""
        ...

    async def ask(self, name: str, request: str, *, sample_key: str = "") -> ExpertReply:
        """Ask one expert; never raises for what an endpoint does.

        Args:
            name: Which expert.
            request: The controller's request, plain text.
            sample_key: Distinguishes repeated samples of one request (for caching and seeds).
        """
        ...
