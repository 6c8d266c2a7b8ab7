"""The public benchmarks: which there are, and loading one from the Hub, its cache or a folder.

The same benchmark gives the same problems whatever the source: ids come from what every source has
in common (the competition's own numbering, else a digest of the statement), the order from the ids,
multiple-choice options from a fixed seed. So prompts and the seeds of samples agree as well.

Which seven sets make up `competition-math` is this project's choice: the paper does not name its
seven. Hub ids and columns are those that the sets' cards and public code name.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data import hub
from data.problems import FILE_ENDINGS, LETTERS, Problem, lettered, load_problems

logger = logging.getLogger(__name__)

CHOICES_SEED = 0


class BenchmarkError(ValueError):
    """A benchmark is unknown, absent, or not what it was; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One public set of problems.

    Attributes:
        name: As commands take it.
        size: Problems in it.
        hub: Dataset id on the Hub.
        config: Configuration of the dataset, if it has several.
        split: Split of the dataset.
        files: Names that a local copy may have, without ending.
        columns: The Hub's column for each of `problem`, `answer` and, where there is one, `key`.
        key: From the native number, the labels and the statement to what follows `name/` in an id.
        is_gated: Whether the Hub asks to accept conditions first.
    """

    name: str
    size: int
    hub: str
    config: str | None
    split: str
    files: tuple[str, ...]
    columns: Mapping[str, str]
    key: Callable[[str, Mapping[str, Any], str], str]
    is_gated: bool = False


def digest_key(number: str, labels: Mapping[str, Any], statement: str) -> str:
    """Eight hex digits of the statement, for sets whose rows have no number of their own."""
    text = " ".join(statement.split())
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _number_key(number: str, labels: Mapping[str, Any], statement: str) -> str:
    return number.removeprefix("imo-bench-")


def _aime_key(number: str, labels: Mapping[str, Any], statement: str) -> str:
    """`II-3`: from the wiki's address, or from a running number 1 to 30 over both papers."""
    found = re.search(r"AIME_(I+)_Problems/Problem_(\d+)", str(labels.get("url", "")))
    if found:
        return f"{found[1]}-{found[2]}"
    if number.isdecimal() and 1 <= int(number) <= 30:
        return f"{'I' if int(number) <= 15 else 'II'}-{(int(number) - 1) % 15 + 1}"
    return number


def _amc_key(number: str, labels: Mapping[str, Any], statement: str) -> str:
    found = re.search(r"AMC_(\w+)_Problems/Problem_(\d+)", str(labels.get("url", "")))
    return f"{found[1]}-{found[2]}" if found else digest_key(number, labels, statement)


def _math_key(number: str, labels: Mapping[str, Any], statement: str) -> str:
    found = re.search(r"(\w+)/(\d+)\.json", str(labels.get("unique_id", "")))
    return f"{found[1]}-{found[2]}" if found else digest_key(number, labels, statement)


_ARENA = {"problem": "problem", "answer": "answer", "key": "problem_idx"}
_QUESTION = {"problem": "question", "answer": "answer"}
_IMO = {"problem": "Problem", "answer": "Short Answer", "key": "Problem ID"}
_OLYMPIAD = {"problem": "question", "answer": "final_answer", "key": "id"}
_GPQA = {"problem": "Question", "answer": "Correct Answer"}
_WRONG_CHOICES = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")

BENCHMARKS: dict[str, Benchmark] = {
    b.name: b
    for b in (
        Benchmark("aime-2024", 30, "HuggingFaceH4/aime_2024", None, "train", ("aime_2024",),
                  {"problem": "problem", "answer": "answer"}, _aime_key),
        Benchmark("aime-2025", 30, "MathArena/aime_2025", None, "train",
                  ("aime_2025", "aime_2025_matharena"), _ARENA, _aime_key),
        Benchmark("aime-2026", 30, "MathArena/aime_2026", None, "train", ("aime_2026",),
                  _ARENA, _aime_key),
        Benchmark("hmmt-feb-2025", 30, "MathArena/hmmt_feb_2025", None, "train",
                  ("hmmt_feb_2025",), _ARENA, _number_key),
        Benchmark("brumo-2025", 30, "MathArena/brumo_2025", None, "train", ("brumo_2025",),
                  _ARENA, _number_key),
        Benchmark("cmimc-2025", 40, "MathArena/cmimc_2025", None, "train", ("cmimc_2025",),
                  _ARENA, _number_key),
        Benchmark("imo-answerbench", 400, "Hwilner/imo-answerbench", None, "train",
                  ("imo_answerbench",), _IMO, _number_key),
        Benchmark("gpqa-diamond", 198, "Idavidrein/gpqa", "gpqa_diamond", "train",
                  ("gpqa_diamond",), _GPQA, digest_key, is_gated=True),
        Benchmark("amc-2023", 40, "math-ai/amc23", None, "test", ("amc_2023", "amc23"),
                  _QUESTION, _amc_key),
        Benchmark("math-500", 500, "HuggingFaceH4/MATH-500", None, "test",
                  ("math_500", "math500"), {"problem": "problem", "answer": "answer"}, _math_key),
        Benchmark("olympiadbench", 675, "Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train",
                  ("olympiadbench",), _OLYMPIAD, _number_key),
        Benchmark("minerva", 272, "math-ai/minervamath", None, "test",
                  ("minerva", "minerva_math"), _QUESTION, digest_key),
        Benchmark("gsm8k", 1319, "openai/gsm8k", "main", "test", ("gsm8k_test", "gsm8k"),
                  _QUESTION, digest_key),
    )
}  # fmt: skip

