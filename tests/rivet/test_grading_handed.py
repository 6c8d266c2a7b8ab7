"""The labelled cases and the data files that live outside the repository; skipped without them."""

import json
import os
from pathlib import Path

import pytest

from data.benchmarks import BENCHMARKS, find_file
from rivet.grading import Grader, Request
from rivet.grading.intake import check_file

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(os.environ.get("RIVET_CASES", ROOT.parent / "shared" / "cases")) / "grading.jsonl"
DATA = Path(os.environ.get("RIVET_DATA", ROOT.parent / "shared" / "data"))
# Golds that no program can compare: worded conditions, cases and recursive notation.
UNUSABLE = {
    "imo_answerbench.jsonl": 16,
    "minerva.jsonl": 1,
    "olympiadbench.jsonl": 2,
    "math_train_simplelr.jsonl.gz": 1,
}


@pytest.fixture(scope="module")
def grader():
    with Grader(workers=2) as shared:
        yield shared


@pytest.mark.skipif(not CASES.is_file(), reason=f"no labelled cases at {CASES} (RIVET_CASES)")
@pytest.mark.parametrize("mode", ["reward", "eval"])
def test_labelled_cases(grader, mode):
    cases = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    requests = [Request(case["answer"], case["gold"]) for case in cases]
    grades = grader.grade_many(requests, mode=mode)
    pairs = list(zip(cases, grades, strict=True))
    faults = [(case["id"], grade) for case, grade in pairs if grade.is_fault]
    accepted = [case["id"] for case, grade in pairs if grade.is_right and not case["expected"]]
    firm = [(case, grade) for case, grade in pairs if "policy" not in case["tags"]]
    right = [(case, grade) for case, grade in firm if case["expected"]]
    refused = [(case["id"], grade.reason) for case, grade in right if not grade.is_right]
    assert faults == []
    assert accepted == []
    assert len(refused) <= 0.02 * len(right), refused


# By name: the folder may belong to somebody else, with files of another form.
TRAINING_SETS = (
    "gsm8k_train.jsonl.gz",
    "math_train_medium_1000.jsonl",
    "math_train_simplelr.jsonl.gz",
)
FILES = [path for name in BENCHMARKS if (path := find_file(name, DATA))]
TRAINING_FILES = [DATA / name for name in TRAINING_SETS if (DATA / name).is_file()]


@pytest.mark.skipif(not FILES, reason=f"no data files at {DATA} (RIVET_DATA)")
def test_golds_of_the_data_files_pass_intake(grader):
    for path in FILES:
        if path.suffix == ".parquet":
            pytest.importorskip("pyarrow")
        report = check_file(path, grader)
        assert report.total > 0
        assert len(report.unusable) <= UNUSABLE.get(path.name, 0), report.unusable


@pytest.mark.slow
@pytest.mark.skipif(not TRAINING_FILES, reason=f"no training files at {DATA} (RIVET_DATA)")
def test_golds_of_the_training_files_pass_intake(grader):
    for path in TRAINING_FILES:
        report = check_file(path, grader)
        assert len(report.unusable) <= UNUSABLE.get(path.name, 0), report.unusable
