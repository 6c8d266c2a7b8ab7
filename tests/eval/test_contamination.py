"""`rivet contamination`: what is found, what evidence is given, and the published overlaps."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from data.benchmarks import find_file, load_benchmark
from data.problems import Problem, load_problems
from eval.contamination import find_contamination, main

COPIES = Path(os.environ.get("RIVET_DATA", Path(__file__).parents[3] / "shared" / "data"))
TRAINING_SET = COPIES / "math_train_simplelr.jsonl.gz"
PROBLEM = (
    r"Let $a_1, a_2, \dots$ be a sequence with $a_1 = 7$ and $a_{n+1} = 3a_n + 11$ for every "
    r"positive integer $n$. Determine $a_{40} - a_{39}$."
)
RETYPED = (
    r"Let $a_{1},$ $a_{2},$ $\ldots$ be a sequence with $a_{1}=7$ and $a_{n + 1}=3 a_{n}+11$ for "
    r"every positive integer $n.$ Determine $a_{40}-a_{39}.$"
)


def write(path: Path, problems: dict[str, str]) -> str:
    rows = [{"id": i, "problem": text, "answer": "1"} for i, text in problems.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_overlaps_are_listed_with_their_evidence(tmp_path, capsys) -> None:
    train = write(tmp_path / "train.jsonl", {"t/1": "How much is two and two?", "t/2": RETYPED})
    test = write(tmp_path / "test.jsonl", {"e/1": "How many are left?", "e/2": PROBLEM})
    pairs = tmp_path / "pairs.jsonl"
    assert main([train, test, "--out", str(pairs)]) == 0
    out = capsys.readouterr().out
    assert "t/2 holds e/2" in out and "in common: let a 1 a 2" in out
    assert "1 of 2 training problems overlap with 1 of 2 evaluation problems" in out
    (pair,) = [json.loads(line) for line in pairs.read_text().splitlines()]
    assert (pair["train_id"], pair["eval_id"], pair["same_answer"]) == ("t/2", "e/2", True)
    assert pair["share"] > 0.9 and pair["train_problem"] == RETYPED
    assert main([train, test, "--check"]) == 1
    assert main([train, test, "--check", "--min_share", "1"]) == 1  # retyped, yet whole
    assert main([write(tmp_path / "other.jsonl", {"o/1": "Other?"}), test, "--check"]) == 0


def test_a_sibling_with_another_answer_must_agree_in_more(tmp_path) -> None:
    sibling = PROBLEM.replace(r"Let $a_1, a_2, \dots$ be a sequence with", "In a sequence")
    rows = [Problem("t", sibling, "1"), Problem("u", sibling, "2")]
    found = list(find_contamination(rows, [Problem("e", PROBLEM, "1")]))
    assert [f.train.id for f in found] == ["t"] and 0.5 < found[0].overlap.share < 0.8


def test_a_share_that_is_none_is_refused(tmp_path, capsys) -> None:
    path = write(tmp_path / "a.jsonl", {"t/1": PROBLEM})
    with pytest.raises(SystemExit):
        main([path, path, "--min_share", "2"])
    assert "expected a share in (0, 1]" in capsys.readouterr().err


@pytest.mark.skipif(
    not TRAINING_SET.is_file() or find_file("olympiadbench", COPIES) is None,
    reason=f"no copies of both sets in {COPIES} (RIVET_DATA)",
)
def test_the_overlaps_hidden_in_a_published_training_set_are_found() -> None:
    known = {f"math_train_simplelr/{n}" for n in (1473, 2847, 3327, 3338, 5922, 8005)}
    train = load_problems(TRAINING_SET)
    found = list(find_contamination(train, load_benchmark("olympiadbench", COPIES)))
    assert known <= {f.train.id for f in found}
    assert len(found) <= len(known) + 2 and all(
        f.train.answer == f.evaluation.answer for f in found
    )
