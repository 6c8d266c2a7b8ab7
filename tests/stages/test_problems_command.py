"""Training problems: what is dropped is counted, and nothing of an evaluation is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import stages.problems
from data.problems import load_problems
from rivet.config import ConfigError
from stages.cli import main as rivet
from stages.problems import ProblemsConfig, ProblemsError, run

HELD_OUT = (
    "Find the number of ordered pairs of positive integers a and b such that their product is "
    "at most one hundred and their sum is a prime number."
)


def write(path: Path, rows: list[tuple[str, str]]) -> str:
    lines = [
        json.dumps({"id": f"r{n}", "problem": problem, "answer": answer})
        for n, (problem, answer) in enumerate(rows)
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_each_reason_drops_its_own_and_is_counted(tmp_path: Path) -> None:
    source = write(
        tmp_path / "all.jsonl",
        [
            ("What is 1 + 1?", "2"),
            ("what is  1+1?", "2"),  # the same, differently spaced
            ("word " * 50, "3"),
            ("What is a colour?", "a colour that nobody can grade \\frac{"),
            (f"Warm up first. {HELD_OUT} Show your work.", "5"),
            ("What is 2 + 2?", "4"),
        ],
    )
    held_out = write(tmp_path / "test.jsonl", [(HELD_OUT, "5")])
    output = tmp_path / "out" / "train.jsonl"
    counts = run(ProblemsConfig(source, str(output), decontaminate=[held_out], max_words=45))
    assert {k: counts[k] for k in ("read", "too long", "repeated", "cannot be graded")} == {
        "read": 6,
        "too long": 1,
        "repeated": 1,
        "cannot be graded": 1,
    }
    assert counts["in an evaluation"] == 1 and counts["kept"] == 2
    kept = [json.loads(line)["answer"] for line in output.read_text().splitlines()]
    assert kept == ["2", "4"]
    assert json.loads(output.with_suffix(".funnel.json").read_text()) == counts


def test_a_data_set_of_the_hub_may_name_its_columns_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = [" 7 ", 8.5, 0, "", None]
    rows = [{"question": f"What is x{n}? ", "gold": a} for n, a in enumerate(answers)]
    monkeypatch.setattr(stages.problems, "load_rows", lambda *_: rows)
    given = {"source": "someone/Sums", "output": str(tmp_path / "out.jsonl")}
    with pytest.raises(ProblemsError, match="no column 'problem', there are question, gold"):
        run(ProblemsConfig(**given))
    columns = {"problem_column": "question", "answer_column": "gold"}
    counts = run(ProblemsConfig(**given, **columns))
    assert (counts["read"], counts["empty"], counts["kept"]) == (5, 2, 3)
    assert [(p.id, p.problem, p.answer, p.source) for p in load_problems(given["output"])] == [
        ("sums/1", "What is x0?", "7", "sums"),
        ("sums/2", "What is x1?", "8.5", "sums"),
        ("sums/3", "What is x2?", "0", "sums"),
    ]


@pytest.mark.parametrize(
    "statement", ["Find the remainder when $2^{100}$ is divided by 7.", "What is 1 + 1?", HELD_OUT]
)
def test_an_evaluation_problem_is_dropped_word_for_word_however_short(
    tmp_path: Path, statement: str
) -> None:
    source = write(tmp_path / "all.jsonl", [(statement, "2"), ("What is 2 + 2?", "4")])
    held_out = write(tmp_path / "test.jsonl", [(statement, "2")])
    output = tmp_path / "train.jsonl"
    assert run(ProblemsConfig(source, str(output), decontaminate=[held_out]))["kept"] == 1
    assert "What is 2 + 2?" in output.read_text()


def test_problems_of_every_kind_are_written_as_they_were_read(tmp_path: Path) -> None:
    entry = {"question": "1 + 1", "answer": "2", "metadata": {"source_dataset": "chain_sum"}}
    rows = [
        {"problem": "Pick one.", "choices": ["red", "blue"], "correct": 1},
        {"problem": "Spell it.", "answer": "a b", "kind": "exact", "meta": {"family": "words"}},
        {"problem": "Add.", "answer": "2", "kind": "reasoning_gym", "meta": {"entry": entry}},
        {"problem": "What is 2 + 2?", "answer": "4", "source": "sums", "meta": {"level": 3}},
    ]
    source = tmp_path / "all.jsonl"
    source.write_text("".join(json.dumps(row | {"id": row["problem"]}) + "\n" for row in rows))
    run(ProblemsConfig(str(source), str(tmp_path / "train.jsonl")))
    assert load_problems(tmp_path / "train.jsonl") == load_problems(source)


def test_the_command_writes_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "all.jsonl", [("What is 1 + 1?", "2"), ("What is 2 + 2?", "4")])
    output = tmp_path / "train.jsonl"
    assert rivet(["problems", source, "--output", str(output), "--limit", "1"]) == 0
    assert f"problems: {output}" in capsys.readouterr().out
    assert len(output.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"limit": -1}, "limit: got -1, expected at least 1"),
        ({"limit": 0}, "limit: got 0, expected at least 1"),
        ({"max_words": 0}, "max_words: got 0, expected at least 1"),
        ({"output": "train.jsonl.gz"}, "output: got 'train.jsonl.gz', expected .* ends in .jsonl"),
        ({"output": "problems"}, "output: got 'problems', expected .* ends in .jsonl"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        ProblemsConfig("all.jsonl", **settings)


def test_a_file_that_is_there_is_replaced_only_when_told_to(tmp_path: Path) -> None:
    source = write(tmp_path / "all.jsonl", [("What is 1 + 1?", "2")])
    output = tmp_path / "train.jsonl"
    output.write_text("mine\n")
    with pytest.raises(ProblemsError, match="exists; choose another --output, or replace it"):
        run(ProblemsConfig(source, str(output)))
    assert output.read_text() == "mine\n"
    run(ProblemsConfig(source, str(output), overwrite=True))
    assert load_problems(output) == load_problems(source)


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    source = write(tmp_path / "all.jsonl", [("What is 1 + 1?", "2")])
    with pytest.raises(ProblemsError, match="nothing is left"):
        run(ProblemsConfig(source, str(tmp_path / "x.jsonl"), max_words=2))


def test_a_data_set_out_of_reach_says_what_was_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route to the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ProblemsError, match="cannot be loaded .no route.*expected a file, or"):
        run(ProblemsConfig("nobody/nothing", str(tmp_path / "x.jsonl")))
