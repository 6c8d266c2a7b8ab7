"""What a Stage I run says about its health, and when it is stopped.

Metrics are namespaced by whom they are about (`controller/`, `expert/`, `route/`, `rollout/`,
`reward/`, `sampling/`) and logged through TRL, so `report_to` sends them on. Two watches use them:
one stops a run that forgets the protocol, one a run whose infrastructure fails. Grammar, not
reward, tells a collapse first: the reward of a collapsing run still moves.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rivet.trajectory import Trajectory, fault_of

# A token below this probability is rare: it surprises the controller.
RARE = 0.01


class FaultRateError(RuntimeError):
    """Too many rollouts failed for reasons that are not the controller's."""


def rollout_metrics(
    trajectories: Sequence[Trajectory], right_experts: Mapping[str, str]
) -> dict[str, float]:
    """Metrics of a batch of graded trajectories; rates are over those without a fault.

    Args:
        trajectories: Graded.
        right_experts: Problem id -> name of the expert that knows it, where that is known.
    """
    faults = Counter(fault for t in trajectories if (fault := fault_of(t)) is not None)
    sound = [t for t in trajectories if fault_of(t) is None]
    metrics = {"rollout/fault_rate": sum(faults.values()) / max(len(trajectories), 1)}
    metrics |= {f"rollout/fault/{name}": n / len(trajectories) for name, n in faults.items()}
    if not sound:
        return metrics

    def rate(count: float) -> float:
        return count / len(sound)

    metrics |= {
        "reward/mean": rate(sum(t.reward or 0.0 for t in sound)),
        "rollout/right": rate(sum(t.outcome == "right" for t in sound)),
        "rollout/no_answer": rate(sum(t.outcome == "no_answer" for t in sound)),
        "rollout/well_formed": rate(sum(t.well_formed for t in sound)),
        "rollout/malformed": rate(sum(not t.well_formed for t in sound)),
        "rollout/truncated": rate(sum(t.finish == "length" for t in sound)),
        "rollout/fabricated_output": rate(sum(t.finish == "fabricated_output" for t in sound)),
        "rollout/expert_calls": rate(sum(len(t.expert_calls) for t in sound)),
        "rollout/code_runs": rate(sum(len(t.code_runs) for t in sound)),
        "rollout/cost_usd": rate(sum(c.cost_usd for t in sound for c in t.expert_calls)),
    }
    return metrics | _route_metrics(sound, right_experts)


def _route_metrics(
    sound: Sequence[Trajectory], right_experts: Mapping[str, str]
) -> dict[str, float]:
    """Shares of the first consultation, and how often it is the expert that knows."""
    first = {t.id: t.routes[0] for t in sound if t.routes}
    shares = Counter(first.values())
    metrics = {f"route/share/{name}": n / len(sound) for name, n in sorted(shares.items())}
    known = [t for t in sound if t.problem_id in right_experts]
    if known:
        hits = sum(first.get(t.id) == right_experts[t.problem_id] for t in known)
        metrics["route/accuracy"] = hits / len(known)
    return metrics


@dataclass(frozen=True, slots=True)
class BatchHealth:
    """Sums over the tokens of a batch, by author; means follow after adding up processes.

    Attributes:
        names: Names of the sums.
        sums: Shape (len(names),).
    """

    names: tuple[str, ...]
    sums: Tensor

    @classmethod
    def of(
        cls, logps: Tensor, entropies: Tensor, weights: Tensor, inputs: Mapping[str, Any]
    ) -> BatchHealth:
        """Add up a batch.

        The gradient of a token is measured by |weight| (1 - p), that of its own logit.

        Args:
            logps: log p of each token under the controller, shape (B*G, T).
            entropies: Entropy of the controller at each token, shape (B*G, T).
            weights: Signed weights in the loss, shape (B*G, T).
            inputs: The trainer's batch with the masks of authors, each (B*G, T).
        """
        p = logps.exp()
        pull = weights.abs() * (1 - p) * inputs["tool_mask"]
        sums: dict[str, Tensor] = {}
        for author in ("controller", "expert", "route"):
            mask = inputs[f"is_{author}"]
            sums[f"{author}/count"] = mask.sum()
            sums[f"{author}/logp"] = (logps * mask).sum()
            sums[f"{author}/entropy"] = (entropies * mask).sum()
            sums[f"{author}/pull"] = (pull * mask).sum()
            sums[f"{author}/rare_pull"] = (pull * mask * (p < RARE)).sum()
        gap = (logps - inputs["sampling_per_token_logps"]).abs()
        sampled = inputs["is_sampled"] & ~torch.isnan(gap)
        sums["sampling/count"] = sampled.sum()
        sums["sampling/gap"] = torch.where(sampled, gap, 0.0).sum()
        return cls(tuple(sums), torch.stack([value.float() for value in sums.values()]))

    def __add__(self, other: BatchHealth) -> BatchHealth:
        """The sums of both: of two micro-batches of one step."""
        return BatchHealth(self.names, self.sums + other.sums)

    def reduced(self, accelerator: Any) -> dict[str, float]:
        """Metrics over all processes; those without a token are left out."""
        total = accelerator.reduce(self.sums, reduction="sum").tolist()
        sums = dict(zip(self.names, total, strict=True))
        metrics: dict[str, float] = {}
        for author in ("controller", "expert", "route"):
            count, pull = sums[f"{author}/count"], sums[f"{author}/pull"]
            if count:
                metrics[f"{author}/logp"] = sums[f"{author}/logp"] / count
                metrics[f"{author}/entropy"] = sums[f"{author}/entropy"] / count
            if pull:
                metrics[f"{author}/rare_gradient"] = sums[f"{author}/rare_pull"] / pull
        if sums["sampling/count"]:
            metrics["sampling/logp_difference"] = sums["sampling/gap"] / sums["sampling/count"]
        return metrics


