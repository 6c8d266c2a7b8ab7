"""Settings of `rivet solve`, the solver that they open, and solutions as JSON.

What one problem (`stages.solve`) and a file of them (`stages.solve_file`) have in common.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rivet.checkpoints import Dtype
from rivet.config import ConfigError

if TYPE_CHECKING:
    from rivet.solver import Solution, Solver, Vote

_SAMPLING_TEMPERATURE = 0.7


def faults_of_urls(urls: Sequence[str]) -> list[str]:
    """What is wrong with the setting `vllm`."""
    return [
        f"vllm: got {url!r}, expected http://HOST:PORT"
        for url in urls
        if not re.match(r"https?://[^/\s]+", url)
    ]


@dataclass(frozen=True)
class SolveConfig:
    """Settings of `rivet solve`."""

    checkpoint: str = field(metadata={"help": "Checkpoint, export or run folder, or a Hub name."})
    problem: str = field(
        default="", metadata={"help": "The problem as text; - reads it from standard input."}
    )
    file: str = field(
        default="",
        metadata={"help": 'Solve every line of a JSONL file instead: {"problem": ..., "id": ...}.'},
    )
    out: str = field(
        default="",
        metadata={
            "help": "Where the solutions of a file go, one JSON object a line; empty: printed. "
            "The same command goes on where it was interrupted."
        },
    )
    json: bool = field(default=False, metadata={"help": "Print one JSON object a solution."})
    samples: int = field(default=1, metadata={"help": "Attempts at each problem, at least 1."})
    vote: bool = field(
        default=False, metadata={"help": "Take the answer that most samples agree on."}
    )
    temperature: float | None = field(
        default=None,
        metadata={
            "help": "Sampling temperature, at least 0; 0 is greedy. null: 0 for one sample, "
            f"{_SAMPLING_TEMPERATURE} for several."
        },
    )
    top_p: float = field(default=1.0, metadata={"help": "Nucleus mass, in (0, 1]."})
    seed: int = field(default=0, metadata={"help": "Seed of the sampling, at least 0."})
    max_completion_length: int | None = field(
        default=None,
        metadata={"help": "Tokens of the completion, at least 1; null: the checkpoint's limit."},
    )
    max_batch: int = field(
        default=16, metadata={"help": "Attempts that are sampled together, at least 1."}
    )
    vllm: list[str] = field(
        default_factory=list,
        metadata={"help": "Base URLs of vLLM servers that hold the weights; none: load them here."},
    )
    device: str | None = field(
        default=None, metadata={"help": "Such as cpu or cuda:0; null: a GPU if there is one."}
    )
    dtype: Dtype = field(
        default="auto", metadata={"help": "Number format of the weights; auto keeps theirs."}
    )

    def __post_init__(self) -> None:
        faults = []
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            faults.append(f"temperature: got {self.temperature}, expected at least 0, finite")
        if not 0 < self.top_p <= 1:
            faults.append(f"top_p: got {self.top_p}, expected above 0 and at most 1")
        for name in ("samples", "max_batch", "max_completion_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                faults.append(f"{name}: got {value}, expected at least 1")
        faults += faults_of_urls(self.vllm)
        if self.vote and self.samples < 2:
            faults.append("vote: one sample cannot vote; set --samples to 2 or more")
        if self.samples > 1 and self.temperature == 0:
            faults.append("temperature: at 0 all samples are the same; set it above 0")
        if bool(self.file) == bool(self.problem.strip()):
            faults.append("problem: is empty; expected text, or --file FILE; not both")
        if self.out and not self.file:
            faults.append("out: is for --file; use --json and redirect the output of one problem")
        if faults:
            raise ConfigError(faults)

    @property
    def ask(self) -> dict[str, Any]:
        """How each problem is asked."""
        default = _SAMPLING_TEMPERATURE if self.samples > 1 else 0.0
        temperature = default if self.temperature is None else self.temperature
        return {"temperature": temperature, "top_p": self.top_p, "seed": self.seed}


def check_device(device: str | None) -> None:
    """Refuse a device that this machine lacks, before anything is loaded.

    Raises:
        ConfigError: It cannot be used.
    """
    if device is None:
        return
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError([f"device: {device!r} cannot be used here ({first})"]) from error


def open_solver(config: SolveConfig) -> Solver:
    """Load the checkpoint."""
    from transformers.utils import logging as transformers_logging

    from rivet.solver import Solver

    check_device(config.device)
    transformers_logging.disable_progress_bar()
    return Solver(
        config.checkpoint,
        vllm=config.vllm,
        device=config.device,
        dtype=config.dtype,
        max_completion_length=config.max_completion_length,
        max_batch=config.max_batch,
    )


def as_json(solution: Solution) -> dict[str, Any]:
    """A solution as JSON types."""
    trajectory = solution.trajectory
    return {
        "problem": solution.problem,
        **solution.outcome(),
        "segments": [asdict(piece) for piece in solution.pieces],
        "prompt_tokens": len(trajectory.prompt_ids),
        "completion_tokens": len(trajectory.completion_ids),
    }


def vote_as_json(vote: Vote) -> dict[str, Any]:
    """A vote as JSON types."""
    return {
        "problem": vote.solutions[0].problem,
        "answer": vote.answer,
        "votes": [{"answer": p.answer, "samples": list(p.members)} for p in vote.parties],
        "solutions": [as_json(solution) for solution in vote.solutions],
    }