SUITES: dict[str, tuple[str, ...]] = {
    "competition-math": (
        "aime-2024",
        "aime-2025",
        "aime-2026",
        "hmmt-feb-2025",
        "brumo-2025",
        "cmimc-2025",
        "imo-answerbench",
    ),
    "extras": ("amc-2023", "math-500", "olympiadbench", "minerva", "gsm8k"),
}


def expand(names: Iterable[str], *, skip: Sequence[str] = ()) -> list[str]:
    """Benchmarks that names of benchmarks and suites stand for, each once, in order.

    Spelling is forgiving: `MATH_500` is `math-500`.

    Args:
        names: Benchmarks and suites.
        skip: Benchmarks to leave out.

    Raises:
        BenchmarkError: A name is neither; the nearest ones are named.
    """
    left_out = {_known(name) for name in skip}
    found: dict[str, None] = {}
    for name in names:
        known = _known(name)
        found |= dict.fromkeys(SUITES.get(known, (known,)))
    return [name for name in found if name not in left_out]


def is_known(name: str) -> bool:
    """Whether a name is a benchmark's or a suite's, in any spelling."""
    return _spelling(name) in BENCHMARKS or _spelling(name) in SUITES


def find_file(name: str, data_dir: str | Path) -> Path | None:
    """A benchmark's file in a folder, None if it has none."""
    for stem in BENCHMARKS[name].files:
        for ending in FILE_ENDINGS:
            path = Path(data_dir) / f"{stem}{ending}"
            if path.is_file():
                return path
    return None


def load_benchmark(
    name: str,
    data_dir: str | Path | None = None,
    *,
    limit: int | None = None,
    choices_seed: int = CHOICES_SEED,
) -> list[Problem]:
    """Load one benchmark.

    Args:
        name: A benchmark's, not a suite's.
        data_dir: Folder with a copy of it; None takes the Hub, or its cache where there is no
            network.
        limit: Take so many problems only: always the same, spread over the set.
        choices_seed: Orders the options of multiple-choice problems.

    Returns:
        Its problems in order of id, `source` the benchmark's name.

    Raises:
        BenchmarkError: Unknown, absent, or of another form than it was.
        data.problems.ProblemFileError: The local copy is broken.
    """
    benchmark = BENCHMARKS.get(_known(name))
    if benchmark is None:
        raise BenchmarkError(
            f"{name} is a suite of {', '.join(SUITES[_known(name)])}; expected one benchmark"
        )
    if data_dir is None:
        problems = [
            _from_hub(benchmark, row, number) for number, row in enumerate(_rows(benchmark), 1)
        ]
    else:
        path = find_file(benchmark.name, data_dir)
        if path is None:
            raise BenchmarkError(missing_message([benchmark.name], data_dir))
        problems = load_problems(path)
    if len(problems) != benchmark.size:
        logger.warning(
            "%s: %d problems, published with %d: scores are of what is here",
            benchmark.name,
            len(problems),
            benchmark.size,
        )
    return arrange(benchmark, problems, limit=limit, choices_seed=choices_seed)


def missing_message(names: Sequence[str], data_dir: str | Path) -> str:
    """Says which benchmarks a folder lacks, and what can be done about it."""
    there = sorted(p.name for p in Path(data_dir).glob("*") if p.name.endswith(FILE_ENDINGS))
    if not Path(data_dir).is_dir():
        return f"{data_dir}: no such folder; expected one with files of problems"
    wanted = "; ".join(f"{n} ({BENCHMARKS[n].files[0]}.jsonl)" for n in names)
    return (
        f"{data_dir}: has no file of {wanted}; it has {', '.join(there) or 'no file of problems'}. "
        f"Put the file there, leave the benchmark out (--skip {' '.join(names)}), or leave out "
        "--data_dir to load from the Hub"
    )


