"""Whom the policy listens to: shares of attention, their entropy, and how it moves with reward.

Entropy of the attention over experts is reported two ways, which need not agree: of each head, then
averaged (`per_head`), and of the attention averaged over heads (`head_averaged`); heads that each
settle on another expert have a low first and a high second. A correlation of two curves that both
drift over training says little, so it is also taken of their first differences.

Shapes: B = problems, N = blocks, A = heads, K = latents, T = tokens, E = experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rivet.latent.adapter import expert_shares


@dataclass(frozen=True, slots=True)
class Listening:
    """Attention over experts of a batch of problems.

    Attributes:
        shares: Mean over problems of each block, head and latent, shape (N, A, K, E + 1); the empty
            slot last.
        per_head: Entropy over the experts of each block, head and latent, averaged, in nats.
        head_averaged: Entropy of the attention averaged over blocks, heads and latents, then
            averaged over problems, in nats.
    """

    shares: Tensor
    per_head: float
    head_averaged: float

    @property
    def by_expert(self) -> list[float]:
        """Share of each expert over all blocks, heads and latents, the empty slot last."""
        return self.shares.mean((0, 1, 2)).tolist()

    @property
    def specialisation(self) -> float:
        """Share of the expert that is listened to most, among the experts alone, in [1/E, 1]."""
        experts = torch.tensor(self.by_expert[:-1])
        return float(experts.max() / experts.sum().clamp(min=1e-12))


def listening(attention: Tensor, num_experts: int) -> Listening:
    """Summarise the attention of a batch.

    Args:
        attention: Shape (B, N, A, K, T), from `rivet.latent.policy.LatentPolicy.attend`.
        num_experts: E.
    """
    shares = expert_shares(attention.detach().float(), num_experts)  # (B, N, A, K, E + 1)
    experts = shares[..., :-1]
    together = experts.mean((1, 2, 3))  # (B, E)
    return Listening(
        shares.mean(0).cpu(), float(entropy(experts).mean()), float(entropy(together).mean())
    )


def entropy(shares: Tensor) -> Tensor:
    """Entropy over the last dimension, which is normalised first, in nats."""
    p = shares / shares.sum(-1, keepdim=True).clamp(min=1e-12)
    return -(p * p.clamp(min=1e-12).log()).sum(-1)


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Rank correlation in [-1, 1], ties by their mean rank; None where it is not defined."""
    if len(x) != len(y):
        raise ValueError(f"{len(x)} values against {len(y)}")
    if len(x) < 3:
        return None
    a, b = _ranks(x), _ranks(y)
    a, b = a - a.mean(), b - b.mean()
    scale = float((a.square().sum() * b.square().sum()).sqrt())
    return float((a * b).sum()) / scale if scale > 0 else None


def differences(values: Sequence[float]) -> list[float]:
    """First differences; one value fewer."""
    return [b - a for a, b in zip(values, values[1:], strict=False)]


def _ranks(values: Sequence[float]) -> Tensor:
    x = torch.tensor(values, dtype=torch.float64)
    below = (x[None] < x[:, None]).sum(1)
    equal = (x[None] == x[:, None]).sum(1)
    return below + (equal - 1) / 2
