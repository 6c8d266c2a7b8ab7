"""What Stage I does around each step beyond what every trainer does: watch for a collapse."""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerControl, TrainerState

from rivet.interrupt import Stop
from rivet.runs import RunDir
from stages.run_callback import RunCallback
from stages.stage1.config import AlarmAction
from stages.stage1.health import CollapseWatch

logger = logging.getLogger(__name__)

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


class Stage1Callback(RunCallback):
    """Stops the run, or warns, when its metrics complete a collapse.

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
        super().__init__(run, stop, _SHOWN)
        self.collapse: str | None = None
        self._is_alarmed = False
        self._watch = watch
        self._alarm = alarm

    def on_metrics(
        self, state: TrainerState, control: TrainerControl, metrics: dict[str, Any]
    ) -> None:
        """Every process logs the same means, so all of them stop at the same step."""
        reason = None if self._alarm == "off" else self._watch.update(metrics)
        if reason and not self._is_alarmed:  # where it began; a warning comes again at each step
            self._run.append_metrics({"step": state.global_step, "alarm": reason})
        self._is_alarmed = reason is not None
        if reason and self._alarm == "warn":
            logger.warning("collapse: %s", reason)
        elif reason:
            self.collapse = f"step {state.global_step}: {reason}"
            control.should_save = control.should_training_stop = True
