"""Runs of both stages that a test can start alone, or in two processes under torchrun.

    torchrun --nproc_per_node 2 many_processes_world.py JOBS.json

Sizes are those of a global batch; the batch of a process follows from how many there are.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stage1_world import ScriptedSource, run, scripted

from rivet.config import load_config
from rivet.trajectory import Trajectory
from stages.stage1.rollouts import Asked
from stages.stage2.config import Stage2Config
from stages.stage2.main import run as run_stage2

GROUP, PROMPTS = 4, 3
ROWS = GROUP * PROMPTS  # of a step: the second of two processes begins inside the second group
FAULT: dict[str, Any] = {"fault": "expert_timeout", "outcome": None, "reward": None}
VOID: dict[str, Any] = {"answer": None, "expert_calls": (), "outcome": "no_answer", "reward": 0.0}


def place(asked: Asked) -> int:
    """Row of a rollout in the step's global batch."""
    return GROUP * (int(asked.problem.id[1:]) % PROMPTS) + asked.sample_index


def plain(asked: Asked) -> Trajectory:
    return scripted(asked)


def second_has_faults(asked: Asked) -> Trajectory:
    return replace(scripted(asked), **(FAULT if place(asked) in (7, 8) else {}))


def second_is_void(asked: Asked) -> Trajectory:
    return replace(scripted(asked), **(VOID if place(asked) >= ROWS // 2 else {}))


ROLLOUTS = {f.__name__: f for f in (plain, second_has_faults, second_is_void)}


class Troubled(ScriptedSource):
    """In the second process, fails at step 2, or is told to stop there."""

    def __init__(self, trouble: str, notes: Path) -> None:
        super().__init__()
        self._trouble = trouble
        self._notes = notes

    def sample(self, asked: Sequence[Asked]) -> list[Trajectory]:
        if asked[0].step == 2 and os.environ.get("RANK") == "1":
            self._notes.write_text("now")
            if self._trouble == "stop":
                signal.raise_signal(signal.SIGTERM)
            else:
                raise OSError("the scratch disk of this node is gone")
        return super().sample(asked)


def stage1(
    folder: str, rollouts: str = "plain", parts: int = 1, trouble: str = "", **changes: Any
) -> None:
    """A Stage I run over scripted rollouts."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    source: Any = ScriptedSource(ROLLOUTS[rollouts])
    if trouble:
        source = Troubled(trouble, Path(folder + ".trouble"))
    run(
        Path(folder),
        source,
        per_device_train_batch_size=ROWS // parts // world,
        gradient_accumulation_steps=parts,
        num_generations=GROUP,
        adam_epsilon=1e-3,  # at the usual 1e-8 rounding alone would move parameters by a step
        shuffle_dataset=False,
        max_fault_rate=1.0,
        **{"max_steps": 2, "save_strategy": "no", "collapse_alarm": "off", **changes},
    )


def stage2(folder: str, parts: int = 1, rows: int = 8, **changes: Any) -> None:
    """A Stage II run, filter and all."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    settings: dict[str, Any] = {
        "output_dir": folder, "max_steps": 2, "learning_rate": 1e-2, "adam_epsilon": 1e-3,
        "per_device_train_batch_size": rows // parts // world,
        "gradient_accumulation_steps": parts, "gradient_checkpointing": False,
        "save_strategy": "no", "max_length": 150, "report_to": "none", "disable_tqdm": True,
        "use_cpu": True, **changes,
    }  # fmt: skip
    run_stage2(load_config(Stage2Config, None, **settings))


def do(jobs: Sequence[dict[str, Any]]) -> None:
    for job in jobs:
        {"stage1": stage1, "stage2": stage2}[job["stage"]](**job["settings"])


if __name__ == "__main__":
    do(json.loads(Path(sys.argv[1]).read_text()))
