"""Whether one run is better than another: differences paired by problem, with a sign-flip test.

Both runs answered the same problems, so the difference of a problem's means is what varies, and
whatever the runs have in common (difficulty) is out of it. Between the conditions `experts` and
`local` of one checkpoint the difference is the *expert-removal gap*.

Run line: `python -m eval.compare runs/mini/eval/experts runs/mini/eval/local`
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eval.conditions import Condition, read_condition
from eval.results_file import ResultsError

SUBSETS = 10_000
_BATCH = 2**22  # numbers drawn at once, to bound memory
# What must agree for a pair to mean anything, with how to name it.
_MUST_AGREE = {
    "problems_digest": "the problems or their golds",
    "samples_per_problem": "samples per problem (k)",
    "prompts_digest": "the prompts",
}


class CompareError(ValueError):
    """Two runs cannot be compared; the message says in what they differ."""


@dataclass(frozen=True, slots=True)
class Difference:
    """b - a over paired problems.

    Attributes:
        value: Mean difference, in [-1, 1].
        low, high: 95% interval; [-1, 1] below six problems, which cannot tell anything.
        p_value: Two-sided, of the same test: at most 0.05 exactly where the interval excludes 0.
        n: Paired problems.
    """

    value: float
    low: float
    high: float
    p_value: float
    n: int

    @property
    def is_real(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "difference": self.value,
            "ci_low": self.low,
            "ci_high": self.high,
            "p_value": self.p_value,
            "n": self.n,
            "is_real": self.is_real,
        }


def paired_difference(
    a: Sequence[float], b: Sequence[float], *, subsets: int = SUBSETS, seed: int = 0
) -> Difference:
    """Mean of b - a over problems, with the interval and the p-value of the sign-flip test.

    Without a difference a problem's b - a is as likely to have the other sign, so the mean of any
    subset of the problems is as likely above 0 as below, and the p-value is twice the share of
    subsets with a mean on the rarer side of 0. The quantiles of these means are the interval that
    goes with it (Hartigan 1969, "Using subsample values as typical values"). Over right and wrong
    answers this is the exact McNemar test. The empty subset is on both sides: a p-value is never 0,
    and below six problems none is at most 0.05. All subsets are counted where they are few; else
    the empty one and random ones. From six equal differences on the interval has no width.

    Args:
        a, b: A value in [0, 1] per problem, in the same order, shape (P,).
        subsets: As many at most, but for the empty one.
        seed: Same seed, same interval.

    Raises:
        CompareError: No problem, or lengths that differ.
    """
    if len(a) != len(b) or not len(a):
        raise CompareError(f"expected pairs of at least one problem, got {len(a)} and {len(b)}")
    differences = np.asarray(b, dtype=float) - np.asarray(a, dtype=float)  # (P,)
    lows, highs = [], []
    for chosen in _subsets(len(differences), subsets, seed):
        sizes = chosen.sum(axis=1)
        # Means of the same numbers in another order differ in the last bits: no side of 0.
        means = np.round(chosen @ differences / np.maximum(sizes, 1), 12)
        lows.append(np.where(sizes, means, -1.0))
        highs.append(np.where(sizes, means, 1.0))
    low, high = np.sort(np.concatenate(lows)), np.sort(np.concatenate(highs))
    p_value = min(1.0, 2 * min((low <= 0).sum(), (high >= 0).sum()) / len(low))
    beyond = len(low) // 40  # 2.5% on either side
    mean = float(differences.mean())
    return Difference(
        mean,
        min(float(low[beyond]), mean),
        max(float(high[-1 - beyond]), mean),
        float(p_value),
        len(differences),
    )


def _subsets(n: int, most: int, seed: int) -> Iterator[np.ndarray]:
    """Subsets of n problems, 1 for each that is in one, in batches of shape (rows, n)."""
    if 2**n <= most:
        yield np.arange(2**n)[:, None] >> np.arange(n) & 1
        return
    yield np.zeros((1, n), dtype=np.int8)
    rng = np.random.default_rng(seed)
    rows = max(1, _BATCH // n)
    for start in range(0, most, rows):
        yield rng.integers(0, 2, (min(rows, most - start), n), dtype=np.int8)


def compare(a: Condition, b: Condition, *, across_prompts: bool = False) -> dict[str, Any]:
    """Compare two conditions, overall and per source.

    Args:
        a, b: What was evaluated; the difference is b - a.
        across_prompts: Compare although the prompts differ (a condition that offers other tags).

    Returns:
        `name` of the comparison, `overall` and `by_source` differences, the accuracies, the
        number of problems that only one of the two has a scored sample of, and in what the two
        were `sampled_differently` (sampling, limits, number format, experts, grading).

    Raises:
        CompareError: Problems, k or prompts differ.
    """
    _check_comparable(a, b, across_prompts)
    in_a = {s["problem_id"]: s for s in a.scores}
    in_b = {s["problem_id"]: s for s in b.scores}
    paired = [p for p in in_a if p in in_b]
    if not paired:
        raise CompareError(f"{a.folder} and {b.folder}: no problem has a scored sample in both")
    sources = sorted({in_a[p]["source"] for p in paired})

    def difference(problems: list[str]) -> dict[str, Any]:
        values = [
            [scores[p]["right"] / scores[p]["samples"] for p in problems] for scores in (in_a, in_b)
        ]
        return paired_difference(*values).to_dict()

    return {
        "name": _name(a, b),
        "a": _label(a),
        "b": _label(b),
        "accuracy_a": a.results["accuracy"],
        "accuracy_b": b.results["accuracy"],
        "overall": difference(paired),
        "by_source": {
            source: difference([p for p in paired if in_a[p]["source"] == source])
            for source in sources
        }
        if len(sources) > 1
        else {},
        "unpaired": len(in_a.keys() ^ in_b.keys()),
        "sampled_differently": _sampled_differently(a, b),
    }


def compare_evaluations(evaluations: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Every comparison that a line of evaluations invites, such as those of successive stages.

    Args:
        evaluations: Run folders of evaluations, in the order of their checkpoints. Conditions that
            are missing are left out.

    Returns:
        The expert-removal gap of each evaluation, then the steps from each to the next, condition
        by condition.

    Raises:
        CompareError: Problems, k or prompts differ between them.
    """
    found = [
        {
            path.parent.name: read_condition(path.parent)
            for path in sorted(run.glob("*/results.json"))
        }
        for run in map(Path, evaluations)
    ]
    gaps = [compare(e["experts"], e["local"]) for e in found if {"experts", "local"} <= e.keys()]
    steps = [
        compare(before[condition], after[condition])
        for before, after in zip(found, found[1:], strict=False)
        for condition in before
        if condition in after
    ]
    return gaps + steps


