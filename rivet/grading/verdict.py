"""The verdict record and the error types of the grader.

A grade has one of five outcomes. `right` and `wrong` are verdicts on an answer, `no_answer` says
that the model gave none, and `timeout` and `died` say that the grader failed: they carry no
information about the answer and must never become a reward.
"""

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["right", "wrong", "no_answer", "timeout", "died"]
Mode = Literal["reward", "eval"]
Kind = Literal["math", "choice", "exact", "reasoning_gym"]
Source = Literal["box", "line", "none"]

OUTCOMES: tuple[Outcome, ...] = ("right", "wrong", "no_answer", "timeout", "died")
KINDS: tuple[Kind, ...] = ("math", "choice", "exact", "reasoning_gym")
MODES: tuple[Mode, ...] = ("reward", "eval")


@dataclass(frozen=True, slots=True)
class Grade:
    """What the grader found out about one answer.

    Args:
        outcome: One of `OUTCOMES`.
        extracted: The answer as the model wrote it, or None when there is none.
        reason: Why, in a few words; meant for reports.
        source: Where the answer was found: a box, an explicit answer line (`eval` mode only; count
            these apart) or nowhere.
    """

    outcome: Outcome
    extracted: str | None
    reason: str
    source: Source = "none"

    @property
    def is_right(self) -> bool:
        """Tell whether the answer is right; raise when the grader failed.

        Raises:
            GraderFault: The outcome is `timeout` or `died`, so nothing is known about the answer.
        """
        if self.is_fault:
            raise GraderFault(f"the grader failed ({self.outcome}: {self.reason}); no verdict")
        return self.outcome == "right"

    @property
    def is_fault(self) -> bool:
        """Tell whether the grader failed, so that the answer has no score."""
        return self.outcome in ("timeout", "died")


class GradingError(Exception):
    """Base class of the errors that this package raises."""


class GraderFault(GradingError):
    """A score was asked of a grade whose grader failed."""


class BadRequest(GradingError):
    """The caller's input cannot be graded: an unknown kind, a gold of the wrong form."""


class Unreadable(GradingError):
    """A text is not an answer that this grader can read."""


class TooExpensive(GradingError):
    """A text is readable but its value costs too much to work out."""
