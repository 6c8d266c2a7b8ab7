"""What is counted over graded trajectories: one condition of one checkpoint as numbers.

Rows voided by an infrastructure fault are counted and take part in nothing else. Every other row
counts in every share, whether it is well formed or not; shares are in [0, 1]. Intervals are
clustered by problem (`eval.metrics`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval.metrics import (
    Estimate,
    clustered_share,
    maj_at_k,
    mean_of_groups,
    mean_pass_at_k,
    shares,
)
from rivet.trajectory import AUTHORS, Trajectory, fault_of

RESULTS: tuple[str, ...] = ("right", "wrong", "no_answer", "malformed", "truncated", "fault")


def result_of(trajectory: Trajectory) -> str:
    """The one way in which a row ended, from `RESULTS`.

    In this order: a fault voids the row; a right answer is right; a row that ran into the token
    limit is truncated; one that breaks the grammar is malformed; then no answer, else wrong.
    """
    if trajectory.outcome is None or fault_of(trajectory) is not None:
        return "fault"
    if trajectory.outcome == "right":
        return "right"
    if trajectory.finish == "length":
        return "truncated"
    if not trajectory.well_formed and trajectory.mode != "plain":
        return "malformed"
    return "no_answer" if trajectory.outcome == "no_answer" else "wrong"


def summarise(
    trajectories: Sequence[Trajectory],
    *,
    competent: Mapping[str, str] | None = None,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """Every number of one condition, JSON-able.

    Args:
        trajectories: Graded rows, k per problem; `info` as `eval.generate` writes it.
        competent: The expert that knows a family (`info["family"]`), for `route_accuracy`.
        confidence: Coverage of the intervals.

    Returns:
        `accuracy` (avg@k) with `ci_low` and `ci_high`, `n` problems, `samples` scored, `outcomes`
        (counts by `RESULTS`, which add up to all rows), `right_by_source` (right answers that stood
        in a box, or in a final line where `eval` grading reads one), `pass_at_k` and `maj_at_k`,
        `well_formed`, `route_accuracy` (None where nothing can be routed), `route_shares`,
        `consulted`, `fabricated_output_rate`, `code_ok`, `faulted_attempts`, `usage_per_problem`,
        and the accuracy `by` family and source. With several sources `mean_of_sources` too, in
        which each counts the same.
    """
    outcomes = Counter(map(result_of, trajectories))
    scored = [t for t in trajectories if result_of(t) != "fault"]
    accuracy = _share(scored, lambda t: t.outcome == "right", confidence)
    well_formed = _share(scored, lambda t: t.well_formed, confidence)
    return {
        "accuracy": accuracy.value,
        "ci_low": accuracy.low,
        "ci_high": accuracy.high,
        "n": accuracy.n,
        "samples": accuracy.samples,
        "outcomes": {name: outcomes[name] for name in RESULTS},
        "right_by_source": dict(
            Counter(str(t.info.get("answer_source", "box")) for t in scored if t.outcome == "right")
        ),
        **_over_problems(scored, confidence),
        "well_formed": well_formed.value,
        "well_formed_ci": [well_formed.low, well_formed.high],
        **_routing(scored, competent or {}, confidence),
        "fabricated_output_rate": _mean(t.finish == "fabricated_output" for t in scored),
        "code_ok": _mean(run.status == "ok" for t in scored for run in t.code_runs),
        "faulted_attempts": dict(
            Counter(f for t in trajectories for f in t.info.get("faults", []))
        ),
        "usage_per_problem": _usage(scored),
        **_over_sources(scored, confidence),
        "by": {
            label: _by_label(scored, label, confidence)
            for label in ("family", "source")
            if any(label in t.info for t in scored)
        },
    }


def scores_by_problem(trajectories: Iterable[Trajectory]) -> dict[str, tuple[int, int]]:
    """Scored samples and right ones per problem, what a paired comparison needs."""
    counts: dict[str, tuple[int, int]] = {}
    for t in trajectories:
        if result_of(t) != "fault":
            samples, right = counts.get(t.problem_id, (0, 0))
            counts[t.problem_id] = (samples + 1, right + (t.outcome == "right"))
    return counts


def routes_of(trajectory: Trajectory) -> list[str]:
    """Experts that the controller named, in order, whoever wrote the reply."""
    return list(trajectory.info.get("routes", trajectory.routes))


def _share(scored: Sequence[Trajectory], is_true: Any, confidence: float) -> Estimate:
    return clustered_share(
        ((t.problem_id, float(is_true(t))) for t in scored), confidence=confidence
    )


def _mean(values: Iterable[Any]) -> float | None:
    """Mean of numbers or truth values, None if there are none."""
    collected = [float(v) for v in values]
    return sum(collected) / len(collected) if collected else None


def _over_problems(scored: Sequence[Trajectory], confidence: float) -> dict[str, Any]:
    """pass@k at k = 1, 2, 4, ... up to the samples of a problem, and maj@k over all of them."""
    counts = scores_by_problem(scored)
    most = max((samples for samples, _ in counts.values()), default=0)
    ks = sorted({2**n for n in range(most.bit_length())} | {most}) if most else []
    votes: dict[str, list[tuple[str | None, bool]]] = {}
    for t in scored:
        vote = (t.info.get("extracted"), t.outcome == "right")
        votes.setdefault(t.problem_id, []).append(vote)
    majority = clustered_share(
        ((problem, maj_at_k(samples)) for problem, samples in votes.items()), confidence=confidence
    )
    return {
        "samples_per_problem": most,
        "pass_at_k": {
            str(k): _with_interval(mean_pass_at_k(counts.values(), k, confidence=confidence))
            for k in ks
        },
        "maj_at_k": {"k": most, **_with_interval(majority)},
    }


def _over_sources(scored: Sequence[Trajectory], confidence: float) -> dict[str, Any]:
    """The mean of the sources' accuracies, where there are several."""
    groups: dict[str, list[tuple[str, float]]] = {}
    for t in scored:
        value = (t.problem_id, float(t.outcome == "right"))
        groups.setdefault(str(t.info.get("source", "")), []).append(value)
    if len(groups) < 2:
        return {}
    mean = mean_of_groups(groups.values(), confidence=confidence)
    return {"mean_of_sources": _with_interval(mean) | {"sources": len(groups)}}


