"""Estimators against worked numbers, exact enumeration and simulation."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from eval.metrics import (
    clustered_share,
    maj_at_k,
    mean_of_groups,
    mean_pass_at_k,
    pass_at_k,
    shares,
    student_t_quantile,
    wilson_interval,
)


def test_wilson_interval_against_published_numbers() -> None:
    # Newcombe (1998), Table I, method 3.
    for right, n, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        assert wilson_interval(right / n, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_stays_in_range_and_holds_its_share() -> None:
    for n in (1, 2, 7, 500):
        for right in range(n + 1):
            low, high = wilson_interval(right / n, n)
            assert 0 <= low <= right / n <= high <= 1 and low < high
    assert wilson_interval(0.3, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="share in"):
        wilson_interval(1.5, 10)


def test_student_t_quantile_against_tables() -> None:
    tables = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 29: 2.045, 100: 1.984}
    for degrees, quantile in tables.items():
        assert student_t_quantile(0.975, degrees) == pytest.approx(quantile, rel=2e-3)
        assert student_t_quantile(0.025, degrees) == pytest.approx(-quantile, rel=2e-3)
    assert student_t_quantile(0.975, 10**9) == pytest.approx(1.960, rel=1e-3)


def test_clustered_share_by_hand() -> None:
    # Problem means 1, 0.5, 0, 0.5: mean 0.5, variance of the mean (1/6) / 4 = 1/24, so the
    # effective size is 0.25 / (1/24) = 6; t at 3 degrees of freedom is about 3.18.
    values = [("a", 1), ("a", 1), ("b", 1), ("b", 0), ("c", 0), ("c", 0), ("d", 0), ("d", 1)]
    estimate = clustered_share(values)
    assert (estimate.value, estimate.n, estimate.samples) == (0.5, 4, 8)
    t = student_t_quantile(0.975, 3)
    half = t / (1 + t * t / 6) * math.sqrt(0.25 / 6 + t * t / (4 * 36))
    assert (estimate.low, estimate.high) == pytest.approx((0.5 - half, 0.5 + half))


def test_with_one_sample_a_problem_the_clustered_interval_is_wilsons() -> None:
    values = [(n, float(n < 130)) for n in range(500)]
    estimate = clustered_share(values)
    z = student_t_quantile(0.975, 499)
    # (P - 1) / P: the variance between problems is the sample variance.
    assert (estimate.low, estimate.high) == pytest.approx(wilson_interval(0.26, 499, z=z))


def test_copies_of_a_sample_add_no_certainty_but_independent_samples_do() -> None:
    rng = random.Random(1)
    single = [(n, float(rng.random() < 0.4)) for n in range(300)]
    copied = clustered_share(single * 8)
    assert (copied.low, copied.high) == pytest.approx(
        (clustered_share(single).low, clustered_share(single).high)
    )
    fresh = clustered_share((n, float(rng.random() < 0.4)) for n in range(300) for _ in range(8))
    assert fresh.high - fresh.low < 0.5 * (copied.high - copied.low)


def test_edges_of_the_clustered_share() -> None:
    assert clustered_share([]).n == 0
    nothing = clustered_share([])
    assert (nothing.value, nothing.low, nothing.high) == (0.0, 0.0, 1.0)
    one = clustered_share([("a", 1), ("a", 1)])
    assert (one.value, one.low, one.high) == (1.0, 0.0, 1.0)
    all_right = clustered_share((n, 1) for n in range(500) for _ in range(4))
    assert all_right.high == 1.0 and 0.98 < all_right.low < 1.0
    no_spread = clustered_share((n, i % 2) for n in range(50) for i in range(2))
    assert no_spread.value == 0.5 and no_spread.low < 0.5 < no_spread.high
    # Unequal counts: the problems weigh the same.
    assert clustered_share([("a", 1), ("b", 0), ("b", 0), ("b", 0)]).value == 0.5


@pytest.mark.parametrize(("mean", "strength"), [(0.5, 1.0), (0.1, 0.5), (0.03, 2.0), (0.9, 0.3)])
def test_the_clustered_interval_covers_the_truth_in_95_of_100_simulated_runs(
    mean: float, strength: float
) -> None:
    # Beta-binomial: problems differ in difficulty, so samples of one problem are correlated.
    rng = np.random.default_rng(0)
    runs, problems, k = 600, 100, 4
    chances = rng.beta(mean * strength, (1 - mean) * strength, (runs, problems))
    right = rng.binomial(k, chances)
    covered = naive = 0
    for row in right:
        values = [(n, float(i < c)) for n, c in enumerate(row.tolist()) for i in range(k)]
        estimate = clustered_share(values)
        covered += estimate.low <= mean <= estimate.high
        low, high = wilson_interval(estimate.value, problems * k)
        naive += low <= mean <= high
    assert 0.925 <= covered / runs <= 0.985
    assert naive < covered  # treating the samples as independent is too sure of itself


@pytest.mark.parametrize(("total", "right"), [(1, 0), (1, 1), (5, 2), (6, 0), (6, 6), (8, 3)])
def test_pass_at_k_equals_the_share_of_all_draws_that_hold_a_right_sample(
    total: int, right: int
) -> None:
    samples = [True] * right + [False] * (total - right)
    for k in range(1, total + 1):
        draws = list(itertools.combinations(samples, k))
        assert pass_at_k(total, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_is_unbiased_where_the_plug_in_estimate_is_not() -> None:
    chance, total, k = 0.2, 6, 4
    truth = 1 - (1 - chance) ** k
    weights = [math.comb(total, c) * chance**c * (1 - chance) ** (total - c) for c in range(7)]
    unbiased = sum(w * pass_at_k(total, c, k) for c, w in enumerate(weights))
    plug_in = sum(w * (1 - (1 - c / total) ** k) for c, w in enumerate(weights))
    assert unbiased == pytest.approx(truth, abs=1e-12)
    assert abs(plug_in - truth) > 0.03


def test_pass_at_k_of_large_counts_and_of_impossible_ones() -> None:
    exact = 1 - math.comb(99_000, 500) / math.comb(100_000, 500)
    assert pass_at_k(100_000, 1_000, 500) == pytest.approx(exact, rel=1e-9)
    for total, right, k in [(3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0)]:
        with pytest.raises(ValueError, match="expected 0 <= right"):
            pass_at_k(total, right, k)


def test_mean_pass_at_k_leaves_out_problems_with_too_few_samples() -> None:
    estimate = mean_pass_at_k([(4, 4), (4, 0), (1, 1)], 2)
    assert (estimate.value, estimate.n) == (0.5, 2)
    assert mean_pass_at_k([(4, 1), (4, 3)], 1).value == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("samples", "score"),
    [
        ([("6", True), ("6", True), ("7", False)], 1.0),
        ([("7", False), ("7 ", False), ("6", True)], 0.0),  # white space makes no other answer
        ([("6", True), ("7", False)], 0.5),  # a tie
        ([("1/2", True), ("0.5", True), ("3", False)], 1.0),  # forms of the gold vote together
        ([("6", True), ("7", False), ("8", False)], 1 / 3),
        ([(None, False), (None, False), ("6", True)], 1.0),  # who has no answer does not vote
        ([(None, False)], 0.0),
        ([], 0.0),
    ],
)
def test_maj_at_k(samples: list[tuple[str | None, bool]], score: float) -> None:
    assert maj_at_k(samples) == pytest.approx(score)


def test_the_mean_of_sets_counts_each_the_same_and_covers_the_truth() -> None:
    small = [(n, float(n < 10)) for n in range(40)]  # 25%
    large = [(n, float(n < 300)) for n in range(400)]  # 75%
    mean = mean_of_groups([small, large])
    assert mean.value == pytest.approx(0.5) and (mean.n, mean.samples) == (440, 440)
    by_hand = math.sqrt((0.75 * 0.25 / 39 + 0.75 * 0.25 / 399) / 4)  # standard error
    assert (mean.high - mean.low) / 2 == pytest.approx(2.01 * by_hand, rel=0.03)  # t at 46
    assert mean_of_groups([]).n == 0 and mean_of_groups([[("p", 1.0)]]).low < 0.3
    rng = random.Random(5)
    hits = 0
    for _ in range(400):  # problems of a mean difficulty of 1/4, drawn anew each time
        drawn = [
            [(n, float(rng.random() < rng.betavariate(0.5, 1.5))) for n in range(size)]
            for size in (30, 30, 200)
        ]
        estimate = mean_of_groups(drawn)
        hits += estimate.low <= 0.25 <= estimate.high
    assert 0.92 <= hits / 400 <= 0.98


def test_degrees_of_freedom_of_one_survive_rounding() -> None:
    unsure = [("p", 9 / 43), ("q", 0.0)]  # 43 samples of each; the square of its variance rounds
    for groups in ([unsure], [unsure, [("r", 1.0), ("s", 1.0)]]):
        found = mean_of_groups(groups)
        assert 0.0 < found.low < found.value < found.high < 1.0


def test_shares_add_up_to_one_and_are_zero_of_nothing() -> None:
    assert shares({"a": 1, "b": 3}) == {"a": 0.25, "b": 0.75}
    assert shares({"a": 0}) == {"a": 0.0}