def arrange(
    benchmark: Benchmark,
    problems: Iterable[Problem],
    *,
    limit: int | None = None,
    choices_seed: int = CHOICES_SEED,
) -> list[Problem]:
    """Problems of a benchmark as every source gives them: ids, order, options, white space.

    Raises:
        BenchmarkError: Two problems have the same id.
    """
    by_id: dict[str, Problem] = {}
    for problem in problems:
        problem = _canonical(benchmark, problem, choices_seed)
        if problem.id in by_id:
            raise BenchmarkError(
                f"{benchmark.name}: {problem.id} is there twice; expected the set as published: "
                "get it again"
            )
        by_id[problem.id] = problem
    chosen = sorted(by_id, key=_natural_order)
    if limit is not None:
        spread = sorted(by_id, key=lambda i: hashlib.blake2b(i.encode(), digest_size=8).digest())
        kept = set(spread[:limit])
        chosen = [i for i in chosen if i in kept]
    return [by_id[i] for i in chosen]


def _canonical(benchmark: Benchmark, problem: Problem, choices_seed: int) -> Problem:
    statement = _clean(problem.problem)
    choices = problem.meta.get("choices") if problem.kind == "choice" else None
    if choices:
        statement = _clean(problem.problem.removesuffix(lettered("", choices)))
    number = problem.id.rsplit("/", 1)[-1]  # without the set's name that local copies put first
    key = benchmark.key(number, problem.meta, statement)
    answer = _clean(problem.answer)
    if answer.count("$") == 2 and answer[0] == answer[-1] == "$":
        answer = answer[1:-1].strip()
    meta: dict[str, Any] = {
        k: v for k, v in problem.meta.items() if isinstance(v, str | int | float | bool)
    }
    if choices:
        # Sorted first: the order that a source happens to have must not matter.
        right = choices[LETTERS.index(problem.answer)]
        marked = sorted((_clean(c), n != LETTERS.index(answer)) for n, c in enumerate(choices))
        random.Random(f"{choices_seed}/{key}").shuffle(marked)
        answer = LETTERS[marked.index((_clean(right), False))]
        texts = [text for text, _ in marked]
        statement, meta = lettered(statement, texts), meta | {"choices": texts}
    return replace(
        problem,
        id=f"{benchmark.name}/{key}",
        problem=statement,
        answer=answer,
        source=benchmark.name,
        meta=meta,
    )


def _rows(benchmark: Benchmark) -> Sequence[Mapping[str, Any]]:
    try:
        return hub.load_rows(benchmark.hub, benchmark.config, benchmark.split)
    except hub.HubError as error:
        asks = error.is_refused and benchmark.is_gated
        login = "; accept its conditions on its page and log in with `hf auth login`"
        raise BenchmarkError(
            f"{benchmark.name}: {error}{login if asks else ''}. Without a network, give a folder "
            f"that holds {benchmark.files[0]}.jsonl (--data_dir), or fill the cache on a machine "
            f"that has one: `rivet benchmarks {benchmark.name}`"
        ) from error


def _from_hub(benchmark: Benchmark, row: Mapping[str, Any], number: int) -> Problem:
    """A row of the Hub's dataset as a problem, before `_canonical`."""
    wanted = [*benchmark.columns.values()]
    wanted += _WRONG_CHOICES if benchmark.columns is _GPQA else ()
    missing = [column for column in wanted if row.get(column) in (None, "", [])]
    if missing:
        raise BenchmarkError(
            f"{benchmark.hub}, row {number}: {missing[0]!r} is missing or empty; expected the "
            f"columns {', '.join(wanted)}, found {', '.join(row)}: the dataset has changed; use a "
            "local copy (--data_dir)"
        )
    columns = benchmark.columns
    meta = {k: v for k, v in row.items() if k in ("url", "unique_id", "level", "subject")}
    statement, answer = str(row[columns["problem"]]), row[columns["answer"]]
    if isinstance(answer, list):
        answer = ", ".join(map(str, answer))
    answer = str(answer)
    if benchmark.name == "gsm8k":  # the solution, then the number behind ####
        answer = answer.rsplit("####", 1)[-1].strip().replace(",", "")
    key = str(row[columns["key"]]) if "key" in columns else str(number)
    if columns is not _GPQA:
        return Problem(key, statement, answer, "", "math", meta)
    choices = [answer, *(str(row[column]) for column in _WRONG_CHOICES)]
    return Problem(key, lettered(statement, choices), "A", "", "choice", {"choices": choices})


def _clean(text: str) -> str:
    return text.replace("\r\n", "\n").strip()


def _natural_order(text: str) -> list[tuple[int, int, str]]:
    """Sorts numbers in a text by value: I-2 before I-10."""
    parts = re.findall(r"\d+|\D+", text)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


def _spelling(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def _known(name: str) -> str:
    spelling = _spelling(name)
    if spelling in BENCHMARKS or spelling in SUITES:
        return spelling
    for benchmark in BENCHMARKS.values():
        if spelling in map(_spelling, benchmark.files):
            return benchmark.name
    names = [*SUITES, *BENCHMARKS]
    near = difflib.get_close_matches(spelling, names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(names)}."
    raise BenchmarkError(
        f"unknown benchmark {name!r}: {hint} A file of problems is given by its path, such as "
        "problems.jsonl"
    )
