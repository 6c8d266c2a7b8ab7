"""Settings of Stage I: ours on top of TRL's `GRPOConfig`, and the combinations that are refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from trl import GRPOConfig

from rivet.rewards import CostTerm
from stages.stage1.health import CollapseWatch
from stages.stage1.objective import (
    Denominator,
    ExpertLoss,
    ObjectiveSettings,
    Shaping,
    preset,
)

AlarmAction = Literal["stop", "warn", "off"]
# Losses whose terms are per token, so that a weight per token means what it says.
_TOKEN_LOSSES = ("dapo", "cispo", "grpo", "bnpo", "dr_grpo", "sapo")
# Losses that divide by the number of items that we give them.
_OWN_DENOMINATOR = ("dapo", "cispo")


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Stage1Config(GRPOConfig):
    """Settings of Stage I. A knob of null takes the value that `expert_loss` stands for."""

    # --- what is trained on what
    model: str = _setting(
        "", "Checkpoint folder to start from: weights, tokenizer and rivet.json. Required."
    )
    problems: str = _setting(
        "miniworld", "Training problems: a .jsonl or .jsonl.gz file, or `miniworld`."
    )
    problems_per_family: int = _setting(
        1500, "Training problems of each mini-world family, at least 1."
    )
    experts: str = _setting(
        "embedded", "An experts.yaml, or `embedded`: the mini-world's own experts, on loopback."
    )
    max_completion_length: int | None = _setting(
        None, "Tokens of a whole completion, spliced ones included; null: the checkpoint's limit."
    )
    # --- the objective
    expert_loss: ExpertLoss = _setting(
        "positive",
        "How expert tokens are trained: `paper` (shared signed advantage), `positive` (only where "
        "it is positive), `luffy` (shaped by p/(p+gamma)), `ce` (constant weight on right "
        "trajectories), `mask` (not at all).",
    )
    expert_weight: float | None = _setting(None, "lambda, weight of expert tokens, at least 0.")
    expert_negative: float | None = _setting(
        None, "nu, factor of expert tokens where the advantage is negative, at least 0."
    )
    shaping: Shaping | None = _setting(
        None, "Where p/(p+gamma) replaces log p on expert tokens: `none`, `negative`, `all`."
    )
    shaping_gamma: float = _setting(0.1, "gamma of the shaping, above 0.")
    expert_cap: float | None = _setting(
        None, "A trajectory's expert tokens weigh at most this many tokens together, above 0."
    )
    denominator: Denominator | None = _setting(
        None,
        "What the sums are divided by: `all` tokens that are trained, the `controller` tokens, "
        "or `separate`: each sum by its own tokens.",
    )
    negative_weight: float = _setting(
        1.0,
        "Factor of the controller's tokens where the advantage is negative, except its choice of "
        "an expert, at least 0.",
    )
    route_weight: float = _setting(
        1.0, "Factor of the tokens with which the controller names an expert, at least 0."
    )
    route_negative: float = _setting(
        1.0,
        "Factor of these tokens where the advantage is negative, on top of route_weight, at "
        "least 0; names that are made up bear the whole. Below 1 real names gain on nonsense.",
    )
    route_entropy: float = _setting(
        0.0,
        "The entropy of each token that names an expert counts like an advantage of this size, "
        "at least 0; too much and names are made up.",
    )
    drop_flat_groups: bool | None = _setting(None, "Leave groups out whose rewards are all equal.")
    importance_clip: float | None = _setting(
        2.0,
        "Upper bound of the ratio of the trainer's probability of a sampled token to the sampling "
        "engine's, above 0; null: no correction.",
    )
    # --- reward
    cost_per_call: float = _setting(
        0.0, "Reward taken off a right answer per consultation, at least 0."
    )
    cost_per_usd: float = _setting(
        0.0, "Reward taken off a right answer per US dollar of consultations, at least 0."
    )
    max_cost: float = _setting(0.5, "At most this is taken off a right answer, in [0, 1).")
    # --- alarms
    collapse_alarm: AlarmAction = _setting(
        "stop", "On a collapse `stop` the run, `warn`, or `off`."
    )
    min_well_formed: float = _setting(
        0.6, "A share of well-formed rollouts below this is a collapse, in [0, 1]."
    )
    max_expert_rise: float | None = _setting(
        1.0,
        "Expert text that costs the controller this much more than in the first steps is a "
        "collapse, in nats per token, above 0; not watched with null, or where it is not trained.",
    )
    collapse_patience: int = _setting(5, "Steps in a row that a collapse must last, at least 1.")
    max_fault_rate: float = _setting(
        0.2,
        "Stop when more than this share of the rollouts of the last `fault_window` steps had an "
        "infrastructure fault, in [0, 1]; 1 never stops.",
    )
    fault_window: int = _setting(3, "Steps that the fault rate is taken over, at least 1.")
    # --- the run
    output_dir: str | None = _setting("runs/stage1", "The run folder.")
    overwrite: bool = _setting(
        False, "Start again where a finished run, or one with other settings, lies."
    )
    # TRL's fields with defaults that suit a run that can be killed at any moment.
    logging_steps: float = _setting(1, "Steps between two logs.")
    save_steps: float = _setting(10, "Steps between two checkpoints.")
    save_total_limit: int | None = _setting(
        2, "Checkpoints to keep, at least 2, so that one is whole at any moment; null: all."
    )

    def __post_init__(self) -> None:
        if self.bf16 is None and not self.fp16 and not torch.cuda.is_available():
            self.bf16 = False  # TRL's default would be bfloat16 autocast, slower on most CPUs
        if not torch.cuda.is_available():
            self.dataloader_pin_memory = False  # there is nothing to pin for; torch warns
        super().__post_init__()
        self._check_values()
        self._check_resume()
        self._check_sampling()
        self.objective()
        self.cost()

    def objective(self) -> ObjectiveSettings:
        """The objective that these settings describe."""
        return preset(
            self.expert_loss,
            expert_weight=self.expert_weight,
            expert_negative=self.expert_negative,
            shaping=self.shaping,
            shaping_gamma=self.shaping_gamma,
            expert_cap=self.expert_cap,
            denominator=self.denominator,
            negative_weight=self.negative_weight,
            route_weight=self.route_weight,
            route_negative=self.route_negative,
            route_entropy=self.route_entropy,
            drop_flat_groups=self.drop_flat_groups,
            scale=self.scale_rewards,
        )

    def collapse_watch(self) -> CollapseWatch:
        """The watch that these settings describe."""
        is_trained = self.objective().expert_weight > 0
        return CollapseWatch(
            min_well_formed=self.min_well_formed,
            max_expert_rise=self.max_expert_rise if is_trained else None,
            patience=self.collapse_patience,
        )

    def cost(self) -> CostTerm:
        """The cost term of the reward."""
        return CostTerm(self.cost_per_call, self.cost_per_usd, self.max_cost)

    @property
    def prompts_per_step(self) -> int:
        """Problems of one optimizer step, over all processes."""
        assert self.generation_batch_size is not None and self.num_generations is not None
        return self.generation_batch_size // self.num_generations

    def _check_values(self) -> None:
        if not self.model:
            raise ValueError("model is not set; expected a checkpoint folder (rivet warmstart)")
        for name in ("collapse_patience", "fault_window", "problems_per_family"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}; expected 0 to {2**32 - 1}")
        for name in ("min_well_formed", "max_fault_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 to 1")
        if self.importance_clip is not None and self.importance_clip <= 0:
            raise ValueError(f"importance_clip is {self.importance_clip}; expected above 0 or null")
        if self.loss_type not in _TOKEN_LOSSES:
            raise ValueError(
                f"loss_type is {self.loss_type!r}; expected one that works token by token: "
                f"{', '.join(_TOKEN_LOSSES)}"
            )
        if self.loss_type not in _OWN_DENOMINATOR and self.objective().denominator != "all":
            raise ValueError(
                f"loss_type {self.loss_type!r} has its own denominator; expected "
                f"denominator: all with it, or loss_type {' or '.join(_OWN_DENOMINATOR)}"
            )

    def _check_resume(self) -> None:
        """Refuse what would make a resumed run differ from an undisturbed one (TRL 1.16)."""
        why = "a resumed run would not equal an undisturbed one"
        if self.num_iterations != 1:
            raise ValueError(f"num_iterations is {self.num_iterations}; expected 1: {why}")
        if self.steps_per_generation != self.gradient_accumulation_steps:
            raise ValueError(
                f"steps_per_generation is {self.steps_per_generation} and "
                f"gradient_accumulation_steps {self.gradient_accumulation_steps}; expected them "
                f"equal: {why}"
            )
        if self.save_only_model or self.ignore_data_skip:
            name = "save_only_model" if self.save_only_model else "ignore_data_skip"
            raise ValueError(f"{name} is true; expected false: {why}")
        if self.save_total_limit is not None and self.save_total_limit < 2:
            raise ValueError(
                f"save_total_limit is {self.save_total_limit}; expected at least 2, or null: a run "
                "that is killed while it saves needs the checkpoint before"
            )
        if str(getattr(self.save_strategy, "value", self.save_strategy)) not in ("steps", "no"):
            raise ValueError(f"save_strategy is {self.save_strategy!r}; expected steps or no")

    def _check_sampling(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ValueError(
                f"temperature is {self.temperature}; expected above 0: greedy samples of one "
                "problem are all the same, and nothing is learnt from them"
            )
        if self.max_completion_length is not None and self.max_completion_length < 1:
            raise ValueError(
                f"max_completion_length is {self.max_completion_length}; expected at least 1, or "
                "null"
            )
        if self.top_p != 1.0 or self.top_k != 0 or self.min_p is not None:
            raise ValueError(
                f"top_p is {self.top_p}, top_k {self.top_k}, min_p {self.min_p}; expected 1, 0 and "
                "null: what cannot be sampled cannot be learnt"
            )
        if self.repetition_penalty != 1.0:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}; expected 1")
        if self.use_vllm:
            raise ValueError(
                "use_vllm is true; expected false: rivet's rollout engine samples, not TRL's"
            )
        if self.mask_truncated_completions:
            raise ValueError(
                "mask_truncated_completions is true; expected false: a rollout that is cut has no "
                "answer and counts as wrong"
            )
        if str(getattr(self.eval_strategy, "value", self.eval_strategy)) != "no":
            raise ValueError(
                f"eval_strategy is {self.eval_strategy!r}; expected no: use `rivet eval` on a "
                "checkpoint"
            )
