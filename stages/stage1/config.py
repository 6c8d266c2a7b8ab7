"""Settings of Stage I: ours on top of TRL's `GRPOConfig`, and the combinations that are refused."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from accelerate.utils import parse_flag_from_env
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOConfig
from trl.import_utils import is_vllm_available

from rivet.checkpoints import is_adapter
from rivet.config import setting
from rivet.rewards import CostTerm
from rivet.rollout.backend_settings import BackendSettings
from rivet.trajectory import Mode
from stages.stage1.health import CollapseWatch
from stages.stage1.objective import (
    Denominator,
    ExpertLoss,
    LossType,
    ObjectiveSettings,
    RatioLevel,
    Scale,
    Shaping,
    preset,
)
from stages.training_problems import TrainingProblems
from stages.training_settings import TrainingSettings

AlarmAction = Literal["stop", "warn", "off"]
RatioTo = Literal["trainer", "engine"]
# Losses that divide by a number of tokens; the others divide by trajectories (`loss_scale`).
_BY_TOKENS = ("dapo", "bnpo", "cispo", "vespo")
# Settings of TRL that are text there, and any other word would count as one of these.
_WORDS = {
    "loss_type": LossType,
    "importance_sampling_level": RatioLevel,
    "scale_rewards": Scale,
}
# Settings of TRL whose code needs one advantage for a whole trajectory, or a loss of its own.
_NOT_BY_TOKEN = {
    "off_policy_mask_threshold": None,
    "use_liger_kernel": False,
}


@dataclass
class Stage1Config(TrainingProblems, TrainingSettings, BackendSettings, GRPOConfig):
    """Settings of Stage I. A knob of null takes the value that `expert_loss` stands for."""

    # --- what is trained on what
    model: str = setting(
        "", "Checkpoint folder to start from: weights, tokenizer and rivet.json. Required."
    )
    balance: str = setting(
        "",
        "A key of the problems' meta, such as `family`: every step has problems of each of its "
        "values, in proportion; empty: as they are shuffled. For steps of few problems, which "
        "would push one expert's name for all kinds of problems.",
    )
    experts: str = setting(
        "embedded", "An experts.yaml, or `embedded`: the mini-world's own experts, on loopback."
    )
    mode: Mode = setting(
        "experts",
        "Condition to sample under: `experts`; or for baselines without any expert `local`, where "
        "the controller writes requests and replies itself, and `no-expert`, where it has Python "
        "alone.",
    )
    max_completion_length: int | None = setting(
        None, "Tokens of a whole completion, spliced ones included; null: the checkpoint's limit."
    )
    # --- the objective
    expert_loss: ExpertLoss = setting(
        "positive",
        "How expert tokens are trained: `paper` (shared signed advantage), `positive` (only where "
        "it is positive), `luffy` (shaped by p/(p+gamma)), `ce` (constant weight on right "
        "trajectories), `mask` (not at all).",
    )
    expert_weight: float | None = setting(None, "lambda, weight of expert tokens, at least 0.")
    expert_negative: float | None = setting(
        None, "nu, factor of expert tokens where the advantage is negative, at least 0."
    )
    shaping: Shaping | None = setting(
        None, "Where p/(p+gamma) replaces log p on expert tokens: `none`, `negative`, `all`."
    )
    shaping_gamma: float = setting(0.1, "gamma of the shaping, above 0.")
    expert_cap: float | None = setting(
        None, "A trajectory's expert tokens weigh at most this many tokens together, above 0."
    )
    denominator: Denominator | None = setting(
        None,
        "What the sums are divided by: `all` tokens that are trained, the `controller` tokens, "
        "or `separate`: each sum by its own tokens.",
    )
    negative_weight: float = setting(
        1.0,
        "Factor of the controller's tokens where the advantage is negative, except its choice of "
        "an expert, at least 0.",
    )
    route_weight: float = setting(
        1.0, "Factor of the tokens with which the controller names an expert, at least 0."
    )
    route_negative: float = setting(
        1.0,
        "Factor of these tokens where the advantage is negative, on top of route_weight, at "
        "least 0; names that are made up bear the whole. Below 1 real names gain on nonsense.",
    )
    route_entropy: float = setting(
        0.0,
        "The entropy of each token that names an expert counts like an advantage of this size, "
        "at least 0; too much and names are made up.",
    )
    drop_void: bool = setting(
        True,
        "Trajectories with neither an answer nor an action train nothing; they stay in their "
        "group's baseline.",
    )
    drop_flat_groups: bool | None = setting(None, "Leave groups out whose rewards are all equal.")
    importance_clip: float | None = setting(
        2.0,
        "Upper bound of the ratio of the trainer's probability of a sampled token to the sampling "
        "engine's, above 0; null: no correction. Of each token, or of the trajectory with "
        "importance_sampling_level: sequence.",
    )
    ratio_to: RatioTo = setting(
        "trainer",
        "Whose policy the clipped ratio (epsilon, epsilon_high) is to: the `trainer`'s before "
        "the update, which makes it 1 and leaves the correction to importance_clip, or the "
        "sampling `engine`'s, for rollouts that are older than the weights.",
    )
    # --- stragglers and flat groups
    rollout_deadline_s: float | None = setting(
        None,
        "Seconds from its start, experts included, after which a rollout is given up: it is late, "
        "a fault, and its group goes on without it; above 0; null waits for ever.",
    )
    max_refills: int = setting(
        0,
        "Problems that are tried in the place of one whose rollouts are all equally good, at "
        "least 0: at most 1 + max_refills times the batch is sampled.",
    )
    canary_tolerance: float | None = setting(
        None,
        "With backend vllm: stop when the servers' log-probabilities of fixed texts differ from "
        "the trainer's by more than this on average, in nats per token, above 0; null: 0.001 in "
        "float32, 0.05 in 16 bits.",
    )
    # --- reward
    cost_per_call: float = setting(
        0.0, "Reward taken off a right answer per consultation, at least 0."
    )
    cost_per_usd: float = setting(
        0.0, "Reward taken off a right answer per US dollar of consultations, at least 0."
    )
    max_cost: float = setting(0.5, "At most this is taken off a right answer, in [0, 1).")
    # --- alarms
    collapse_alarm: AlarmAction = setting("stop", "On a collapse `stop` the run, `warn`, or `off`.")
    min_well_formed: float = setting(
        0.6, "A share of well-formed rollouts below this is a collapse, in [0, 1]."
    )
    max_expert_rise: float | None = setting(
        1.0,
        "Expert text that costs the controller this much more than in the first steps is a "
        "collapse, in nats per token, above 0; not watched with null, or where it is not trained.",
    )
    collapse_patience: int = setting(5, "Steps in a row that a collapse must last, at least 1.")
    max_fault_rate: float = setting(
        0.2,
        "Stop when more than this share of the rollouts of the last `fault_window` steps had an "
        "infrastructure fault, in [0, 1]; 1 never stops.",
    )
    fault_window: int = setting(3, "Steps that the fault rate is taken over, at least 1.")
    # --- the run
    output_dir: str | None = setting("runs/stage1", "The run folder.")
    save_steps: float = setting(10, "Steps between two checkpoints to resume from.")

    def __post_init__(self) -> None:
        # TRL divides by it.
        if self.num_generations is not None and self.num_generations < 2:
            raise ValueError(
                f"num_generations is {self.num_generations}; expected at least 2: an advantage is "
                "taken within a group"
            )
        super().__post_init__()
        self._check_values()
        self._check_resume()
        self._check_sampling()
        self._check_sharding()
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
            drop_void=self.drop_void,
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
        self.check_problems()
        for name in ("collapse_patience", "fault_window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.max_refills < 0:
            raise ValueError(f"max_refills is {self.max_refills}; expected at least 0")
        if self.rollout_deadline_s is not None and self.rollout_deadline_s <= 0:
            raise ValueError(
                f"rollout_deadline_s is {self.rollout_deadline_s}; expected above 0, or null"
            )
        for name in ("min_well_formed", "max_fault_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 to 1")
        if self.importance_clip is not None and self.importance_clip <= 0:
            raise ValueError(f"importance_clip is {self.importance_clip}; expected above 0 or null")
        for name, known in _WORDS.items():
            if getattr(self, name) not in get_args(known):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; expected one of "
                    f"{', '.join(get_args(known))}"
                )
        for name in ("beta", "epsilon", "epsilon_high"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 0")
        if self.loss_type == "cispo" and (self.epsilon_high is None or self.epsilon_high < 1):
            raise ValueError(
                f"epsilon_high is {self.epsilon_high}; expected at least 1 with loss_type cispo, "
                "such as 5: it bounds the ratio itself there, and would scale every update down"
            )
        if self.loss_type not in _BY_TOKENS and self.objective().denominator != "all":
            raise ValueError(
                f"loss_type {self.loss_type!r} divides by trajectories; expected denominator: all "
                f"with it, or a loss_type among {', '.join(_BY_TOKENS)}"
            )
        if self.loss_type not in _BY_TOKENS and self.beta:
            raise ValueError(
                f"beta is {self.beta} with loss_type {self.loss_type!r}; expected 0, since the KL "
                f"term is divided by tokens here, or a loss_type among {', '.join(_BY_TOKENS)}"
            )
        if self.beta and not self.use_peft and is_adapter(Path(self.model)):
            raise ValueError(
                f"beta is {self.beta} and {self.model} an adapter; expected 0, use_peft: true, or "
                "merged weights (`rivet export`): the reference would be the adapter's base"
            )
        for name, expected in _NOT_BY_TOKEN.items():
            if getattr(self, name) != expected:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; expected {expected}: tokens have weights of "
                    "their own here"
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
        if str(getattr(self.save_strategy, "value", self.save_strategy)) not in ("steps", "no"):
            raise ValueError(f"save_strategy is {self.save_strategy!r}; expected steps or no")

    def _check_sharding(self) -> None:
        """Refuse to sample from a model of which each process has a part: all would wait for all,
        at different tokens."""
        is_fsdp = bool(self.fsdp) or parse_flag_from_env("ACCELERATE_USE_FSDP")
        if self.backend == "local" and (is_fsdp or is_deepspeed_zero3_enabled()):
            raise ValueError(
                f"backend is local with {'FSDP' if is_fsdp else 'ZeRO-3'}; expected vllm: no "
                "process has the whole model to sample from"
            )

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
        if self.mode not in ("experts", "local", "no-expert"):
            raise ValueError(f"mode is {self.mode!r}; expected experts, local or no-expert")
        if self.lora_dropout:
            raise ValueError(
                f"lora_dropout is {self.lora_dropout}; expected 0: the policy that is trained must "
                "be the one that samples"
            )
        if self.neftune_noise_alpha is not None:
            raise ValueError(
                f"neftune_noise_alpha is {self.neftune_noise_alpha}; expected null: the policy "
                "that is trained must be the one that samples"
            )
        if self.use_vllm:
            raise ValueError(
                "use_vllm is true; expected false: rivet's rollout engine samples, not TRL's "
                "(backend: vllm)"
            )
        self.check_backend()
        if self.backend == "vllm" and not self.use_peft:
            self._check_whole_weights()
        if self.canary_tolerance is not None and self.canary_tolerance <= 0:
            raise ValueError(
                f"canary_tolerance is {self.canary_tolerance}; expected above 0, or null"
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

    def _check_whole_weights(self) -> None:
        """All weights go by TRL's client, which says what it lacks when the run is under way."""
        lacking = ""
        if not torch.cuda.is_available():
            lacking = "a GPU, from which alone they can be sent"
        elif not is_vllm_available():
            lacking = "vLLM in the trainer's own environment too, because TRL sends by its code"
        elif os.environ.get("VLLM_API_KEY"):
            lacking = "servers without a key, because TRL sends none (unset VLLM_API_KEY)"
        if lacking:
            raise ValueError(
                "backend is vllm and use_peft false, so that all weights are sent; expected "
                f"use_peft: true, or {lacking}"
            )
