"""What every trainer shows and keeps: metrics on disk, a line and a bar for people, Ctrl-C."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from rivet.interrupt import Stop
from rivet.runs import RunDir
from stages.checkpointing import list_files

logger = logging.getLogger(__name__)


class RunCallback(TrainerCallback):
    """Keeps the run folder and the reader up to date, and stops in an orderly way.

    Args:
        run: The opened run folder.
        stop: Whether the user asked to stop.
        shown: The line of a step: metric, label, format. metrics.jsonl has every metric.
    """

    def __init__(self, run: RunDir, stop: Stop, shown: Sequence[tuple[str, str, str]]) -> None:
        self._run = run
        self._stop = stop
        self._shown = shown
        self._bar: tqdm[Any] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Open the bar."""
        self._bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            unit="step",
            mininterval=0.5,
            dynamic_ncols=True,
            disable=args.disable_tqdm or not state.is_world_process_zero,
        )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Move the bar; save and stop where a signal asked for it."""
        if self._bar is not None:
            self._bar.update()
        is_asked = self._stop.requested
        if args.world_size > 1:
            # A signal may reach one process alone; they must stop at the same step. One that comes
            # while they talk is not in the sum: it counts at the next step.
            is_asked = bool(reduce(torch.tensor(int(is_asked), device=args.device), "sum"))
        if is_asked:
            self._stop.requested = True
            control.should_save = control.should_training_stop = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """List the checkpoint's files once every process has written its own: now it counts."""
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            assert args.output_dir is not None
            list_files(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Write a step's metrics; the trainer's summary at the end is none."""
        if not logs or "train_runtime" in logs:
            return
        self._run.append_metrics({"step": state.global_step, **logs})
        parts = [
            f"{label} {form.format(logs[name])}".strip()
            for name, label, form in self._shown
            if isinstance(logs.get(name), int | float)
        ]
        logger.info("step %d/%d  %s", state.global_step, state.max_steps, "  ".join(parts))
        self.on_metrics(state, control, logs)

    def on_metrics(
        self, state: TrainerState, control: TrainerControl, metrics: dict[str, Any]
    ) -> None:
        """For subclasses: what to do about a step's metrics once they are written."""

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
