r"""Finding evaluation problems in training text, also in other wording and other LaTeX.

A statement is found in a text that equals it, or that holds at least half of its runs of five words
and three quarters of its numbers. Words are taken from normalised text, in which commands that only
lay out (`\left`, `\dfrac`, `\text`), braces and signs are gone, so the same problem typeset in
another way has the same words; drawings ([asy] code) are left out. The numbers tell apart problems
of one template, and runs that many statements share ("enter your answer in the form ...") say
nothing. Statements of fewer than thirteen words are found only where a text equals them: their runs
are those of any problem.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

RUN = 5  # words
MIN_WORDS = 13
MIN_SHARE = 0.5
_MIN_NUMBERS = 0.75
_MIN_OWN = 4  # runs that are left of a statement
_MAX_STATEMENTS = 3  # that share a run which still says something
_DRAWING = re.compile(r"\[asy\].*?(?:\[/asy\]|$)", re.DOTALL)
# Commands that say how something looks, not what it is; `text` and `mathrm` keep their content.
_LAYOUT = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|quad|qquad|hspace|vspace|text"
    r"|textbf|textit|mathrm|mathbf|mathit|mbox|operatorname|rm|bf|it|begin|end)(?![a-z])\*?"
    r"|\\[,;:!> ]|\\\\",
    re.IGNORECASE,
)
_SAME = {"dfrac": "frac", "tfrac": "frac", "cdots": "dots", "ldots": "dots", "degree": "circ"}
# A letter of a script without spaces is a word of its own.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\d_\u3040-\u30ff\u3400-\u9fff]+|\d+")
_SHORT = frozenset(
    "am an as at be by do eg go he hi ie if in is it ln me mu my no nu of oh ok on or pi so to up "
    "us vs we xi".split()
)
_VOWEL = re.compile("[aeiou]")
_INVISIBLE = re.compile(r"[\s${}~]+|\\(?![a-z])")


@dataclass(frozen=True, slots=True)
class Overlap:
    """A statement found in a text.

    Attributes:
        statement: Its position among the statements.
        share: Share of its runs of words that the text holds, in (0, 1].
        is_equal: Whether the text is the statement, apart from typesetting.
        passage: Longest run of words that both have.
    """

    statement: int
    share: float
    is_equal: bool
    passage: str


def normalized(text: str) -> str:
    """Text without differences of case, width, white space and typesetting; symbols stay."""
    text = unicodedata.normalize("NFKC", text).casefold()
    text = _LAYOUT.sub(" ", text)
    for other, name in _SAME.items():
        text = text.replace(f"\\{other}", f"\\{name}")
    return _INVISIBLE.sub(" ", text).replace("...", "\\dots").strip()


def words_of(text: str) -> list[str]:
    """Words and numbers of a text, normalised; signs, braces and drawings are none.

    Letters that are written together as a product or a triangle (`ax`, `xyz`) are words apart.
    """
    found = _WORD.findall(_DRAWING.sub(" ", normalized(text)))
    return [part for word in found for part in (word if _is_product(word) else (word,))]


def _is_product(word: str) -> bool:
    return (len(word) == 2 and word.isalpha() and word not in _SHORT) or (
        len(word) == 3 and word.isalpha() and not _VOWEL.search(word)
    )


class Contamination:
    """Finds evaluation statements in texts.

    Args:
        statements: The evaluation problems.
        min_share: Share of a statement's runs that a text must hold, in (0, 1].
    """

    def __init__(self, statements: Iterable[str], *, min_share: float = MIN_SHARE) -> None:
        if not 0 < min_share <= 1:
            raise ValueError(f"min_share is {min_share}; expected a share in (0, 1]")
        self._min_share = min_share
        self._whole: dict[str, int] = {}
        self._words: list[list[str]] = []
        runs: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for number, statement in enumerate(statements):
            self._words.append(words_of(statement))
            if self._whole.setdefault(squeezed(statement), number) != number:
                continue  # the same statement again
            if len(self._words[-1]) >= MIN_WORDS:
                for run in _runs(self._words[-1]):
                    runs[run].append(number)
        self._runs = {run: n for run, n in runs.items() if len(n) <= _MAX_STATEMENTS}
        # Only what is left counts as a statement's own.
        self._own: dict[int, int] = defaultdict(int)
        for numbers in self._runs.values():
            for number in numbers:
                self._own[number] += 1

    def __len__(self) -> int:
        """Different statements."""
        return len(self._whole)

    def equals(self, text: str) -> bool:
        """Whether the text is one of the statements."""
        return squeezed(text) in self._whole

    def holds(self, text: str) -> bool:
        """Whether the text equals or holds one of the statements: whether `find` finds any."""
        return self.equals(text) or bool(self._held(words_of(text)))

    def find(self, text: str) -> list[Overlap]:
        """Every statement that the text holds or equals, the largest share first."""
        words = words_of(text)
        shares = self._held(words)
        same = self._whole.get(squeezed(text))
        if same is not None:
            shares[same] = 1.0
        found = [
            Overlap(n, share, n == same, " ".join(_longest_common(self._words[n], words)))
            for n, share in shares.items()
        ]
        return sorted(found, key=lambda o: (-o.share, o.statement))

    def _held(self, words: list[str]) -> dict[int, float]:
        """Statement -> share of its runs, for those that a text with these words holds."""
        counts: dict[int, int] = defaultdict(int)
        for run in _runs(words):
            for number in self._runs.get(run, ()):
                counts[number] += 1
        shares = {n: count / self._own[n] for n, count in counts.items()}
        return {
            n: share
            for n, share in shares.items()
            if share >= self._min_share
            and self._own[n] >= _MIN_OWN
            and _has_numbers(words, self._words[n])
        }


def squeezed(text: str) -> str:
    """A statement for the test of equality: normalised, and spaces mean nothing beside signs."""
    return re.sub(r"(?<=\W) | (?=\W)", "", normalized(text)).rstrip(".")


def _runs(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[n : n + RUN]) for n in range(len(words) - RUN + 1)}


def _has_numbers(words: list[str], statement: list[str]) -> bool:
    """Whether most of the statement's numbers are among the words."""
    numbers = {word for word in statement if word.isdecimal()}
    return len(numbers.intersection(words)) >= _MIN_NUMBERS * len(numbers)


def _longest_common(a: list[str], b: list[str]) -> list[str]:
    """Longest run that two lists of words have in common; O(len(a) len(b)), for few pairs only."""
    best, end = 0, 0
    before = [0] * (len(b) + 1)
    for n, word in enumerate(a, start=1):
        row = [0] * (len(b) + 1)
        for m, other in enumerate(b, start=1):
            if word == other:
                row[m] = before[m - 1] + 1
                if row[m] > best:
                    best, end = row[m], n
        before = row
    return a[end - best : end]
