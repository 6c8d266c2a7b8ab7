"""The supervised warm start: the adapter learns to say what the policy can read.

A few steps on right answers with theta frozen, so that RL begins where some samples are right. A
policy without an adapter (the control `single`) takes the same steps itself: no arm sees an answer
that another does not.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from data.problems import Problem
from rivet.latent.policy import LatentPolicy
from rivet.latent.prompts import LatentPrompts
from stages.latent.config import LatentConfig
from stages.latent.listener import Listener
from stages.latent.specialists import answer_ids, completion_loss

logger = logging.getLogger(__name__)


def warm_up(
    policy: LatentPolicy,
    prompts: LatentPrompts,
    listener: Listener,
    problems: Sequence[Problem],
    config: LatentConfig,
) -> list[float]:
    """Take the supervised steps.

    Args:
        policy: Trained in place; afterwards everything requires gradients again.
        prompts: Builds its prompts.
        listener: What it hears; steps count down from -1, so that RL's shuffling is another.
        problems: Whose answers are learnt. Those that the policy solves alone are among them: an
            adapter that never sees them talks over what the policy knows, and the first thing
            that RL then learns is not to listen.
        config: Number, size and rate of the steps.

    Returns:
        Loss of each step, nats per completion token.
    """
    adapter = policy.model.context_adapter
    trained = list((policy if adapter is None else adapter).parameters())
    policy.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    device = policy.lm_head.weight.device
    # A policy that is trained whole would forget at the adapter's rate.
    rate = config.warm_learning_rate * (1.0 if adapter is not None else 0.1)
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    generator = torch.Generator().manual_seed(config.seed)
    losses: list[float] = []
    policy.train()
    for step in range(1, config.warm_steps + 1):
        size = min(config.warm_batch_size, len(problems))
        chosen = torch.randperm(len(problems), generator=generator)[:size].tolist()
        batch = [problems[n] for n in chosen]
        heard = listener.hear([listener.row(p.id) for p in batch], -step)
        loss = completion_loss(
            policy,
            [(prompts.build(p.problem), answer_ids(prompts, p.answer)) for p in batch],
            expert_states=None if heard is None else heard.values.to(device),
            expert_mask=None if heard is None else heard.mask.to(device),
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if step % 10 == 0:
            logger.info("warm start: step %d/%d  loss %.3f", step, config.warm_steps, losses[-1])
    policy.requires_grad_(True)
    return losses
