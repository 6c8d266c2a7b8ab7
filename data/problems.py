"""The problem record, and reading problems from files with errors that name file and line.

A file is JSONL (plain or gzip) or parquet with the same columns. Every fault of a file is reported
at once, so that one look is enough to repair it.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

GoldKind = Literal["math", "choice", "exact", "reasoning_gym"]
FILE_ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")
LETTERS = "ABCDEFGHIJ"
_SHOWN_FAULTS = 200


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
    """Read a `.jsonl`, `.jsonl.gz` or `.parquet` file of problems, in order.

    A row with `choices` (a list) and `correct` (index of the right one) is a multiple-choice
    problem: it becomes the statement with lettered options, with the right letter as its answer.

    Raises:
        ProblemFileError: Rows are no JSON objects, lack a field, have an empty answer, an unknown
            kind, choices that do not fit, or repeat an id. Every such row is named.
    """
    path = Path(path)
    problems: list[Problem] = []
    faults: list[str] = []
    first_line: dict[str, int] = {}
    try:
        for number, row in _rows(path):
            where = f"{path}:{number}"
            try:
                problem = _to_problem(row, where)
            except ProblemFileError as error:
                faults.append(str(error))
                continue
            if problem.id in first_line:
                faults.append(
                    f"{where}: id {problem.id!r} is already on line {first_line[problem.id]}; "
                    "expected unique ids: rename or remove one of the two"
                )
                continue
            first_line[problem.id] = number
            problems.append(problem)
    except ProblemFileError as error:  # nothing behind this place can be read
        faults.append(str(error))
    if faults:
        raise ProblemFileError(_report(faults, path, len(problems)))
    if not problems:
        raise ProblemFileError(f"{path}: no problem in the file; expected one JSON object a line")
    return problems


def lettered(question: str, choices: list[str]) -> str:
    """A question with its options, one a line, as `A) ...`."""
    options = "\n".join(f"{letter}) {text}" for letter, text in zip(LETTERS, choices, strict=False))
    return f"{question}\n\n{options}\n\nAnswer with the letter of the right option."


def _report(faults: list[str], path: Path, good: int) -> str:
    if len(faults) == 1:
        return faults[0]
    lines = faults[:_SHOWN_FAULTS]
    if len(faults) > len(lines):
        lines.append(f"... and {len(faults) - len(lines)} more")
    return "\n  ".join([*lines, f"{len(faults)} faults in {path}, beside {good} good rows"])


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Rows with their line, or with their position in a parquet file; text lines undecoded."""
    if not path.is_file():
        raise ProblemFileError(
            f"{path}: no such file; expected a file that ends in {', '.join(FILE_ENDINGS)}"
        )
    yield from (_parquet_rows(path) if path.suffix == ".parquet" else _lines(path))


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ProblemFileError(
            f"{path}: cannot be read ({error}); expected a parquet file"
        ) from error
    yield from enumerate(rows, start=1)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    opened = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opened(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                # A byte order mark, which some editors put first, is no part of the text.
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise ProblemFileError(
            f"{path}:{number + 1}: cannot be read ({error}); expected UTF-8 text"
        ) from error


def _to_problem(line: Any, where: str) -> Problem:
    row = _parse(line, where) if isinstance(line, bytes) else line
    if not isinstance(row, dict):
        raise ProblemFileError(f"{where}: got {type(row).__name__}; expected a JSON object")
    choices = row.get("choices")
    texts = ["id", "problem"] if choices is not None else ["id", "problem", "answer"]
    for key in texts:
        _check_text(row, key, where)
    kind = row.get("kind") or ("math" if choices is None else "choice")
    if kind not in get_args(GoldKind):
        raise ProblemFileError(
            f"{where}: kind is {kind!r}; expected one of {', '.join(get_args(GoldKind))}"
        )
    meta = row.get("meta") or {}
    if not isinstance(meta, dict):
        raise ProblemFileError(f"{where}: meta is {type(meta).__name__}; expected a JSON object")
    statement, answer = row["problem"], str(row.get("answer"))
    if choices is not None:
        answer = _right_letter(row, where)
        statement = lettered(statement, choices)
        meta = meta | {"choices": list(choices)}
    source = str(row.get("source") or "")
    return Problem(row["id"], statement, answer, source, cast(GoldKind, kind), meta)


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ProblemFileError(f"{where}: cannot be read ({error}); expected UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise ProblemFileError(
            f"{where}: not valid JSON ({error.msg} at column {error.colno}); "
            "expected one JSON object a line"
        ) from error
    except (ValueError, RecursionError) as error:  # an endless number, or brackets without end
        raise ProblemFileError(
            f"{where}: cannot be read ({error}); expected one JSON object a line"
        ) from error


def _check_text(row: dict[str, Any], key: str, where: str) -> None:
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


def _right_letter(row: dict[str, Any], where: str) -> str:
    """The letter of the right option, from `correct` or from `answer`; they must agree."""
    choices, correct, answer = row["choices"], row.get("correct"), row.get("answer")
    is_list = isinstance(choices, list) and all(isinstance(c, str) and c.strip() for c in choices)
    if not is_list or not 2 <= len(choices) <= len(LETTERS):
        raise ProblemFileError(
            f"{where}: choices: expected a list of 2 to {len(LETTERS)} non-empty strings"
        )
    letters = LETTERS[: len(choices)]
    if correct is None:
        if not isinstance(answer, str) or answer.strip() not in list(letters):
            raise ProblemFileError(
                f"{where}: answer is {answer!r}; expected a letter from {letters[0]} to "
                f"{letters[-1]}, or `correct` with the index of the right choice"
            )
        return answer.strip()
    if isinstance(correct, bool) or not isinstance(correct, int) or not 0 <= correct < len(choices):
        raise ProblemFileError(
            f"{where}: correct is {correct!r}; expected the index of the right choice, "
            f"0 to {len(choices) - 1}"
        )
    if isinstance(answer, str) and answer.strip() not in (letters[correct], choices[correct]):
        raise ProblemFileError(
            f"{where}: answer is {answer!r}, but correct is {correct}, which is "
            f"{letters[correct]}; expected them to agree"
        )
    return letters[correct]
