"""Which evaluation problems are in a training set: every pair, with the evidence.

    rivet contamination TRAIN EVAL...

TRAIN and EVAL are files of problems, or benchmarks and suites by name. How a problem is found is in
`data.decontamination`, which the filter of Stage II uses as well. Answers are known here and help
to tell a problem from its siblings: with another answer, more of the statement must agree.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.benchmarks import expand, find_file, load_benchmark
from data.decontamination import MIN_SHARE, Contamination, Overlap
from data.problems import FILE_ENDINGS, Problem, load_problems
from rivet.files import atomic_write_text

MIN_SHARE_OTHER_ANSWER = 0.8
_EXCERPT = 160  # characters of a statement in the printed list


@dataclass(frozen=True, slots=True)
class Finding:
    """An evaluation problem in a training problem."""

    train: Problem
    evaluation: Problem
    overlap: Overlap

    @property
    def has_same_answer(self) -> bool:
        """Whether the gold answers are spelled alike, apart from spaces."""
        return "".join(self.train.answer.split()) == "".join(self.evaluation.answer.split())

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "train_id": self.train.id,
            "eval_id": self.evaluation.id,
            "share": round(self.overlap.share, 4),
            "is_equal": self.overlap.is_equal,
            "passage": self.overlap.passage,
            "train_problem": self.train.problem,
            "eval_problem": self.evaluation.problem,
            "same_answer": self.has_same_answer,
        }


def find_contamination(
    train: Sequence[Problem], evaluation: Sequence[Problem], *, min_share: float = MIN_SHARE
) -> Iterator[Finding]:
    """Pairs of a training and an evaluation problem that overlap, in order of training problem."""
    index = Contamination((p.problem for p in evaluation), min_share=min_share)
    for problem in train:
        for overlap in index.find(problem.problem):
            finding = Finding(problem, evaluation[overlap.statement], overlap)
            if finding.has_same_answer or overlap.share >= max(min_share, MIN_SHARE_OTHER_ANSWER):
                yield finding


def main(argv: list[str] | None = None) -> int:
    """Run `rivet contamination`."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="rivet contamination",
        description="List evaluation problems that a training set holds, with the evidence.",
    )
    parser.add_argument("train", help="a file of problems, a benchmark or a suite")
    parser.add_argument("evaluation", nargs="+", help="the same, one or several")
    parser.add_argument("--data_dir", "--data-dir", help="folder with copies of the benchmarks")
    parser.add_argument(
        "--min_share", type=float, default=MIN_SHARE, help="of a problem's runs of words, in (0, 1]"
    )
    parser.add_argument("--out", type=Path, help="write the pairs as JSONL")
    parser.add_argument("--check", action="store_true", help="exit with 1 if there is any")
    args = parser.parse_args(argv)
    if not 0 < args.min_share <= 1:
        parser.error(f"--min_share is {args.min_share}; expected a share in (0, 1]")
    train = _load(args.train, args.data_dir)
    evaluation = [p for name in args.evaluation for p in _load(name, args.data_dir)]
    findings = list(find_contamination(train, evaluation, min_share=args.min_share))
    for finding in findings:
        print(describe(finding))
    held = {finding.train.id for finding in findings}
    print(
        f"{len(held)} of {len(train):,} training problems overlap with "
        f"{len({f.evaluation.id for f in findings})} of {len(evaluation):,} evaluation problems"
    )
    if args.out is not None:
        lines = "".join(json.dumps(f.to_dict(), ensure_ascii=False) + "\n" for f in findings)
        print(f"pairs: {atomic_write_text(args.out, lines)}")
    return int(bool(findings) and args.check)


def describe(finding: Finding) -> str:
    """A finding as lines of text."""
    overlap = finding.overlap
    kind = "the same statement" if overlap.is_equal else f"{overlap.share:.0%} of its word runs"
    answers = "same" if finding.has_same_answer else "other"
    return (
        f"{finding.train.id} holds {finding.evaluation.id}: {kind}, {answers} answer\n"
        f"  in common: {_excerpt(overlap.passage)}\n"
        f"  training:   {_excerpt(finding.train.problem)}\n"
        f"  evaluation: {_excerpt(finding.evaluation.problem)}"
    )


def _load(name: str, data_dir: str | None) -> list[Problem]:
    if "/" in name or name.endswith(FILE_ENDINGS) or Path(name).is_file():
        return load_problems(name)
    names = expand([name])
    if data_dir is not None and len(names) > 1:  # of a suite, what the folder has
        names = [n for n in names if find_file(n, data_dir)]
    return [p for n in names for p in load_benchmark(n, data_dir)]


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _EXCERPT else f"{line[: _EXCERPT - 3]}..."


if __name__ == "__main__":
    sys.exit(main())
