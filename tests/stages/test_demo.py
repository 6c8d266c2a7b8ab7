"""The demo and the study: every phase for real at a size of seconds, a kill in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from eval.results_file import ResultsError
from rivet.config import ConfigError, load_config
from rivet.runs import RunDir, RunFinishedError
from rivet.settings import ProtocolSettings
from stages.demo import RECIPE, DemoConfig, main, results_table
from stages.pipeline import (
    Phases,
    Pipeline,
    PipelineConfig,
    check_overrides,
    give_memory_back,
)

REPO = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(1800)  # two commands, each with up to 900 s for itself
# Nothing is learnt at this size; what is tested is that every phase runs and hands on.
SMALL = {
    "warmstart": {"max_steps": 40, "dialogues": 1500, "gate": 0.0, "gate_problems": 2},
    "stage1": {"max_steps": 2, "collapse_alarm": "off", "save_steps": 1},
    "collect": {"limit": 48, "temperature": 1.0},
    "stage2": {
        "max_steps": 3,
        "require_right": False,
        "require_use": "any",
        "require_code_ok": False,
    },
    "eval": {"problems_per_family": 4},
}


def command(name: str, recipe: Path, folder: Path, **extra: object) -> list[str]:
    """A `rivet` command line at the small size."""
    arguments = [sys.executable, "-m", "stages.cli", name, str(recipe), "--output_dir", str(folder)]
    for key, value in {**SMALL, **extra}.items():
        arguments += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    return arguments


def run_to_the_end(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(arguments, cwd=REPO, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def row(checkpoint: str, condition: str, **values: object) -> dict[str, object]:
    share = {"accuracy": 0.5, "ci_low": 0.4, "ci_high": 0.6, "well_formed": 0.9}
    share |= {"well_formed_ci": [0.8, 0.95], "route_accuracy": 0.25}  # type: ignore[dict-item]
    share |= {"route_accuracy_ci": [0.2, 0.3]}  # type: ignore[dict-item]
    return {"checkpoint": checkpoint, "condition": condition, "n": 600, **share, **values}


def test_a_misspelt_setting_of_a_late_phase_fails_before_the_first_one() -> None:
    config = load_config(DemoConfig, RECIPE, stage2={"max_step": 3}, eval={"limit": "few"})
    with pytest.raises(ConfigError, match="stage2: .*did you mean max_steps") as caught:
        check_overrides(config)
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["stage2", "eval"]


def test_a_dry_run_checks_every_phase(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(RECIPE), "--dry-run", "--stage2", '{"max_step": 3}'])
    assert caught.value.code == 2
    assert "stage2: " in (shown := capsys.readouterr().err) and "did you mean max_steps" in shown


def test_the_settings_of_the_tiny_demo_fit_every_phase() -> None:
    check_overrides(load_config(DemoConfig, RECIPE.with_name("demo_tiny.yaml")))


def test_the_table_shows_every_stage_with_intervals() -> None:
    rows = [row(c, k) for c in ("warm", "stage1", "stage2") for k in ("experts", "local")]
    rendered = results_table(rows)
    assert rendered.row_count == 3
    cells = [list(column.cells) for column in rendered.columns]
    assert cells[0] == ["warm start", "Stage I", "Stage II"]
    assert cells[1] == ["50.0 [40.0, 60.0]"] * 3
    assert cells[3] == ["25.0 [20.0, 30.0]"] * 3


def test_a_size_without_recipes_is_refused() -> None:
    with pytest.raises(ConfigError, match="size is 'huge'"):
        load_config(DemoConfig, RECIPE, size="huge")


@pytest.mark.skipif(sys.platform != "linux", reason="the C library's own call")
def test_memory_that_a_phase_has_freed_goes_back_to_the_system() -> None:
    """A process that had Stage I behind it kept 17 GB, and Stage II came on top."""
    process, mib = psutil.Process(), 1 << 20
    before = process.memory_info().rss
    held = [bytearray(20_000) for _ in range(10_000)]
    kept = held[::1000]  # so that nothing can simply be cut off at the end
    del held
    freed_only = process.memory_info().rss
    give_memory_back()
    assert process.memory_info().rss < min(before + 100 * mib, freed_only - 50 * mib)
    assert len(kept) == 10


def test_phase_times_add_up_over_runs(tmp_path: Path) -> None:
    path = tmp_path / "phases.json"
    seconds = []
    for _ in range(2):
        with Phases.load(path).timed("warm"):
            sum(range(200_000))
        seconds.append(json.loads(path.read_text())["warm"][0])
    assert 0 < seconds[0] < seconds[1]
    assert [phase["name"] for phase in Phases.load(path).rows()] == ["warm"]


@pytest.mark.parametrize("text", ['{"warm": [1.0', "[]", '{"warm": 3}', '{"warm": ["x", 1]}'])
def test_broken_phase_times_are_begun_anew(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "phases.json"
    path.write_text(text)
    assert Phases.load(path).seconds == {}
    assert str(path) in caplog.text


@pytest.mark.parametrize("text", [None, '{"rows": [', "[]"])
def test_results_of_a_finished_evaluation_that_are_broken_are_named(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finished(config: object) -> None:
        raise RunFinishedError

    monkeypatch.setattr("eval.main.run", finished)
    folder = tmp_path / "eval" / "warm"
    with RunDir.open(folder, {}, stage="eval") as run:
        run.finish()
    if text is not None:
        (folder / "results.json").write_text(text)
    pipeline = Pipeline(tmp_path, PipelineConfig(), experts=tmp_path / "experts.yaml")
    with pytest.raises(ResultsError, match="warm/results.json: .*remove .*finished.json"):
        pipeline.evaluate(tmp_path, "warm", ["local"])


@pytest.mark.slow
def test_the_demo_runs_is_killed_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    arguments = command("demo", RECIPE, folder)
    process = subprocess.Popen(
        arguments, cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    # Killed in Stage I, after its first checkpoint.
    deadline = time.monotonic() + 600
    while not list(folder.glob("stage1/trajectories/*.parquet")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    warm = (folder / "warm" / "checkpoint" / "model.safetensors").stat().st_mtime_ns

    done = run_to_the_end(arguments)

    assert (folder / "warm" / "checkpoint" / "model.safetensors").stat().st_mtime_ns == warm
    results = json.loads((folder / "results.json").read_text())
    pairs = [(r["checkpoint"], r["condition"]) for r in results["rows"]]
    assert pairs == [(c, k) for c in ("warm", "stage1", "stage2") for k in ("experts", "local")]
    for r in results["rows"]:
        assert r["n"] == 24 and 0 <= r["ci_low"] <= r["accuracy"] <= r["ci_high"] <= 1
        assert 0 <= r["well_formed"] <= 1
    assert {"name", "wall_s", "cpu_s"} == set(results["phases"][0])
    assert ProtocolSettings.load(results["export"]).prompt == "bare"
    assert "<html" in (folder / "report" / "report.html").read_text()
    for path in ("report/report.html", "collect/trajectories", "export", "config.json"):
        assert str(folder / path) in done.stdout

    again = run_to_the_end(arguments)
    assert "is finished; --overwrite true runs it again" in again.stderr
    assert again.stdout == done.stdout


@pytest.mark.slow
def test_the_study_runs_its_arms_and_names_what_fails(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    arms = {
        "mask": {"stage1": {"expert_loss": "mask"}, "stage2": ["plain"]},
        "broken": {"stage2": ["nothing"]},
    }
    arguments = command(
        "study",
        RECIPE.with_name("study_mini.yaml"),
        folder,
        seeds=[1],
        arms=arms,
        variants={"plain": {"format_alpha": 1.0}, "nothing": {"max_length": 1}},
        stage2_conditions=["local", "plain"],
        jobs=2,
    )
    done = subprocess.run(
        arguments, cwd=REPO, capture_output=True, text=True, timeout=900, env=os.environ.copy()
    )
    results = json.loads((folder / "results.json").read_text())
    assert done.returncode == 1, done.stderr[-3000:]
    assert [f["arm"] for f in results["failures"]] == ["broken"]
    assert "no trajectory passes the filter" in results["failures"][0]["error"]
    keys = {(r["arm"], r["checkpoint"], r["stage2"], r["condition"]) for r in results["rows"]}
    assert keys == {
        (arm, checkpoint, stage2, condition)
        for arm, checkpoint, stage2 in (
            ("", "warm", "none"),
            ("mask", "stage1", "none"),
        )
        for condition in ("experts", "local")
    } | {("mask", "stage2", "plain", condition) for condition in ("local", "plain")}
    assert {r["expert_loss"] for r in results["rows"]} == {"none", "mask"}

    # More arms of the same study: what is there is read, and an arm may start anywhere.
    at = f"{folder}/seed-{{seed}}/mask/stage1/checkpoint"
    learnt = f"{folder}/seed-{{seed}}/mask/collect/trajectories"
    arms = {
        "mask": arms["mask"],
        "on": {"start": at, "stage2": ["plain"]},
        "again": {"start": at, "trajectories": learnt, "stage2": ["plain"]},
    }
    arguments[arguments.index("--arms") + 1] = json.dumps(arms)
    done = subprocess.run(
        arguments, cwd=REPO, capture_output=True, text=True, timeout=900, env=os.environ.copy()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    grown = json.loads((folder / "results.json").read_text())
    assert [r for r in grown["rows"] if r["checkpoint"] == "stage1"] == [
        r for r in results["rows"] if r["checkpoint"] == "stage1"
    ]
    stage2 = {
        arm: [(r["condition"], r["accuracy"]) for r in grown["rows"] if r["arm"] == arm]
        for arm in ("on", "again")
    }
    assert [condition for condition, _ in stage2["on"]] == ["local", "plain"]
    assert stage2["again"] == stage2["on"]  # the trajectories are those that it collects itself
