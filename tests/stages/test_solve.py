"""`rivet solve`: who wrote what, safely on a terminal; the answer; the exit code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rivet.solver import Piece, Solution
from rivet.trajectory import CodeRun, Segment, Trajectory
from stages import solve
from stages.solve import SolveConfig, as_text, printable

PIECES = (
    Piece("controller", "format", "<python>"),
    Piece("controller", "code", "print(6)"),
    Piece("environment", "output", "[bold]6\x1b[2J"),
    Piece("controller", "answer", "6"),
)


def solution(answer: str | None = "6") -> Solution:
    """A solved problem, made by hand."""
    trajectory = Trajectory(
        id="p#0@0",
        problem_id="p",
        mode="local",
        prompt_ids=(1, 2),
        segments=(Segment("controller", "answer", (1, 2, 3)),),
        finish="answer" if answer else "length",
        well_formed=answer is not None,
        code_runs=(CodeRun("controller", "ok"),),
    )
    return Solution("gcd(12, 18)", answer, trajectory, PIECES)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[SolveConfig]:
    """Settings that the command was run with."""
    seen: list[SolveConfig] = []

    def run(config: SolveConfig) -> Solution:
        seen.append(config)
        return solution(None if "hard" in config.problem else "6")

    monkeypatch.setattr(solve, "run", run)
    return seen


def test_it_prints_the_trajectory_and_the_answer(asked: list[SolveConfig], capsys: Any) -> None:
    assert solve.main(["some/checkpoint", "gcd(12, 18) = ?", "--temperature", "0.5"]) == 0
    assert asked[0].checkpoint == "some/checkpoint" and asked[0].problem == "gcd(12, 18) = ?"
    assert asked[0].temperature == 0.5
    out = capsys.readouterr().out
    assert "written by: controller environment" in out
    assert "<python>print(6)[bold]6" in out
    assert out.rstrip().endswith("answer: 6")


def test_a_model_cannot_steer_the_terminal() -> None:
    text = as_text(solution()).plain
    assert "\x1b" not in text and "␛[2J" in text
    assert printable("a\tb\nc\x7f\x9b") == "a\tb\nc␡�"


def test_authors_have_their_own_colours() -> None:
    text = as_text(solution())
    styles = {text.plain[s.start : s.end]: str(s.style) for s in text.spans}
    assert styles["print(6)"] == "cyan" and styles["<python>"] == "cyan dim"
    assert styles["[bold]6␛[2J"] == "yellow"


def test_json_holds_segments_and_counts(asked: list[SolveConfig], capsys: Any) -> None:
    assert solve.main(["c", "p", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["answer"] == "6" and result["completion_tokens"] == 3
    assert [s["author"] for s in result["segments"]] == [p.author for p in PIECES]
    assert result["code_runs"] == [{"author": "controller", "status": "ok"}]


def test_without_an_answer_the_exit_code_is_1(asked: list[SolveConfig], capsys: Any) -> None:
    assert solve.main(["c", "a hard one"]) == 1
    assert "no answer (length)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["c"], "problem: required"),
        (["c", "p", "--top_p", "0"], "top_p: got 0.0"),
        (["c", "p", "--temperature=-1"], "temperature: got -1.0"),
        (["c", " "], "problem: is empty"),
        (["c", "1", "+", "1"], "unexpected argument '+'; quote a value that has spaces"),
    ],
)
def test_a_wrong_request_is_refused(argv: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        solve.main(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
