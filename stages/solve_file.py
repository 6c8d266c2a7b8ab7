"""`rivet solve --file`: every problem of a JSONL file, each solution kept as soon as it is there.

The output grows by whole lines; a killed run goes on with the problems that are not in it yet.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rivet.async_solver import ProblemError
from rivet.files import explain_full_disk
from rivet.hub import local_checkpoint
from stages.solve_config import SolveConfig, as_json, open_solver, vote_as_json

if TYPE_CHECKING:
    from rivet.solver import Solution, Solver

_ROW = b'{"id": '  # how every row of solutions begins
_AHEAD = 4  # batches that are read ahead, so that the model never waits for a slow problem


class SolveFileError(ValueError):
    """A file of problems, or of solutions, that cannot be used; the message names the line."""


@dataclass(frozen=True, slots=True)
class Question:
    """One line of the file, of problems or of solutions."""

    id: str
    problem: str
    line: int


def solve_file(config: SolveConfig) -> int:
    """Solve the problems of a file that have no solution yet; 0 when all have one.

    Raises:
        SolveFileError: A line of the problems is broken, or the output is of other settings or
            of other problems.
    """
    questions = read_questions(Path(config.file))
    # Once: a name on the Hub may mean other weights later.
    config = replace(config, checkpoint=str(local_checkpoint(config.checkpoint)))
    settings = settings_of(config)
    out = Path(config.out) if config.out else None
    left = _without_solution(questions, config.file, out, settings) if out else questions
    if not left:
        print(f"{out}: all {len(questions)} problems have a solution", file=sys.stderr)
        return 0
    with open_solver(config) as solver, _Output(out, settings) as output:
        for start in range(0, len(left), config.max_batch * _AHEAD):
            batch = left[start : start + config.max_batch * _AHEAD]
            _solve_batch(solver, batch, config, output)
    return 0


def _without_solution(
    questions: list[Question], file: str, out: Path, settings: dict[str, Any]
) -> list[Question]:
    """The questions that the output does not answer yet."""
    done = read_done(out, settings)
    for question in questions:
        kept = done.get(question.id)
        if kept is not None and kept.problem != question.problem:
            raise SolveFileError(
                f"{file}:{question.line}: the problem {question.id!r} is another one in "
                f"{out}:{kept.line}; choose another --out"
            )
    return [question for question in questions if question.id not in done]


def _solve_batch(solver: Solver, batch: list[Question], config: SolveConfig, out: _Output) -> None:
    """Solve some problems; each is written when all its samples are there."""
    k = config.samples
    asked = []
    for question in batch:
        try:
            solver.prompt(question.problem)
            asked.append(question)
        except ProblemError as error:
            row = {"id": question.id, "problem": question.problem, "answer": None}
            out.add({**row, "error": str(error)})
    samples: list[dict[int, Solution]] = [{} for _ in asked]

    def on_done(n: int, solution: Solution) -> None:
        found = samples[n // k]
        found[n % k] = solution
        if len(found) == k and not config.vote:
            rows = [as_json(found[index]) for index in range(k)]
            value = rows[0] if k == 1 else {"problem": solution.problem, "solutions": rows}
            out.add({"id": asked[n // k].id, **value})

    problems = [question.problem for question in asked for _ in range(k)]
    solver.solve_many(problems, on_done=on_done, **config.ask)
    if config.vote:
        for question, found in zip(asked, samples, strict=True):
            vote = solver.count([found[index] for index in range(k)])
            out.add({"id": question.id, **vote_as_json(vote)})


def settings_of(config: SolveConfig) -> dict[str, Any]:
    """What the solutions depend on, kept with each of them; the checkpoint is a folder."""
    return {
        "checkpoint": str(Path(config.checkpoint).resolve()),
        "samples": config.samples,
        "vote": config.vote,
        "max_completion_length": config.max_completion_length,
        **config.ask,
    }


def read_questions(path: Path) -> list[Question]:
    """Problems of a JSONL file; a line without an id is named by its number.

    Raises:
        SolveFileError: The file cannot be read, a line is broken, or an id comes twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SolveFileError(f"{path}: cannot be read ({error}); expected JSONL text") from error
    questions: dict[str, Question] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SolveFileError(f"{where}: broken JSON ({error})") from error
        problem = row.get("problem") if isinstance(row, dict) else None
        if not isinstance(problem, str) or not problem.strip():
            raise SolveFileError(f'{where}: expected an object with a non-empty text "problem"')
        name = _plain(str(number if row.get("id") is None else row["id"]))
        if name in questions:
            raise SolveFileError(f"{where}: the id {name!r} comes twice")
        questions[name] = Question(name, _plain(problem), number)
    if not questions:
        raise SolveFileError(f"{path}: holds no problem")
    return list(questions.values())


def _plain(text: str) -> str:
    """A text that can be written: JSON can spell lone surrogates, which no file can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def read_done(path: Path, settings: dict[str, Any]) -> dict[str, Question]:
    """What has a solution, by id; a last line that was cut by a kill is removed.

    Raises:
        SolveFileError: A line is no solution, or one of other settings.
    """
    if not path.exists():
        return {}
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise SolveFileError(f"{path}: cannot be read ({error}); choose another --out") from error
    done = {}
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = json.loads(line)
            kept = row["settings"]
            done[str(row["id"])] = Question(str(row["id"]), row["problem"], number)
        except (ValueError, KeyError, TypeError) as error:
            raise SolveFileError(
                f"{path}:{number}: is no solution that this command wrote; choose another --out"
            ) from error
        if kept != settings:
            differing = sorted(k for k in settings if kept.get(k) != settings[k])
            raise SolveFileError(
                f"{path}:{number}: was written with other settings "
                f"({', '.join(differing) or 'of another release'}); choose another --out"
            )
    if lines[-1]:  # a kill in the middle of a line, unless it is somebody else's file
        if not lines[-1].startswith(_ROW[: len(lines[-1])]) or _is_problem(lines[-1]):
            raise SolveFileError(
                f"{path}:{len(lines)}: is no solution that this command wrote; choose another --out"
            )
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size - len(lines[-1]))
    return done


def _is_problem(line: bytes) -> bool:
    """Whether a line is whole, and lacks what every solution has."""
    try:
        return "settings" not in json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return False


class _Output:
    """Whole lines, each with the settings, to a file or to standard output."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._path, self._settings = path, settings
        self._file: IO[str] | None = None

    def __enter__(self) -> _Output:
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self._path, "a", encoding="utf-8")
            except OSError as error:
                raise SolveFileError(
                    f"{self._path}: cannot be written ({error}); choose another --out"
                ) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, row: dict[str, Any]) -> None:
        """Write a row so that it survives what comes next."""
        line = json.dumps({**row, "settings": self._settings}, ensure_ascii=False) + "\n"
        if self._file is None:
            sys.stdout.write(line)
            sys.stdout.flush()
            return
        assert self._path is not None
        with explain_full_disk(self._path):
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
