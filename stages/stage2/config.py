"""Settings of Stage II on top of TRL's `SFTConfig`: every TRL argument works as well."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trl import SFTConfig

from rivet.config import setting
from stages.stage2.objective import FormatWeight, Normalization, Objective
from stages.training_settings import TrainingSettings

Use = Literal["any", "expert", "code", "expert_or_code"]


_SAMPLING = ("group_by_length", "random", "sequential")
# Settings of TRL that nothing reads here, with the only value that is true.
_NOT_DONE = {
    "loss_type": "nll",
    "label_smoothing_factor": 0.0,
    "assistant_only_loss": False,
    "completion_only_loss": None,
    "padding_free": False,
    "packing_strategy": "bfd",
}


@dataclass
class WeightedSFTConfig(TrainingSettings, SFTConfig):
    """What every run of the weighted trainer shares: the objective and how it is run."""

    controller_weight: float = setting(1.0, "Weight of the controller's text, at least 0.")
    expert_weight: float = setting(
        1.0, "Beta, weight of the expert's text and code, at least 0; 0 masks them."
    )
    format_weight: FormatWeight = setting(
        "constant",
        "How format tokens (tags, `\\boxed{`, end of turn) are weighted: `constant` at alpha, or "
        "`focal`: 1 + (alpha - 1)(1 - p), which vanishes once they are learnt.",
    )
    format_alpha: float = setting(
        1.0,
        "Alpha, weight of a format token, at least 0. 1 is ordinary SFT; more has shown no gain "
        "(docs/results.md).",
    )
    route_weight: float = setting(1.0, "Weight of an expert's name inside a tag, at least 0.")
    train_reply_tags: bool = setting(
        True, "Train the tags of a spliced reply, which the deployed controller must write."
    )
    normalization: Normalization = setting(
        "weights",
        "What the loss is divided by: the sum of the `weights`, or the number of trained `tokens`, "
        "which leaves content its share whatever alpha is.",
    )
    # TRL's fields with other defaults.
    output_dir: str | None = setting("runs/stage2", "The run folder.")
    max_length: int | None = setting(
        2048,
        "Longest row in tokens, prompt included; longer trajectories are dropped, never cut. With "
        "`packing` also the length of a packed row.",
    )
    train_sampling_strategy: str = setting(
        "group_by_length",
        "`group_by_length` batches rows of like length, `random` shuffles, `sequential` keeps the "
        "order of the data set.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.objective()
        self._check_trainer()

    def objective(self) -> Objective:
        """The objective that these settings describe."""
        return Objective(
            controller=self.controller_weight,
            expert=self.expert_weight,
            format_weight=self.format_weight,
            format_alpha=self.format_alpha,
            route=self.route_weight,
            train_reply_tags=self.train_reply_tags,
            normalization=self.normalization,
        )

    def _check_trainer(self) -> None:
        """Refuse what the weighted trainer would silently not do."""
        for name, expected in _NOT_DONE.items():
            if getattr(self, name) != expected:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; expected {expected!r}: the weights of "
                    "tokens and the packing are ours"
                )
        if self.max_length is None and self.packing:
            raise ValueError("max_length is null; expected the length of a packed row, in tokens")
        given = self.model_init_kwargs if isinstance(self.model_init_kwargs, dict) else {}
        attention = str(given.get("attn_implementation", ""))
        if self.packing and "flash" in attention:
            # transformers 5.17 tells packed documents apart in a batch of a single row only.
            raise ValueError(
                f"attn_implementation is {attention!r} with packing; expected sdpa, or packing: "
                "false: it would attend across the documents of a row"
            )
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length is {self.max_length}; expected at least 1, or null")
        if self.train_sampling_strategy not in _SAMPLING:
            raise ValueError(
                f"train_sampling_strategy is {self.train_sampling_strategy!r}; expected one of "
                f"{', '.join(_SAMPLING)}"
            )
        if str(getattr(self.eval_strategy, "value", self.eval_strategy)) != "no":
            raise ValueError(
                f"eval_strategy is {self.eval_strategy!r}; expected no: use `rivet eval` on a "
                "checkpoint"
            )


@dataclass
class Stage2Config(WeightedSFTConfig):
    """Settings of Stage II: what is kept, how it is weighted, how it is trained."""

    model: str = setting(
        "", "Checkpoint folder to start from: weights, tokenizer and rivet.json. Required."
    )
    trajectories: str = setting(
        "", "Folder of graded trajectories, as `rivet collect` writes it. Required."
    )
    # --- the filter
    require_right: bool = setting(
        True, "Drop a trajectory whose answer is not right; false is for ablations only."
    )
    require_use: Use = setting(
        "expert_or_code",
        "Keep a trajectory only if it used an `expert`, ran `code`, either, or `any` (no demand).",
    )
    require_code_ok: bool = setting(
        True, "Drop a trajectory in which a program failed, timed out or was cut."
    )
    near_duplicate: float = setting(
        0.9,
        "Within a problem, drop a trajectory whose 5-token shingles overlap an earlier kept one by "
        "at least this share (Jaccard), above 0 and at most 1; 1 drops exact repetitions only.",
    )
    max_per_problem: int = setting(4, "Trajectories kept of one problem, at least 1.")
    max_trajectories: int | None = setting(
        None, "Take the first so many that pass only, at least 1; null: all."
    )
    decontaminate: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Evaluation problems that must not be trained on: .jsonl files, or `miniworld` "
            "for its held-out problems. A trajectory is dropped if its problem is one of them, in "
            "the same or nearly the same words: docs/evaluation.md, Contamination."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ValueError("model is not set; expected a checkpoint folder (rivet stage1)")
        if not self.trajectories:
            raise ValueError("trajectories is not set; expected a folder (rivet collect)")
        if not 0 < self.near_duplicate <= 1:
            raise ValueError(
                f"near_duplicate is {self.near_duplicate}; expected above 0 and at most 1"
            )
        if self.max_trajectories is not None and self.max_trajectories < 1:
            raise ValueError(
                f"max_trajectories is {self.max_trajectories}; expected at least 1, or null"
            )
        if self.max_per_problem < 1:
            raise ValueError(f"max_per_problem is {self.max_per_problem}; expected at least 1")
