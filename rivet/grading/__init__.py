"""Grade answers: `grade(answer_text, gold)` and `Grader`, which owns the worker processes.

Importing this package imports neither sympy nor torch nor reasoning_gym; workers do, when needed.
"""

from rivet.grading.grader import Gold, Grader, Request, grade
from rivet.grading.intake import check_gold
from rivet.grading.verdict import (
    KINDS,
    MODES,
    OUTCOMES,
    BadRequest,
    Grade,
    GraderFault,
    GradingError,
    Kind,
    Mode,
    Outcome,
)

__all__ = [
    "KINDS",
    "MODES",
    "OUTCOMES",
    "BadRequest",
    "Gold",
    "Grade",
    "Grader",
    "GraderFault",
    "GradingError",
    "Kind",
    "Mode",
    "Outcome",
    "Request",
    "check_gold",
    "grade",
]
