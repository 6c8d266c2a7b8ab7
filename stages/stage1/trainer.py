"""TRL's GRPO trainer with our rollouts and a weight for every token.

Written against TRL 1.16.0. What is overridden, each pinned by a contract test:

- `rollout_func` (public) supplies whole trajectories with spliced expert and output tokens;
- `_generate_and_score_completions` replaces advantages (B*G,) by signed token weights (B*G, T), the
  loss mask and the denominator. Fractional numbers go there and never into the mask, which would
  scale the KL term and the ratio too;
- `_compute_loss` multiplies in what needs the current probabilities (shaping, importance ratio)
  and adds the entropy of route tokens. TRL computes the loss from the weights as it always does;
- `_get_per_token_logps_and_entropies` hands TRL's loss the scores of the forward pass that
  `_compute_loss` has just made, so there is one forward pass a step;
- rows that train nothing are left out of the passes;
- the sampler keeps our order of problems (`shuffle_dataset` is ours, not TRL's).

Shapes: B = prompts, G = generations per prompt, T = completion tokens.
"""

from __future__ import annotations

import math
import os
import random
import re
import time
from collections.abc import Collection, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback
from trl import GRPOTrainer

from data.problems import Problem
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Trajectory
from stages.stage1.config import Stage1Config
from stages.stage1.health import BatchHealth, FaultWatch, fault_of, rollout_metrics
from stages.stage1.objective import (
    TokenRoles,
    group_advantages,
    importance_factor,
    shaping_factor,
    token_counts,
    token_weights,
    trained,
)
from stages.stage1.rollouts import Asked, StepRollouts, with_info

_ROW = "rivet_row"


def is_void(trajectory: Trajectory) -> bool:
    """True if it holds neither an answer nor an action: there is nothing to reinforce."""
    return not (trajectory.answer or trajectory.expert_calls or trajectory.code_runs)


def problem_order(count: int, per_step: int, steps: int, *, seed: int, shuffle: bool) -> list[int]:
    """Rows of the problems of every step, `per_step` distinct ones each, flat.

    Each pass over the problems has its own order, fixed by the seed; what is left at its end and
    does not fill a step is skipped.

    Raises:
        ValueError: There are fewer problems than one step needs.
    """
    if count < per_step:
        raise ValueError(f"{count} problems, but one step takes {per_step}; add problems")
    order: list[int] = []
    epoch = 0
    while len(order) < steps * per_step:
        rows = list(range(count))
        if shuffle:
            random.Random(f"{seed}\x1f{epoch}").shuffle(rows)
        order += rows[: count - count % per_step]
        epoch += 1
    return order[: steps * per_step]


def roles_of(
    trajectories: Sequence[Trajectory],
    length: int,
    tokenizer: ProtocolTokenizer,
    experts: Collection[str],
    *,
    device: torch.device | str = "cpu",
) -> TokenRoles:
    """Masks of shape (B*G, length) from the trajectories' authors and kinds.

    What follows `<expert name="` is a choice of an expert even where no name comes of it: if only
    valid names counted as choices, a name that is made up would be punished less than a real one
    that does not know the answer, and the controller would flee into nonsense.
    """
    codes = torch.zeros(len(trajectories), length, dtype=torch.int8)  # 0: environment, padding
    for row, trajectory in enumerate(trajectories):
        start = 0
        for segment in trajectory.segments:
            end = start + len(segment)
            if segment.author == "expert":
                codes[row, start:end] = 2
            elif segment.author == "controller":
                codes[row, start:end] = 3 if segment.kind == "route" else 1
            start = end
        for n, name in choices(trajectory, tokenizer):
            codes[row, n] = 3 if name in experts else 4
    codes = codes.to(device)
    route = codes >= 3
    return TokenRoles((codes == 1) | route, codes == 2, route, codes == 4)


def choices(trajectory: Trajectory, tokenizer: ProtocolTokenizer) -> list[tuple[int, str]]:
    """The controller's choices of an expert, whatever became of them.

    Returns:
        For each `<expert name="` the index of the token that holds the first byte behind it, if the
        controller wrote that, and what stands there up to the next quote or tag.
    """
    pieces = [tokenizer.token_bytes[i] for i in trajectory.completion_ids]
    authors = trajectory.authors
    found: list[tuple[int, str]] = []
    token, token_end = -1, 0
    for match in re.finditer(rb'<expert name="([^"<>]*)', b"".join(pieces)):
        while token_end <= match.start(1) and token + 1 < len(pieces):
            token += 1
            token_end += len(pieces[token])
        if token_end > match.start(1) and authors[token] == "controller":
            found.append((token, match[1].decode("utf-8", "replace")))
    return found


