"""`rivet eval` of a latent policy: the rows of `rivet latent`, whom it hears, what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data.problems import Problem
from eval.conditions import read_condition
from eval.config import EvalConfig
from eval.latent import LatentEvalError
from eval.main import main, run
from eval.regrade import regrade
from eval.report import main as report
from rivet import Solver
from rivet.checkpoints import CheckpointError
from rivet.grading import Grader
from rivet.latent.engine import LatentEngine
from rivet.latent.experts import ExpertError
from rivet.latent.states import ExpertStates
from rivet.runs import RunDirError
from rivet.store import TrajectoryStore
from rivet.trajectory import Trajectory
from stages.export import ExportConfig
from stages.latent.evaluate import evaluate
from stages.latent.export import export_latent
from stages.latent.source import LatentSource, Sampling
from stages.latent.start import gather, load_start, open_listeners
from tests.stages.latent_world import (
    VERDICTS,
    latent_config,
    scripted_grades,
    write_latent_world,
)


class Arm:
    """An untrained policy of one arm in a checkpoint, and what `rivet latent` makes of it."""

    def __init__(self, world: Path, folder: Path, **changes: Any) -> None:
        self.config = latent_config(world, folder, **changes)
        self.data = gather(self.config)
        self.start = load_start(self.config, self.data)
        self.listener = open_listeners(self.config, self.data)[1]
        # Large weights: what a random policy says then depends on what it hears.
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.start.policy.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.7, generator=generator)
        self.start.policy.eval()
        self.checkpoint = folder / "checkpoint"
        self.start.policy.save_pretrained(self.checkpoint)
        self.start.tokenizer.hf.save_pretrained(self.checkpoint)
        self.start.settings.save(self.checkpoint)

    def answers(self, states: ExpertStates | None) -> dict[str, list[int]]:
        """Greedy completions of the test problems by problem."""
        start, sampling = self.start, Sampling(4)
        grader: Any = None
        source = LatentSource(start.policy, start.prompts, self.listener, grader, sampling)
        done = source.of_problems(self.data.test, states)
        return {t.problem_id: t.completion_ids for t in done}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_latent_world(tmp_path_factory.mktemp("latent-eval-world"))


@pytest.fixture(scope="module", autouse=True)
def verdicts() -> Any:
    """Both samplers' rows get the verdicts of the latent world."""

    async def scripted(grader: Grader, problem: Problem, trajectory: Trajectory) -> Trajectory:
        outcome, reward = VERDICTS[trajectory.completion_ids[0] % 2]
        return replace(trajectory, outcome=outcome, reward=reward)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LatentSource, "_graded", scripted_grades)
        patch.setattr("eval.generate.grade_trajectory", scripted)
        yield


