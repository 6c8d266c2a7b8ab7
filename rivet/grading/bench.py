"""Measure the grader against math-verify, interleaved in one run so that both meet the same load.

    python -m rivet.grading.bench [--rounds N]

Prints a table and, as its last line, one JSON object. Golds come from `math_500.jsonl` under
RIVET_DATA (default ../shared/data beside the repository); without it, from a small built-in set.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rivet.grading.grader import Grader, Request
from rivet.grading.records import read_records, text_field

_REPOSITORY = Path(__file__).resolve().parents[2]
_CHUNK = 25
_REASONING = "We add the two parts and simplify the sum step by step, checking each term. " * 4
BUILT_IN_GOLDS = [
    "12", "-3", "205", "70000", "1,250", r"\frac{7}{12}", r"-\frac{3}{8}", "0.125", r"35\%",
    r"2\sqrt{7}", r"\frac{\sqrt{5}}{4}", r"3\pi", r"120^\circ", r"\$4.75", r"18\text{ cm}^2",
    "x^2-4x+7", r"\frac{n(n-1)}{2}", "4-9i", "(2,-5)", r"\left(\frac{1}{2}, 3\right]",
    r"(-\infty,1)\cup(4,\infty)", "2,5,11", r"\{1,4\}", r"1\pm\sqrt{3}", "y=3x-2",
    r"\begin{pmatrix} 2 \\ -1 \end{pmatrix}", "312_5", r"\text{odd}", "x=9", r"\sin 2x",
]  # fmt: skip


@dataclass(slots=True)
class Series:
    """Times of one way of grading, in seconds, and how many answers it called right."""

    times: list[float] = field(default_factory=list)
    right: int = 0

    @property
    def rate(self) -> float:
        """Answers per second."""
        return len(self.times) / sum(self.times)

    def percentile_ms(self, percent: int) -> float:
        """Return a percentile of the time of one answer, in milliseconds."""
        return 1000 * statistics.quantiles(self.times, n=100)[percent - 1]


def load_golds() -> tuple[list[str], str]:
    """Return the golds to measure on and where they come from."""
    folder = Path(os.environ.get("RIVET_DATA", _REPOSITORY.parent / "shared" / "data"))
    path = folder / "math_500.jsonl"
    if not path.is_file():
        return BUILT_IN_GOLDS, "built-in"
    records = read_records(path)
    return [text_field(path, number, record, "answer") for number, record in records], path.name


def with_another_digit(gold: str) -> str:
    """Return the gold with its last digit changed; a gold without a digit stays."""
    for index in range(len(gold) - 1, -1, -1):
        if gold[index].isdigit() and gold[index].isascii():
            return gold[:index] + str((int(gold[index]) + 1) % 10) + gold[index + 1 :]
    return gold


def measure(series: Series, judge: Callable[[str, str], bool], pairs: Sequence[tuple]) -> None:
    """Time each pair of gold and answer."""
    for gold, answer in pairs:
        start = time.perf_counter()
        is_right = judge(gold, answer)
        series.times.append(time.perf_counter() - start)
        series.right += is_right


def math_verify_judge() -> Callable[[str, str], bool]:
    """Return math-verify as its readme calls it."""
    from math_verify import parse, verify

    def judge(gold: str, answer: str) -> bool:
        return bool(verify(parse(f"${gold}$"), parse(answer)))

    return judge


def interleave(grader: Grader, golds: Sequence[str], rounds: int) -> dict[str, Series]:
    """Measure both graders on the golds as right answers and with one digit changed."""
    judges = {
        "rivet": lambda gold, answer: grader.grade_sync(answer, gold).outcome == "right",
        "math-verify": math_verify_judge(),
    }
    series = {f"{name} {what}": Series() for what in ("self", "digit") for name in judges}
    pairs: dict[str, list[tuple[str, str]]] = {"self": [], "digit": []}
    for gold in golds:
        pairs["self"].append((gold, rf"{_REASONING}\boxed{{{gold}}}"))
        changed = with_another_digit(gold)
        if changed != gold:
            pairs["digit"].append((gold, rf"{_REASONING}\boxed{{{changed}}}"))
    for _ in range(rounds):
        for start in range(0, len(golds), _CHUNK):
            for what, chosen in pairs.items():
                for name, judge in judges.items():
                    measure(series[f"{name} {what}"], judge, chosen[start : start + _CHUNK])
    return series


def integers_per_second(grader: Grader, count: int) -> Series:
    """Measure plain integer answers at the end of a paragraph of reasoning."""
    series = Series()
    pairs = [(str(i % 997), rf"{_REASONING}\boxed{{{i % 998}}}") for i in range(count)]
    judge = lambda gold, answer: grader.grade_sync(answer, gold).outcome == "right"  # noqa: E731
    measure(series, judge, pairs)
    return series


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m rivet.grading.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="passes over the golds")
    parser.add_argument("--integers", type=int, default=20_000, help="integer answers to time")
    options = parser.parse_args(argv)
    golds, source = load_golds()
    with Grader(workers=2) as grader:
        grader.grade_sync(r"\boxed{x}", "x")
        series = interleave(grader, golds, options.rounds)
        series["rivet integers"] = integers_per_second(grader, options.integers)
        start = time.perf_counter()
        requests = [Request(rf"\boxed{{{gold}}}", gold) for gold in golds * 8]
        grader.grade_many(requests)
        pooled = len(requests) / (time.perf_counter() - start)
    report(series, source, len(golds), pooled)
    return 0


def report(series: dict[str, Series], source: str, golds: int, pooled: float) -> None:
    """Print the table and the JSON line."""
    print(f"golds: {source} ({golds}); one answer at a time, both graders interleaved\n")
    print(f"{'':20} {'answers/s':>10} {'p50 ms':>8} {'p99 ms':>8} {'right':>6} {'of':>6}")
    for name, one in series.items():
        print(
            f"{name:20} {one.rate:10.0f} {one.percentile_ms(50):8.3f} {one.percentile_ms(99):8.2f} "
            f"{one.right:6} {len(one.times):6}"
        )
    print(f"{'rivet self, 2 workers':20} {pooled:9.0f}\n")
    rivet = series["rivet self"].times + series["rivet digit"].times
    print(
        json.dumps(
            {
                "golds": source,
                "integers_per_s": round(series["rivet integers"].rate),
                "math500_per_s": round(series["rivet self"].rate),
                "math500_two_workers_per_s": round(pooled),
                "math_verify_per_s": round(series["math-verify self"].rate),
                "ratio": round(series["rivet self"].rate / series["math-verify self"].rate, 1),
                "ratio_changed_digit": round(
                    series["rivet digit"].rate / series["math-verify digit"].rate, 1
                ),
                "p99_ms": round(Series(rivet).percentile_ms(99), 2),
                "max_ms": round(1000 * max(rivet), 1),
                "python": sys.version.split()[0],
            }
        )
    )


if __name__ == "__main__":
    sys.exit(main())
