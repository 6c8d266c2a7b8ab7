"""Grading files in bulk, checking files of golds, and the benchmark."""

import gzip
import json
import subprocess
import sys

import pytest

from rivet.grading import check_gold
from rivet.grading.__main__ import main
from rivet.grading.bench import BUILT_IN_GOLDS, with_another_digit
from rivet.grading.bench import main as bench_main
from rivet.grading.intake import check_math_gold

CASES = [
    {"id": "a", "gold": "42", "answer": r"\boxed{42}"},
    {"id": 2, "gold": r"\frac{1}{2}", "answer": r"\boxed{0.5}"},
    {"id": "c", "gold": r"\frac{1}{2}", "answer": r"\boxed{0.6}"},
    {"id": "d", "gold": "B", "answer": r"\boxed{(B)}", "kind": "choice", "choices": ["x", "y"]},
    {"id": "e", "gold": "7", "answer": "The answer is 7."},
    {"id": "f", "gold": "red", "answer": r"\boxed{red}", "kind": "exact"},
]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run(tmp_path, records, *options):
    cases, out = write(tmp_path / "cases.jsonl", records), tmp_path / "out.jsonl"
    code = main([str(cases), "--out", str(out), "--workers", "1", *options])
    verdicts = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return code, verdicts


def test_a_file_is_graded_in_order(tmp_path, capsys):
    code, verdicts = run(tmp_path, CASES)
    assert code == 0
    assert [verdict["id"] for verdict in verdicts] == ["a", 2, "c", "d", "e", "f"]
    assert [verdict["outcome"] for verdict in verdicts] == [
        "right", "right", "wrong", "right", "no_answer", "right",
    ]  # fmt: skip
    assert all(set(verdict) == {"id", "outcome", "extracted", "reason"} for verdict in verdicts)
    assert "right 4, wrong 1, no_answer 1" in capsys.readouterr().out


def test_answer_lines_are_counted_apart(tmp_path, capsys):
    code, verdicts = run(tmp_path, CASES, "--mode", "eval")
    assert code == 0
    assert verdicts[4]["outcome"] == "right"
    assert "answer line" in verdicts[4]["reason"]
    assert "read from an answer line: 1" in capsys.readouterr().out


BROKEN = {
    "not json": ("{", "not JSON"),
    "no object": ("[1]", "expected one JSON object"),
    "no id": ('{"gold": "1", "answer": "2"}', "'id' is missing"),
    "no gold": ('{"id": 1, "answer": "2"}', "'gold' is missing"),
    "number as gold": ('{"id": 1, "gold": 3, "answer": "2"}', "'gold' is 3; expected a string"),
    "no answer": ('{"id": 1, "gold": "3"}', "'answer' is missing"),
    "misspelt kind": ('{"id": 1, "gold": "3", "answer": "", "kind": "chioce"}', "did you mean"),
    "bad choice": ('{"id": 1, "gold": "3", "answer": "", "kind": "choice"}', "expected a letter"),
    "bad choices": ('{"id": 1, "gold": "A", "answer": "", "choices": "AB"}', "no list"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_line_is_named_and_nothing_is_written(tmp_path, capsys, name):
    line, message = BROKEN[name]
    cases, out = tmp_path / "cases.jsonl", tmp_path / "out.jsonl"
    cases.write_text(json.dumps(CASES[0]) + "\n\n" + line + "\n")
    assert main([str(cases), "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert f"{cases}:3:" in error
    assert message in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cases.jsonl"]


def test_a_missing_file_is_an_error(tmp_path, capsys):
    assert main([str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "out")]) == 1
    assert "no such file" in capsys.readouterr().err


def test_a_case_file_may_name_its_kinds_of_fault(tmp_path, caplog):
    code, verdicts = run(tmp_path, [CASES[0] | {"kind": "thousands-separator"}])
    assert (code, verdicts[0]["outcome"]) == (0, "right")
    assert "thousands-separator" in caplog.text


def test_the_commands_run_as_a_module(tmp_path):
    cases = write(tmp_path / "cases.jsonl", CASES[:1])
    command = [sys.executable, "-m", "rivet.grading", str(cases), "--out", str(tmp_path / "out")]
    subprocess.run(command, check=True, capture_output=True)
    usage = subprocess.run(command[:3], capture_output=True)
    assert usage.returncode == 2


def test_intake_lists_unusable_golds_of_every_format(tmp_path, capsys):
    rows = [
        {"id": "s/0", "answer": "3"},
        {"id": "s/1", "answer": "for all odd $n$ below"},
        {"id": "s/2", "answer": r"\frac{1}{"},
        {"id": "s/3", "answer": "B", "choices": ["x", "y"]},
        {"id": "s/4", "answer": "x", "choices": ["x", "y"]},
    ]
    write(tmp_path / "one.jsonl", rows)
    with gzip.open(tmp_path / "two.jsonl.gz", "wt") as lines:
        lines.write(json.dumps({"id": "t/0", "answer": r"\frac{0}{0}"}) + "\n")
    files = [str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl.gz")]
    assert main(["intake", *files, "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "s/0" not in out and "s/3" not in out
    for identifier in ("s/2", "s/4", "t/0"):
        assert identifier in out
    assert "one.jsonl" in out and "two.jsonl.gz" in out


def test_intake_reads_parquet(tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": ["p/0", "p/1"], "answer": ["A", r"\sqrt{"]})
    parquet.write_table(table, tmp_path / "golds.parquet")
    assert main(["intake", str(tmp_path / "golds.parquet"), "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "p/1" in out and "p/0" not in out


def test_intake_names_a_line_without_a_gold(tmp_path, capsys):
    path = write(tmp_path / "golds.jsonl", [{"id": "x", "answer": "1"}, {"id": "y"}])
    assert main(["intake", str(path)]) == 1
    assert f"{path}:2:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gold", "kind", "problem"),
    [
        (r"\frac{3}{4}", "math", None),
        (r"\frac{3}{", "math", "cannot read"),
        (r"\frac{0}{0}", "math", "division by zero"),
        (r"0 \cdot 5", "math", "one digit changed"),
        ("B", "choice", None),
        ("the second", "choice", "not the letter"),
        ("any text", "exact", None),
        (" ", "exact", "empty"),
    ],
)
def test_check_gold_says_what_is_wrong(gold, kind, problem):
    found = check_gold(gold, kind)
    assert found is None if problem is None else problem in found


@pytest.mark.parametrize("gold", BUILT_IN_GOLDS)
def test_built_in_golds_pass_intake(gold):
    assert check_math_gold(gold) is None


@pytest.mark.slow
def test_the_benchmark_runs_without_data(tmp_path, monkeypatch, capsys):
    pytest.importorskip("math_verify")
    monkeypatch.setenv("RIVET_DATA", str(tmp_path))
    assert bench_main(["--rounds", "1", "--integers", "100"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["golds"] == "built-in"
    assert {"integers_per_s", "math500_per_s", "ratio", "p99_ms"} <= set(result)


def test_a_changed_digit_changes_one_digit():
    assert with_another_digit(r"\frac{19}{20}") == r"\frac{19}{21}"
    assert with_another_digit("x^9") == "x^0"
    assert with_another_digit("abc") == "abc"
