"""What a rollout is asked for. The engine's result is `rivet.trajectory.Trajectory`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from rivet.rollout.backend import SamplingParams
from rivet.trajectory import Mode


def rollout_seed(run_seed: int, step: int, problem_id: str, sample_index: int) -> int:
    """Seed of one rollout, in [0, 2**63): the same on every machine and in every process."""
    key = f"{run_seed}\x1f{step}\x1f{problem_id}\x1f{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Bounds of one trajectory.

    Attributes:
        max_completion_length: Tokens of the whole completion, spliced ones included.
        max_expert_calls: Consultations; one more ends the trajectory with finish `budget`.
        max_code_runs: Programs, those inside replies included.
        max_reply_length: Tokens of one spliced reply; a longer one is cut and closed.
        max_output_length: Tokens of one spliced program output; a longer one is cut.
    """

    max_completion_length: int = 2048
    max_expert_calls: int = 4
    max_code_runs: int = 8
    max_reply_length: int = 1024
    max_output_length: int = 512


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One trajectory to sample.

    Attributes:
        problem_id: The problem.
        prompt_ids: Its prompt as token ids, from `rivet.prompts`.
        mode: Which condition (see `rivet.protocol`).
        sampling: How the controller samples.
        seed: From `rollout_seed`.
        step: Optimizer step, 0 outside training.
        sample_index: Index in the problem's group.
        info: Carried into `Trajectory.info` unchanged.
    """

    problem_id: str
    prompt_ids: tuple[int, ...]
    mode: Mode = "experts"
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    step: int = 0
    sample_index: int = 0
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """`{problem_id}#{sample_index}@{step}`, unique in a run."""
        return f"{self.problem_id}#{self.sample_index}@{self.step}"
