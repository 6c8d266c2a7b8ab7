"""Problem files: what is broken is named by file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from data.problems import Problem, ProblemFileError, load_problems

GOOD = {"id": "a/1", "problem": "1+1?", "answer": "2"}


def write(path: Path, *rows: object) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_rows_become_problems_in_order(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, "", {**GOOD, "id": "a/2", "meta": {"level": 3}})
    assert load_problems(path) == [
        Problem("a/1", "1+1?", "2"),
        Problem("a/2", "1+1?", "2", meta={"level": 3}),
    ]


def test_gzip_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    assert len(load_problems(path)) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{broken", "not valid JSON"),
        ("[1]", "got list; expected a JSON object"),
        ({**GOOD, "answer": " "}, "answer is empty"),
        ({**GOOD, "answer": 2}, "answer is int 2"),
        ({"id": "x", "answer": "2"}, "'problem' is missing"),
        ({**GOOD, "problem": "half \ud800"}, "half a surrogate pair at character 5"),
        ({**GOOD, "kind": "essay"}, "kind is 'essay'; expected one of math"),
        ({**GOOD, "meta": [1]}, "meta is list"),
        (GOOD, "id 'a/1' is already on line 1"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, row: object, message: str) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, row)
    with pytest.raises(ProblemFileError, match="a.jsonl:2: ") as error:
        load_problems(path)
    assert message in str(error.value)


def test_a_missing_or_empty_or_binary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProblemFileError, match="no such file"):
        load_problems(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ProblemFileError, match="no problem in the file"):
        load_problems(tmp_path / "empty.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProblemFileError, match="binary.jsonl:1: cannot be read"):
        load_problems(tmp_path / "binary.jsonl")


@pytest.mark.parametrize("value", ["[" * 100_000, '{"n": ' + "9" * 5000 + "}"])
def test_json_that_the_parser_gives_up_on_names_its_line(tmp_path: Path, value: str) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text('{"id": "a", "problem": "p", "answer": "1"}\n' + value + "\n")
    with pytest.raises(ProblemFileError, match=r"deep\.jsonl:2: cannot be read"):
        load_problems(path)
