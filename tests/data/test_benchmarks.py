"""Benchmarks: one set of problems whatever the source, and every refusal says what to do."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

import data.hub
from data.benchmarks import BENCHMARKS, SUITES, BenchmarkError, expand, find_file, load_benchmark
from data.problems import load_problems

COPIES = Path(os.environ.get("RIVET_DATA", Path(__file__).parents[3] / "shared" / "data"))
WIKI = "https://wiki.example/index.php/2024_AIME_{}_Problems/Problem_{}"

# The same made-up problems as a local file has them and as the Hub has them.
LOCAL: dict[str, list[dict[str, Any]]] = {
    "aime-2024": [
        {"id": "aime_2024/I-1", "problem": "One?", "answer": "1", "source": "aime_2024"},
        {"id": "aime_2024/II-10", "problem": "Ten?", "answer": "10", "source": "aime_2024"},
    ],
    "aime-2025": [
        {"id": "aime_2025/I-2", "problem": "Two?", "answer": "2", "source": "aime_2025"},
        {"id": "aime_2025/II-1", "problem": "Sixteen?", "answer": "16", "source": "aime_2025"},
    ],
    "hmmt-feb-2025": [
        {"id": "hmmt_feb_2025/1", "problem": "Half?", "answer": "\\frac12"},
        {"id": "hmmt_feb_2025/12", "problem": "Dozen?", "answer": "12"},
        {"id": "hmmt_feb_2025/3", "problem": "Three?", "answer": "3"},
    ],
    "imo-answerbench": [
        {"id": "imo_answerbench/algebra-001", "problem": "Find $x$.", "answer": "odd $n$"},
    ],
    "math-500": [
        {"id": "math_500/0", "problem": "Half of one?", "answer": "\\frac{1}{2}",
         "source": "math_500", "meta": {"unique_id": "test/algebra/7.json", "level": 1}},
    ],
    "amc-2023": [
        {"id": "amc_2023/4", "problem": "Nine?", "answer": "9", "source": "amc_2023",
         "meta": {"url": WIKI.replace("2024_AIME_{}", "2023_AMC_12B").format(9)}},
    ],
    "olympiadbench": [
        {"id": "olympiadbench/1606", "problem": "Which pairs?", "answer": "$(1,2)$"},
        {"id": "olympiadbench/1610", "problem": "How many?", "answer": "2, 3"},
    ],
    "gsm8k": [
        {"id": "gsm8k_test/0", "problem": "Sam has 1,000 and  3.", "answer": "1003"},
        {"id": "gsm8k_test/1", "problem": "Kim has two.", "answer": "2"},
    ],
    "minerva": [{"id": "minerva/0", "problem": "How bright?", "answer": "4e33"}],
    "gpqa-diamond": [
        {"id": "gpqa_diamond/0", "problem": "Which colour?", "answer": "C", "correct": 2,
         "choices": ["red", "blue", "green", "grey"]},
        {"id": "gpqa_diamond/1", "problem": "Which animal?", "answer": "A", "correct": 0,
         "choices": ["cat", "dog", "cow", "cow"]},
    ],
}  # fmt: skip
HUB: dict[str, list[dict[str, Any]]] = {
    "aime-2024": [
        {"id": 60, "problem": "Ten? ", "answer": "10", "url": WIKI.format("II", 10)},
        {"id": 61, "problem": "One?", "answer": "1", "url": WIKI.format("I", 1)},
    ],
    "aime-2025": [
        {"problem_idx": 2, "problem": "Two?", "answer": 2, "problem_type": ["Algebra"]},
        {"problem_idx": 16, "problem": "Sixteen?", "answer": 16, "problem_type": ["Algebra"]},
    ],
    "hmmt-feb-2025": [
        {"problem_idx": 12, "problem": "Dozen?", "answer": "12"},
        {"problem_idx": 1, "problem": "Half?", "answer": "\\frac12"},
        {"problem_idx": 3, "problem": "Three?", "answer": "3"},
    ],
    "imo-answerbench": [
        {"Problem ID": "imo-bench-algebra-001", "Problem": "Find $x$.", "Short Answer": "odd $n$"},
    ],
    "math-500": [
        {"problem": "Half of one?", "solution": "...", "answer": "\\frac{1}{2}",
         "unique_id": "test/algebra/7.json", "level": 1},
    ],
    "amc-2023": [
        {"id": 4, "question": "Nine?", "answer": "9",
         "url": WIKI.replace("2024_AIME_{}", "2023_AMC_12B").format(9)},
    ],
    "olympiadbench": [
        {"id": 1610, "question": "How many?", "final_answer": ["2", "3"]},
        {"id": 1606, "question": "Which pairs?", "final_answer": ["(1,2)"]},
    ],
    "gsm8k": [
        {"question": "Kim has two.", "answer": "So two.\n#### 2"},
        {"question": "Sam has 1,000 and  3.", "answer": "1000 + 3.\n#### 1,003"},
    ],
    "minerva": [{"question": "How bright?", "answer": "4e33"}],
    "gpqa-diamond": [
        {"Question": "Which animal?\n", "Correct Answer": "cat", "Incorrect Answer 1": "cow",
         "Incorrect Answer 2": "dog", "Incorrect Answer 3": "cow"},
        {"Question": "Which colour?", "Correct Answer": "green ", "Incorrect Answer 1": "grey",
         "Incorrect Answer 2": "blue", "Incorrect Answer 3": "red"},
    ],
}  # fmt: skip


def write_copy(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"{BENCHMARKS[name].files[0]}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", sorted(LOCAL))
def test_the_hub_and_a_folder_give_the_same_problems(name, tmp_path, monkeypatch) -> None:
    write_copy(tmp_path, name, LOCAL[name])
    monkeypatch.setattr(data.hub, "load_rows", lambda *_: HUB[name])
    local, hub = load_benchmark(name, tmp_path), load_benchmark(name)
    for here, there in zip(local, hub, strict=True):
        assert (here.id, here.problem, here.answer, here.kind, here.source) == (
            there.id, there.problem, there.answer, there.kind, name,
        )  # fmt: skip
        assert here.id.startswith(f"{name}/")
        assert here.meta.get("choices") == there.meta.get("choices")


def test_ids_are_the_competition_s_own_numbers_in_order(tmp_path) -> None:
    for name in LOCAL:
        write_copy(tmp_path, name, LOCAL[name])
    ids = {name: [p.id.split("/")[1] for p in load_benchmark(name, tmp_path)] for name in LOCAL}
    assert ids["aime-2024"] == ["I-1", "II-10"] and ids["aime-2025"] == ["I-2", "II-1"]
    assert ids["hmmt-feb-2025"] == ["1", "3", "12"]  # by number, not by letter
    assert ids["math-500"] == ["algebra-7"] and ids["amc-2023"] == ["12B-9"]
    assert ids["imo-answerbench"] == ["algebra-001"] and ids["olympiadbench"] == ["1606", "1610"]
    assert all(len(key) == 8 for key in ids["gsm8k"] + ids["gpqa-diamond"])  # digests


def test_choices_are_shuffled_by_a_fixed_seed_and_the_letter_follows(tmp_path) -> None:
    rows = [
        {"id": f"q/{n}", "problem": f"Question {n}?", "correct": n % 4,
         "choices": [f"{'right' if at == n % 4 else 'wrong'} {at}" for at in range(4)]}
        for n in range(200)
    ]  # fmt: skip
    write_copy(tmp_path, "gpqa-diamond", rows)
    problems = load_benchmark("gpqa-diamond", tmp_path)
    assert problems == load_benchmark("gpqa-diamond", tmp_path)
    letters = [p.answer for p in problems]
    for letter in "ABCD":  # 50 expected, three standard deviations are 18
        assert 30 < letters.count(letter) < 70
    for p in problems:
        right = p.meta["choices"]["ABCD".index(p.answer)]
        assert right.startswith("right") and f"\n{p.answer}) {right}\n" in p.problem
        assert p.problem.endswith("Answer with the letter of the right option.")
        assert p.kind == "choice" and p.problem.count(") ") == 4
    other = load_benchmark("gpqa-diamond", tmp_path, choices_seed=1)
    assert [p.id for p in other] == [p.id for p in problems]
    assert [p.answer for p in other] != letters


def test_a_limit_takes_the_same_problems_in_whatever_order_the_rows_are(tmp_path) -> None:
    rows = [{"id": f"h/{n}", "problem": f"{n}?", "answer": str(n)} for n in range(1, 31)]
    write_copy(tmp_path, "hmmt-feb-2025", rows)
    few = load_benchmark("hmmt-feb-2025", tmp_path, limit=10)
    random.Random(3).shuffle(rows)
    write_copy(tmp_path, "hmmt-feb-2025", rows)
    assert load_benchmark("hmmt-feb-2025", tmp_path, limit=10) == few and len(few) == 10
    numbers = [int(p.id.split("/")[1]) for p in few]
    assert numbers == sorted(numbers) and max(numbers) > 15  # spread, not the first ten
    more = load_benchmark("hmmt-feb-2025", tmp_path, limit=20)
    assert {p.id for p in few} <= {p.id for p in more}


def test_suites_are_made_of_benchmarks_and_names_are_forgiving() -> None:
    assert len(SUITES["competition-math"]) == 7
    assert {name for names in SUITES.values() for name in names} <= set(BENCHMARKS)
    assert expand(["AIME_2024", "aime-2024", "math500"]) == ["aime-2024", "math-500"]
    assert expand(["competition_math"], skip=["cmimc-2025", "BRUMO_2025"]) == [
        name for name in SUITES["competition-math"] if name not in ("cmimc-2025", "brumo-2025")
    ]


@pytest.mark.parametrize(
    ("name", "near"),
    [("aime-2204", "aime-2024"), ("mat-500", "math-500"), ("gqpa", "gpqa-diamond"),
     ("competition", "competition-math"), ("xyz", "expected one of competition-math, extras")],
)  # fmt: skip
def test_an_unknown_benchmark_gets_the_nearest_names(name: str, near: str) -> None:
    with pytest.raises(BenchmarkError, match=f"unknown benchmark '{name}'") as error:
        expand([name])
    assert near in str(error.value)


def test_what_a_folder_lacks_is_named_with_what_it_has(tmp_path) -> None:
    write_copy(tmp_path, "aime-2024", LOCAL["aime-2024"])
    assert find_file("brumo-2025", tmp_path) is None
    with pytest.raises(BenchmarkError) as error:
        load_benchmark("brumo-2025", tmp_path)
    assert "has no file of brumo-2025 (brumo_2025.jsonl); it has aime_2024.jsonl" in str(
        error.value
    )
    assert "--skip brumo-2025" in str(error.value)
    with pytest.raises(BenchmarkError, match="no such folder"):
        load_benchmark("brumo-2025", tmp_path / "none")
    with pytest.raises(BenchmarkError, match="is a suite of aime-2024"):
        load_benchmark("competition-math", tmp_path)


def test_columns_that_have_changed_and_doubled_problems_are_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(data.hub, "load_rows", lambda *_: [{"text": "?", "answer": "1"}])
    with pytest.raises(BenchmarkError, match="row 1: 'problem' is missing or empty.*found text"):
        load_benchmark("hmmt-feb-2025")
    write_copy(
        tmp_path, "gsm8k", [row | {"id": f"g/{n}"} for n in (1, 2) for row in LOCAL["gsm8k"][:1]]
    )
    with pytest.raises(BenchmarkError, match="is there twice"):
        load_benchmark("gsm8k", tmp_path)


@pytest.fixture
def offline_cache(tmp_path, monkeypatch) -> None:
    """The cache of `datasets` as a download of BRUMO 2025 leaves it, and no network."""
    import datasets
    import huggingface_hub.constants
    from datasets.arrow_writer import ArrowWriter

    folder = tmp_path / "MathArena___brumo_2025" / "default" / "0.0.0" / "0123abcd"
    folder.mkdir(parents=True)
    rows = [{"problem_idx": n, "problem": f"{n} + {n}?", "answer": str(2 * n)} for n in (2, 1)]
    features = datasets.Dataset.from_list(rows).features
    writer = ArrowWriter(path=str(folder / "brumo_2025-train.arrow"), features=features)
    for row in rows:
        writer.write(row)
    count, size = writer.finalize()
    splits = datasets.SplitDict()
    splits.add(datasets.SplitInfo("train", size, count, dataset_name="brumo_2025"))
    datasets.DatasetInfo(
        features=features,
        builder_name="parquet",
        dataset_name="brumo_2025",
        config_name="default",
        version="0.0.0",
        splits=splits,
    ).write_to_directory(str(folder))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_the_hub_s_cache_serves_without_a_network(offline_cache) -> None:
    assert [(p.id, p.problem, p.answer) for p in load_benchmark("brumo-2025")] == [
        ("brumo-2025/1", "1 + 1?", "2"),
        ("brumo-2025/2", "2 + 2?", "4"),
    ]
    with pytest.raises(BenchmarkError, match="cmimc-2025: MathArena/cmimc_2025: .*--data_dir"):
        load_benchmark("cmimc-2025")
    with pytest.raises(BenchmarkError, match="accept its conditions|cannot be loaded"):
        load_benchmark("gpqa-diamond")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_published_copy_loads_whole(name: str) -> None:
    if find_file(name, COPIES) is None:
        pytest.skip(f"no copy in {COPIES} (RIVET_DATA)")
    assert len(load_benchmark(name, COPIES)) == BENCHMARKS[name].size


@pytest.mark.parametrize("name", ["gsm8k_train.jsonl.gz", "math_train_simplelr.jsonl.gz"])
def test_a_published_training_set_loads(name: str) -> None:
    if not (COPIES / name).is_file():
        pytest.skip(f"not in {COPIES} (RIVET_DATA)")
    assert load_problems(COPIES / name)
