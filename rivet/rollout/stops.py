"""Finding stop strings in sampled tokens, by bytes."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Stop strings over one vocabulary; looks only at tokens that can complete one.

    Args:
        stop: Non-empty strings.
        token_bytes: Bytes of each token id.
    """

    def __init__(self, stop: Sequence[str], token_bytes: Sequence[bytes]) -> None:
        if not all(stop):
            raise ValueError(f"got an empty stop string in {list(stop)!r}; expected text")
        self._token_bytes = token_bytes
        self._stop = tuple(s.encode() for s in stop)
        last = {s[-1] for s in self._stop}
        self._candidates = frozenset(
            i for i, piece in enumerate(token_bytes) if not last.isdisjoint(piece)
        )
        self._longest = max(map(len, self._stop), default=0)

    def completed_by_last(self, ids: Sequence[int]) -> bool:
        """Whether the last token of `ids` completes a stop string that lies within `ids`."""
        if ids[-1] not in self._candidates:
            return False
        tail = self._token_bytes[ids[-1]]
        wanted = len(tail) + self._longest - 1
        for n in range(len(ids) - 2, -1, -1):
            if len(tail) >= wanted:
                break
            tail = self._token_bytes[ids[n]] + tail
        return any(s in tail for s in self._stop)
