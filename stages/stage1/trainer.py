"""TRL's GRPO trainer with our rollouts and a weight for every token.

Written against TRL 1.16.0. What is overridden, each pinned by a contract test:

- `rollout_func` (public) supplies whole trajectories with spliced expert and output tokens;
- `_generate_and_score_completions` replaces advantages (B*G,) by signed token weights (B*G, T), the
  loss mask and the denominator. Fractional numbers go there and never into the mask, which would
  scale the KL term and the ratio too;
- `_compute_loss` multiplies in what needs the current probabilities (shaping, importance ratio)
  and adds the entropy of route tokens. TRL computes the loss from the weights as it always does,
  token by token: what a loss type divides by is in the weights (`loss_scale`), exact over
  micro-batches and processes, and a ratio of whole sequences is in the old log-probabilities, as
  in GSPO-token (Sec. 4.3, arXiv:2507.18071), so that a token's gradient has its own weight;
- `_get_per_token_logps_and_entropies` hands TRL's loss the scores of the forward pass that
  `_compute_loss` has just made, so there is one forward pass a step;
- rows that train nothing are left out of the passes, and rows of like length share a part of the
  step (`_prepare_inputs`), which is padded to the longest of its own;
- the sampler keeps our order of problems (`shuffle_dataset` is ours, not TRL's).

Shapes: B = prompts, G = generations per prompt, T = completion tokens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback
from trl import GRPOTrainer

from data.problems import Problem
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Trajectory
from stages.fused_head import score_trained_only
from stages.stage1.batches import (
    is_void,
    parts_of_like_length,
    problem_order,
    roles_of,
    without_idle_rows,
)
from stages.stage1.config import Stage1Config
from stages.stage1.fates import fate_metrics, fate_of
from stages.stage1.health import BatchHealth, FaultWatch, fault_of, rollout_metrics
from stages.stage1.objective import (
    LossType,
    group_advantages,
    importance_factor,
    log_ratio_to_engine,
    shaping_factor,
    token_counts,
    token_weights,
    trained,
)
from stages.stage1.rollouts import Asked, StepRollouts, segment_weights, with_info

_ROW = "rivet_row"
# Loss types that are the same function of a token's ratio and weight once nothing is divided by.
_SURROGATE = {"grpo": "dapo", "bnpo": "dapo", "dr_grpo": "dapo", "luspo": "dapo"}


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
        self._loss_type: LossType = args.loss_type  # type: ignore[assignment] # checked
        self._ratio_level = args.importance_sampling_level
        self._ratio_to = args.ratio_to
        self._importance_clip = args.importance_clip if args.ratio_to == "trainer" else None
        assert args.num_generations is not None and args.steps_per_generation is not None
        self._group_size = args.num_generations
        self._num_parts = args.steps_per_generation
        self._fault_watch = FaultWatch(args.max_fault_rate, args.fault_window)
        self._protocol_tokenizer = tokenizer
        self._experts = frozenset(experts)
        self._batch: list[Trajectory] = []
        self._batch_is_stored = False
        self._health: BatchHealth | None = None
        self._scores: tuple[Tensor, Tensor | None, Tensor | None] | None = None
        order = problem_order(
            len(problems),
            args.prompts_per_step,
            args.max_steps,
            seed=args.seed,
            shuffle=bool(args.shuffle_dataset),
            strata=[str(p.meta.get(args.balance)) for p in problems] if args.balance else None,
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
            peft_config=args.peft(),
        )
        self.shuffle_dataset = False
        self.loss_type = _SURROGATE.get(args.loss_type, args.loss_type)
        self.importance_sampling_level = "token"

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
        # Every process sees the faults of all, so all of them stop.
        faults = gather_object([fault_of(t) for t in self._batch])
        known = [fault for fault in faults if fault is not None]
        self._fault_watch.update(len(known), len(faults), known)

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
            loss_type=self._loss_type,
            max_completion_length=self.max_completion_length or length,
        )
        output["advantages"] = weights.weights
        output["tool_mask"] = weights.mask
        output["num_items_in_batch"] = weights.num_items
        # Tensors whose first dimension is the batch are shuffled and split with it.
        output["entropy_weights"] = weights.entropy_weights
        output["is_sampled"] = roles.controller
        row = is_trained.unsqueeze(1)  # rows that are kept as fillers are nobody's in the metrics
        for name in ("controller", "expert", "route"):
            output[f"is_{name}"] = getattr(roles, name) & row
        self._log_rollouts(
            advantages.is_flat.float().mean().item(),
            mine.values.tolist(),
            is_trained.tolist(),
            segment_weights(batch, weights.weights),
        )
        most = int(self.accelerator.gather(is_trained.sum()).max())
        return without_idle_rows(output, is_trained, self._num_parts, most)

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is before:
            return inputs
        # A new step: TRL has sampled, shuffled and split it.
        self._buffered_inputs = parts_of_like_length(self._buffered_inputs)
        return self._buffered_inputs[self._step % self._num_parts]

    def _log_rollouts(
        self,
        flat_rate: float,
        advantages: list[float],
        is_trained: list[bool],
        weights: list[list[float]],
    ) -> None:
        """Write the step's shard, unless it was replayed, and the metrics of its rollouts."""
        if not self._batch_is_stored:
            step = self.state.global_step + 1
            fates = [
                fate_of(t, advantage=a, is_trained=z, is_void=is_void(t))
                for t, a, z in zip(self._batch, advantages, is_trained, strict=True)
            ]
            self._batch = with_info(
                self._batch, {"advantage": advantages, "fate": fates, "segment_weights": weights}
            )
            self._rollouts.keep(step, self._batch)
        self._metric("reward/flat_groups", flat_rate)
        # Without its tokens a trajectory is a few hundred bytes, so every process sees all of them
        # and an alarm goes off in all of them at the same step.
        everyone = gather_object([replace(t, prompt_ids=(), segments=()) for t in self._batch])
        metrics = rollout_metrics(everyone, self._right_experts)
        metrics |= fate_metrics(
            [t.info["fate"] for t in everyone], sum(gather_object([self._rollouts.replaced]))
        )
        for name, value in metrics.items():
            self._metric(name, value)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        logps, entropies, aux_loss = self._forward(model, inputs)
        assert entropies is not None
        log_ratio = log_ratio_to_engine(
            logps,
            inputs["sampling_per_token_logps"],
            inputs["is_sampled"],
            self._ratio_level,  # type: ignore[arg-type] # TRL's annotation is str
        )
        weights = self._current_weights(logps, log_ratio, inputs)
        self._scores = (logps, entropies, aux_loss)
        given = {**inputs, "advantages": weights * self._undone_mean(inputs)}
        if self._ratio_to == "engine":
            given["old_per_token_logps"] = logps.detach() - log_ratio
        loss = super()._compute_loss(model, given)
        # The data-parallel mean over processes divides by their number.
        scale = self.accelerator.num_processes
        loss = loss - scale * (entropies * inputs["entropy_weights"]).sum()
        health = BatchHealth.of(logps.detach(), entropies.detach(), weights, inputs)
        self._health = health if self._health is None else self._health + health
        if self.accelerator.sync_gradients:  # the last micro-batch of the step
            for name, value in self._health.reduced(self.accelerator).items():
                self._metric(name, value)
            self._health = None
        return loss

    def _forward(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probabilities and entropies of the completion, each of shape (B*G, T)."""
        with score_trained_only(inputs["completion_ids"].device, model):
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

    def _undone_mean(self, inputs: dict[str, Any]) -> Tensor | float:
        """What undoes the mean over a micro-batch that TRL takes for `sapo`, (B*G, 1)."""
        if self.loss_type != "sapo":
            return 1.0
        lengths = inputs["tool_mask"].sum(1, keepdim=True).clamp(min=1)
        rows = len(lengths) * self.current_gradient_accumulation_steps
        return lengths * rows * self.accelerator.num_processes / inputs["num_items_in_batch"]

    def _current_weights(self, logps: Tensor, log_ratio: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Token weights with everything that depends on current probabilities, (B*G, T)."""
        weights = inputs["advantages"]
        if self._objective.shaping != "none":
            factor = shaping_factor(self._objective, logps, weights)
            weights = torch.where(inputs["is_expert"], weights * factor, weights)
        if self._importance_clip is not None:
            weights = weights * importance_factor(log_ratio, self._importance_clip)
        return weights

    def _metric(self, name: str, value: float) -> None:
        """One value of a metric; TRL averages them at the next log and reports the mean."""
        self._metrics["train"][name].append(value)