def without_idle_rows(batch: dict[str, Any], is_trained: Tensor, num_parts: int) -> dict[str, Any]:
    """The batch without rows that train nothing, and without the padding that they needed.

    Rows of flat groups, faults and void trajectories cost a forward and a backward pass and
    change nothing. As many are kept as it takes to split the batch into equal parts, of at least
    one row each.

    Args:
        batch: The trainer's tensors: rows first, then columns of the prompt or the completion.
        is_trained: z_i, shape (B*G,).
        num_parts: Parts that the batch will be split into.
    """
    total = int(is_trained.sum())
    rows = max(math.ceil(total / num_parts), 1) * num_parts
    # A stable sort keeps the order of the rows that stay.
    keep = torch.argsort(~is_trained, stable=True)[:rows]
    width = int(batch["completion_mask"][keep].sum(1).max())
    prompt_width = int(batch["prompt_mask"][keep].sum(1).max())
    result: dict[str, Any] = {}
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            result[name] = value
        elif name in ("prompt_ids", "prompt_mask"):
            result[name] = value[keep][:, value.size(1) - prompt_width :]
        else:
            result[name] = value[keep][:, :width]
    return result


class Stage1Trainer(GRPOTrainer):
    """GRPO over expert-assisted trajectories.

    Args:
        model: The controller.
        args: Settings; `max_steps` must be set.
        problems: What is trained on; rows are drawn from it by `problem_order`.
        rollouts: Gives the graded trajectories of each step.
        tokenizer: The controller's, padding on the left.
        experts: Names that the controller may choose from.
        right_experts: Problem id -> name of the expert that knows it, where that is known.
        callbacks: As in TRL.
    """

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        args: Stage1Config,
        problems: Sequence[Problem],
        rollouts: StepRollouts,
        tokenizer: ProtocolTokenizer,
        experts: Collection[str],
        right_experts: dict[str, str] | None = None,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        self._problems = problems
        self._rollouts = rollouts
        self._right_experts = right_experts or {}
        self._objective = args.objective()
        self._importance_clip = args.importance_clip
        assert args.num_generations is not None and args.steps_per_generation is not None
        self._group_size = args.num_generations
        self._num_parts = args.steps_per_generation
        self._fault_watch = FaultWatch(args.max_fault_rate, args.fault_window)
        self._protocol_tokenizer = tokenizer
        self._experts = frozenset(experts)
        self._batch: list[Trajectory] = []
        self._batch_is_stored = False
        self._scores: tuple[Tensor, Tensor | None, Tensor | None] | None = None
        order = problem_order(
            len(problems),
            args.prompts_per_step,
            args.max_steps,
            seed=args.seed,
            shuffle=bool(args.shuffle_dataset),
        )
        # The row travels inside the message: a rollout function sees no other column.
        prompts = [
            [{"role": "user", "content": p.problem, _ROW: row}] for row, p in enumerate(problems)
        ]
        # TRL warns about rollout functions; the contract tests are our answer.
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        super().__init__(
            model=model,
            reward_funcs=[self.outcome_reward],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": prompts}).select(order),
            processing_class=tokenizer.hf,
            callbacks=callbacks,
            rollout_func=self._rollout,  # type: ignore[arg-type] # declared for text prompts
        )
        self.shuffle_dataset = False

    def outcome_reward(self, **_: Any) -> list[float | None]:
        """Rewards of the batch; None leaves TRL's own statistics as it leaves ours."""
        return [t.reward for t in self._batch]

    @staticmethod
    def _rollout(prompts: list[list[dict[str, Any]]], trainer: Stage1Trainer) -> dict[str, Any]:
        """TRL's rollout function. The prompts come repeated: one row per trajectory."""
        step = trainer.state.global_step + 1
        offset = trainer.accelerator.process_index * len(prompts)
        size = trainer._group_size
        asked = [
            Asked(trainer._problems[prompt[0][_ROW]], (offset + n) % size, step)
            for n, prompt in enumerate(prompts)
        ]
        started = time.perf_counter()
        # Sampling must not move the trainer's generator: replayed steps do not sample.
        with torch.random.fork_rng(), torch.no_grad():
            trainer._batch, trainer._batch_is_stored = trainer._rollouts.of_step(step, asked)
        trainer._metric("time/rollout_s", time.perf_counter() - started)
        trainer._watch_faults()
        eos = trainer._tokenizer.eos_token_id
        return {
            "prompt_ids": [list(t.prompt_ids) for t in trainer._batch],
            # TRL reads the last token of every completion, so none may be empty.
            "completion_ids": [t.completion_ids or [eos] for t in trainer._batch],
            "logprobs": [t.logprobs or [None] for t in trainer._batch],
            # All floats: `pad` takes the type of the first row for every row.
            "env_mask": [
                [0.0 if author == "environment" else 1.0 for author in t.authors] or [0.0]
                for t in trainer._batch
            ],
        }

    def _watch_faults(self) -> None:
        """Stop before anything is written or trained if too much of the batch failed."""
        faults = [fault for t in self._batch if (fault := fault_of(t)) is not None]
        counts = torch.tensor([len(faults), len(self._batch)], device=self.accelerator.device)
        # Every process sees the same counts, so all of them stop.
        total = self.accelerator.reduce(counts, reduction="sum").tolist()
        self._fault_watch.update(total[0], total[1], faults)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        batch, device = self._batch, self.accelerator.device
        rewards = torch.tensor(
            [float("nan") if t.reward is None else t.reward for t in batch], device=device
        )
        # Groups may straddle processes.
        advantages = group_advantages(
            self.accelerator.gather(rewards),
            self._group_size,
            scale=self._objective.scale,
            epsilon=self._objective.epsilon,
        )
        start = self.accelerator.process_index * len(batch)
        mine = advantages.rows(start, start + len(batch))
        length = output["completion_ids"].size(1)
        roles = roles_of(batch, length, self._protocol_tokenizer, self._experts, device=device)
        is_trained = trained(
            mine, torch.tensor([is_void(t) for t in batch], device=device), self._objective
        )
        weights = token_weights(
            self._objective,
            roles,
            mine.values,
            is_right=torch.tensor([t.outcome == "right" for t in batch], device=device),
            is_trained=is_trained,
            counts=self.accelerator.reduce(token_counts(roles, is_trained), reduction="sum"),
        )
        output["advantages"] = weights.weights
        output["tool_mask"] = weights.mask
        output["num_items_in_batch"] = weights.num_items
        # Tensors whose first dimension is the batch are shuffled and split with it.
        output["entropy_weights"] = weights.entropy_weights
        output["is_controller"], output["is_expert"] = roles.controller, roles.expert
        output["is_route"] = roles.route
        self._log_rollouts(advantages.is_flat.float().mean().item(), mine.values.tolist())
        return without_idle_rows(output, is_trained, self._num_parts)

    def _log_rollouts(self, flat_rate: float, advantages: list[float]) -> None:
        """Write the step's shard, unless it was replayed, and the metrics of its rollouts."""
        if not self._batch_is_stored:
            step = self.state.global_step + 1
            self._batch = with_info(self._batch, {"advantage": advantages})
            self._rollouts.keep(step, self._batch)
        self._metric("reward/flat_groups", flat_rate)
        for name, value in rollout_metrics(self._batch, self._right_experts).items():
            self._metric(name, value)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        logps, entropies, aux_loss = self._forward(model, inputs)
        assert entropies is not None
        weights = self._current_weights(logps, inputs)
        self._scores = (logps, entropies, aux_loss)
        loss = super()._compute_loss(model, {**inputs, "advantages": weights})
        # The data-parallel mean over processes divides by their number.
        scale = self.accelerator.num_processes
        loss = loss - scale * (entropies * inputs["entropy_weights"]).sum()
        health = BatchHealth.of(logps.detach(), entropies.detach(), weights, inputs)
        for name, value in health.reduced(self.accelerator).items():
            self._metric(name, value)
        return loss

    def _forward(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probabilities and entropies of the completion, each of shape (B*G, T)."""
        return super()._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
        )

    def _get_per_token_logps_and_entropies(
        self, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if self._scores is not None:
            scores, self._scores = self._scores, None
            return scores
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _current_weights(self, logps: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Token weights with everything that depends on current probabilities, (B*G, T)."""
        weights = inputs["advantages"]
        if self._objective.shaping != "none":
            factor = shaping_factor(self._objective, logps, weights)
            weights = torch.where(inputs["is_expert"], weights * factor, weights)
        clip = self._importance_clip
        if clip is not None:
            old = inputs.get("old_per_token_logps", logps)
            factor = importance_factor(old, inputs["sampling_per_token_logps"], clip)
            weights = torch.where(inputs["is_controller"], weights * factor, weights)
        return weights

    def _metric(self, name: str, value: float) -> None:
        """One value of a metric; TRL averages them at the next log and reports the mean."""
        self._metrics["train"][name].append(value)
