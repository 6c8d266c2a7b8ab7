"""What a rollout is asked for, and where its programs run.

The result is `rivet.trajectory.Trajectory`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rivet.rollout.backend import SamplingParams
from rivet.trajectory import Mode
from sandbox import ExecutionResult


def rollout_seed(run_seed: int, step: int, problem_id: str, sample_index: int) -> int:
    """Seed of one rollout, in [0, 2**63): the same on every machine and in every process."""
    key = f"{run_seed}\x1f{step}\x1f{problem_id}\x1f{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


LATE = "late:deadline"  # the fault of a trajectory that was given up at its deadline


class PromptTooLongError(ValueError):
    """Problems whose prompt leaves no room for a single token; the message names them."""


def check_prompts(lengths: Mapping[str, int], max_context: int | None) -> None:
    """Refuse prompts that no backend call could continue.

    Args:
        lengths: Problem id -> tokens of its prompt.
        max_context: What the backend takes, prompt included; None: it does not say.

    Raises:
        PromptTooLongError: There is no room behind a prompt.
    """
    if max_context is None:
        return
    too_long = {name: n for name, n in lengths.items() if n >= max_context}
    if too_long:
        listed = ", ".join(f"{name} ({n} tokens)" for name, n in list(too_long.items())[:5])
        raise PromptTooLongError(
            f"the prompts of {len(too_long)} of {len(lengths)} problems do not fit: {listed}"
            f"{', ...' if len(too_long) > 5 else ''}; expected fewer than {max_context} tokens, "
            "what the controller's context holds, completion included: shorten these problems or "
            "leave them out, or take a controller with a longer context"
        )


class Sandbox(Protocol):
    """Where programs run; `sandbox.PythonSandbox` is one."""

    async def run(self, code: str) -> ExecutionResult:
        """Run a program; never raises for what it does."""
        ...


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
        max_completion_length: Lowers the engine's limit for this trajectory; None keeps it.
        deadline_s: Seconds from its start, experts and programs included, after which it is given
            up with the fault `late:deadline`; None waits for ever.
        info: Carried into `Trajectory.info` unchanged.
    """

    problem_id: str
    prompt_ids: tuple[int, ...]
    mode: Mode = "experts"
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    step: int = 0
    sample_index: int = 0
    max_completion_length: int | None = None
    deadline_s: float | None = None
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """`{problem_id}#{sample_index}@{step}`, unique in a run."""
        return f"{self.problem_id}#{self.sample_index}@{self.step}"
