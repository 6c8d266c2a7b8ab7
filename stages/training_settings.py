"""Settings that every training stage shares: precision, the adapter, exact resume.

Mixed in before one of TRL's configurations, `class Stage2Config(TrainingSettings, SFTConfig)`, so
that each rule is written once. What a stage adds is in its own `config` module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rivet.config import setting

if TYPE_CHECKING:
    from peft import LoraConfig

_NOT_EQUAL = "a resumed run would not equal an undisturbed one"


@dataclass
class TrainingSettings:
    """What Stage I, Stage II and the warm start have in common; the names of the adapter's
    settings are those of TRL's `ModelConfig`."""

    # --- the adapter
    use_peft: bool = setting(
        False,
        "Train a LoRA adapter instead of all weights; the result holds it merged, and apart in "
        "`adapter/`.",
    )
    lora_r: int = setting(32, "Rank of the adapter, at least 1.")
    lora_alpha: int = setting(64, "Scale of the adapter, at least 1; the factor is alpha / r.")
    lora_dropout: float = setting(0.0, "Dropout before the adapter, at least 0 and below 1.")
    lora_target_modules: str | list[str] = setting(
        "all-linear", "Modules that get an adapter; never the LM head."
    )
    use_rslora: bool = setting(False, "Scale the adapter by alpha / sqrt(r) (arXiv:2312.03732).")
    # --- the run
    overwrite: bool = setting(
        False, "Start again where a finished run, or one with other settings, lies."
    )
    # TRL's fields with defaults that suit a run that can be killed at any moment.
    logging_steps: float = setting(1, "Steps between two logs.")
    save_steps: float = setting(100, "Steps between two checkpoints to resume from.")
    save_total_limit: int | None = setting(
        2, "Checkpoints to keep, at least 2, so that one is whole at any moment; null: all."
    )

    def __post_init__(self) -> None:
        args: Any = self
        if args.bf16 is None and not args.fp16 and not torch.cuda.is_available():
            args.bf16 = False  # TRL's default would be bfloat16 autocast, slower on most CPUs
        if not torch.cuda.is_available():
            args.dataloader_pin_memory = False  # there is nothing to pin for; torch warns
        self._check_run()  # TRL divides by some of these
        super().__post_init__()  # type: ignore[misc] # TRL's, next in line
        if not 0 <= args.seed < 2**32:
            raise ValueError(f"seed is {args.seed}; expected 0 to {2**32 - 1}")
        self._check_adapter()
        self._check_exact_resume()

    def peft(self) -> LoraConfig | None:
        """The adapter, None for full fine-tuning."""
        if not self.use_peft:
            return None
        from peft import LoraConfig

        return LoraConfig(
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=self.lora_target_modules,
            use_rslora=self.use_rslora,
            exclude_modules=["lm_head"],
            task_type="CAUSAL_LM",
        )

    def _check_run(self) -> None:
        """Refuse numbers that transformers would take, and train otherwise or not at all."""
        args: Any = self
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            if getattr(args, name) < 1:
                raise ValueError(f"{name} is {getattr(args, name)}; expected at least 1")
        if args.max_steps < 1 and args.max_steps != -1:
            raise ValueError(
                f"max_steps is {args.max_steps}; expected at least 1, or -1 to count in "
                "num_train_epochs"
            )
        for name in ("num_train_epochs", "save_steps"):
            if not 0 < getattr(args, name) < math.inf:
                raise ValueError(f"{name} is {getattr(args, name)}; expected above 0")
        for name in ("learning_rate", "weight_decay", "max_grad_norm"):
            if not 0 <= getattr(args, name) < math.inf:
                raise ValueError(f"{name} is {getattr(args, name)}; expected at least 0")

    def _check_adapter(self) -> None:
        for name in ("lora_r", "lora_alpha"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(
                f"lora_dropout is {self.lora_dropout}; expected at least 0 and below 1"
            )
        if not self.lora_target_modules:
            raise ValueError("lora_target_modules is empty; expected module names or all-linear")

    def _check_exact_resume(self) -> None:
        """Refuse what would make a resumed run differ from an undisturbed one."""
        args: Any = self
        if args.resume_from_checkpoint:
            raise ValueError(
                f"resume_from_checkpoint is {args.resume_from_checkpoint!r}; expected null: the "
                "same command goes on where its run folder stopped"
            )
        for name in ("save_only_model", "ignore_data_skip", "auto_find_batch_size"):
            if getattr(self, name):
                raise ValueError(f"{name} is true; expected false: {_NOT_EQUAL}")
        if self.save_total_limit is not None and self.save_total_limit < 2:
            raise ValueError(
                f"save_total_limit is {self.save_total_limit}; expected at least 2, or null: a run "
                "that is killed while it saves needs the checkpoint before"
            )
