"""Sampling from a latent policy: each prompt is read once, however many samples it has.

The noise of a sample depends on its own seed alone, not on what else is in the batch, so a step
that is sampled by several processes gives what one process would have sampled.

Shapes: B = prompts, R = samples, T = tokens of a sample, V = vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rivet.latent.policy import LatentPolicy
from rivet.latent.scoring import last_token, positions_of
from rivet.latent.states import ExpertStates
from rivet.rollout.sampling import invert, truncate


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion.

    Attributes:
        ids: Token ids, the end of turn included, shape (T,).
        logprobs: Of each token under the distribution that was sampled from, shape (T,).
        is_finished: Whether it ended by itself.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_finished: bool


def pad_left(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and their mask, padded on the left, both of shape (B, P)."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for n, row in enumerate(rows):
        ids[n, width - len(row) :] = torch.tensor(row, dtype=torch.long)
        mask[n, width - len(row) :] = 1
    return ids, mask


def pad_right(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and their mask, padded on the right, both of shape (B, T)."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for n, row in enumerate(rows):
        ids[n, : len(row)] = torch.tensor(row, dtype=torch.long)
        mask[n, : len(row)] = 1
    return ids, mask


@torch.no_grad()
def sample(
    policy: LatentPolicy,
    prompts: Sequence[Sequence[int]],
    states: ExpertStates | None,
    *,
    rows: Sequence[int],
    seeds: Sequence[int] | None,
    max_new_tokens: int,
    eos_ids: Collection[int],
    vocab_size: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> list[Sample]:
    """Sample completions.

    Args:
        policy: On its device; its mode (train or eval) is left as it is.
        prompts: Token ids of B prompts, each with its placeholders.
        states: H of the B problems; None for a policy without experts.
        rows: Prompt of each sample, R indices.
        seeds: Seed of each sample, R integers; None is greedy.
        max_new_tokens: Most tokens of a completion.
        eos_ids: Tokens that end one.
        vocab_size: V, tokens that can be sampled; None is all that the model has an output for,
            those that pad its embeddings beyond the tokenizer included.
        temperature: Above 0.
        top_k: Sample from the k most likely tokens only; 0 from all.
        top_p: Nucleus mass in (0, 1].

    Returns:
        R samples, in order.
    """
    device = policy.lm_head.weight.device
    index = torch.as_tensor(rows, device=device)
    ids, mask = (x.to(device) for x in pad_left(prompts, 0))
    output = policy.model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions_of(mask),
        expert_states=None if states is None else states.values.to(device),
        expert_mask=None if states is None else states.mask.to(device),
        use_cache=True,
    )
    hidden = last_token(output.last_hidden_state, mask)[index]
    cache = output.past_key_values
    cache.batch_select_indices(index)
    mask = mask[index]
    noise = None if seeds is None else _noise(seeds, max_new_tokens).to(device)
    ends = torch.tensor(sorted(eos_ids), device=device)
    done = torch.zeros(len(index), dtype=torch.bool, device=device)
    tokens, logps, alive = [], [], []
    for t in range(max_new_tokens):
        scores = policy.lm_head(hidden)[:, :vocab_size].float() / temperature  # (R, V)
        if top_k > 0 or top_p < 1:
            scores = truncate(scores, top_k, top_p)
        distribution = scores.log_softmax(-1)
        chosen = _choose(distribution, None if noise is None else noise[:, t])
        tokens.append(chosen)
        logps.append(distribution.gather(-1, chosen[:, None])[:, 0])
        alive.append(~done)
        done = done | torch.isin(chosen, ends)
        if t + 1 == max_new_tokens or bool(done.all()):
            break
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        output = policy.model(
            input_ids=chosen[:, None],
            attention_mask=mask,
            position_ids=mask.sum(1, keepdim=True) - 1,
            past_key_values=cache,
            use_cache=True,
        )
        hidden = output.last_hidden_state[:, -1]
    lengths = torch.stack(alive, 1).sum(1).tolist()
    all_ids, all_logps = torch.stack(tokens, 1).tolist(), torch.stack(logps, 1).tolist()
    return [
        Sample(tuple(row[:n]), tuple(values[:n]), finished)
        for row, values, n, finished in zip(all_ids, all_logps, lengths, done.tolist(), strict=True)
    ]


def _choose(logps: Tensor, uniform: Tensor | None) -> Tensor:
    """The most likely token, or the one whose share of [0, 1) the uniform number lies in, (R,)."""
    return logps.argmax(-1) if uniform is None else invert(logps.exp(), uniform)[0][:, 0]


def _noise(seeds: Sequence[int], count: int) -> Tensor:
    """Uniform numbers of each seed, shape (R, count)."""
    draws = []
    for seed in seeds:
        generator = random.Random(seed)
        draws.append([generator.random() for _ in range(count)])
    return torch.tensor(draws, dtype=torch.float32)
