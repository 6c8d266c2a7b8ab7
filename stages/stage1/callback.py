"""What happens around each step: metrics on disk, a line and a bar for people, alarms, Ctrl-C."""

from __future__ import annotations

import logging
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rivet.interrupt import Stop
from rivet.runs import RunDir
from stages.stage1.config import AlarmAction
from stages.stage1.health import CollapseWatch

logger = logging.getLogger(__name__)

# The line of a step: metric, label, format. metrics.jsonl has everything.
_SHOWN = (
    ("reward/mean", "reward", "{:.2f}"),
    ("route/accuracy", "routes", "{:.0%}"),
    ("rollout/well_formed", "well-formed", "{:.0%}"),
    ("rollout/fault_rate", "faults", "{:.0%}"),
    ("expert/logp", "expert logp", "{:.2f}"),
    ("route/entropy", "route entropy", "{:.2f}"),
    ("grad_norm", "grad", "{:.2f}"),
    ("step_time", "", "{:.1f} s"),
)


class Stage1Callback(TrainerCallback):
    """Keeps the run folder and the reader up to date.

    Args:
        run: The opened run folder.
        stop: Whether the user asked to stop.
        watch: Tells a collapse.
        alarm: What to do about one.

    Attributes:
        collapse: Why the run was stopped; None if it was not.
    """

    def __init__(
        self, run: RunDir, stop: Stop, watch: CollapseWatch, alarm: AlarmAction = "stop"
    ) -> None:
        self.collapse: str | None = None
        self._run = run
        self._stop = stop
        self._watch = watch
        self._alarm = alarm
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
        if self._stop.requested:
            control.should_save = control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Write a step's metrics, and stop the run if they complete a collapse."""
        if not logs or "train_runtime" in logs:
            return
        # Every process logs the same means, so all of them stop at the same step.
        reason = None if self._alarm == "off" else self._watch.update(logs)
        self._run.append_metrics({"step": state.global_step, **logs})
        parts = [
            f"{label} {form.format(logs[name])}".strip()
            for name, label, form in _SHOWN
            if isinstance(logs.get(name), int | float)
        ]
        logger.info("step %d/%d  %s", state.global_step, state.max_steps, "  ".join(parts))
        if reason and self._alarm == "warn":
            logger.warning("collapse: %s", reason)
        elif reason:
            self.collapse = f"step {state.global_step}: {reason}"
            control.should_save = control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
