"""Grade files, or check golds:

python -m rivet.grading CASES.jsonl --out VERDICTS.jsonl [--mode reward|eval]
python -m rivet.grading intake FILE...
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rivet.grading.bulk import grade_file, summary
from rivet.grading.grader import Grader
from rivet.grading.intake import check_file
from rivet.grading.verdict import MODES, GradingError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 0 when done, 1 on an error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        if arguments[:1] == ["intake"]:
            return intake(arguments[1:])
        return bulk(arguments)
    except (GradingError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def bulk(arguments: Sequence[str]) -> int:
    """Grade a file of answers."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m rivet.grading",
        description="Grade a file of answers. `python -m rivet.grading intake` checks golds.",
    )
    parser.add_argument(
        "cases",
        type=Path,
        help='lines {"id", "gold", "answer"}, with optional "kind" and "choices"',
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help='written whole: lines {"id", "outcome", "extracted", "reason"}, in order',
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="reward",
        help="reward: boxes only; eval: an explicit answer line counts when there is no box",
    )
    add_worker_arguments(parser)
    options = parser.parse_args(arguments)
    with Grader(workers=options.workers, timeout_s=options.timeout_s) as grader:
        counts = grade_file(options.cases, options.out, grader=grader, mode=options.mode)
    print(f"{options.out}: {summary(counts, options.mode)}")
    return 0


def intake(arguments: Sequence[str]) -> int:
    """List the golds that cannot be graded with."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m rivet.grading intake",
        description="List the golds that do not parse fully, do not equal themselves, or do not "
        "change when one digit does.",
    )
    parser.add_argument("files", type=Path, nargs="+", help=".jsonl, .jsonl.gz or .parquet")
    add_worker_arguments(parser)
    options = parser.parse_args(arguments)
    rows: list[tuple[str, int, int]] = []
    with Grader(workers=options.workers, timeout_s=options.timeout_s) as grader:
        for path in options.files:
            report = check_file(path, grader)
            for identifier, gold, problem in report.unusable:
                print(f"{identifier}\t{gold[:80]!r}\t{problem}")
            rows.append((path.name, report.total, len(report.unusable)))
    width = max(len(name) for name, _, _ in rows)
    print(f"\n{'file':{width}}  golds  unusable")
    for name, total, bad in rows:
        print(f"{name:{width}}  {total:5}  {bad:8}")
    return 0


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the settings of the worker processes."""
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 8))
    parser.add_argument(
        "--timeout-s", type=float, default=5.0, help="seconds before a worker is killed"
    )


if __name__ == "__main__":
    sys.exit(main())
