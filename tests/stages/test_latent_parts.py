"""Parts of latent training: who hears what, interventions, gates of the study, the report."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data.problems import Problem
from eval.gather import ReportError
from eval.latent_report import write_latent_report
from eval.metrics import half_width
from eval.report import main as report
from rivet.config import ConfigError, load_config
from rivet.grading import Grade, Grader, Request
from rivet.latent.states import ExpertStates, ProblemStates
from rivet.runs import RunDir
from rivet.trajectory import Segment, Trajectory
from stages.latent.config import LatentConfig
from stages.latent.evaluate import ENTROPIES, accuracy_rows, correlations
from stages.latent.listener import Listener
from stages.latent.main import run as run_latent
from stages.latent.source import LatentSource, Sampling
from stages.latent.specialists import SPECIALISTS, completion_loss, word_tokenizer
from stages.latent.study import LatentStudyConfig, gates, mean_rows, run, summary, table
from tests.rivet.latent.conftest import tiny_llama

PROBLEMS = [
    Problem(f"{family}/{n}", f"{family} {n}?", str(n), meta={"family": family})
    for family in ("a", "b")
    for n in range(4)
]
RECIPES = Path(__file__).parents[2] / "stages" / "recipes"


def listener(arm: str, expert: str = "", seed: int = 0) -> Listener:
    """Over states whose first number is the problem's row."""
    values = torch.arange(8.0).view(8, 1, 1).expand(8, 2, 3)
    one = ProblemStates(values, torch.ones(8, 2, dtype=torch.bool))
    states = ExpertStates.of({"x": one, "y": one})
    return Listener(PROBLEMS, states, arm=arm, expert=expert, seed=seed)  # type: ignore[arg-type]


def heard(found: ExpertStates | None) -> list[int]:
    """Rows that were heard."""
    assert found is not None
    return [int(row) for row in found.values[:, 0, 0, 0]]


def test_the_system_hears_the_problem_itself() -> None:
    assert heard(listener("full").hear([3, 5, 3], step=1)) == [3, 5, 3]


