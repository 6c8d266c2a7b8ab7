"""Answer problems with a checkpoint and show who wrote what, while it is written.

rivet solve exports/controller "What is the gcd of 84 and 36?"
rivet solve exports/controller --file problems.jsonl --out answers.jsonl
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rivet.checkpoints import Dtype
from rivet.config import ConfigError, parse_config

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from rivet.pieces import Piece
    from rivet.solver import Solution, Solver, Vote

# How each author's text looks; tags are dimmed on top of it. Deployed, the model writes the
# expert's part itself: the colour says in whose name.
STYLES = {"controller": "cyan", "expert": "magenta", "environment": "yellow"}
_IN_EXPERTS_NAME = ("reply", "code")
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rivet solve`; for one problem the exit code is 1 where no answer was reached."""
    config = parse_config(
        SolveConfig,
        argv,
        prog="rivet solve",
        description="Answer problems with a checkpoint, with no expert reachable.",
        positional=("checkpoint", "problem"),
    ).config
    if config.file:
        from stages.solve_file import solve_file

        return solve_file(config)
    problem = _read_problem() if config.problem == "-" else config.problem
    with open_solver(config) as solver:
        return _solve(solver, problem, config)


def _read_problem() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError([f"problem: standard input is no UTF-8 text ({error})"]) from error


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


def _solve(solver: Solver, problem: str, config: SolveConfig) -> int:
    """Solve one problem and show it; the exit code."""
    if config.vote:
        vote = solver.vote(problem, config.samples, **config.ask)
        if config.json:
            print(json.dumps(vote_as_json(vote), ensure_ascii=False))
        else:
            _show_vote(vote)
        return int(vote.answer is None)
    found = []
    for n in range(config.samples):
        if config.json:
            found.append(solver.solve(problem, sample_index=n, **config.ask))
            print(json.dumps(as_json(found[-1]), ensure_ascii=False), flush=True)
        else:
            found.append(_show_live(solver, problem, n, config))
    return int(all(solution.answer is None for solution in found))


# --- as JSON ------------------------------------------------------------------------------------


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


# --- on a terminal ------------------------------------------------------------------------------


def as_text(piece: Piece) -> Text:
    """A piece of a completion, coloured by author, tags dimmed."""
    from rich.text import Text

    is_as_expert = piece.expert is not None and piece.kind in _IN_EXPERTS_NAME
    style = STYLES["expert" if is_as_expert else piece.author]
    if piece.kind in ("format", "route"):
        style += " dim"
    return Text(printable(piece.text), style)


def printable(text: str) -> str:
    """Show control characters instead of sending them: a model must not steer the terminal."""
    shown = {n: chr(0x2400 + n) for n in range(32) if chr(n) not in "\n\t"}
    shown |= {127: "\u2421"} | {n: "\ufffd" for n in range(128, 160)}
    # Marks that reorder text would show it otherwise than it is.
    shown |= dict.fromkeys(
        [0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)], "\ufffd"
    )
    return text.translate(shown)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def _legend() -> Text:
    from rich.text import Text

    legend = Text("written by: ", "dim")
    for name, style in (
        ("the model", "controller"),
        ("the model as an expert", "expert"),
        ("the sandbox", "environment"),
    ):
        legend.append(f"{name}  ", STYLES[style])
    return legend


def _show_live(solver: Solver, problem: str, sample_index: int, config: SolveConfig) -> Solution:
    """Print an attempt while it is written."""
    from rivet.solver import Solution

    console = _console()
    if sample_index == 0:
        console.print(_legend())
    for item in solver.stream(problem, sample_index=sample_index, **config.ask):
        if isinstance(item, Solution):
            console.print()
            console.print(_result(item))
            return item
        console.print(as_text(item), end="")
    raise AssertionError("a stream ends with its solution")


def _result(solution: Solution) -> Text:
    from rich.text import Text

    if solution.answer is not None:
        return Text("answer: ", "bold").append(printable(solution.answer))
    why = solution.trajectory.malformed_reason or solution.trajectory.finish
    return Text(f"no answer ({why})", "bold red")


def _show_vote(vote: Vote) -> None:
    """Print the first sample of the largest party, and who agreed."""
    from rich.text import Text

    console = _console()
    if vote.parties:
        console.print(_legend())
        for piece in vote.solutions[vote.parties[0].members[0]].pieces:
            console.print(as_text(piece), end="")
        console.print()
    count = len(vote.solutions)
    for party in vote.parties:
        console.print(Text(f"{len(party.members)} of {count}: {printable(party.answer)}"))
    silent = sum(solution.answer is None for solution in vote.solutions)
    if silent:
        console.print(Text(f"{silent} of {count}: no answer", "dim"))
    if vote.answer is None:
        console.print(Text("no answer", "bold red"))
    else:
        console.print(Text("answer: ", "bold").append(printable(vote.answer)))


if __name__ == "__main__":
    raise SystemExit(main())
