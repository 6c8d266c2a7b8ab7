"""One training run inside a run folder: resume, train, save. Shared by warm start and Stage II.

    run/trainer/checkpoint-N   the trainer's own state, for resuming
    run/metrics.jsonl          one line each time the trainer logs
    run/checkpoint             the result: weights, tokenizer, rivet.json

A checkpoint counts once `trainer_state.json`, which the trainer writes last, is whole; one that a
kill cut short is removed and training resumes from the one before. The data order depends on seed
and epoch alone, so the parameters end the same as without the interruption.
"""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import PeftConfig
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
)
from transformers.trainer_pt_utils import get_model_param_count
from transformers.utils.logging import disable_progress_bar
from trl import SFTConfig

from rivet.files import atomic_folder, remove
from rivet.interrupt import interruptible
from rivet.runs import RunDir
from rivet.settings import ProtocolSettings
from rivet.tokenization import ProtocolTokenizer
from stages.run_callback import RunCallback
from stages.stage2.objective import Objective
from stages.stage2.trainer import Stage2Trainer

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
# Shown in the line of each step, in this order; metrics.jsonl has them all.
_SHOWN = tuple(
    (name, name, "{:.4g}")
    for name in ("loss", "loss/format", "mean_token_accuracy", "grad_norm", "learning_rate")
)


def train(
    run: RunDir,
    args: SFTConfig,
    *,
    model: PreTrainedModel,
    tokenizer: ProtocolTokenizer,
    settings: ProtocolSettings,
    objective: Objective,
    dataset: Dataset,
    peft_config: PeftConfig | None = None,
) -> dict[str, Any]:
    """Train, resuming if the run folder holds a checkpoint, and save `run.checkpoint`.

    Args:
        run: The opened run folder.
        args: Trainer arguments; `output_dir` is set to a folder inside the run.
        model: Where training starts.
        tokenizer: Saved with the weights.
        settings: Saved with the weights.
        objective: Weights of the loss.
        dataset: Rows for `Stage2Trainer`.
        peft_config: Train an adapter, merged into the saved weights.

    Returns:
        `steps`, and of the last logged step `loss` and `num_tokens`.

    Raises:
        Interrupted: A signal asked to stop; the state is saved.
    """
    disable_progress_bar()  # of reading and writing weights, which tears ours apart
    folder = run.path / "trainer"
    args = copy.copy(args)
    args.output_dir = str(folder)
    resume_from = last_checkpoint(folder, clean=run.is_writer)
    state = {} if resume_from is None else _state_of(Path(resume_from))
    run.trim_metrics(state.get("global_step", 0))
    with interruptible() as stop:
        trainer = Stage2Trainer(
            model,
            args,
            objective=objective,
            train_dataset=dataset,
            processing_class=tokenizer.hf,
            callbacks=[RunCallback(run, stop, _SHOWN)],
            peft_config=peft_config,
        )
        for printing in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(printing)
        trainer._total_train_tokens = max((line["num_tokens"] for line in logged(run)), default=0)
        if resume_from is not None and state["global_step"] >= state["max_steps"]:
            # transformers would train a step more than it was told to.
            trainer._load_from_checkpoint(resume_from)
        else:
            logger.info(
                "training %d parameters on %d rows%s",
                get_model_param_count(trainer.model, trainable_only=True),
                len(dataset),
                f", from step {state['global_step']}" if state else "",
            )
            trainer.train(resume_from_checkpoint=resume_from)
            if stop.requested and trainer.state.global_step < trainer.state.max_steps:
                stop.check(f"step {trainer.state.global_step}")
    save_checkpoint(run, trainer, tokenizer, settings)
    steps = max(trainer.state.global_step, state.get("global_step", 0))
    last = logged(run)[-1:] or [{}]
    return {"steps": steps, **{k: last[0][k] for k in ("loss", "num_tokens") if k in last[0]}}


def logged(run: RunDir) -> list[dict[str, Any]]:
    """Lines of the run's metrics that belong to a training step."""
    return [line for line in run.metrics() if "loss" in line]


def save_checkpoint(
    run: RunDir,
    trainer: Stage2Trainer,
    tokenizer: ProtocolTokenizer,
    settings: ProtocolSettings,
) -> None:
    """Write weights, tokenizer and `rivet.json` to `run.checkpoint`, whole or not at all."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    state = None
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if not run.is_writer:
        return
    with atomic_folder(run.checkpoint) as temporary:
        model.save_pretrained(temporary, state_dict=state)
        tokenizer.hf.save_pretrained(temporary)
        settings.save(temporary)


def model_arguments(args: SFTConfig) -> dict[str, Any]:
    """Arguments for loading the controller: `model_init_kwargs`, in float32 unless they say."""
    given = args.model_init_kwargs
    return {"dtype": "float32", **(given if isinstance(given, dict) else {})}


def last_checkpoint(folder: Path, *, clean: bool = False) -> str | None:
    """The trainer's last whole checkpoint, None if there is none.

    Args:
        folder: The trainer's output folder.
        clean: Remove what a kill left half-written.
    """
    found: list[tuple[int, str]] = []
    for path in folder.glob("checkpoint-*"):
        if state := _state_of(path):
            found.append((state["global_step"], str(path)))
        elif clean:
            logger.warning("%s: not whole, left by an interrupted save; removed", path)
            remove(path)
    return max(found)[1] if found else None


def _state_of(checkpoint: Path) -> dict[str, Any]:
    """The trainer's state in a checkpoint, empty if the checkpoint is not whole."""
    try:
        state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_whole = isinstance(state, dict) and checkpoint.name == f"checkpoint-{state['global_step']}"
    return state if is_whole else {}
