"""The one interface between the rollout engine and whatever samples from the controller.

Implementations: `rivet.rollout.local` (transformers in process) and `rivet.rollout.vllm_backend`
(vLLM servers). Token ids go in and come out; nothing is rendered or tokenised on the way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

logger = logging.getLogger(__name__)

_LEAST_CONTEXT = 4096
_PROMPT_ROOM = 2048


class BackendError(RuntimeError):
    """The backend could not sample: an infrastructure fault, never a wrong answer."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. The defaults have full support, as training needs (top_p 1, top_k off).

    Attributes:
        temperature: 0 is greedy.
        top_p: Nucleus mass in (0, 1].
        top_k: Keep the k most likely tokens; 0 is off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        is_finite = 0 <= self.temperature < float("inf")  # False for NaN
        if not is_finite or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(
                f"expected finite temperature >= 0, top_p in (0, 1], top_k >= 0, got {self}"
            )


@dataclass(frozen=True, slots=True)
class Generation:
    """What one call sampled.

    Attributes:
        ids: Sampled token ids, shape (n,); the last may reach past the stop string.
        logprobs: Log-probability of each under the distribution that it was drawn from (after
            temperature), shape (n,). Greedy decoding reports those at temperature 1.
        finish_reason: `stop` (a stop string was completed), `eos`, `length`, or `unknown_token`: a
            token came that the tokenizer does not have; it is not among the ids.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "eos", "length", "unknown_token"]


class Backend(Protocol):
    """Samples continuations. Safe to call from many coroutines of one event loop.

    A backend whose attribute `streams` is True also takes `on_token`, called in the caller's event
    loop with each token id as soon as it is sampled, before `generate` returns.
    """

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        stop: Sequence[str],
        max_new_tokens: int,
        sampling: SamplingParams,
        seed: int,
        banned_ids: Sequence[int] = (),
        session: str | None = None,
    ) -> Generation:
        """Sample until a stop string, the end of the turn, or the limit.

        Args:
            prompt_ids: The whole context so far, shape (n,).
            stop: Strings that end the call once the sampled text contains one.
            max_new_tokens: At most this many tokens, at least 1.
            sampling: Temperature and truncation.
            seed: With the position in the context it fixes the random draw of each token, so a
                trajectory does not depend on what else is in the batch (up to floating point).
            banned_ids: Tokens that must not be sampled.
            session: Name of the trajectory: a later call whose prompt begins with what this one
                saw may reuse its state. A hint; results do not depend on it.

        Raises:
            BackendError: It could not sample.
        """
        ...

    async def release(self, session: str) -> None:
        """Forget a session's state."""
        ...


def context_for(max_completion_length: int, allowed: int | None) -> int:
    """Tokens of context, prompt included, that a backend is opened with.

    Args:
        max_completion_length: Tokens of a completion that should fit behind a prompt.
        allowed: Most that the model can serve; None: it does not say.
    """
    wanted = max(_LEAST_CONTEXT, max_completion_length + _PROMPT_ROOM)
    if allowed is None:
        return wanted
    if allowed <= max_completion_length:
        logger.warning(
            "the model's context holds %d tokens, prompt included; completions end there, although "
            "max_completion_length allows %d",
            allowed,
            max_completion_length,
        )
    return min(wanted, allowed)


def room_for(prompt_ids: Sequence[int], max_new_tokens: int, max_context: int, remedy: str) -> int:
    """Tokens that fit behind a prompt, at least 1.

    Args:
        prompt_ids: The prompt, shape (n,).
        max_new_tokens: What the caller wants sampled at most.
        max_context: Longest context in tokens, prompt included.
        remedy: What to do about a prompt that fills the context.

    Raises:
        ValueError: There is no prompt, or nothing to sample.
        BackendError: The prompt fills the context.
    """
    if not prompt_ids or max_new_tokens < 1:
        raise ValueError(
            f"got {len(prompt_ids)} prompt tokens and max_new_tokens {max_new_tokens}; "
            "expected at least 1 of each"
        )
    room = max_context - len(prompt_ids)
    if room < 1:
        raise BackendError(
            f"the prompt has {len(prompt_ids)} tokens; expected less than {max_context}: {remedy}"
        )
    return room
