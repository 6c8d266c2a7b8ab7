"""The Stage II trainer: TRL's `SFTTrainer` with a weight for each token.

Written against TRL 1.16 and transformers 5.17. Beyond public interfaces it relies on the hooks
that `tests/stages/test_stage2_contract.py` pins:

- `Trainer._get_num_items_in_batch`: what it returns reaches `compute_loss` as
  `num_items_in_batch`, once an optimizer step; here it is Z, so accumulation is exact.
- `SFTTrainer.__init__` gives the model TRL's fused LM head: log-probabilities without logits.
- `Trainer._set_signature_columns_if_needed`, `Trainer._get_train_sampler`,
  `Trainer._run_epoch`, `Trainer.model_accepts_loss_kwargs`, `SFTTrainer._metrics`,
  `SFTTrainer._total_train_tokens`.
- `trl.trainer.utils`, through `stages.fused_head`.

Packing is ours (`stages.stage2.batching`): TRL's own refuses a collator, and cuts trajectories.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import SFTConfig, SFTTrainer

from stages.fused_head import score_trained_only
from stages.stage2.batching import PAD_CODE, LengthBucketSampler, WeightedCollator
from stages.stage2.objective import (
    AUTHOR_CODES,
    EXPERT,
    FORMAT,
    Objective,
    focal_weights,
    normalizer,
    weighted_nll,
)

COLUMNS = ("input_ids", "authors", "kinds", "expert_scale", "length")
_CONTROLLER = AUTHOR_CODES.index("controller")
_GROUPS = ("controller", "expert", "format")


class Stage2Trainer(SFTTrainer):
    """Weighted SFT over rows of token ids with author and kind codes.

    Args:
        model: The controller.
        args: As for TRL. `packing` packs each batch into rows of `max_length`;
            `train_sampling_strategy="group_by_length"` uses `LengthBucketSampler`.
        objective: Weights and normalisation.
        train_dataset: Columns `input_ids`, `authors`, `kinds`, `length`, maybe `expert_scale`.
        processing_class: The controller's tokenizer, saved with each checkpoint.
        eval_dataset: Same columns.
        callbacks: As for TRL.
        peft_config: Train an adapter.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: SFTConfig,
        *,
        objective: Objective,
        train_dataset: Dataset,
        processing_class: PreTrainedTokenizerBase,
        eval_dataset: Dataset | None = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        peft_config: PeftConfig | None = None,
    ) -> None:
        _check(args)
        self.objective: Objective = objective
        pack_length = args.max_length if args.packing else None
        collator = WeightedCollator(
            objective,
            pad_token_id=_pad_token_id(processing_class),
            pack_length=pack_length,
        )
        args.dataset_kwargs = {"skip_prepare_dataset": True}  # the only key that TRL knows
        args.packing = False  # for TRL; ours happens in the collator
        super().__init__(
            model=model,
            args=args,
            data_collator=collator,
            train_dataset=_arrays(train_dataset),
            eval_dataset=None if eval_dataset is None else _arrays(eval_dataset),
            processing_class=processing_class,
            callbacks=list(callbacks or []),
            peft_config=peft_config,
        )
        args.packing = pack_length is not None
        # Our loss is normalised over the whole step whatever the model's forward accepts.
        self.model_accepts_loss_kwargs = True
        self._sums: dict[str, torch.Tensor] = {}
        self._last_log = time.perf_counter()

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Weighted negative log-likelihood of one micro-batch over Z of the optimizer step."""
        weights = inputs["weights"][:, 1:]
        is_format = inputs["kinds"][:, 1:] == FORMAT
        names = ("input_ids", "labels", "position_ids")
        with score_trained_only(weights.device, model):
            outputs = model(
                **{name: inputs[name] for name in names if name in inputs},
                use_cache=False,
                fused_lm_head=True,
            )
        log_probs = outputs.log_probs
        z = num_items_in_batch
        if z is None:
            z = normalizer(weights, self.objective.normalization)
        if self.objective.is_focal:
            alpha = self.objective.format_alpha
            weights = focal_weights(weights, log_probs, is_format, alpha)
        loss = weighted_nll(log_probs, weights, z)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            # Z counts every process and DDP averages the gradients over them.
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        self._record(outputs, inputs, is_format)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log with the metrics of all processes since the last time."""
        mode = "train" if self._is_training else "eval"
        if self._sums:
            sums = self.accelerator.reduce(torch.stack(list(self._sums.values())), "sum").tolist()
            self._metrics[mode].update(
                {k: [v] for k, v in self._rates(dict(zip(self._sums, sums, strict=True))).items()}
            )
            self._sums = {}
        super().log(logs, start_time)

    @property
    def _is_training(self) -> bool:
        assert self.model is not None
        return self.model.training

    def _rates(self, sums: dict[str, float]) -> dict[str, float]:
        trained = max(sums["trained"], 1.0)
        metrics = {
            "entropy": sums["entropy"] / trained,
            "mean_token_accuracy": sums["top1"] / trained,
        }
        for group in _GROUPS:
            if sums[f"count/{group}"]:
                metrics[f"loss/{group}"] = sums[f"nll/{group}"] / sums[f"count/{group}"]
        if self._is_training:
            self._total_train_tokens += int(sums["tokens"])
            now = time.perf_counter()
            metrics["speed/tokens_per_s"] = sums["tokens"] / max(now - self._last_log, 1e-9)
            metrics["num_tokens"] = self._total_train_tokens
            self._last_log = now
        return metrics

    def _record(self, outputs: Any, inputs: dict[str, Any], is_format: torch.Tensor) -> None:
        """Add to running sums on the device; nothing waits for it until the next log."""
        authors = inputs["authors"][:, 1:]
        trained = outputs.label_mask
        nll = -outputs.log_probs.detach()
        groups = {
            "controller": (authors == _CONTROLLER) & ~is_format,
            "expert": (authors == EXPERT) & ~is_format,
            "format": is_format,
        }
        step = {
            "trained": trained.sum(),
            "entropy": outputs.entropy.detach().sum(),
            "top1": outputs.is_top1.sum(),
            "tokens": (inputs["authors"] != PAD_CODE).sum(),
        }
        for name, mask in groups.items():
            counted = mask & trained
            step[f"count/{name}"] = counted.sum()
            step[f"nll/{name}"] = nll[counted].sum()
        for name, value in step.items():
            value = value.double() if value.device.type != "mps" else value.float()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def _get_num_items_in_batch(
        self, batch_samples: list[dict[str, Any]], device: torch.device
    ) -> torch.Tensor | None:
        """Z over the micro-batches of one optimizer step, of all processes."""
        if not batch_samples:
            return None
        parts = [
            normalizer(batch["weights"][:, 1:], self.objective.normalization)
            for batch in batch_samples
        ]
        z = torch.stack(parts).sum().to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            z = self.accelerator.gather(z).sum()
        parallel = getattr(self.accelerator, "parallelism_config", None)
        return z / parallel.non_data_parallel_size if parallel else z

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns: Any = list(COLUMNS)

    def _run_epoch(
        self, model: Any, epoch: int, train_dataloader: Any, *rest: Any, **named: Any
    ) -> None:
        # Within a resumed epoch the trainer wraps the loader to skip batches, and with several
        # processes what it tells the wrapper of the epoch no longer reaches the sampler.
        train_dataloader.set_epoch(epoch)
        super()._run_epoch(model, epoch, train_dataloader, *rest, **named)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Any:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != "group_by_length":
            return super()._get_train_sampler(train_dataset)
        return LengthBucketSampler(
            dataset["length"][:],
            # Of all processes, so that what is in a step does not depend on their number.
            self.args.train_batch_size * self.args.world_size,
            seed=self.args.data_seed if self.args.data_seed is not None else self.args.seed,
        )


def _check(args: SFTConfig) -> None:
    """Refuse what this trainer would silently not do."""
    if args.loss_type != "nll":
        raise ValueError(f"loss_type is {args.loss_type!r}; Stage II knows 'nll' only")
    if args.label_smoothing_factor:
        raise ValueError("label_smoothing_factor is not supported by Stage II; set it to 0")
    if args.packing and args.max_length is None:
        raise ValueError("packing needs max_length, the length of a packed row; set it")


def _pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad is None:
        raise ValueError("the tokenizer has neither a pad nor an eos token; set one")
    return int(pad)


def _arrays(dataset: Dataset) -> Dataset:
    """Rows as NumPy arrays: lists of Python integers cost more than a small model's step."""
    return dataset.with_format("numpy")
