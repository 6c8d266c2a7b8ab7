"""Estimators that every reported number comes from: intervals, avg@k, pass@k, maj@k.

Each function names its estimator and its edge cases. They take plain numbers, so they can be
checked against worked examples and simulation; what is counted over trajectories is in
`eval.summary`. Every share lies in [0, 1].
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeVar

CONFIDENCE = 0.95
_Cluster = TypeVar("_Cluster", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A share with its interval.

    Attributes:
        value: In [0, 1].
        low, high: Bounds of the interval, `low <= value <= high`.
        n: Problems (clusters) that it rests on.
        samples: Samples that it rests on, at least `n`.
    """

    value: float
    low: float
    high: float
    n: int
    samples: int

    def __str__(self) -> str:
        return f"{100 * self.value:.1f}% [{100 * self.low:.1f}, {100 * self.high:.1f}]"


def wilson_interval(
    share: float, n: float, *, z: float | None = None, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Wilson score interval of a share seen in n independent trials.

    Unlike the normal interval it stays in [0, 1] and has a width at 0 and 1.

    Args:
        share: Observed share in [0, 1].
        n: Trials; may be fractional (an effective sample size). 0 gives (0, 1).
        z: Quantile to use instead of the normal one.
        confidence: Coverage of the interval.
    """
    if not 0 <= share <= 1 or n < 0:
        raise ValueError(f"expected a share in [0, 1] and n >= 0, got {share} and {n}")
    if n == 0:
        return 0.0, 1.0
    if z is None:
        z = NormalDist().inv_cdf(0.5 + confidence / 2)
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # Rounding must not push a bound past the value itself (at 0 and 1 they coincide).
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def clustered_share(
    values: Iterable[tuple[_Cluster, float]], *, confidence: float = CONFIDENCE
) -> Estimate:
    """Mean of per-problem means with an interval clustered by problem (avg@k).

    Samples of one problem are not independent: the variance is that of the problems' means,
    var(means, ddof=1) / P, which holds for any dependence within a problem and for unequal counts.
    The interval is Wilson's at the effective sample size m(1-m) / variance, with Student's t at
    P - 1 degrees of freedom (Korn and Graubard 1998; Dean and Pagano 2015), so that it stays in
    [0, 1] and keeps a width when every sample agrees. The effective size is at most the number of
    samples; where the variance is 0 at a mean of 0 or 1 it is P, as if the samples of one problem
    were one.

    Args:
        values: Pairs of problem and value in [0, 1], one per sample.
        confidence: Coverage of the interval.

    Returns:
        The estimate; without any value 0 in [0, 1] with n = 0.
    """
    by_cluster: dict[_Cluster, list[float]] = {}
    for cluster, value in values:
        by_cluster.setdefault(cluster, []).append(value)
    samples, n = sum(map(len, by_cluster.values())), len(by_cluster)
    if n == 0:
        return Estimate(0.0, 0.0, 1.0, 0, 0)
    means = [sum(v) / len(v) for v in by_cluster.values()]
    mean = min(1.0, max(0.0, sum(means) / n))
    if n == 1:
        return Estimate(mean, 0.0, 1.0, 1, samples)  # one problem says nothing about others
    variance = sum((m - mean) ** 2 for m in means) / (n - 1) / n
    z = student_t_quantile(0.5 + confidence / 2, n - 1)
    low, high = wilson_interval(mean, _effective_size(mean, variance, n, samples), z=z)
    return Estimate(mean, low, high, n, samples)


def mean_of_groups(
    groups: Iterable[Iterable[tuple[_Cluster, float]]], *, confidence: float = CONFIDENCE
) -> Estimate:
    """Mean of several sets' own means, each set counting the same whatever its size.

    The sets are fixed and their problems independent, so the variance is the sum of the variances
    of their means over the square of their number, with the degrees of freedom of Welch and
    Satterthwaite; the interval is Wilson's as in `clustered_share`. A set of one problem has the
    largest variance that a share can have.

    Args:
        groups: Pairs of problem and value in [0, 1], one per sample, for each set.
        confidence: Coverage of the interval.
    """
    means, variances, degrees, n, samples = [], [], [], 0, 0
    for values in groups:
        by_cluster: dict[_Cluster, list[float]] = {}
        for cluster, value in values:
            by_cluster.setdefault(cluster, []).append(value)
        if not by_cluster:
            continue
        inner = [sum(v) / len(v) for v in by_cluster.values()]
        mean, size = sum(inner) / len(inner), len(inner)
        spread = sum((m - mean) ** 2 for m in inner)
        variances.append(spread / (size - 1) / size if size > 1 else 0.25)
        degrees.append(max(1, size - 1))
        means.append(mean)
        n += size
        samples += sum(map(len, by_cluster.values()))
    if not means:
        return Estimate(0.0, 0.0, 1.0, 0, 0)
    mean = min(1.0, max(0.0, sum(means) / len(means)))
    variance = sum(variances) / len(means) ** 2
    squares = sum(v * v / d for v, d in zip(variances, degrees, strict=True))
    freedom = sum(variances) ** 2 / squares if squares > 0 else n - len(means)
    # A whole number of degrees can come out a rounding error below itself.
    z = student_t_quantile(0.5 + confidence / 2, max(1, int(freedom + 1e-9)))
    low, high = wilson_interval(mean, _effective_size(mean, variance, n, samples), z=z)
    return Estimate(mean, low, high, n, samples)


def _effective_size(mean: float, variance: float, n: int, samples: int) -> float:
    """Independent trials that would give a mean this variance, at most the samples."""
    spread = mean * (1 - mean)
    if spread == 0:
        return float(n)
    return min(float(samples), spread / variance) if variance > 0 else float(samples)


def student_t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t: exact for 1 and 2 degrees of freedom, above by the Cornish-Fisher
    series (Abramowitz and Stegun 26.7.5), which is within 0.2% for 95% intervals.
    """
    if degrees < 1:
        raise ValueError(f"expected at least 1 degree of freedom, got {degrees}")
    if degrees == 1:
        return math.tan(math.pi * (probability - 0.5))
    if degrees == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    x = NormalDist().inv_cdf(probability)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def half_width(values: Sequence[float]) -> float | None:
    """Half of the 95% interval of a mean over seeds; None with one seed."""
    if len(values) < 2:
        return None
    error = statistics.stdev(values) / len(values) ** 0.5
    return student_t_quantile(0.975, len(values) - 1) * error


def pass_at_k(total: int, right: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k samples is right.

    1 - C(total - right, k) / C(total, k) (Eq. 1, arXiv:2107.03374), as a product, so that large
    counts do not overflow. `1 - (1 - right/total)**k` would be biased.

    Args:
        total: Samples of the problem, at least k.
        right: Right ones among them.
        k: Size of the draw, at least 1.

    Raises:
        ValueError: Fewer samples than k, or impossible counts.
    """
    if not 0 <= right <= total or not 1 <= k <= total:
        raise ValueError(
            f"expected 0 <= right <= total and 1 <= k <= total, got {right=} {total=} {k=}"
        )
    if total - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(total - right + 1, total + 1))


def mean_pass_at_k(
    counts: Iterable[tuple[int, int]], k: int, *, confidence: float = CONFIDENCE
) -> Estimate:
    """Mean of `pass_at_k` over problems.

    Args:
        counts: Pairs (samples, right ones), one per problem.
        k: Size of the draw.
        confidence: Coverage of the interval over problems.

    Returns:
        The estimate; `n` counts the problems with at least k samples, the others (some samples
        voided by faults) are left out.
    """
    values = [
        (problem, pass_at_k(total, right, k))
        for problem, (total, right) in enumerate(counts)
        if total >= k
    ]
    return clustered_share(values, confidence=confidence)


def maj_at_k(samples: Sequence[tuple[str | None, bool]]) -> float:
    """Score of the majority vote over all samples of one problem.

    Answers vote by their text without white space; right answers are one party whatever their
    form, since each equals the gold (wrong ones in different forms split, which the vote of a
    deployed system would suffer too). Samples without an answer do not vote. A tie scores the
    share of the tied parties that are right, the expectation of a random tie break.

    Args:
        samples: Pairs (extracted answer or None, whether it is right).

    Returns:
        In [0, 1]; 0 if nobody votes.
    """
    votes: Counter[str | bool] = Counter()
    for answer, is_right in samples:
        if is_right:
            votes[True] += 1
        elif answer is not None:
            votes["".join(answer.split())] += 1
    if not votes:
        return 0.0
    most = max(votes.values())
    tied = [party for party, count in votes.items() if count == most]
    return (True in tied) / len(tied)


def shares(counts: Mapping[str, int]) -> dict[str, float]:
    """Counts as shares of their sum; all 0 if the sum is 0."""
    total = sum(counts.values())
    return {name: count / total if total else 0.0 for name, count in counts.items()}
