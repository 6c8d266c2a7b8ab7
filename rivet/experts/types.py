"""What asking an expert gives: a reply, or a typed fault. A fault never carries text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

ExpertStatus = Literal[
    "ok",
    "unknown_expert",  # the controller asked for a name that is not configured: its own mistake
    "budget",  # the trajectory may not ask more often: its own doing as well
    "timeout",
    "connection",
    "rate_limited",
    "server_error",
    "bad_response",  # an answer that is no chat completion: malformed, empty, too large
    "rejected",  # the endpoint refused the request: 4xx other than 429
    "unavailable",  # not asked: every base URL failed so often that it is left alone for a while
    "not_recorded",  # not asked: the run replays recorded replies and this one is not among them
]

FAULTS: frozenset[str] = frozenset(
    {
        "timeout",
        "connection",
        "rate_limited",
        "server_error",
        "bad_response",
        "rejected",
        "unavailable",
        "not_recorded",
    }
)


def sample_key(seed: int, request_id: str, call: int) -> str:
    """Name of one call of one sample: what caching, seeds and limits of a trajectory go by.

    Args:
        seed: Of the rollout; it stands for run seed, step, problem and sample index
            (`rivet.rollout.types.rollout_seed`).
        request_id: Of the rollout: problem, sample index and step, for people.
        call: Number of the call in its trajectory, from 0.
    """
    return f"{seed:x}/{request_id}/{call}"


def call_number(key: str) -> int:
    """Number of the call in its trajectory that a `sample_key` names; 0 for any other text."""
    number = key.rpartition("/")[2]
    return int(number) if number.isascii() and number.isdigit() else 0


@dataclass(frozen=True, slots=True)
class ExpertReply:
    """The outcome of one consultation, after retries.

    Attributes:
        name: The expert that was asked.
        status: `ok`, or why there is no text.
        text: The reply, raw and untrusted; empty unless `status` is `ok`.
        detail: For people: what happened, without any credential.
        latency_s: Seconds from the question to the outcome, retries included.
        prompt_tokens, completion_tokens: As metered by the provider, or estimated.
        cost_usd: Price of these tokens by the configured rates, also where the reply was recorded
            before and nothing was paid now.
        attempts: Requests that were sent.
        is_metered: False if the provider did not say how many tokens it took.
        is_cached: True if it was recorded before, and nobody was asked.
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
    is_metered: bool = True
    is_cached: bool = False

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
            sample_key: From the function of that name: distinguishes repeated samples of one
                request, for caching and seeds.

        Raises:
            BudgetExceededError: The run has spent what it may (`rivet.experts.ledger`).
        """
        ...