def test_shuffled_hears_another_problem_of_the_family_and_another_one_each_step() -> None:
    shuffled = listener("shuffled")
    draws = [heard(shuffled.hear(range(8), step)) for step in range(30)]
    for draw in draws:
        assert all(other != row and other // 4 == row // 4 for row, other in enumerate(draw))
    assert {draw[0] for draw in draws} == {1, 2, 3}
    assert heard(shuffled.hear(range(8), 5)) == draws[5]  # one step, one partner
    assert heard(listener("shuffled", seed=1).hear(range(8), 5)) != draws[5]


def test_problems_of_one_text_hear_the_same_and_never_themselves() -> None:
    texts = {"one": "a", "two": "b", "again": "a", "three": "c"}
    problems = [Problem(name, text, "1") for name, text in texts.items()]
    values = ProblemStates(torch.arange(4.0).view(4, 1, 1), torch.ones(4, 1, dtype=torch.bool))
    shuffled = Listener(problems, ExpertStates.of({"x": values}), arm="shuffled")
    assert shuffled.row("again") == shuffled.row("one") == 0
    draws = [[shuffled.partner(row, step) for row in range(4)] for step in range(30)]
    for one, two, again, three in draws:
        assert again == one in (1, 3) and two in (0, 3) and three in (0, 1)
    alone = Listener([problems[0], problems[2]], None, arm="shuffled")
    with pytest.raises(ValueError, match="one: the only problem"):
        alone.partner(1, 0)


def test_one_expert_hears_nobody_else() -> None:
    found = listener("one-expert", "y").hear([0, 1], 1)
    assert found is not None and found.mask.any(2).tolist() == [[False, True]] * 2


def test_a_problem_without_another_of_its_family_cannot_be_shuffled() -> None:
    alone = Listener(PROBLEMS[:1], None, arm="shuffled")
    with pytest.raises(ValueError, match="the only problem of its family 'a'"):
        alone.partner(0, 1)


def trajectory(problem: Problem, text: str) -> Trajectory:
    """A completion that reads so."""
    return Trajectory(
        f"{problem.id}#0@1",
        problem.id,
        "plain",
        (1,),
        (Segment("controller", "answer", (2, 3)),),
        "eos",
        True,
        answer=text or None,
    )


def test_answers_are_graded_by_the_projects_grader_and_faults_carry_no_reward() -> None:
    class Failing(Grader):
        def grade_many(self, requests: Iterable[Request], **_: Any) -> list[Grade]:
            return [Grade("timeout", None, "slow") for _ in requests]

    problem = Problem("p", "1 + 2", "3")
    texts = ["\\boxed{3}", "\\boxed{4}", ""]
    for grader, outcomes, rewards in (
        (Grader(), ["right", "wrong", "no_answer"], [1.0, 0.0, 0.0]),
        (Failing(), ["timeout", "timeout", "no_answer"], [None, None, 0.0]),
    ):
        source = LatentSource(None, None, None, grader, Sampling(4))  # type: ignore[arg-type]
        for _ in range(2):  # the second time from memory
            done = source._graded([problem] * 3, [trajectory(problem, text) for text in texts])
            assert [t.outcome for t in done] == outcomes
            assert [t.reward for t in done] == rewards
        grader.close()


@pytest.mark.parametrize(("source", "hard"), [("latentworld", 1.0), ("mine", 0.75)])
def test_reading_is_easy_in_the_latent_world_and_a_family_like_others_elsewhere(
    source: str, hard: float
) -> None:
    problems, done = [], []
    for n, (family, outcome) in enumerate(
        [("reading", "right"), ("reading", "wrong"), ("sums", "right"), ("primes", "right")]
    ):
        problems.append(Problem(str(n), "?", "3", source, meta={"family": family}))
        done.append(replace(trajectory(problems[-1], "3"), outcome=outcome))  # type: ignore[arg-type]
    accuracy = {r["family"]: r["accuracy"] for r in accuracy_rows(problems, done, "as trained")}
    assert accuracy == {"reading": 0.5, "sums": 1.0, "primes": 1.0, "hard": hard}


def test_correlations_are_of_entropy_with_reward_and_of_their_differences() -> None:
    lines = [
        {
            "step": n,
            "reward/mean": reward,
            "attention/entropy_per_head": 1 - reward,
            "attention/entropy_head_averaged": 0.5,
        }
        for n, reward in enumerate([0.1, 0.3, 0.2, 0.6])
    ]
    lost = {"reward/mean": 0.1, **dict.fromkeys(ENTROPIES)}  # null: it was no number
    found = correlations([*lines, {"step": 9}, {"step": 10, **lost}])
    assert found["steps"] == 4
    assert found["per_head"] == pytest.approx(-1.0)
    assert found["per_head_differences"] == pytest.approx(-1.0)
    assert found["head_averaged"] is None


def result(name: str, arm: str, values: dict[tuple[str, str], float]) -> dict[str, Any]:
    """Results of one arm and seed."""
    rows = [
        {
            "condition": condition,
            "family": family,
            "accuracy": value,
            "ci_low": max(0.0, value - 0.1),
            "ci_high": min(1.0, value + 0.1),
            "n": 100,
        }
        for (condition, family), value in values.items()
    ]
    return {
        "name": name,
        "arm": arm,
        "expert": "",
        "seed": 1,
        "rows": rows,
        "correlations": {"per_head": -0.5, "per_head_differences": None},
        "attention": {},
    }


def study_runs(full: float = 0.6) -> list[dict[str, Any]]:
    """A system and three controls, the best single at 0.15."""
    as_trained = "as trained"
    return [
        result(
            "full",
            "full",
            {
                ("warm start", "hard"): 0.3,
                (as_trained, "hard"): full,
                (as_trained, "primes"): 0.8,
                (as_trained, "reading"): 0.99,
                ("shuffled", "hard"): 0.12,
                ("without primes", "primes"): 0.2,
            },
        ),
        result("single", "single", {(as_trained, "hard"): 0.1, (as_trained, "reading"): 0.98}),
        result("single-fast", "single", {(as_trained, "hard"): 0.15}),
        result("shuffled", "shuffled", {(as_trained, "hard"): 0.08}),
    ]


def test_claims_are_held_against_the_best_setting_of_each_control() -> None:
    runs = study_runs()
    found = {g["claim"]: g for g in gates(runs)}
    against = found["full beats single on the hard families by"]
    assert against["value"] == pytest.approx(0.45) and against["holds"]
    assert found["RL adds to the warm start"]["value"] == pytest.approx(0.3)
    assert found["without primes, left of its own family"]["value"] == pytest.approx(0.25)
    assert found["full, shuffled at evaluation, falls to"]["bound"] == "<= 0.250"
    assert found["full gains on the saturated family at most"]["holds"]
    assert all(g["holds"] for g in found.values())
    runs = study_runs(full=0.3)
    failed = gates(runs)
    assert {g["claim"] for g in failed if not g["holds"]} == {
        "full beats single on the hard families by",
        "RL adds to the warm start",
    }


def test_claims_compare_arms_over_the_seeds_that_both_have() -> None:
    # The second seed is easier for everybody; single and shuffled have not run there.
    second = {("warm start", "hard"): 0.6, ("as trained", "hard"): 0.9, ("shuffled", "hard"): 0.5}
    constant = result("constant", "constant", {("as trained", "hard"): 0.45})
    easier = [{**x, "seed": 2} for x in (result("full", "full", second), constant)]
    found = {g["claim"]: g["value"] for g in gates([*study_runs(), *easier])}
    assert found["full beats single on the hard families by"] == pytest.approx(0.6 - 0.15)
    assert found["full beats constant on the hard families by"] == pytest.approx(0.9 - 0.45)
    assert found["full, shuffled at evaluation, falls to"] == pytest.approx(0.5)
    assert found["RL adds to the warm start"] == pytest.approx((0.3 + 0.3) / 2)
    elsewhere = [*study_runs()[:1], *({**x, "seed": 2} for x in study_runs()[1:])]
    assert not any("single" in g["claim"] or "falls to" in g["claim"] for g in gates(elsewhere))


def test_the_interval_over_seeds_is_students() -> None:
    assert half_width([0.5]) is None
    # Three seeds: t at 2 degrees of freedom is 4.303, the error 0.1 / sqrt(3).
    assert half_width([0.4, 0.5, 0.6]) == pytest.approx(4.303 * 0.1 / 3**0.5, rel=0.02)


def test_the_table_names_arms_conditions_and_claims() -> None:
    runs = study_runs()
    rows = mean_rows(runs, [r["name"] for r in runs])
    correlations = {"full": [{"per_head": -0.5}, {"per_head": -0.7}], "single": [{}]}
    text = table({"rows": rows, "gates": gates(runs), "correlations": correlations})
    assert "| full | -0.60 (-0.50/-0.70) | - | - | - |" in text
    assert "| single | - |" not in text
    assert "| full | as trained | 60.0 | 80.0 | 99.0 | 1 |" in text
    assert "| RL adds to the warm start | 0.300 | >= 0.150 | yes |" in text


def test_a_family_of_a_file_stays_within_its_cell_of_the_table() -> None:
    runs = study_runs()
    rows = [{**row, "family": "a|b"} for row in mean_rows(runs, [r["name"] for r in runs])]
    text = table({"rows": rows, "gates": []})
    assert "| arm | condition | a\\|b | seeds |" in text


def write_runs(folder: Path, runs: list[dict[str, Any]]) -> None:
    """What is in the folders of arms besides `results.json`."""
    runs[0]["attention"] = {
        "experts": ["x"],
        "families": {"primes": {"shares": [[[[0.75, 0.25]]]], "by_expert": [0.75, 0.25]}},
    }
    (folder / "full").mkdir(parents=True)
    (folder / "full" / "metrics.jsonl").write_text(
        '{"step": 1, "reward/mean": 0.2, "attention/share/primes/x": 0.7}\n'
        '{"step": 2, "reward/mean": 0.4, "attention/share/primes/x": 0.8}\n'
    )
    (folder / "full" / "config.json").write_text('{"config": {"k": "</pre>"}}')


def test_a_report_of_arms_is_one_page_that_loads_nothing(tmp_path: Path) -> None:
    folder, runs = tmp_path / "a <title>", study_runs()
    write_runs(folder, runs)
    (folder / "results.json").write_text(json.dumps({"arms": runs}))
    (folder / "full" / "results.json").write_text(json.dumps(runs[0]))
    assert report([str(folder)]) == 0
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "a &lt;title&gt;" in text and "&lt;/pre&gt;" in text
    assert "http" not in text.replace("http-equiv", "")
    for words in ("full: primes", "1 / 1 / 1", ">75</td>", "-0.50", "reward", "single-fast"):
        assert words in text
    # One arm alone has the same page without the others.
    assert report([str(folder / "full"), "--out", str(tmp_path / "out")]) == 0
    alone = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "full: primes" in alone and "single" not in alone
    assert not (folder / "full" / "report.html").exists()
    # A folder of a study's seed has no file of its own: those of its arms are read.
    (folder / "results.json").unlink()
    assert report([str(folder), "--out", str(tmp_path / "seed")]) == 0
    assert "full: primes" in (tmp_path / "seed" / "report.html").read_text(encoding="utf-8")


def test_a_report_of_a_study_has_means_claims_and_a_page_of_each_seed(tmp_path: Path) -> None:
    runs = []
    for seed, accuracy in ((1, 0.6), (2, 0.7)):
        of_seed = [{**run, "seed": seed, "folder": run["name"]} for run in study_runs(accuracy)]
        write_runs(tmp_path / f"seed-{seed}", of_seed)
        runs += of_seed
    failures = [{"arm": "odd", "seed": 2, "error": "out of <luck>"}]
    found = summary(runs, failures, [run["name"] for run in study_runs()])
    (tmp_path / "results.json").write_text(json.dumps(found))
    assert report([str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    low = 0.65 - half_width([0.6, 0.7])
    assert f"full: 65.0%, 95% interval {max(0.0, low):.1%} to 100.0%" in text
    assert "RL adds to the warm start" in text and 'href="seed-2/report.html"' in text
    assert "odd, seed 2: out of &lt;luck&gt;" in text
    assert "full, seed 1" in text
    for seed in (1, 2):
        page = (tmp_path / f"seed-{seed}" / "report.html").read_text(encoding="utf-8")
        assert "full: primes" in page and "single-fast" in page


def test_a_latent_run_is_reported_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latent").mkdir()
    (tmp_path / "latent" / "results.json").write_text(json.dumps({"arms": study_runs()}))
    assert report([str(tmp_path / "latent"), str(tmp_path)]) == 1
    assert "give it alone" in capsys.readouterr().err
    with pytest.raises(ReportError, match="no results of `rivet latent`"):
        write_latent_report(tmp_path)


@pytest.mark.parametrize("name", ["results.json", "full/results.json"])
def test_broken_latent_results_are_named_and_make_no_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    write_runs(tmp_path, study_runs())
    whole = json.dumps({"arms": study_runs()} if "/" not in name else study_runs()[0])
    for content, fault in (
        (whole[: len(whole) // 2], "cannot be read as JSON"),
        ("[]", "it is []; expected an object"),
        (whole.replace('"accuracy": 0.3', '"accuracy": "x"'), 'rows[0].accuracy is "x"; expected'),
    ):
        (tmp_path / name).write_text(content)
        assert report([str(tmp_path)]) == 1
        told = capsys.readouterr().err
        assert told.startswith(f"rivet report: {tmp_path / name}: ") and fault in told
    assert not (tmp_path / "report.html").exists()


def test_a_latent_study_without_its_results_is_no_other_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_runs(tmp_path / "seed-1", study_runs())
    (tmp_path / "config.json").write_text('{"stage": "latent-study"}')
    assert report([str(tmp_path)]) == 1
    assert f"{tmp_path}/results.json: no such file" in capsys.readouterr().err


def test_a_study_checks_the_settings_of_every_arm_before_it_starts(tmp_path: Path) -> None:
    config = load_config(
        LatentStudyConfig,
        base=str(RECIPES / "latent_mini.yaml"),
        output_dir=str(tmp_path / "study"),
        arms={"full": {}, "odd": {"arm": "sideways"}, "none": {"expert": "primes"}},
    )
    with pytest.raises(ConfigError) as error:
        run(config)
    assert any(fault.startswith("arms: odd: ") for fault in error.value.faults)
    assert any(fault.startswith("arms: none: ") for fault in error.value.faults)
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize("broken", [("late",), ("full", "late")])
def test_a_study_writes_down_arms_that_fail_after_the_last_success_or_without_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: tuple[str, ...]
) -> None:
    def result_or_fault(config: LatentConfig) -> dict[str, Any]:
        name = Path(str(config.output_dir)).name
        if name in broken:
            raise RuntimeError(f"{name} ran out of luck")
        return study_runs()[0]

    monkeypatch.setattr("stages.latent.main.finished_or_run", result_or_fault)
    config = LatentStudyConfig(
        base=str(RECIPES / "latent_mini.yaml"),
        output_dir=str(tmp_path / "study"),
        seeds=[1],
        arms={"full": {}, "late": {}},
    )
    results = run(config)
    assert json.loads((tmp_path / "study" / "results.json").read_text()) == results
    assert [failure["arm"] for failure in results["failures"]] == list(broken)
    page = (tmp_path / "study" / "report.html").read_text(encoding="utf-8")
    assert "late ran out of luck" in page
    assert not (tmp_path / "study" / "finished.json").exists()


def test_another_arm_in_the_same_folder_joins_the_results_of_those_that_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(config: LatentConfig) -> dict[str, Any]:
        found = {**study_runs()[0], "arm": config.arm}
        with RunDir.open(str(config.output_dir), config, stage="latent") as run_dir:
            run_dir.write_json("results.json", found)
            run_dir.finish({})
        return found

    monkeypatch.setattr("stages.latent.run.run_arm", finish)
    for arm, controls in (("full", ["single"]), ("static", []), ("single", [])):
        config = {"arm": arm, "controls": controls, "output_dir": str(tmp_path)}
        run_latent(load_config(LatentConfig, str(RECIPES / "latent_mini.yaml"), **config))
    arms = [x["arm"] for x in json.loads((tmp_path / "results.json").read_text())["arms"]]
    assert arms == ["single", "full", "static"]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(arm in page for arm in arms)


def test_specialists_tokenize_the_same_text_differently() -> None:
    text = "Solve 12*x + 5 = 125."
    cut = [
        tokenizer.tokenize(text)
        for s in SPECIALISTS
        for tokenizer in [word_tokenizer([text], digits=s.digits, template=s.template)]
    ]
    assert cut[0] != cut[1]
    assert "125" in cut[1] and "125" not in cut[0]
    assert all("<unk>" not in words for words in cut)


def test_the_loss_of_completions_is_computed_where_the_model_lies() -> None:
    class Elsewhere(torch.nn.Linear):
        def forward(self, **inputs: torch.Tensor) -> Any:
            assert {x.device.type for x in inputs.values()} == {"meta"}
            kept = inputs["logits_to_keep"].numel()
            features = torch.empty(len(inputs["input_ids"]), kept, 1, device="meta")
            return SimpleNamespace(logits=super().forward(features))

    rows = [([5, 6], [7]), ([8], [9, 10])]
    away: Any = Elsewhere(1, 64, device="meta")
    assert completion_loss(away, rows).device.type == "meta"
    model = tiny_llama(64)
    logps = [model(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in ([5, 6], [8, 9])]
    # Token 7 behind 5 and 6; 9 behind 8, and 10 behind both.
    expected = -(logps[0][1, 7] + logps[1][0, 9] + logps[1][1, 10]) / 3
    torch.testing.assert_close(completion_loss(model, rows), expected)


def test_the_metrics_of_attention_are_documented() -> None:
    root = Path(__file__).parents[2]
    docs = (root / "docs" / "latent.md").read_text(encoding="utf-8")
    code = (root / "stages" / "latent" / "trainer.py").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `attention/(\w+)", docs, flags=re.MULTILINE))
    assert documented == set(re.findall(r"\"attention/(\w+)", code))
