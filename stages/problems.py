"""Training problems from the Hub, or a file: gradable, each once, and none of an evaluation's.

    rivet problems agentica-org/DeepScaleR-Preview-Dataset --output problems/deepscaler.jsonl \
        --decontaminate competition-math gpqa-diamond

Nothing is repaired: what is dropped is counted by reason, and the counts stand beside the file as
`NAME.funnel.json`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data.benchmarks import expand, is_known, load_benchmark
from data.decontamination import Contamination, squeezed
from data.hub import HubError, load_rows
from data.problems import Problem, load_problems
from eval.grade import gold_faults
from rivet.config import ConfigError, parse_config
from rivet.files import atomic_write_json, atomic_write_text

logger = logging.getLogger(__name__)


class ProblemsError(ValueError):
    """The problems cannot be made; the message says what is missing and what to do."""


@dataclass
class ProblemsConfig:
    """Settings of `rivet problems`."""

    source: str = field(metadata={"help": "A data set of the Hub, or a file of problems."})
    output: str = field(
        default="problems/train.jsonl", metadata={"help": "The .jsonl file to write."}
    )
    subset: str | None = field(
        default=None, metadata={"help": "The data set's configuration; null for its only one."}
    )
    split: str = field(default="train", metadata={"help": "Split of the data set."})
    problem_column: str = field(default="problem", metadata={"help": "Column of the statement."})
    answer_column: str = field(default="answer", metadata={"help": "Column of the gold answer."})
    decontaminate: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Evaluation problems that must not be trained on: files, benchmarks, suites."
        },
    )
    data_dir: str | None = field(
        default=None, metadata={"help": "Folder with copies of the benchmarks; null: the Hub."}
    )
    max_words: int = field(
        default=400, metadata={"help": "Longest statement in words, at least 1."}
    )
    limit: int | None = field(
        default=None, metadata={"help": "Keep the first so many only, at least 1."}
    )
    overwrite: bool = field(
        default=False, metadata={"help": "Replace a file of that name that is there."}
    )

    def __post_init__(self) -> None:
        faults = []
        if Path(self.output).suffix != ".jsonl":
            faults.append(f"output: got {self.output!r}, expected a name that ends in .jsonl")
        if self.max_words < 1:
            faults.append(f"max_words: got {self.max_words}, expected at least 1")
        if self.limit is not None and self.limit < 1:
            faults.append(f"limit: got {self.limit}, expected at least 1, or null")
        if faults:
            raise ConfigError(faults)


def run(config: ProblemsConfig) -> dict[str, Any]:
    """Write the problems.

    Returns:
        The counts: `read`, and for each rule what it dropped, and `kept`.

    Raises:
        ProblemsError: The output is there, the data set cannot be loaded or lacks a column, or
            nothing is left.
        data.problems.ProblemFileError: The file is broken.
        data.benchmarks.BenchmarkError: A benchmark is unknown or absent.
    """
    output = Path(config.output)
    if output.exists() and not config.overwrite:
        raise ProblemsError(
            f"{output}: exists; choose another --output, or replace it with --overwrite true"
        )
    problems = list(_read(config))
    evaluation = [p for name in config.decontaminate for p in _evaluation(name, config.data_dir)]
    counts: dict[str, Any] = {"source": config.source, "read": len(problems)}
    empty = {p.id for p in problems if not (p.problem and p.answer)}
    problems = _drop(problems, counts, "empty", empty)
    problems = _drop(problems, counts, "too long", _too_long(problems, config.max_words))
    problems = _drop(problems, counts, "repeated", _repeated(problems))
    problems = _drop(problems, counts, "cannot be graded", set(gold_faults(problems)))
    held = Contamination(p.problem for p in evaluation)
    contaminated = {p.id for p in problems if held.holds(p.problem)}
    problems = _drop(problems, counts, "in an evaluation", contaminated)[: config.limit]
    if not problems:
        raise ProblemsError(f"{config.source}: nothing is left of {counts}; expected problems")
    counts |= {"kept": len(problems), "decontaminated_against": config.decontaminate}
    output.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(asdict(p), ensure_ascii=False) + "\n" for p in problems)
    atomic_write_text(output, lines)
    atomic_write_json(output.with_suffix(".funnel.json"), counts)
    return counts


def _read(config: ProblemsConfig) -> Iterator[Problem]:
    if Path(config.source).is_file():
        yield from load_problems(config.source)
        return
    try:
        rows = load_rows(config.source, config.subset, config.split)
    except HubError as error:
        raise ProblemsError(
            f"{error}; expected a file, or a data set of the Hub that is in reach or in its cache"
        ) from error
    name = config.source.rpartition("/")[2].lower()
    for number, row in enumerate(rows, start=1):
        for column in (config.problem_column, config.answer_column):
            if column not in row:
                raise ProblemsError(
                    f"{config.source}: no column {column!r}, there are {', '.join(row)}; name it "
                    "with --problem_column and --answer_column"
                )
        statement, answer = _text(row[config.problem_column]), _text(row[config.answer_column])
        yield Problem(f"{name}/{number}", statement, answer, name)


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()  # the number 0 is an answer


def _evaluation(name: str, data_dir: str | None) -> list[Problem]:
    if is_known(name):
        return [p for known in expand([name]) for p in load_benchmark(known, data_dir)]
    return load_problems(name)


def _drop(
    problems: list[Problem], counts: dict[str, Any], reason: str, ids: set[str]
) -> list[Problem]:
    counts[reason] = len(ids)
    logger.info("%s: %d of %d dropped", reason, len(ids), len(problems))
    return [p for p in problems if p.id not in ids]


def _too_long(problems: Sequence[Problem], words: int) -> set[str]:
    return {p.id for p in problems if len(p.problem.split()) > words}


def _repeated(problems: Sequence[Problem]) -> set[str]:
    seen: set[str] = set()
    again: set[str] = set()
    for problem in problems:
        text = squeezed(problem.problem)
        if text in seen:
            again.add(problem.id)
        seen.add(text)
    return again


def main(argv: Sequence[str] | None = None) -> int:
    """`rivet problems SOURCE [--name value ...]`; prints what was dropped and kept."""
    config = parse_config(
        ProblemsConfig,
        argv,
        prog="rivet problems",
        description="Make a file of training problems: gradable, each once, decontaminated.",
        positional=("source",),
    ).config
    for name, value in run(config).items():
        print(f"{name}: {value}")
    print(f"problems: {config.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