def _with_interval(estimate: Estimate) -> dict[str, Any]:
    return {"value": estimate.value, "ci": [estimate.low, estimate.high], "n": estimate.n}


def _routing(
    scored: Sequence[Trajectory], competent: Mapping[str, str], confidence: float
) -> dict[str, Any]:
    """The first expert that each row consulted.

    `route_accuracy` is over all rows whose family has a competent expert; one that consults nobody
    has not routed right, so that silence is no way to a high value.
    """
    first = [(t, next(iter(routes_of(t)), None)) for t in scored]
    routable = [
        (t, name)
        for t, name in first
        if t.info.get("family") in competent and t.mode not in ("plain", "no-expert")
    ]
    accuracy = clustered_share(
        ((t.problem_id, float(name == competent[t.info["family"]])) for t, name in routable),
        confidence=confidence,
    )
    named = Counter(name for _, name in first if name is not None)
    return {
        "route_accuracy": accuracy.value if routable else None,
        "route_accuracy_ci": [accuracy.low, accuracy.high] if routable else None,
        "consulted": _mean(name is not None for _, name in first),
        "route_shares": dict(sorted(shares(named).items())),
    }


def _usage(scored: Sequence[Trajectory]) -> dict[str, float]:
    """Means over problems of the sums over a problem's samples."""
    problems = len({t.problem_id for t in scored}) or 1
    tokens = {
        author: sum(len(s) for t in scored for s in t.segments if s.author == author)
        for author in AUTHORS
    }
    totals = {f"{author}_tokens": count for author, count in tokens.items()} | {
        "expert_calls": sum(len(t.expert_calls) for t in scored),
        "code_runs": sum(len(t.code_runs) for t in scored),
        "cost_usd": sum(call.cost_usd for t in scored for call in t.expert_calls),
    }
    return {name: total / problems for name, total in totals.items()}


def _by_label(
    scored: Sequence[Trajectory], label: str, confidence: float
) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Trajectory]] = {}
    for t in scored:
        groups.setdefault(str(t.info.get(label, "")), []).append(t)
    table = {}
    for name, rows in sorted(groups.items()):
        estimate = _share(rows, lambda t: t.outcome == "right", confidence)
        first = Counter((routes_of(t) or ["nobody"])[0] for t in rows)
        table[name] = _with_interval(estimate) | {
            "route_shares": dict(sorted(shares(first).items()))
        }
    return table