def describe(comparison: dict[str, Any]) -> str:
    """A comparison as lines of text."""
    lines = [
        f"{comparison['name']}: {comparison['a']} {comparison['accuracy_a']:.1%}, "
        f"{comparison['b']} {comparison['accuracy_b']:.1%}"
    ]
    rows = {"all problems": comparison["overall"]} | comparison["by_source"]
    for name, d in rows.items():
        verdict = "a real difference" if d["is_real"] else "no difference can be told"
        lines.append(
            f"{name}: {100 * d['difference']:+.1f} points "
            f"[{100 * d['ci_low']:+.1f}, {100 * d['ci_high']:+.1f}], p = {d['p_value']:.4f}, "
            f"{d['n']} problems: {verdict}"
        )
    if different := comparison.get("sampled_differently"):
        lines.append(f"not of the checkpoints alone: {'; '.join(different)}")
    if comparison["unpaired"]:
        lines.append(f"{comparison['unpaired']} problems without a partner were left out")
    return "\n  ".join(" ".join(line.split()) for line in lines)  # whatever names hold


def main(argv: list[str] | None = None) -> int:
    """Compare two evaluated conditions."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="rivet compare",
        description="Difference of two runs, B minus A, paired by problem.",
    )
    parser.add_argument("run_a", type=Path, help="folder of a condition, such as RUN/experts")
    parser.add_argument("run_b", type=Path, help="folder of the condition to compare with it")
    parser.add_argument(
        "--across-prompts", action="store_true", help="compare although the prompts differ"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    try:
        result = compare(
            read_condition(args.run_a),
            read_condition(args.run_b),
            across_prompts=args.across_prompts,
        )
    except (CompareError, ResultsError) as error:
        print(f"rivet compare: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=2) if args.json else describe(result))
    return 0


def _check_comparable(a: Condition, b: Condition, across_prompts: bool) -> None:
    different = [
        f"{what}: {a.settings.get(key)} and {b.settings.get(key)}"
        for key, what in _MUST_AGREE.items()
        if a.settings.get(key) != b.settings.get(key)
        and not (across_prompts and key == "prompts_digest")
    ]
    if different:
        hint = "; --across-prompts allows other prompts" if "prompts" in different[-1] else ""
        raise CompareError(
            f"{a.folder} and {b.folder} differ in {'; '.join(different)}: only runs over the same "
            f"problems can be paired{hint}"
        )


def _name(a: Condition, b: Condition) -> str:
    condition = a.results["condition"]
    if _sampled_differently(a, b):
        return "difference"
    if _checkpoint(a) != _checkpoint(b):
        return f"step, {condition}" if condition == b.results["condition"] else "difference"
    if {condition, b.results["condition"]} == {"experts", "local"}:
        return "expert-removal gap"
    return "difference"


def _sampled_differently(a: Condition, b: Condition) -> list[str]:
    """Such as `temperature 0.0 and 1.0`; the difference is then of greedy and sampled answers."""
    of_a, of_b = _choices(a), _choices(b)
    experts_a, experts_b = _experts(a), _experts(b)
    if experts_a and experts_b:  # else they are what the conditions differ in
        of_a, of_b = of_a | experts_a, of_b | experts_b
    return [
        f"{name} {of_a.get(name)!s:.60} and {of_b.get(name)!s:.60}"
        for name in sorted(of_a.keys() | of_b.keys())
        if of_a.get(name) != of_b.get(name)
    ]


def _choices(condition: Condition) -> dict[str, Any]:
    """What samples and verdicts depend on besides checkpoint, problems, prompts and experts."""
    settings = condition.settings.get("settings") or {}
    return {
        **(condition.settings.get("sampling") or {}),
        **(settings.get("limits") or {}),
        **{name: settings.get(name) for name in ("grading", "dtype")},
    }


def _experts(condition: Condition) -> dict[str, Any]:
    """Such as `expert calc: model`, with its value; some are known by their names alone."""
    settings = condition.settings.get("settings") or {}
    experts = [e if isinstance(e, dict) else {"name": e} for e in settings.get("experts") or []]
    return {f"expert {e['name']}: {key}": value for e in experts for key, value in e.items()}


def _checkpoint(condition: Condition) -> tuple[str, Any]:
    """Its name and the digest of its weights: `stage1` is what every run calls its own."""
    weights = (condition.settings.get("settings") or {}).get("weights")
    return condition.results["checkpoint"], weights


def _label(condition: Condition) -> str:
    return f"{condition.results['checkpoint']}/{condition.results['condition']}"


if __name__ == "__main__":
    sys.exit(main())