class CollapseWatch:
    """Says when a run has collapsed, from the metrics of its steps.

    Args:
        min_well_formed: Floor of the share of well-formed rollouts.
        max_expert_rise: How much more expert text may cost the controller than in the first
            steps, nats per token; None does not watch it.
        patience: Steps in a row beyond a bound, and number of the first steps.
    """

    def __init__(
        self, *, min_well_formed: float, max_expert_rise: float | None, patience: int
    ) -> None:
        self._min_well_formed = min_well_formed
        self._max_expert_rise = max_expert_rise
        self._first: list[float] = []
        self._patience = patience
        self._beyond: Counter[str] = Counter()

    def update(self, metrics: Mapping[str, Any]) -> str | None:
        """Take one step's metrics; the reason if they complete a collapse, else None."""
        reasons = [self._low_well_formed(metrics), self._dear_expert_text(metrics)]
        return next((reason for reason in reasons if reason), None)

    def _low_well_formed(self, metrics: Mapping[str, Any]) -> str | None:
        rate = metrics.get("rollout/well_formed")
        if rate is None or not self._lasts("well_formed", rate < self._min_well_formed):
            return None
        return (
            f"only {rate:.0%} of the rollouts are well formed, below {self._min_well_formed:.0%} "
            f"for {self._patience} steps: the controller is losing the protocol"
        )

    def _dear_expert_text(self, metrics: Mapping[str, Any]) -> str | None:
        logp = metrics.get("expert/logp")
        if logp is None or self._max_expert_rise is None:
            return None
        if len(self._first) < self._patience:
            self._first.append(-logp)
            return None
        start = sum(self._first) / len(self._first)
        if not self._lasts("expert_text", -logp - start > self._max_expert_rise):
            return None
        return (
            f"expert text costs {-logp:.2f} nats per token, {start:.2f} at the start, more than "
            f"{self._max_expert_rise:g} above it for {self._patience} steps: the controller is "
            "driven away from what experts write"
        )

    def _lasts(self, what: str, is_beyond: bool) -> bool:
        self._beyond[what] = self._beyond[what] + 1 if is_beyond else 0
        return self._beyond[what] >= self._patience


class FaultWatch:
    """Stops a run whose infrastructure fails, before it trains on what is left.

    Args:
        max_rate: Faults over rollouts, over the last steps, that are still borne.
        window: Steps that count; those before the run began count as sound.
    """

    def __init__(self, max_rate: float, window: int) -> None:
        self._max_rate = max_rate
        self._window = window
        self._last: deque[tuple[int, int]] = deque(maxlen=window)

    def update(self, faults: int, rollouts: int, examples: Sequence[str] = ()) -> None:
        """Take one step's counts, over all processes.

        Raises:
            FaultRateError: The rate is above the bound.
        """
        self._last.append((faults, rollouts))
        missing = self._window - len(self._last)
        rate = sum(f for f, _ in self._last) / max(
            sum(n for _, n in self._last) + missing * rollouts, 1
        )
        if rate > self._max_rate:
            kinds = ", ".join(f"{name} x{n}" for name, n in Counter(examples).most_common(5))
            raise FaultRateError(
                f"{faults} of {rollouts} rollouts of this step failed ({kinds or 'no detail'}); "
                f"{rate:.0%} over {self._window} steps is above max_fault_rate "
                f"{self._max_rate:.0%}. Nothing was trained on them: repair the experts, the "
                "sandbox or the grader, then run the same command again to go on"
            )
