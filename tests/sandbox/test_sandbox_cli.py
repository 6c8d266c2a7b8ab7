"""The commands: what they print, their exit codes, their messages on bad input."""

from __future__ import annotations

import json

import pytest

from sandbox import doctor
from sandbox.__main__ import main


@pytest.fixture
def write(tmp_path):
    def inner(name: str, text: str):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return inner


def test_run_prints_what_a_model_sees(write, capsys):
    assert main(["run", str(write("a.py", "print(3)\n3 + 1"))]) == 0
    assert capsys.readouterr().out == "3\n4\n"


def test_run_of_failing_code_exits_with_1(write, capsys):
    assert main(["run", str(write("a.py", "1/0"))]) == 1
    captured = capsys.readouterr()
    assert "ZeroDivisionError" in captured.out and "[error]" in captured.err


def test_run_of_a_missing_file_is_bad_usage(tmp_path, capsys):
    assert main(["run", str(tmp_path / "no.py")]) == 2
    assert "no.py" in capsys.readouterr().err


def test_batch_keeps_order_and_ids(write, tmp_path, capsys):
    codes = ["print(1)", "1/0", "import time\ntime.sleep(0.2)\n'late'", "2"]
    lines = [json.dumps({"id": f"c{i}", "code": code}) for i, code in enumerate(codes)]
    out = tmp_path / "r.jsonl"
    cases = write("cases.jsonl", "\n".join([*lines, "", ""]))
    assert main(["batch", str(cases), "--out", str(out), "--concurrency", "2"]) == 0
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["id"] for r in results] == ["c0", "c1", "c2", "c3"]
    assert [r["status"] for r in results] == ["ok", "error", "ok", "ok"]
    assert results[0]["stdout"] == "1\n" and results[2]["value_repr"] == "'late'"
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []
    assert "3 ok" in capsys.readouterr().out


def test_batch_replays_a_prelude(write, tmp_path):
    out = tmp_path / "r.jsonl"
    cases = write("cases.jsonl", json.dumps({"id": 1, "code": "x", "prelude": ["x = 5"]}))
    assert main(["batch", str(cases), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["value_repr"] == "5"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{bad", "not JSON"),
        ("[1]", "a list, not an object"),
        ('{"code": "1"}', "`id` is missing"),
        ('{"id": 1}', "`code` is missing"),
        ('{"id": 1, "code": 5}', "`code` is a int"),
        ('{"id": 1, "code": "1", "prelude": "x"}', "`prelude` is not a list"),
    ],
)
def test_batch_names_the_broken_line(write, tmp_path, capsys, line, message):
    cases = write("cases.jsonl", f'{{"id": 0, "code": "1"}}\n{line}\n')
    out = tmp_path / "r.jsonl"
    assert main(["batch", str(cases), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert f"{cases}:2: " in error and message in error and not out.exists()


def test_doctor_names_every_wall_and_tries_the_promises(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert all(meaning[0] in text for meaning in doctor.MEANING.values())
    assert text.count("cannot ") == len(doctor.PROMISES)


@pytest.mark.parametrize("command", [[], ["run"], ["batch"], ["doctor"]])
def test_help_explains(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0 and "usage:" in capsys.readouterr().out


def test_bad_concurrency_is_bad_usage(write, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["batch", "x", "--out", "y", "--concurrency", "0"])
    assert stop.value.code == 2 and "above 0" in capsys.readouterr().err
