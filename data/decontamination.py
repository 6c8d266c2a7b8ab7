"""Finding evaluation problems in training text: equal statements, or a long run of equal words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

WORDS_IN_A_ROW = 13
_WORD = re.compile(r"\w+")


def normalized(text: str) -> str:
    """Text without differences of case, width, and white space; symbols stay, as they matter."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


class Contamination:
    """Tells whether a text holds one of the evaluation statements.

    Statements shorter than `words` are found only where a text equals them.

    Args:
        statements: The evaluation problems.
        words: Length of a run of equal words that counts, at least 1.
    """

    def __init__(self, statements: Iterable[str], *, words: int = WORDS_IN_A_ROW) -> None:
        self._words = words
        self._statements: set[str] = set()
        self._runs: set[tuple[str, ...]] = set()
        for statement in statements:
            self._statements.add(normalized(statement))
            self._runs.update(self._runs_of(statement))

    def __len__(self) -> int:
        return len(self._statements)

    def equals(self, text: str) -> bool:
        """Whether the text is one of the statements."""
        return normalized(text) in self._statements

    def overlaps(self, text: str) -> bool:
        """Whether the text shares a run of words with one of the statements."""
        return any(run in self._runs for run in self._runs_of(text))

    def _runs_of(self, text: str) -> Iterable[tuple[str, ...]]:
        words = _WORD.findall(normalized(text))
        for start in range(len(words) - self._words + 1):
            yield tuple(words[start : start + self._words])
