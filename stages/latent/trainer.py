"""Stage I's trainer for a policy that listens to frozen experts.

Everything that makes Stage I's training what it is (rollouts, advantages, void trajectories,
faults, exact resume) is inherited. What is added, each held by a test:

- `_forward` hands the experts' states to the policy and reads each prompt once for all its samples.
  A row's problem is known by its prompt, which no step between sampling and loss changes;
- the entropy of every sampled token counts like an advantage, not only a choice of an expert;
- theta and phi have their own learning rates, and theta may begin later;
- attention is measured on the problems of each step.

Shapes: R = rows of a batch, T = completion tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from rivet.latent.attention import listening
from rivet.latent.policy import LatentPolicy
from rivet.latent.prompts import LatentPrompts
from rivet.latent.states import ExpertStates
from stages.latent.config import LatentConfig
from stages.latent.listener import Listener
from stages.stage1.objective import loss_scale
from stages.stage1.trainer import Stage1Trainer

ADAPTER = "context_adapter"


def language_policy(model: Any) -> LatentPolicy:
    """The latent policy itself, where data parallelism or LoRA wraps it."""
    model = getattr(model, "module", model)
    return model.get_base_model() if hasattr(model, "peft_config") else model


class LatentTrainer(Stage1Trainer):
    """GRPO over completions of a policy that listens.

    Args:
        args: Settings.
        prompts: Builds the prompts that the rollouts were sampled with.
        listener: What the policy hears.
        **stage1: As in `Stage1Trainer`.
    """

    def __init__(
        self, *, args: LatentConfig, prompts: LatentPrompts, listener: Listener, **stage1: Any
    ) -> None:
        self._listener = listener
        self._latent = args
        problems = stage1["problems"]
        self._row_of_prompt = {prompts.build(p.problem): listener.row(p.id) for p in problems}
        super().__init__(args=args, **stage1)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Two groups: the adapter, then the policy."""
        if self.optimizer is None:
            policy: Any = self.model
            named = [(n, p) for n, p in policy.named_parameters() if p.requires_grad]
            phi = [p for n, p in named if ADAPTER in n]
            theta = [p for n, p in named if ADAPTER not in n]
            groups = [
                {"params": phi, "lr": self._latent.adapter_learning_rate, "name": "adapter"},
                {"params": theta, "lr": self.args.learning_rate, "name": "policy"},
            ]
            cls, kwargs = self.get_optimizer_cls_and_kwargs(self.args, policy)
            kwargs = {k: v for k, v in kwargs.items() if k != "lr"}
            used = [
                {**group, "weight_decay": self.args.weight_decay}
                for group in groups
                if group["params"]
            ]
            self.optimizer = cls(used, **kwargs)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """The schedule of the settings; the policy's rate is 0 in the adapter's first steps."""
        is_new = self.lr_scheduler is None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        first = self._latent.adapter_first_steps
        has_adapter = any(g.get("name") == "adapter" for g in scheduler.optimizer.param_groups)
        if is_new and first and has_adapter:
            if not isinstance(scheduler, LambdaLR):
                raise ValueError(
                    f"lr_scheduler_type is {self.args.lr_scheduler_type}; expected constant, "
                    "linear or cosine with adapter_first_steps above 0"
                )
            for n, group in enumerate(scheduler.optimizer.param_groups):
                if group.get("name") == "policy":
                    scheduler.lr_lambdas[n] = _delayed(scheduler.lr_lambdas[n], first)
                    group["lr"] = scheduler.base_lrs[n] * scheduler.lr_lambdas[n](0)
            scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
        return scheduler

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        mask, num_items = output["tool_mask"], output["num_items_in_batch"]
        lengths = mask.sum(1)
        # A loss type divides the bonus by what it divides an advantage by.
        scale = loss_scale(
            self._loss_type,
            lengths,
            num_items,
            self.accelerator.reduce((lengths > 0).sum(), reduction="sum").clamp(min=1),
            self.max_completion_length or max(len(t.completion_ids) for t in self._batch),
        )
        bonus = scale.unsqueeze(1) * (self._latent.entropy / num_items)
        output["entropy_weights"] = mask * bonus
        self._measure_attention([t.problem_id for t in self._batch])
        return output

    def _forward(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        rows = self._rows(inputs["prompt_ids"], inputs["prompt_mask"])
        step = self.state.global_step + 1
        if self._latent.share_prompts:
            distinct, first, place = _distinct(rows)
            heard = _inputs(self._listener.hear(distinct, step), self.accelerator.device)
            with self.accelerator.autocast():
                scores = model(
                    input_ids=inputs["prompt_ids"][first],
                    attention_mask=inputs["prompt_mask"][first],
                    completion_ids=inputs["completion_ids"],
                    completion_mask=inputs["completion_mask"],
                    prompt_rows=torch.tensor(place, device=self.accelerator.device),
                    temperature=self.temperature,
                    **heard,
                )
            return scores.log_probs, scores.entropy, None
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        labels = ids.masked_fill(mask == 0, -100)
        length = inputs["completion_ids"].size(1)
        labels[:, :-length] = -100
        with self.accelerator.autocast():
            # TRL's head: logits over a large vocabulary are never whole in memory.
            output = model(
                input_ids=ids,
                attention_mask=mask,
                labels=labels,
                fused_lm_head=True,
                **_inputs(self._listener.hear(rows, step), self.accelerator.device),
            )
        return output.log_probs[:, -length:], output.entropy[:, -length:], None

    def _rows(self, prompt_ids: Tensor, prompt_mask: Tensor) -> list[int]:
        """Rows of the problems of a batch."""
        found = []
        for ids, mask in zip(prompt_ids.tolist(), prompt_mask.tolist(), strict=True):
            prompt = tuple(i for i, keep in zip(ids, mask, strict=True) if keep)
            found.append(self._row_of_prompt[prompt])
        return found

    def _measure_attention(self, problem_ids: Sequence[str]) -> None:
        """Log whom the policy listens to on the problems of this step."""
        rows = list(dict.fromkeys(self._listener.row(i) for i in problem_ids))
        policy = language_policy(self.model)
        for name, value in attention_metrics(
            policy, self._listener, rows, self.state.global_step + 1
        ).items():
            self._metric(name, value)


@torch.no_grad()
def attention_metrics(
    policy: LatentPolicy, listener: Listener, rows: Sequence[int], step: int
) -> dict[str, float]:
    """Shares of each expert by family, entropy two ways; empty for a policy that hears nothing."""
    heard = listener.hear(rows, step)
    found = attend(policy, heard)
    if found is None or heard is None:
        return {}
    together = listening(found, len(heard.names))
    metrics = {
        "attention/entropy_per_head": together.per_head,
        "attention/entropy_head_averaged": together.head_averaged,
        "attention/empty": together.by_expert[-1],
    }
    families = [listener.family(row) for row in rows]
    special = []
    for family in sorted(set(families)):
        here = torch.tensor([name == family for name in families])
        part = listening(found[here], len(heard.names))
        special.append(part.specialisation)
        for name, share in zip(heard.names, part.by_expert, strict=False):
            metrics[f"attention/share/{family or 'all'}/{name}"] = share
    return metrics | {"attention/specialisation": sum(special) / len(special)}


@torch.no_grad()
def attend(policy: LatentPolicy, states: ExpertStates | None) -> Tensor | None:
    """Attention of some problems, shape (B, N, A, K, T); None where there is none."""
    if states is None or policy.model.context_adapter is None:
        return None
    device = policy.lm_head.weight.device
    return policy.attend(states.values.to(device), states.mask.to(device)).attention


def _inputs(states: ExpertStates | None, device: torch.device) -> dict[str, Tensor]:
    if states is None:
        return {}
    return {"expert_states": states.values.to(device), "expert_mask": states.mask.to(device)}


def _distinct(rows: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Distinct rows, where each first stands, and the place of every row among them."""
    place: dict[int, int] = {}
    first: list[int] = []
    for n, row in enumerate(rows):
        if row not in place:
            place[row] = len(place)
            first.append(n)
    return list(place), first, [place[row] for row in rows]


def _delayed(schedule: Any, first: int) -> Any:
    """A schedule that is 0 before a step."""
    return lambda step: 0.0 if step < first else schedule(step)