@pytest.fixture(scope="module")
def full(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Arm:
    return Arm(world, tmp_path_factory.mktemp("latent-eval") / "full")


def eval_config(arm: Arm, folder: Path, **changes: Any) -> EvalConfig:
    """An evaluation on the test problems of the world."""
    given: dict[str, Any] = {
        "model": str(arm.checkpoint),
        "output_dir": str(folder),
        "conditions": ["experts", "no-expert"],
        "problems": arm.config.test_problems,
    }
    return EvalConfig(**{**given, **changes})


def rows(folder: Path) -> list[Trajectory]:
    """Rows of a condition, in the order of their ids."""
    return sorted(TrajectoryStore(folder / "trajectories"), key=lambda t: t.id)


def completions(folder: Path) -> dict[str, list[int]]:
    """Completions of a condition by problem."""
    return {t.problem_id: t.completion_ids for t in rows(folder)}


def test_it_gives_the_answers_and_the_accuracies_of_rivet_latent(full: Arm, tmp_path: Path) -> None:
    results = run(eval_config(full, tmp_path / "eval"))
    states = full.listener.hear(range(len(full.data.test)), 0)
    assert completions(tmp_path / "eval" / "experts") == full.answers(states)
    grader: Any = None
    start = full.start
    given = (start.policy, start.prompts, full.listener, full.data.test, grader, full.config)
    expected = {r["family"]: (r["accuracy"], r["n"]) for r in evaluate(*given)}
    assert 0 < expected["hard"][0] < 1
    by_family = results["rows"][0]["by"]["family"]
    assert {f: (x["value"], x["n"]) for f, x in by_family.items()} == {
        family: value for family, value in expected.items() if family != "hard"
    }
    assert (results["rows"][0]["accuracy"], results["rows"][0]["n"]) == expected["hard"]
    comparison = results["comparisons"][0]
    assert (comparison["a"], comparison["b"]) == ("full/experts", "full/no-expert")


def test_its_report_is_that_of_every_evaluation_with_the_viewer(full: Arm, tmp_path: Path) -> None:
    run(eval_config(full, tmp_path / "eval", model=str(full.checkpoint.parent)))
    assert report([str(tmp_path / "eval")]) == 0
    page = (tmp_path / "eval" / "report.html").read_text(encoding="utf-8")
    for words in ('id="viewer-chunk-0"', 'id="trajectories"', "no-expert", 'id="results"'):
        assert words in page
    assert (tmp_path / "eval" / "report.md").read_text(encoding="utf-8").count("| full") == 2


def test_who_names_no_expert_has_no_route_accuracy_also_when_graded_again(
    full: Arm, tmp_path: Path
) -> None:
    asked = {"problems": "miniworld", "problems_per_family": 1, "conditions": ["experts"]}
    (row,) = run(eval_config(full, tmp_path / "eval", **asked))["rows"]
    assert row["n"] == 6 and row["route_accuracy"] is None
    (again,) = regrade(tmp_path / "eval", tmp_path / "again", grading="reward")["rows"]
    assert again["n"] == 6 and again["route_accuracy"] is None


@pytest.mark.slow
def test_an_export_gives_the_same_rows(full: Arm, tmp_path: Path) -> None:
    target = tmp_path / "export"
    export_latent(ExportConfig(str(full.checkpoint), tolerance=1e-6), full.checkpoint, target)
    for name, model in (("one", full.checkpoint), ("two", tmp_path / "export")):
        run(eval_config(full, tmp_path / name, model=str(model)))
    for condition in ("experts", "no-expert"):
        assert rows(tmp_path / "one" / condition) == rows(tmp_path / "two" / condition)


def test_without_experts_every_one_of_them_is_masked(full: Arm, tmp_path: Path) -> None:
    run(eval_config(full, tmp_path / "eval"))
    states = full.listener.states
    assert states is not None
    masked = replace(states, mask=torch.zeros_like(states.mask))
    silent = completions(tmp_path / "eval" / "no-expert")
    assert silent == full.answers(masked)
    assert silent != completions(tmp_path / "eval" / "experts")


def test_a_policy_in_training_samples_without_dropout_and_stays_in_training(
    world: Path, tmp_path: Path
) -> None:
    arm = Arm(world, tmp_path / "run")
    states, policy = arm.listener.states, arm.start.policy
    before = arm.answers(states)
    for layer in policy.model.language_model.layers:
        layer.self_attn.attention_dropout = 0.9
    policy.train()
    assert arm.answers(states) == before
    assert policy.training and policy.model.language_model.training


def test_an_expert_that_was_masked_in_training_stays_masked(world: Path, tmp_path: Path) -> None:
    arm = Arm(world, tmp_path / "one", arm="one-expert", expert="gpt")
    run(eval_config(arm, tmp_path / "eval", conditions=["experts"]))
    found = completions(tmp_path / "eval" / "experts")
    assert found == arm.answers(arm.listener.states)
    everybody = open_listeners(latent_config(world, tmp_path / "all"), arm.data)[1].states
    assert found != arm.answers(everybody)


@pytest.mark.parametrize("arm", ["single", "constant"])
def test_a_policy_without_experts_has_one_condition(arm: str, world: Path, tmp_path: Path) -> None:
    alone = Arm(world, tmp_path / arm, arm=arm)
    run(eval_config(alone, tmp_path / "eval", conditions=["no-expert"]))
    assert completions(tmp_path / "eval" / "no-expert") == alone.answers(None)
    with pytest.raises(LatentEvalError, match="trained without experts; expected no-expert"):
        run(eval_config(alone, tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_a_killed_evaluation_ends_with_the_same_rows(
    full: Arm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"samples_per_problem": 3, "temperature": 1.0, "batch_size": 5, "shard_size": 2}
    run(eval_config(full, tmp_path / "whole", **how))
    whole = {c: rows(tmp_path / "whole" / c) for c in ("experts", "no-expert")}
    assert len(whole["experts"]) == 24
    assert len({tuple(t.completion_ids) for t in whole["experts"]}) > 8
    original, batches = LatentEngine._sample, 0

    def dies(self: LatentEngine, requests: Sequence[Any]) -> Any:
        nonlocal batches
        batches += 1
        if batches > 2:
            raise RuntimeError("killed")
        return original(self, requests)

    config = eval_config(full, tmp_path / "killed", **how)
    with monkeypatch.context() as patch:
        patch.setattr(LatentEngine, "_sample", dies)
        with pytest.raises(RuntimeError, match="killed"):
            run(config)
    left = rows(tmp_path / "killed" / "experts")
    assert 0 < len(left) < 24
    run(replace(config, batch_size=7))
    for condition, expected in whole.items():
        found = rows(tmp_path / "killed" / condition)
        assert [(t.id, t.completion_ids, t.outcome) for t in found] == [
            (t.id, t.completion_ids, t.outcome) for t in expected
        ]


def test_experts_that_moved_are_found_where_they_are_said_to_lie(
    full: Arm, world: Path, tmp_path: Path
) -> None:
    shutil.copytree(full.checkpoint, tmp_path / "checkpoint")
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    for expert in config["experts"]:
        expert["path"] = f"gone/with/{expert['name']}"
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(config))
    moved = {"model": str(tmp_path / "checkpoint"), "conditions": ["experts"]}
    with pytest.raises(
        ExpertError, match=r"expert llama: gone/with/llama: no such folder.*--expert_paths"
    ):
        run(eval_config(full, tmp_path / "eval", **moved))
    assert not (tmp_path / "eval").exists()
    paths = {name: str(world / name) for name in ("llama", "gpt")}
    run(eval_config(full, tmp_path / "eval", **moved, expert_paths=paths))
    run(eval_config(full, tmp_path / "plain", conditions=["experts"]))
    assert rows(tmp_path / "eval" / "experts") == rows(tmp_path / "plain" / "experts")
    there, here = (read_condition(tmp_path / n / "experts").settings for n in ("eval", "plain"))
    assert there == here


def test_another_revision_of_an_expert_is_refused(full: Arm, world: Path, tmp_path: Path) -> None:
    other = shutil.copytree(world / "llama", tmp_path / "llama")
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    model.save_pretrained(other)
    for paths, message in (
        ({"llama": str(other)}, r"expert llama: .* holds another model or revision"),
        ({"bert": str(other)}, r"expert bert: .* among llama, gpt"),
    ):
        with pytest.raises(ExpertError, match=message):
            run(eval_config(full, tmp_path / "eval", expert_paths=paths))
    assert not (tmp_path / "eval").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entries: entries[0].pop("path"), "config.json: experts: .* lacks path"),
        (lambda entries: entries[0].pop("fingerprint"), "lacks fingerprint"),
        (lambda entries: entries.pop(), "llama; expected those .* llama, gpt"),
        (lambda entries: entries[1].update(last_k="x"), "last_k is 'x'"),
    ],
)
def test_what_a_policy_says_of_its_experts_is_checked(
    change: Callable[[list[dict[str, Any]]], Any], message: str, full: Arm, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(full.checkpoint, broken)
    config = json.loads((broken / "config.json").read_text())
    change(config["experts"])
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExpertError, match=message):
        run(eval_config(full, tmp_path / "eval", model=str(broken)))
    with pytest.raises(ExpertError, match=message):
        export_latent(ExportConfig(str(broken)), broken, tmp_path / "export")
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("condition", ["local", "no-python", "plain"])
def test_conditions_that_mean_nothing_here_are_refused(
    condition: Any, full: Arm, tmp_path: Path
) -> None:
    with pytest.raises(LatentEvalError, match=f"{condition} is none .* experts and no-expert"):
        run(eval_config(full, tmp_path / "eval", conditions=["experts", condition]))
    assert not (tmp_path / "eval").exists()


def test_what_answers_alone_refuses_a_policy_that_needs_its_experts(full: Arm) -> None:
    with pytest.raises(CheckpointError, match="answers only together with its experts"):
        Solver(full.checkpoint)


def test_other_samplers_are_refused(full: Arm, tmp_path: Path) -> None:
    for changes in ({"ray": 2}, {"backend": "vllm"}):
        with pytest.raises(LatentEvalError, match="expected 0 and local"):
            run(eval_config(full, tmp_path / "eval", **changes))


def test_the_command_opens_no_textual_experts_and_resumes_only_the_same_evaluation(
    full: Arm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def nobody(name: str) -> Any:
        raise AssertionError("a latent policy consults nobody")

    arguments = ["--model", str(full.checkpoint), "--output_dir", str(tmp_path / "eval")]
    arguments += ["--problems", full.config.test_problems, "--conditions", "experts", "no-expert"]
    assert main(arguments, open_experts=nobody) == 0
    assert "| full       | no-expert |" in capsys.readouterr().out
    with pytest.raises(RunDirError, match="other settings"):
        main([*arguments, "--limit", "2"], open_experts=nobody)
