"""One training run inside a run folder: resume, train, save. Shared by warm start and Stage II.

    run/metrics.jsonl          one line each time the trainer logs

and the checkpoints of `stages.checkpointing`. The data order depends on seed and epoch alone, so
the parameters end the same as without an interruption.
"""

from __future__ import annotations

import copy
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

from rivet.interrupt import interruptible
from rivet.runs import RunDir
from rivet.settings import ProtocolSettings
from rivet.tokenization import ProtocolTokenizer
from stages.checkpointing import TRAINER, resume_point, save_controller, state_of
from stages.run_callback import RunCallback
from stages.stage2.objective import Objective
from stages.stage2.trainer import Stage2Trainer

logger = logging.getLogger(__name__)

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
    args = copy.copy(args)
    args.output_dir = str(run.path / TRAINER)
    resume_from = resume_point(run, args.world_size)
    state = {} if resume_from is None else state_of(Path(resume_from))
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
    save_controller(run, run.checkpoint, trainer, tokenizer, settings)
    steps = max(trainer.state.global_step, state.get("global_step", 0))
    last = logged(run)[-1:] or [{}]
    return {"steps": steps, **{k: last[0][k] for k in ("loss", "num_tokens") if k in last[0]}}


def logged(run: RunDir) -> list[dict[str, Any]]:
    """Lines of the run's metrics that belong to a training step."""
    return [line for line in run.metrics() if "loss" in line]
