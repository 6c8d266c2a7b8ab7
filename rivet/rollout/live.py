"""Showing a trajectory's tokens to somebody while it is sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rivet.rollout.backend import Backend
from rivet.trajectory import Author

OnTokens = Callable[[Sequence[int], Author], None]


class Live:
    """Passes every token of one trajectory on once: as it is sampled, or when it is appended.

    Args:
        on_tokens: Called with runs of tokens, in order; None shows nothing.
        backend: With an attribute `streams` that is true it hands over each token as it comes.
    """

    def __init__(self, on_tokens: OnTokens | None, backend: Backend) -> None:
        self._on_tokens = on_tokens
        self._streams = on_tokens is not None and getattr(backend, "streams", False)
        self._shown = 0  # tokens of the call under way

    def watch(self) -> dict[str, Any]:
        """What to pass to the backend's next `generate`, beside its usual arguments."""
        return {"on_token": self._on_token} if self._streams else {}

    def append(self, ids: Sequence[int], author: Author) -> None:
        """Show what has been appended to the trajectory, without what was shown already."""
        rest, self._shown = ids[self._shown :], 0
        if self._on_tokens is not None and rest:
            self._on_tokens(rest, author)

    def _on_token(self, token: int) -> None:
        self._shown += 1
        if self._on_tokens is not None:
            self._on_tokens((token,), "controller")
