"""What an evaluation asks: the mini-world, benchmarks and suites by name, files by path.

A file whose golds cannot be graded is refused: its owner can repair it. A published benchmark is
taken as it is: problems with a gold that the grader cannot read stay in and never count as right,
so its score is a lower bound, and the log names them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from data.benchmarks import (
    BenchmarkError,
    expand,
    find_file,
    is_known,
    load_benchmark,
    missing_message,
)
from data.problems import FILE_ENDINGS, Problem
from eval.grade import gold_faults, load_gradable

logger = logging.getLogger(__name__)


class ProblemSetError(ValueError):
    """What is to be asked cannot be put together; the message says why."""


@dataclass(frozen=True, slots=True)
class MiniWorldSplit:
    """Which problems of the mini-world are meant."""

    split: Literal["train", "test", "validation"]
    per_family: int
    seed: int
    families: Sequence[str] = ()  # empty: all


def load_problem_sets(
    names: Sequence[str],
    *,
    mini_world: MiniWorldSplit,
    data_dir: str | Path | None = None,
    skip: Sequence[str] = (),
    limit: int | None = None,
) -> tuple[list[Problem], Mapping[str, str]]:
    """Problems to ask, and the expert that knows each family (empty outside the mini-world).

    Args:
        names: `miniworld`, benchmarks and suites (`data.benchmarks`), paths of files.
        mini_world: Which of its problems, where it is named.
        data_dir: Folder with copies of benchmarks; None takes the Hub or its cache.
        skip: Benchmarks that a suite is taken without.
        limit: So many problems of each set only: the first ones of a file or the mini-world, a
            fixed choice spread over a benchmark.

    Raises:
        BenchmarkError: A benchmark is unknown or absent.
        ProblemFileError, GoldError: A file is broken, or golds in it are.
        ProblemSetError: The same id in two sets.
    """
    problems: list[Problem] = []
    competent: Mapping[str, str] = {}
    benchmarks: list[str] = []
    for name in names:
        if name == "miniworld":
            found, competent = _load_mini_world(mini_world)
            problems += found[:limit]
        elif (path := _file_of(name, data_dir)) is not None:
            found = load_gradable(path)[:limit]
            stem = path.name.split(".")[0]
            problems += [p if p.source else replace(p, source=stem) for p in found]
        else:
            benchmarks += expand([name], skip=skip)
    problems += _load_benchmarks(list(dict.fromkeys(benchmarks)), data_dir, limit)
    seen: dict[str, str] = {}
    for problem in problems:
        if problem.id in seen:
            raise ProblemSetError(
                f"problem id {problem.id!r} is in {seen[problem.id] or 'one set'} and again in "
                f"{problem.source or 'another'}; expected ids that are unique over all sets of a "
                "run: rename one of the two, or evaluate the sets apart"
            )
        seen[problem.id] = problem.source
    if not problems:
        raise ProblemSetError(f"{', '.join(names)}: nothing is left to ask; skip fewer benchmarks")
    return problems, competent


def _load_mini_world(chosen: MiniWorldSplit) -> tuple[list[Problem], Mapping[str, str]]:
    from data.miniworld.experts import route
    from data.miniworld.tasks import FAMILIES, build_split

    problems = build_split(chosen.split, chosen.per_family, chosen.seed, chosen.families)
    return problems, {family: route(family) for family in FAMILIES}


def _file_of(name: str, data_dir: str | Path | None) -> Path | None:
    """The file that a name stands for: a path, or a file in the folder that is no benchmark."""
    if "/" in name or name.endswith(FILE_ENDINGS) or Path(name).is_file():
        return Path(name)
    if data_dir is not None and not is_known(name):
        for ending in FILE_ENDINGS:
            path = Path(data_dir) / f"{name}{ending}"
            if path.is_file():
                return path
    return None


def _load_benchmarks(
    names: Sequence[str], data_dir: str | Path | None, limit: int | None
) -> list[Problem]:
    if data_dir is not None:
        missing = [name for name in names if find_file(name, data_dir) is None]
        if missing:
            raise BenchmarkError(missing_message(missing, data_dir))
    problems: list[Problem] = []
    for name in names:
        logger.info("loading %s from %s", name, data_dir or "the Hub")
        problems += load_benchmark(name, data_dir, limit=limit)
    faults = gold_faults(problems)
    if faults:
        logger.warning(
            "%d of %d problems have a gold that cannot be graded; answers to them never count as "
            "right: %s",
            len(faults),
            len(problems),
            "; ".join(f"{i} ({what})" for i, what in faults.items()),
        )
    return problems
