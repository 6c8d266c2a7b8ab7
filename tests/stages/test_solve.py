"""`rivet solve`: who wrote what, live and safe on a terminal; votes, files, the exit code."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from learnt import PROBLEMS

from rivet.async_solver import Vote
from rivet.config import ConfigError
from rivet.pieces import Piece
from rivet.solver import Solution, Solver
from rivet.trajectory import CodeRun, Segment, Trajectory
from rivet.voting import Party
from stages import solve, solve_config
from stages.solve import as_text, printable
from stages.solve_file import SolveFileError

PIECES = (
    Piece("controller", "format", '<reply name="calc"><python>'),
    Piece("controller", "code", "print(6)", "calc"),
    Piece("environment", "output", "[bold]6\x1b[2J", "calc"),
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


class Scripted:
    """Stands in for a solver; knows one problem to be hard."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def solve(self, problem: str, **ask: Any) -> Solution:
        """The same for every problem."""
        self.asked.append((problem, ask))
        return solution(None if "hard" in problem else "6")

    def stream(self, problem: str, **ask: Any) -> Iterator[Piece | Solution]:
        """The pieces, then the solution."""
        yield from PIECES
        yield self.solve(problem, **ask)

    def vote(self, problem: str, samples: int, **ask: Any) -> Vote:
        """All but the last sample agree; the last one says nothing."""
        found = [self.solve(problem, **ask) for _ in range(samples - 1)]
        return Vote("6", (Party("6", tuple(range(samples - 1))),), (*found, solution(None)))


