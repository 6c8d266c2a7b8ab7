"""Problem files: what is broken is named by file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
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


def test_every_broken_row_is_named_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, "{", {**GOOD, "id": "b", "answer": ""}, GOOD)
    with pytest.raises(ProblemFileError) as error:
        load_problems(path)
    message = str(error.value)
    for number, what in ((2, "not valid JSON"), (3, "answer is empty"), (4, "already on line 1")):
        assert f"a.jsonl:{number}: " in message and what in message
    assert message.endswith(f"3 faults in {path}, beside 1 good rows")


def test_a_byte_order_mark_is_no_fault_and_a_bad_byte_names_its_line_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert len(load_problems(path)) == 1
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\n[\n")
    with pytest.raises(
        ProblemFileError, match=r"a.jsonl:2: cannot be read(.|\n)*a.jsonl:3: not val"
    ):
        load_problems(path)


def test_a_cut_gzip_file_is_named_with_what_could_be_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    rows = "".join(json.dumps({**GOOD, "id": str(n)}) + "\n" for n in range(2000))
    path.write_bytes(gzip.compress(rows.encode())[:-30])
    with pytest.raises(ProblemFileError, match=r"a.jsonl.gz:\d+: cannot be read"):
        load_problems(path)


def test_parquet_is_read_and_choices_become_letters(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    row = {"id": "q/1", "problem": "Which?", "choices": ["no", "yes"], "correct": 1}
    pq.write_table(pa.Table.from_pylist([row]), path)
    (problem,) = load_problems(path)
    assert problem.problem == (
        "Which?\n\nA) no\nB) yes\n\nAnswer with the letter of the right option."
    )
    assert (problem.answer, problem.kind, problem.meta) == (
        "B",
        "choice",
        {"choices": ["no", "yes"]},
    )
    path.write_bytes(b"PAR1")
    with pytest.raises(ProblemFileError, match="expected a parquet file"):
        load_problems(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choices": ["one"]}, "expected a list of 2 to 10"),
        ({"choices": "ab"}, "expected a list of 2 to 10"),
        ({"correct": 2}, "correct is 2; expected the index of the right choice, 0 to 1"),
        ({"correct": True}, "correct is True"),
        ({"correct": 1, "answer": "A"}, "answer is 'A', but correct is 1"),
        ({"answer": "C"}, "expected a letter from A to B"),
        ({}, "answer is None; expected a letter"),
    ],
)
def test_choices_that_do_not_fit_are_named(tmp_path: Path, change: dict, message: str) -> None:
    row = {"id": "q/1", "problem": "Which?", "choices": ["no", "yes"]} | change
    with pytest.raises(ProblemFileError, match="a.jsonl:1: ") as error:
        load_problems(write(tmp_path / "a.jsonl", row))
    assert message in str(error.value)
