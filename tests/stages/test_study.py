"""Studies: what a recipe may say, what is kept, and that no arm takes another with it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from eval.results_file import RESULTS_FILE
from rivet.config import ConfigError, load_config
from stages.demo import RECIPE
from stages.study import _run_units
from stages.study import main as study
from stages.study import run as run_study
from stages.study_config import StudyConfig, check_arms


def row(seed: int, arm: str, accuracy: float = 0.5) -> dict[str, Any]:
    """A row of results, after removal."""
    return {
        **{"checkpoint": "stage1", "condition": "local", "n": 600, "stage2": "none"},
        **{"accuracy": accuracy, "ci_low": 0.4, "ci_high": 0.6, "well_formed": 0.9},
        **{"well_formed_ci": [0.8, 0.95], "route_accuracy": 0.25, "route_accuracy_ci": [0.2, 0.3]},
        **{"seed": seed, "arm": arm},
    }


def fake_unit(monkeypatch: pytest.MonkeyPatch, *failing: tuple[int, str]) -> list[tuple[int, str]]:
    """Arms that only give a row, in threads of this process; gives the list of what has run."""
    ran: list[tuple[int, str]] = []

    def unit(_config: object, _folder: object, _experts: object, seed: int, arm: str) -> object:
        ran.append((seed, arm))
        if (seed, arm) in failing:
            raise RuntimeError("it broke")
        return {"rows": [row(seed, arm)], "phases": []}

    monkeypatch.setattr("stages.study.ProcessPoolExecutor", lambda n, **_: ThreadPoolExecutor(n))
    monkeypatch.setattr("stages.study.run_unit", unit)
    return ran


def config_of(folder: Path, **settings: Any) -> StudyConfig:
    """One seed and one job, unless said otherwise."""
    given = {"seeds": [1], "jobs": 1, "output_dir": str(folder), **settings}
    return load_config(StudyConfig, **given)


def test_a_misspelt_setting_of_any_arm_fails_before_the_first_one() -> None:
    config = load_config(
        StudyConfig,
        RECIPE.with_name("study_mini.yaml"),
        arms={"a": {"stage1": {"expert_weight": -1.0}}, "b": {"stage2": ["plain"]}},
        variants={"plain": {"format_alfa": 1.0}},
    )
    with pytest.raises(ConfigError) as caught:
        check_arms(config)
    first, second = caught.value.faults
    assert first.startswith("arms: a: stage1: ") and "expert_weight is -1" in first
    assert second.startswith("variants: plain: stage2: ") and "format_alpha" in second


def test_the_arms_of_every_study_fit() -> None:
    for recipe in RECIPE.parent.glob("study_*.yaml"):
        check_arms(load_config(StudyConfig, recipe))


def test_a_study_prints_its_table_and_leaves_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(1, "a", 0.2), row(2, "a", 0.4)]
    results = {"rows": rows, "failures": [], "phases": []}
    monkeypatch.setattr("stages.study._run_units", lambda *_: results)
    monkeypatch.setattr("stages.experts.start_miniworld_experts", lambda: nullcontext([]))
    recipe = RECIPE.with_name("study_mini.yaml")
    given = ["--output_dir", str(tmp_path / "s"), "--arms", '{"a": {"stage1": {}}}']
    assert study([str(recipe), *given]) == 0
    shown = capsys.readouterr().out
    assert "| a, Stage I | 30.0 \u00b1 14.1 (20.0 / 40.0) |" in shown
    assert (tmp_path / "s" / "table.md").read_text() in shown
    for name in ("report.html", "figure.svg", "results.csv", "finished.json"):
        assert (tmp_path / "s" / name).is_file()
    assert str(tmp_path / "s" / "report.html") in shown


def test_a_study_goes_seed_by_seed_and_leaves_out_the_arms_of_a_broken_warm_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = fake_unit(monkeypatch, (2, ""))
    arms = {"a": {"stage1": {}}, "b": {"stage1": {}}, "c": {"start": "x", "stage1": {}}}
    results = _run_units(config_of(tmp_path, seeds=[1, 2, 3], arms=arms), tmp_path, tmp_path)
    first, last = [[(seed, arm) for arm in ("", "a", "b", "c")] for seed in (1, 3)]
    assert ran == [*first, (2, ""), (2, "c"), *last]
    assert results["failures"] == [{"seed": 2, "arm": "warm", "error": "it broke"}]


def test_rows_of_arms_and_seeds_that_are_not_named_this_time_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_unit(monkeypatch)
    a, b = {"a": {"stage1": {}}}, {"b": {"stage1": {}}}
    _run_units(config_of(tmp_path, seeds=[1, 2], arms=a | b), tmp_path, tmp_path)
    results = _run_units(config_of(tmp_path, seeds=[2], arms=b), tmp_path, tmp_path)
    found = [(r["seed"], r["arm"]) for r in results["rows"]]
    # What is named comes in its order, the rest behind it.
    assert found == [(1, ""), (1, "b"), (1, "a"), (2, ""), (2, "b"), (2, "a")]
    assert json.loads((tmp_path / RESULTS_FILE).read_text()) == results
    # An arm that fails has no rows any more: they might be of other settings.
    fake_unit(monkeypatch, (2, "b"))
    results = _run_units(config_of(tmp_path, seeds=[2], arms=b), tmp_path, tmp_path)
    assert (2, "b") not in {(r["seed"], r["arm"]) for r in results["rows"]}
    assert [f["arm"] for f in results["failures"]] == ["b"]


def test_results_that_are_broken_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_unit(monkeypatch)
    (tmp_path / RESULTS_FILE).write_text('{"rows": [{"se')
    results = _run_units(config_of(tmp_path, arms={"a": {"stage1": {}}}), tmp_path, tmp_path)
    assert len(results["rows"]) == 2
    assert str(tmp_path / RESULTS_FILE) in caplog.text


def _killed_in_b(
    _config: object, _folder: object, _experts: object, seed: int, arm: str
) -> dict[str, Any]:
    if arm == "b":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"rows": [row(seed, arm)], "phases": []}


@pytest.mark.slow
def test_a_process_that_is_killed_takes_no_other_arm_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.study.run_unit", _killed_in_b)
    arms = {name: {"stage1": {}, "start": "x"} for name in "abc"}
    results = _run_units(config_of(tmp_path, arms=arms, jobs=2), tmp_path, tmp_path)
    assert [r["arm"] for r in results["rows"]] == ["a", "c"]
    assert [f["arm"] for f in results["failures"]] == ["b"]
    assert "short of memory" in results["failures"][0]["error"]


@pytest.mark.parametrize(
    "name", ["../b", "a/b", "", ".", ".a", "warm", "eval", "a b", "a\nb", "a" * 65, "<i>"]
)
def test_an_arm_that_is_called_like_no_folder_of_its_own_is_refused(name: str) -> None:
    config = load_config(StudyConfig, arms={"fine": {"stage1": {}}})
    config.arms[name] = {"stage1": {}}
    with pytest.raises(ConfigError, match="^arms: .*expected"):
        config.parsed_arms()


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        (None, "arms: a: got null, expected a mapping"),
        ("plain", "arms: a: got plain, expected a mapping"),
        ({5: 1}, "arms: a: got .*expected a mapping with text as keys"),
        ({}, "arms: a: .*nothing to do"),
        ({"stage1": True}, "arms: a: .*stage1: got true, expected mapping"),
        ({"stage2": "plain"}, "arms: a: .*stage2: got plain .*expected list of text"),
        ({"stage2": [["plain"]]}, "arms: a: .*stage2: got .*expected list of text"),
        ({"stage2": ["plain", "plain"]}, "expected each variant once"),
        ({"stage2": ["plane"]}, "arms: a: stage2: no variant plane; expected some of plain"),
        ({"stage3": {}}, "arms: a: .*unknown setting; did you mean stage"),
        ({"stage1": {}, "start": 5}, "arms: a: .*start: got 5 .*expected text"),
        ({"stage2": ["plain"], "collect": {}, "trajectories": "x"}, "expected one source"),
    ],
)
def test_an_arm_of_another_form_is_refused_by_name(arm: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(StudyConfig, arms={"a": arm}, variants={"plain": {}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seeds": [1, 1]}, "seeds are .*expected different ones"),
        ({"seeds": [-1]}, "seeds are .*at least 0"),
        ({"seeds": []}, "seeds are"),
        ({"jobs": 0}, "jobs is 0"),
        ({"conditions": []}, "conditions is .*expected different ones of experts"),
        ({"conditions": ["local", "local"]}, "conditions is"),
        ({"stage2_conditions": []}, "stage2_conditions is"),
        ({"variants": {"p": None}}, "variants: p: got null, expected a mapping"),
        ({"variants": {"p-sampled": {}}}, "does not end in -sampled"),
        ({"variants": {"p/q": {}}}, "variants: 'p/q' is no name for a folder"),
    ],
)
def test_settings_of_a_study_out_of_range_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(StudyConfig, **({"arms": {"a": {"stage1": {}}}} | settings))


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"stage1": {"model": "x"}}, "stage1: model: set by"),
        ({"eval": {"conditions": ["local"]}}, "eval: conditions: set by"),
        ({"collect": {"output_dir": "x"}}, "collect: output_dir: set by"),
        ({"stage2": {"recipe": "x"}}, "stage2: .*recipe: unknown setting"),
        ({"arms": {"a": {"stage1": {"experts": "x"}}}}, "arms: a: stage1: experts: set by"),
        ({"variants": {"p": {"trajectories": "x"}}}, "variants: p: stage2: trajectories: set by"),
    ],
)
def test_what_joins_the_phases_cannot_be_set(settings: dict[str, Any], where: str) -> None:
    config = load_config(StudyConfig, **({"arms": {"a": {"stage1": {}}}} | settings))
    with pytest.raises(ConfigError, match=where):
        check_arms(config)


def test_an_arm_that_has_begun_keeps_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = fake_unit(monkeypatch)
    monkeypatch.setattr("stages.experts.start_miniworld_experts", lambda: nullcontext([]))

    def go(**arm: Any) -> None:
        ran.clear()
        arms = {"a": {"stage1": {"expert_loss": "mask"}, **arm}}
        run_study(config_of(tmp_path / "s", arms=arms, variants={"p": {}}))

    go()
    (tmp_path / "s" / "seed-1" / "a").mkdir(parents=True)
    with pytest.raises(ConfigError, match="arms: a: was .*mask.*, is .*luffy.*name of its own"):
        go(stage1={"expert_loss": "luffy"})
    assert not ran
    go(stage2=["p"])  # a variant more is no other arm
    assert ran == [(1, ""), (1, "a")]
    shutil.rmtree(tmp_path / "s" / "seed-1" / "a")
    go(stage1={"expert_loss": "luffy"})
    assert ran == [(1, ""), (1, "a")]


@pytest.mark.parametrize("start", ["{sed}/warm", "{", "{0}"])
def test_a_start_with_other_braces_is_refused(start: str) -> None:
    with pytest.raises(ConfigError, match="expected a path in which {seed} stands for the seed"):
        load_config(StudyConfig, arms={"a": {"start": start, "stage1": {}}})


def test_a_start_that_is_not_there_is_named_before_anything_runs(tmp_path: Path) -> None:
    config = load_config(
        StudyConfig,
        output_dir=str(tmp_path / "study"),
        seeds=[1, 2],
        variants={"p": {}},
        arms={
            "a": {
                "start": f"{tmp_path}/seed-{{seed}}",
                "trajectories": f"{tmp_path}/none",
                "stage2": ["p"],
            }
        },
    )
    (tmp_path / "seed-1").mkdir()
    with pytest.raises(ConfigError, match="start: .*seed-2") as caught:
        run_study(config)
    where = [fault.split(": ")[0] for fault in caught.value.faults]
    assert where == ["start", "start", "trajectories"], "a folder alone is no checkpoint"
    assert not (tmp_path / "study").exists()
