"""Answer problems with a checkpoint and show who wrote what, while it is written.

rivet solve exports/controller "What is the gcd of 84 and 36?"
rivet solve exports/controller --file problems.jsonl --out answers.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rivet.config import ConfigError, parse_config
from stages.solve_config import SolveConfig, as_json, open_solver, vote_as_json
from stages.solve_file import solve_file

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from rivet.pieces import Piece
    from rivet.solver import Solution, Solver, Vote

# How each author's text looks; tags are dimmed on top of it. Deployed, the model writes the
# expert's part itself: the colour says in whose name.
STYLES = {"controller": "cyan", "expert": "magenta", "environment": "yellow"}
_IN_EXPERTS_NAME = ("reply", "code")


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
        return solve_file(config)
    problem = _read_problem() if config.problem == "-" else config.problem
    with open_solver(config) as solver:
        return _solve(solver, problem, config)


def _read_problem() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError([f"problem: standard input is no UTF-8 text ({error})"]) from error


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
