"""Drawing the next token of each row of a batch, reproducibly and with its exact log-probability.

Each draw takes one uniform number that depends on the row's seed and on the token's position in its
context alone, so what is sampled does not depend on who else is in the batch. The draw inverts the
cumulative distribution: one `exp` and one `cumsum` over the vocabulary, far cheaper at 50k tokens
than `softmax` and `multinomial`. Truncation is applied in the usual order: temperature, then top_k,
then top_p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rivet.rollout.backend import SamplingParams

_MASK = np.uint64(0xFFFFFFFFFFFFFFFF)
# Below it, scores divided by a temperature overflow and a nucleus rounds to nothing: the limit of
# both is the likeliest token.
_SMALLEST = 1e-6


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is sampled: parameters, its seed, and tokens that it must not take."""

    params: SamplingParams
    seed: int
    banned_ids: tuple[int, ...] = ()


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) that depend on (seed, position) alone.

    Args:
        seeds: uint64, shape (B,).
        positions: uint64, shape (B,).

    Returns:
        float64, shape (B,).
    """
    with np.errstate(over="ignore"):
        keys = _mix(seeds + np.uint64(0x9E3779B97F4A7C15))
        bits = _mix(keys + positions * np.uint64(0xD1342543DE82EF95))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: every input bit changes half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Sampler:
    """Samples for a fixed list of rows; build a new one when the rows change.

    Args:
        draws: How each row is sampled, length B.
        device: Where the logits are.
    """

    def __init__(self, draws: Sequence[Draw], device: torch.device) -> None:
        params = [draw.params for draw in draws]
        self._device = device
        self._seeds = np.array([draw.seed & int(_MASK) for draw in draws], dtype=np.uint64)
        greedy = [p.temperature < _SMALLEST for p in params]
        self._all_greedy = all(greedy)
        self._greedy = torch.tensor(greedy, device=device) if any(greedy) else None
        temperatures = [
            1.0 if is_greedy else p.temperature for p, is_greedy in zip(params, greedy, strict=True)
        ]
        self._temperatures = (
            None
            if all(t == 1.0 for t in temperatures)
            else torch.tensor(temperatures, device=device)[:, None]
        )
        banned = [(n, i) for n, draw in enumerate(draws) for i in draw.banned_ids]
        self._banned = tuple(torch.tensor(banned, device=device).T) if banned else None
        self._truncated: dict[tuple[int, float], torch.Tensor] = {}
        groups: dict[tuple[int, float], list[int]] = {}
        for n, p in enumerate(params):
            if not greedy[n] and (p.top_k > 0 or p.top_p < 1):
                groups.setdefault((p.top_k, p.top_p), []).append(n)
        for key, rows in groups.items():
            self._truncated[key] = torch.tensor(rows, device=device)

    def __call__(
        self, logits: torch.Tensor, positions: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample one token a row.

        Args:
            logits: Shape (B, V).
            positions: Position in its context of the token to sample, shape (B,).

        Returns:
            Token ids and their log-probabilities (float32), both of shape (B,).
        """
        scores = logits.float()
        if self._temperatures is not None:
            scores = scores / self._temperatures
        if self._banned is not None:
            scores = scores.clone() if scores is logits else scores
            scores[self._banned] = -torch.inf
        for (top_k, top_p), rows in self._truncated.items():
            scores = scores.clone() if scores is logits else scores
            scores[rows] = truncate(scores[rows], top_k, top_p)
        peak, best = scores.max(-1, keepdim=True)
        mass = torch.exp(scores - peak)
        if self._all_greedy:
            ids, total = best, mass.sum(-1, keepdim=True)
        else:
            uniform = torch.from_numpy(uniforms(self._seeds, positions.astype(np.uint64)))
            ids, total = invert(mass, uniform.to(self._device).float())
            if self._greedy is not None:
                ids = torch.where(self._greedy[:, None], best, ids)
        logprobs = scores.gather(-1, ids) - peak - torch.log(total)
        return ids[:, 0], logprobs[:, 0]


def invert(mass: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from each row by inverting its cumulative mass.

    Args:
        mass: Of each token, in any unit, shape (B, V).
        uniform: float32 in [0, 1]: a number just below 1 rounds to 1. Shape (B,).

    Returns:
        Token ids and the mass of the row, both of shape (B, 1).
    """
    cumulative = mass.cumsum(-1)
    total = cumulative[:, -1:]
    # Strictly below the total even after rounding: a token of no mass is never drawn.
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniform[:, None] * total, below)
    return torch.searchsorted(cumulative, target, right=True), total


def truncate(scores: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Set what top_k (0 is off) and then top_p exclude to minus infinity. Shape (n, V)."""
    ordered, order = scores.sort(-1, descending=True)
    if 0 < top_k < scores.shape[-1]:
        ordered[:, top_k:] = -torch.inf
    if top_p < 1:
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        # The token that crosses the threshold stays, so at least one always does.
        ordered = ordered.masked_fill(before >= max(top_p, _SMALLEST), -torch.inf)
    return torch.empty_like(scores).scatter_(-1, order, ordered)
