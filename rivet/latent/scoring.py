"""Log-probabilities and entropies of completions, and where tokens stand in padded rows.

Shapes: B = rows, P = tokens of a row, R = completions, T = completion tokens, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Scores:
    """Of each completion token, shape (B, T): log-probability and entropy, in nats."""

    log_probs: Tensor
    entropy: Tensor


def score(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Scores:
    """Log-probability of each token and entropy of its distribution.

    Args:
        logits: Shape (R, T, V).
        ids: Shape (R, T).
        temperature: Above 0.
    """
    logps = (logits.float() / temperature).log_softmax(-1)
    chosen = logps.gather(-1, ids[..., None]).squeeze(-1)
    return Scores(chosen, -(logps.exp() * logps).sum(-1))


def positions_of(mask: Tensor) -> Tensor:
    """Position of each token, padding on either side left out of the count, shape (B, P)."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def last_token(hidden: Tensor, mask: Tensor) -> Tensor:
    """Hidden state of each row's last token, wherever the padding is, shape (B, D)."""
    at = (mask.long() * torch.arange(mask.size(1), device=mask.device)).argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), at]
