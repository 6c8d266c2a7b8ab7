"""`rivet stage1` with everything real but the size: engine, experts over HTTP, sandbox, grader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from accelerate import PartialState
from transformers import AutoModelForCausalLM
from untrained import write_untrained

from data.miniworld.experts import EXPERTS
from data.miniworld.tasks import build_split
from data.problems import ProblemFileError
from rivet.config import ConfigError, load_config
from rivet.experts.config import ExpertsFileError
from rivet.experts.pool import ExpertsUnavailableError
from rivet.rollout.types import RolloutLimits
from rivet.runs import RunDir
from rivet.settings import ProtocolSettings, SettingsError
from rivet.store import TrajectoryStore
from stages.stage1.config import Stage1Config
from stages.stage1.main import main, read_problems, run
from stages.stage1.objective import ObjectiveSettings
from stages.stage1.sampling import right_experts

RECIPE = Path(__file__).parents[2] / "stages" / "recipes" / "stage1_mini.yaml"
UNREACHABLE = """
experts:
  - name: calc
    skill: adds
    model: calc
    base_url: http://127.0.0.1:9/v1
    max_retries: 0
    timeout_s: 2
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose answers do not matter."""
    return write_untrained(tmp_path_factory.mktemp("checkpoint"), RolloutLimits(40, 2, 2, 24, 16))


def settings(checkpoint: Path, folder: Path) -> list[str]:
    values = {
        "model": checkpoint,
        "output_dir": folder,
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "problems_per_family": 2,
        "collapse_alarm": "off",
        "disable_tqdm": "true",
    }
    return [str(part) for name, value in values.items() for part in (f"--{name}", value)]


def test_the_command_trains_and_leaves_a_checkpoint(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main([str(RECIPE), *settings(checkpoint, folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "checkpoint")
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "metrics.jsonl", "finished.json", "trajectories", "log.txt"} <= names
    trajectories = TrajectoryStore(folder / "trajectories").load()
    assert len(trajectories) == 16
    for t in trajectories:
        assert t.fault is None and t.mode == "experts"
        assert t.outcome in ("right", "wrong", "no_answer") and t.reward == float(
            t.outcome == "right"
        )
        assert t.info["gold"] and t.info["family"] and "advantage" in t.info
        assert len({tuple(x.completion_ids) for x in trajectories}) > 8, "samples differ"
    loaded = ProtocolSettings.load(folder / "checkpoint")
    assert [card.name for card in loaded.experts] == list(EXPERTS)
    AutoModelForCausalLM.from_pretrained(folder / "checkpoint")
    # What the engine sampled with is what the trainer computes: nothing is lost on the way.
    line = RunDir.load(folder).metrics()[0]
    assert line["sampling/logp_difference"] < 1e-4


def test_the_mini_recipe_is_what_the_design_describes() -> None:
    config = load_config(Stage1Config, RECIPE)
    assert config.objective() == ObjectiveSettings(
        expert_weight=0.3,
        expert_negative=0.0,
        denominator="separate",
        negative_weight=config.negative_weight,
        route_weight=config.route_weight,
        route_negative=config.route_negative,
        route_entropy=config.route_entropy,
    )
    assert (config.prompts_per_step, config.num_generations) == (12, 8)
    assert config.beta == 0 and config.temperature == 1


def test_the_expert_that_knows_a_family_is_known() -> None:
    problems = build_split("test", 1, 0)
    known = right_experts(problems, ["calc", "numth", "algebra", "sage"])
    assert {p.meta["family"]: known[p.id] for p in problems}["gcd"] == "numth"
    assert len(known) == len(problems)
    assert set(right_experts(problems, ["calc"]).values()) == {"calc"}


def config(checkpoint: Path, folder: Path, **changes: object) -> Stage1Config:
    values: dict[str, object] = {
        "model": str(checkpoint),
        "output_dir": str(folder),
        "problems_per_family": 4,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_steps": 1,
    }
    return load_config(Stage1Config, None, **(values | changes))


def test_a_broken_problems_file_is_named_with_its_line(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"id": "a", "problem": "1+1", "answer": "2"}) + "\n{oops\n")
    with pytest.raises(ProblemFileError, match=r"p\.jsonl:2: not valid JSON"):
        run(config(checkpoint, tmp_path / "run", problems=str(path)))
    path.write_text(json.dumps({"id": "a", "problem": "1+1", "answer": "2"}) + "\n")
    with pytest.raises(ConfigError, match=r"p\.jsonl holds 1; expected at least 2"):
        run(config(checkpoint, tmp_path / "run", problems=str(path)))
    assert not (tmp_path / "run").exists(), "nothing was started"


def test_a_key_to_balance_by_that_no_problem_has_is_named_with_those_that_there_are(
    checkpoint: Path,
) -> None:
    config = load_config(Stage1Config, RECIPE, model=str(checkpoint), balance="famly")
    with pytest.raises(ConfigError, match="balance: famly: no problem of miniworld.*family"):
        read_problems(config)


def test_an_expert_that_does_not_answer_is_found_before_the_first_step(
    checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "experts.yaml"
    path.write_text(UNREACHABLE)
    with pytest.raises(ExpertsUnavailableError, match=r"calc at http://127.0.0.1:9/v1"):
        run(config(checkpoint, tmp_path / "run", experts=str(path)))
    assert not (tmp_path / "run" / "trajectories").exists()
    path.write_text("experts:\n  - name: calc\n")
    with pytest.raises(ExpertsFileError, match="experts.yaml"):
        run(config(checkpoint, tmp_path / "other", experts=str(path)))
    assert not (tmp_path / "other").exists(), "nothing was started"


def test_every_process_waits_for_the_writer_before_it_touches_the_run_folder(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others do not wait by the folder's lock, which only the writer takes."""
    order: list[str] = []

    class EndHere(Exception):
        pass

    def experts(*_: object) -> None:
        order.append("experts")
        raise EndHere

    def wait(*_: object) -> None:
        assert RunDir.load(tmp_path / "run").manifest["stage"] == "stage1"
        order.append("wait")

    monkeypatch.setattr(PartialState, "wait_for_everyone", wait)
    monkeypatch.setattr("stages.stage1.main.open_experts", experts)
    with pytest.raises(EndHere):
        run(config(checkpoint, tmp_path / "run"))
    assert order == ["wait", "experts"]


def test_a_folder_that_is_no_rivet_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(SettingsError, match=r"rivet\.json: no such file"):
        run(config(tmp_path / "model", tmp_path / "run"))


def test_a_misspelt_key_is_named_with_the_nearest(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: x\nroute_wieght: 8\n")
    with pytest.raises(ConfigError, match=r"r\.yaml:2: route_wieght: .*did you mean route_weight"):
        load_config(Stage1Config, recipe)
