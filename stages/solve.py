"""Answer one problem with a checkpoint and show who wrote what.

rivet solve exports/controller "What is the gcd of 84 and 36?"
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rivet.checkpoints import Dtype
from rivet.config import ConfigError, parse_config

if TYPE_CHECKING:
    from rich.text import Text

    from rivet.solver import Solution, Solver

# How each author's text looks; tags are dimmed on top of it.
STYLES = {"controller": "cyan", "expert": "magenta", "environment": "yellow"}


@dataclass(frozen=True)
class SolveConfig:
    """Settings of `rivet solve`."""

    checkpoint: str = field(metadata={"help": "Checkpoint, export or run folder."})
    problem: str = field(metadata={"help": "The problem as text; - reads it from standard input."})
    json: bool = field(default=False, metadata={"help": "Print one JSON object instead."})
    temperature: float = field(
        default=0.0, metadata={"help": "Sampling temperature, at least 0; 0 is greedy."}
    )
    top_p: float = field(default=1.0, metadata={"help": "Nucleus mass, in (0, 1]."})
    seed: int = field(default=0, metadata={"help": "Seed of the sampling, at least 0."})
    max_completion_length: int | None = field(
        default=None,
        metadata={"help": "Tokens of the completion, at least 1; null: the checkpoint's limit."},
    )
    device: str | None = field(
        default=None, metadata={"help": "Such as cpu or cuda:0; null: a GPU if there is one."}
    )
    dtype: Dtype = field(
        default="auto", metadata={"help": "Number format of the weights; auto keeps theirs."}
    )

    def __post_init__(self) -> None:
        faults = []
        if self.temperature < 0:
            faults.append(f"temperature: got {self.temperature}, expected at least 0")
        if not 0 < self.top_p <= 1:
            faults.append(f"top_p: got {self.top_p}, expected above 0 and at most 1")
        if self.max_completion_length is not None and self.max_completion_length < 1:
            faults.append(
                f"max_completion_length: got {self.max_completion_length}, expected at least 1"
            )
        if not self.problem.strip():
            faults.append("problem: is empty; expected text")
        if faults:
            raise ConfigError(faults)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rivet solve`; the exit code is 1 where no answer was reached."""
    config = parse_config(
        SolveConfig,
        argv,
        prog="rivet solve",
        description="Answer one problem with a checkpoint, with no expert reachable.",
        positional=("checkpoint", "problem"),
    ).config
    solution = run(config)
    if config.json:
        print(json.dumps(as_json(solution), ensure_ascii=False))
    else:
        _show(solution)
    return 0 if solution.answer is not None else 1


def run(config: SolveConfig) -> Solution:
    """Load the checkpoint and solve the problem."""
    from rivet.solver import Solver

    problem = sys.stdin.read() if config.problem == "-" else config.problem
    with Solver(
        config.checkpoint,
        device=config.device,
        dtype=config.dtype,
        max_completion_length=config.max_completion_length,
    ) as solver:
        return _solve(solver, problem, config)


def _solve(solver: Solver, problem: str, config: SolveConfig) -> Solution:
    return solver.solve(
        problem, temperature=config.temperature, top_p=config.top_p, seed=config.seed
    )


def as_json(solution: Solution) -> dict[str, Any]:
    """A solution as JSON types."""
    trajectory = solution.trajectory
    return {
        "problem": solution.problem,
        "answer": solution.answer,
        "finish": trajectory.finish,
        "well_formed": trajectory.well_formed,
        "malformed_reason": trajectory.malformed_reason,
        "segments": [
            {"author": piece.author, "kind": piece.kind, "text": piece.text}
            for piece in solution.pieces
        ],
        "code_runs": [{"author": run.author, "status": run.status} for run in trajectory.code_runs],
        "prompt_tokens": len(trajectory.prompt_ids),
        "completion_tokens": len(trajectory.completion_ids),
    }


def as_text(solution: Solution) -> Text:
    """The completion, coloured by author, tags dimmed."""
    from rich.text import Text

    text = Text()
    for piece in solution.pieces:
        style = STYLES[piece.author] + (" dim" if piece.kind in ("format", "route") else "")
        text.append(printable(piece.text), style)
    return text


def printable(text: str) -> str:
    """Show control characters instead of sending them: a model must not steer the terminal."""
    shown = {n: chr(0x2400 + n) for n in range(32) if chr(n) not in "\n\t"}
    shown |= {127: "\u2421"} | {n: "\ufffd" for n in range(128, 160)}
    return text.translate(shown)


def _show(solution: Solution) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    legend = Text("written by: ", "dim")
    for author in dict.fromkeys(piece.author for piece in solution.pieces):
        legend.append(f"{author} ", STYLES[author])
    console.print(legend)
    console.print(as_text(solution))
    if solution.answer is not None:
        console.print(Text("answer: ", "bold").append(printable(solution.answer)))
    else:
        why = solution.trajectory.malformed_reason or solution.trajectory.finish
        console.print(Text(f"no answer ({why})", "bold red"))


if __name__ == "__main__":
    raise SystemExit(main())