@pytest.fixture
def solver(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """What the command opens."""
    scripted = Scripted()
    monkeypatch.setattr(solve, "open_solver", lambda config: scripted)
    return scripted


def test_it_prints_the_attempt_and_the_answer(solver: Scripted, capsys: Any) -> None:
    assert solve.main(["some/checkpoint", "gcd(12, 18) = ?", "--temperature", "0.5"]) == 0
    ask = {"temperature": 0.5, "top_p": 1.0, "seed": 0, "sample_index": 0}
    assert solver.asked == [("gcd(12, 18) = ?", ask)]
    out = capsys.readouterr().out
    assert "written by: the model  the model as an expert  the sandbox" in out
    assert '<reply name="calc"><python>print(6)[bold]6' in out
    assert out.rstrip().endswith("answer: 6")


def test_a_model_cannot_steer_the_terminal() -> None:
    text = "".join(as_text(piece).plain for piece in PIECES)
    assert "\x1b" not in text and "\u241b[2J" in text
    assert printable("a\tb\nc\x7f\x9b\u202e") == "a\tb\nc\u2421\ufffd\ufffd"


def test_authors_have_their_own_colours() -> None:
    styles = [str(as_text(piece).style) for piece in PIECES]
    assert styles == ["cyan dim", "magenta", "yellow", "cyan"]


def test_json_holds_segments_and_counts(solver: Scripted, capsys: Any) -> None:
    assert solve.main(["c", "p", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["answer"] == "6" and result["completion_tokens"] == 3
    assert [s["author"] for s in result["segments"]] == [p.author for p in PIECES]
    assert [s["expert"] for s in result["segments"]] == [None, "calc", "calc", None]
    assert result["code_runs"] == [{"author": "controller", "status": "ok"}]


def test_several_samples_are_shown_one_by_one(solver: Scripted, capsys: Any) -> None:
    assert solve.main(["c", "p", "--samples", "3", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert [ask["sample_index"] for _, ask in solver.asked] == [0, 1, 2]
    assert {ask["temperature"] for _, ask in solver.asked} == {0.7}


def test_a_vote_shows_its_parties(solver: Scripted, capsys: Any) -> None:
    assert solve.main(["c", "p", "--samples", "4", "--vote"]) == 0
    out = capsys.readouterr().out
    assert "3 of 4: 6\n1 of 4: no answer\nanswer: 6" in out
    assert solve.main(["c", "p", "--samples", "4", "--vote", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["answer"] == "6" and len(result["solutions"]) == 4
    assert result["votes"] == [{"answer": "6", "samples": [0, 1, 2]}]


def test_without_an_answer_the_exit_code_is_1(solver: Scripted, capsys: Any) -> None:
    assert solve.main(["c", "a hard one"]) == 1
    assert "no answer (length)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["c"], "problem: is empty; expected text, or --file FILE"),
        (["c", "p", "--file", "f"], "not both"),
        (["c", "p", "--out", "f"], "out: is for --file"),
        (["c", "p", "--top_p", "0"], "top_p: got 0.0"),
        (["c", "p", "--temperature=-1"], "temperature: got -1.0"),
        (["c", "p", "--samples", "2", "--temperature", "0"], "all samples are the same"),
        (["c", "p", "--vllm", "nonsense"], "vllm: got 'nonsense', expected http://HOST:PORT"),
        (["c", "p", "--temperature", ".inf"], "temperature: got inf"),
        (["c", "p", "--vote"], "one sample cannot vote"),
        (["c", "p", "--samples", "0"], "samples: got 0"),
        (["c", " "], "problem: is empty"),
        (["c", "1", "+", "1"], "unexpected argument '+'; quote a value that has spaces"),
    ],
)
def test_a_wrong_request_is_refused(argv: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        solve.main(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_there_is_named(device: str) -> None:
    solve_config.check_device(None)
    solve_config.check_device("cpu")
    with pytest.raises(ConfigError, match=f"device: '{device}' cannot be used here"):
        solve.main(["c", "p", "--device", device])


def test_a_problem_that_is_no_text_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    with pytest.raises(ConfigError, match="standard input is no UTF-8 text"):
        solve.main(["c", "-"])


# --- files --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opened(learnt_checkpoint: Path) -> Iterator[Solver]:
    """A real solver, opened once."""
    with Solver(learnt_checkpoint) as solver:
        yield solver


class Lent:
    """A solver that `with` does not close."""

    def __init__(self, solver: Solver) -> None:
        self.solver = solver

    def __enter__(self) -> Solver:
        return self.solver

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def problems(opened: Solver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of problems, and a command that solves with the open solver."""
    monkeypatch.setattr("stages.solve_file.open_solver", lambda config: Lent(opened))
    path = tmp_path / "problems.jsonl"
    rows = [{"id": f"p{n}", "problem": problem} for n, problem in enumerate(PROBLEMS)]
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_of_problems_becomes_a_file_of_solutions(
    problems: Path, tmp_path: Path, learnt_checkpoint: Path
) -> None:
    command = [str(learnt_checkpoint), "--file", str(problems), "--out", str(tmp_path / "o")]
    assert solve.main(command) == 0
    found = {row["id"]: row["answer"] for row in rows_of(tmp_path / "o")}
    assert found == {f"p{n}": str(answer) for n, answer in enumerate(PROBLEMS.values())}


def test_a_killed_file_goes_on_and_is_never_mixed(
    problems: Path, tmp_path: Path, learnt_checkpoint: Path, capsys: Any
) -> None:
    out = tmp_path / "out" / "solutions.jsonl"
    command = [str(learnt_checkpoint), "--file", str(problems), "--out", str(out)]
    assert solve.main(command) == 0
    whole = out.read_bytes()
    first, second = whole.splitlines(keepends=True)
    out.write_bytes(first + second[:20])  # killed in the middle of a line
    assert solve.main(command) == 0
    assert out.read_bytes() == whole
    assert solve.main(command) == 0 and out.read_bytes() == whole
    assert "all 2 problems have a solution" in capsys.readouterr().err
    with pytest.raises(SolveFileError, match=r"solutions.jsonl:1: .*other settings \(seed\)"):
        solve.main([*command, "--seed", "1"])
    out.write_text("{}\n")
    with pytest.raises(SolveFileError, match="is no solution that this command wrote"):
        solve.main(command)


def test_a_file_never_goes_on_with_answers_to_other_problems(
    tmp_path: Path, problems: Path, learnt_checkpoint: Path
) -> None:
    one, two = PROBLEMS
    out = tmp_path / "solutions.jsonl"
    command = [str(learnt_checkpoint), "--file", str(problems), "--out", str(out)]
    problems.write_text(json.dumps({"problem": one}) + "\n")
    assert solve.main(command) == 0
    kept = out.read_bytes()
    problems.write_text("".join(json.dumps({"problem": text}) + "\n" for text in (two, one)))
    with pytest.raises(
        SolveFileError, match=r"problems.jsonl:1: the problem '1' is another one in .*jsonl:1; "
    ):
        solve.main(command)
    assert out.read_bytes() == kept


def test_the_checkpoint_of_a_file_is_looked_up_once(
    problems: Path, learnt_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def look_up(name: str) -> Path:
        asked.append(name)
        return learnt_checkpoint

    monkeypatch.setattr("stages.solve_file.local_checkpoint", look_up)
    out = tmp_path / "o"
    command = ["user/name", "--file", str(problems), "--out", str(out), "--max_batch", "1"]
    monkeypatch.setattr("stages.solve_file._AHEAD", 1)  # a batch each
    assert solve.main(command) == 0
    assert asked == ["user/name"]
    assert {row["settings"]["checkpoint"] for row in rows_of(out)} == {str(learnt_checkpoint)}


def test_an_output_that_cannot_be_written_is_named(
    problems: Path, tmp_path: Path, learnt_checkpoint: Path
) -> None:
    (tmp_path / "taken").touch()
    out = tmp_path / "taken" / "out.jsonl"
    with pytest.raises(SolveFileError, match="cannot be (read|written)"):
        solve.main([str(learnt_checkpoint), "--file", str(problems), "--out", str(out)])


@pytest.mark.parametrize("text", ["my notes", '{"id": "p0", "problem": "1 + 1"}'])
def test_a_file_of_somebody_elses_is_left_alone(
    text: str, problems: Path, tmp_path: Path, learnt_checkpoint: Path
) -> None:
    out = tmp_path / "mine.txt"
    out.write_text(text)  # without a line break at the end, as after a kill
    with pytest.raises(SolveFileError, match="mine.txt:1: is no solution"):
        solve.main([str(learnt_checkpoint), "--file", str(problems), "--out", str(out)])
    assert out.read_text() == text


def test_samples_of_a_file_vote_and_one_long_problem_costs_one_row(
    problems: Path, learnt_checkpoint: Path, capsys: Any
) -> None:
    with open(problems, "a") as file:
        file.write(json.dumps({"problem": "7 " * 600}) + "\n")
    command = [str(learnt_checkpoint), "--file", str(problems), "--samples", "3", "--vote"]
    assert solve.main([*command, "--temperature", "0.1"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["id"]: row["answer"] for row in rows} == {"p0": "6", "p1": "23", "5": None}
    assert "at most 511" in rows[0]["error"]
    assert [len(row.get("solutions", [])) for row in rows] == [0, 3, 3]


def test_a_line_of_broken_text_is_solved_like_the_others(
    problems: Path, tmp_path: Path, learnt_checkpoint: Path, capsys: Any
) -> None:
    with open(problems, "a") as file:
        file.write(
            '{"id": "\\ud800", "problem": "3 + \\ud800"}\n{"id": null, "problem": "3 + 4"}\n'
        )
    out = tmp_path / "solutions.jsonl"
    command = [str(learnt_checkpoint), "--file", str(problems), "--out", str(out)]
    assert solve.main([*command, "--max_completion_length", "8"]) == 0
    found = {row["id"]: row["problem"] for row in rows_of(out) if row["problem"] not in PROBLEMS}
    assert found == {"?": "3 + ?", "6": "3 + 4"}
    assert solve.main([*command, "--max_completion_length", "8"]) == 0
    assert "all 4 problems have a solution" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no problem"),
        ("{", ":1: broken JSON"),
        ("\n[]", ':2: expected an object with a non-empty text "problem"'),
        ('{"problem": " "}', ":1: expected"),
        ('{"id": 1, "problem": "a"}\n{"id": "1", "problem": "b"}', "'1' comes twice"),
    ],
)
def test_a_broken_line_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(text)
    with pytest.raises(SolveFileError, match=message):
        solve.main(["c", "--file", str(path)])
    with pytest.raises(SolveFileError, match="cannot be read"):
        solve.main(["c", "--file", str(tmp_path / "none.jsonl")])
