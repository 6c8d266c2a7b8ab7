"""What a trained policy makes of held-out problems, and what is left when it hears otherwise.

Masking an expert and shuffling the states at evaluation are the evidence that the policy uses what
it hears; attention alone is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from data.problems import Problem
from eval.latent_report import AS_TRAINED, HARD
from eval.metrics import wilson_interval
from rivet.grading import Grader
from rivet.latent.attention import differences, listening, spearman
from rivet.latent.policy import LatentPolicy
from rivet.latent.prompts import LatentPrompts
from rivet.latent.states import ExpertStates
from rivet.trajectory import Trajectory
from stages.latent.config import LatentConfig
from stages.latent.listener import Listener
from stages.latent.source import LatentSource, Sampling
from stages.latent.trainer import attend

SHUFFLED, WARM = "shuffled", "warm start"
ENTROPIES = ("attention/entropy_per_head", "attention/entropy_head_averaged")


class EvaluationFault(RuntimeError):
    """The grader failed on some answers, so there is no result."""


def evaluate(
    policy: LatentPolicy,
    prompts: LatentPrompts,
    listener: Listener,
    problems: Sequence[Problem],
    grader: Grader,
    config: LatentConfig,
    *,
    condition: str = AS_TRAINED,
    states: ExpertStates | None = None,
) -> list[dict[str, Any]]:
    """Greedy accuracy of each family and of the hard ones together.

    Args:
        policy: In evaluation mode.
        prompts: Builds its prompts.
        listener: Of the held-out problems.
        problems: Held-out problems, in the listener's order.
        grader: Grades.
        config: Of the run.
        condition: Name of the row.
        states: H that goes with each problem; None takes what the arm hears.

    Returns:
        Rows with `condition`, `family`, `accuracy` in [0, 1], its 95% interval and `n`.

    Raises:
        EvaluationFault: The grader failed.
    """
    rows = list(range(len(problems)))
    heard = listener.hear(rows, 0) if states is None else states
    length = config.max_completion_length or 64
    sampling = Sampling(length, seed=config.seed, batch_size=config.sample_batch_size)
    source = LatentSource(policy, prompts, listener, grader, sampling)
    done = source.of_problems(problems, heard)
    faults = [t for t in done if t.reward is None]
    if faults:
        raise EvaluationFault(
            f"{len(faults)} of {len(done)} answers could not be graded ({faults[0].outcome}); run "
            "the same command again"
        )
    return accuracy_rows(problems, done, condition)


def accuracy_rows(
    problems: Sequence[Problem], trajectories: Sequence[Trajectory], condition: str
) -> list[dict[str, Any]]:
    """Accuracy of each family, and of those that need experts together."""
    right: dict[str, list[bool]] = {}
    pooled: list[bool] = []
    for problem, trajectory in zip(problems, trajectories, strict=True):
        family, is_right = family_of(problem), trajectory.outcome == "right"
        right.setdefault(family, []).append(is_right)
        if is_hard(problem):
            pooled.append(is_right)
    groups = right | ({HARD: pooled} if len(right) > 1 and pooled else {})
    return [_row(condition, family, values) for family, values in groups.items()]


def family_of(problem: Problem) -> str:
    """The family that a problem counts with."""
    return str(problem.meta.get("family", "")) or "all"


def is_hard(problem: Problem) -> bool:
    """Whether it is not of a family that the latent world's policy solves alone."""
    from data.latentworld.tasks import FAMILIES, SOURCE

    known = FAMILIES.get(family_of(problem)) if problem.source == SOURCE else None
    return known is None or known.is_hard


def _row(condition: str, family: str, values: Sequence[bool]) -> dict[str, Any]:
    share = sum(values) / len(values)
    low, high = wilson_interval(share, len(values))
    return {
        "condition": condition,
        "family": family,
        "accuracy": share,
        "ci_low": low,
        "ci_high": high,
        "n": len(values),
    }


def interventions(listener: Listener, config: LatentConfig) -> dict[str, ExpertStates]:
    """Other states than those that the arm was trained with, by condition."""
    states = listener.states
    if states is None or config.arm not in ("full", "static", "one-expert"):
        return {}
    partners = [listener.partner(row, 0) for row in range(len(states))]
    found = {SHUFFLED: states.rows(partners)}
    if config.arm != "one-expert":
        found |= {f"without {name}": states.without(name) for name in states.names}
    return found


@torch.no_grad()
def attention_by_family(
    policy: LatentPolicy, listener: Listener, problems: Sequence[Problem]
) -> dict[str, Any]:
    """Attention on held-out problems, family by family; empty where there is none.

    Returns:
        `experts`, and for each family `shares` of shape (blocks, heads, latents, E + 1), the
        empty slot last, `per_head` and `head_averaged` entropies.
    """
    heard = listener.hear(list(range(len(problems))), 0)
    attention = attend(policy, heard)
    if attention is None or heard is None:
        return {}
    families: dict[str, list[int]] = {}
    for n, problem in enumerate(problems):
        families.setdefault(family_of(problem), []).append(n)
    found: dict[str, Any] = {}
    for family, rows in families.items():
        part = listening(attention[rows], len(heard.names))
        found[family] = {
            "shares": part.shares.tolist(),
            "by_expert": part.by_expert,
            "per_head": part.per_head,
            "head_averaged": part.head_averaged,
        }
    return {"experts": list(heard.names), "families": found}


def correlations(lines: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Spearman correlation of attention's entropy with reward over steps, and of differences.

    Args:
        lines: Of `metrics.jsonl`; steps where one of them is not a finite number (null there) are
            left out.
    """
    needed = ("reward/mean", *ENTROPIES)
    known = [x for x in lines if all(x.get(name) is not None for name in needed)]
    reward = [float(x["reward/mean"]) for x in known]
    found: dict[str, float | None] = {"steps": float(len(known))}
    for name in ENTROPIES:
        values = [float(x[name]) for x in known]
        short = name.removeprefix("attention/entropy_")
        found[short] = spearman(values, reward)
        found[f"{short}_differences"] = spearman(differences(values), differences(reward))
    return found
