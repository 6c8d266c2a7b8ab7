"""What a run has spent on experts, kept in its folder, and where it stops.

    RUN/experts.sqlite    one row per expert: calls, attempts, tokens, USD, unmetered replies

Every attempt is booked before its reply is used, so a run that is killed or interrupted goes on
counting where it was, and the processes of one run count together. `max_calls` is exact; tokens and
USD are known after the reply only, so those limits are overrun by what is under way at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rivet.experts.config import BudgetConfig
from rivet.experts.database import Database
from rivet.interrupt import Interrupted

FILE_NAME = "experts.sqlite"
_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS spent (
  expert TEXT PRIMARY KEY,
  calls INTEGER NOT NULL DEFAULT 0,
  attempts INTEGER NOT NULL DEFAULT 0,
  prompt_tokens INTEGER NOT NULL DEFAULT 0,
  completion_tokens INTEGER NOT NULL DEFAULT 0,
  usd REAL NOT NULL DEFAULT 0,
  unmetered INTEGER NOT NULL DEFAULT 0
) STRICT
"""
_COLUMNS = ("calls", "attempts", "prompt_tokens", "completion_tokens", "usd", "unmetered")


class BudgetExceededError(RuntimeError):
    """The budget of the run is spent: no expert is asked any more, and no outcome is made up."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What was spent, on one expert or on all.

    Attributes:
        calls: Questions that were put to a provider.
        attempts: Requests sent, retries included.
        prompt_tokens, completion_tokens: By the provider's `usage`, or estimated.
        usd: By the configured prices.
        unmetered: Replies without `usage`, whose tokens are estimated.
    """

    calls: int = 0
    attempts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float = 0.0
    unmetered: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of prompts and replies."""
        return self.prompt_tokens + self.completion_tokens

    def __str__(self) -> str:
        text = f"{self.calls} calls, {self.tokens} tokens, ${self.usd:.4f}"
        return text + (f", {self.unmetered} replies estimated" if self.unmetered else "")


class Ledger:
    """Books what is spent and refuses what would go beyond the budget.

    Args:
        folder: The run's folder; None keeps the books in memory.
        budget: Its limits.
        source: Where the limits are written, for messages.

    Raises:
        DatabaseError: The file cannot be used.
    """

    def __init__(self, folder: Path | None, budget: BudgetConfig, *, source: str = "") -> None:
        path = Path(":memory:") if folder is None else folder / FILE_NAME
        self._database = Database(path, _SCHEMA, _VERSION)
        self._budget = budget
        self._source = source or "the experts file"

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def total(self) -> Spent:
        """What the run has spent so far, all processes together."""
        sums = ", ".join(f"coalesce(sum({name}), 0)" for name in _COLUMNS)
        return Spent(*self._database.rows(f"SELECT {sums} FROM spent")[0])  # type: ignore[arg-type]

    def by_expert(self) -> dict[str, Spent]:
        """What was spent on each expert."""
        return _by_expert(self._database)

    def check(self, *, is_retry: bool) -> None:
        """Refuse to go on if a limit is reached.

        Args:
            is_retry: Another attempt of a call that is booked already, so that the last of
                `max_calls` may be made again.

        Raises:
            BudgetExceededError: It is; the message says which, what was spent and what to do.
        """
        budget = self._budget
        if not budget.is_limited:
            return
        spent = self.total()
        reached = [
            f"{name} is {limit:g}"
            for name, limit, value in (
                ("max_calls", budget.max_calls, spent.calls - is_retry),
                ("max_tokens", budget.max_tokens, spent.tokens),
                ("max_usd", budget.max_usd, spent.usd),
            )
            if limit is not None and value >= limit
        ]
        if reached:
            raise BudgetExceededError(
                f"the budget for experts is spent ({', '.join(reached)}; so far {spent}); what is "
                f"finished is kept: to go on, raise the limit under `budget:` in {self._source}"
            )

    def begin_call(self, expert: str) -> None:
        """Book a call before anything is sent.

        Raises:
            BudgetExceededError: A limit is reached; nothing is booked.
        """
        with self._database.writing() as connection:
            self.check(is_retry=False)
            connection.execute(
                "INSERT INTO spent (expert, calls) VALUES (?, 1) "
                "ON CONFLICT (expert) DO UPDATE SET calls = calls + 1",
                (expert,),
            )

    def add(self, expert: str, spent: Spent) -> None:
        """Book what an attempt took."""
        values = [getattr(spent, name) for name in _COLUMNS]
        changes = ", ".join(f"{name} = {name} + excluded.{name}" for name in _COLUMNS)
        with self._database.writing() as connection:
            connection.execute(
                f"INSERT INTO spent (expert, {', '.join(_COLUMNS)}) VALUES (?, ?, ?, ?, ?, ?, ?) "
                f"ON CONFLICT (expert) DO UPDATE SET {changes}",
                (expert, *values),
            )


def read_spent(folder: Path) -> dict[str, Spent]:
    """What a run has spent on each expert, from its folder; nothing is written there.

    Raises:
        DatabaseError: There is no ledger, or it cannot be read.
    """
    database = Database(folder / FILE_NAME, _SCHEMA, _VERSION, is_read_only=True)
    try:
        return _by_expert(database)
    finally:
        database.close()


def _by_expert(database: Database) -> dict[str, Spent]:
    rows = database.rows(f"SELECT expert, {', '.join(_COLUMNS)} FROM spent ORDER BY expert")
    return {str(name): Spent(*values) for name, *values in rows}  # type: ignore[arg-type]


@contextmanager
def stop_at_budget() -> Iterator[None]:
    """Turn a spent budget into an orderly stop of the stage, as Ctrl-C is one.

    Raises:
        Interrupted: The budget is spent; the same command resumes the run.
    """
    try:
        yield
    except BudgetExceededError as error:
        raise Interrupted(str(error)) from error
    except BaseExceptionGroup as group:
        found: BaseException | None = group.subgroup(BudgetExceededError)
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        if found is None:
            raise
        raise Interrupted(str(found)) from group
