"""`rivet benchmarks`: the list, and files that load back as what they were written from."""

from __future__ import annotations

import json

import pytest

from data.benchmarks import BENCHMARKS, load_benchmark
from data.problems import load_problems
from eval.list_benchmarks import listing, main


@pytest.fixture
def copies(tmp_path):
    rows = [
        {"id": f"q/{n}", "problem": f"Which of these, {n}?", "correct": 1,
         "choices": ["one", "two", "three", "four"]}
        for n in range(5)
    ]  # fmt: skip
    path = tmp_path / "gpqa_diamond.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_every_benchmark_is_listed_with_its_file(copies) -> None:
    lines = listing(str(copies)).splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(BENCHMARKS)
    (gpqa,) = [line for line in lines if line.startswith("gpqa-diamond")]
    assert gpqa.endswith("gpqa_diamond.jsonl") and "gated" in gpqa
    assert lines[1].endswith("not there") and "not there" not in listing()


def test_a_written_benchmark_loads_back_as_it_was(copies, capsys) -> None:
    out = copies / "out"
    assert main(["gpqa-diamond", "--data_dir", str(copies), "--to", str(out)]) == 0
    assert "gpqa-diamond, 5 problems: " in capsys.readouterr().out
    assert load_problems(out / "gpqa-diamond.jsonl") == load_benchmark("gpqa-diamond", copies)
    assert main([]) == 0 and "competition-math" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--to", str(out)])
