"""The problem record, and reading problems from JSONL files with errors that name file and line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

GoldKind = Literal["math", "choice", "exact", "reasoning_gym"]


class ProblemFileError(ValueError):
    """A problems file is broken; the message says file, line, what is wrong, what is expected."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem with its gold answer.

    Attributes:
        id: Unique in its set.
        problem: The statement, without system prompt or answer-format instructions.
        answer: Gold answer, a non-empty string.
        source: Name of the set.
        kind: How the answer is graded (`rivet.grading`).
        meta: Extras: `family`, `level`, `choices`, a Reasoning Gym `entry`, ...
    """

    id: str
    problem: str
    answer: str
    source: str = ""
    kind: GoldKind = "math"
    meta: dict[str, Any] = field(default_factory=dict)


def load_problems(path: str | Path) -> list[Problem]:
    """Read a `.jsonl` or `.jsonl.gz` file of problems, in order.

    Raises:
        ProblemFileError: A line is no JSON object, lacks a field, has an empty answer, an unknown
            kind, or repeats an id.
    """
    path = Path(path)
    problems: list[Problem] = []
    first_line: dict[str, int] = {}
    for number, line in _lines(path):
        problem = _parse_line(line, path, number)
        if problem.id in first_line:
            raise ProblemFileError(
                f"{path}:{number}: id {problem.id!r} is already on line {first_line[problem.id]}; "
                "expected unique ids: rename or remove one of the two"
            )
        first_line[problem.id] = number
        problems.append(problem)
    if not problems:
        raise ProblemFileError(f"{path}: no problem in the file; expected one JSON object a line")
    return problems


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    if not path.is_file():
        raise ProblemFileError(f"{path}: no such file; expected a .jsonl or .jsonl.gz file")
    opened = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise ProblemFileError(
            f"{path}:{number + 1}: cannot be read ({error}); expected UTF-8 text"
        ) from error


def _parse_line(line: str, path: Path, number: int) -> Problem:
    where = f"{path}:{number}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ProblemFileError(
            f"{where}: not valid JSON ({error.msg} at column {error.colno}); "
            "expected one JSON object a line"
        ) from error
    except (ValueError, RecursionError) as error:  # an endless number, or brackets without end
        raise ProblemFileError(
            f"{where}: cannot be read ({error}); expected one JSON object a line"
        ) from error
    if not isinstance(row, dict):
        raise ProblemFileError(f"{where}: got {type(row).__name__}; expected a JSON object")
    for key in ("id", "problem", "answer"):
        value = row.get(key)
        if value is None:
            raise ProblemFileError(f"{where}: {key!r} is missing; expected a non-empty string")
        if not isinstance(value, str):
            raise ProblemFileError(
                f"{where}: {key} is {type(value).__name__} {value!r}; expected a non-empty string"
            )
        if not value.strip():
            raise ProblemFileError(f"{where}: {key} is empty; expected a non-empty string")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ProblemFileError(
                f"{where}: {key} holds half a surrogate pair at character {error.start}; expected "
                "whole Unicode characters: the file was cut or escaped wrongly"
            ) from error
    kind = row.get("kind", "math")
    if kind not in get_args(GoldKind):
        raise ProblemFileError(
            f"{where}: kind is {kind!r}; expected one of {', '.join(get_args(GoldKind))}"
        )
    meta = row.get("meta") or {}
    if not isinstance(meta, dict):
        raise ProblemFileError(f"{where}: meta is {type(meta).__name__}; expected a JSON object")
    return Problem(
        row["id"], row["problem"], row["answer"], str(row.get("source") or ""), kind, meta
    )
