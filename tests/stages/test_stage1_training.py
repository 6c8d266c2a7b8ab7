"""A Stage I run in its folder: exact resume, alarms, orderly stops, what is left on disk."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stage1_world import ScriptedSource, build_config, build_start, run, scripted
from transformers import AutoModelForCausalLM

from rivet.interrupt import Interrupted
from rivet.runs import RunDir, RunDirError, RunFinishedError
from rivet.settings import ProtocolSettings
from rivet.store import StoreError, TrajectoryStore
from rivet.trajectory import Trajectory
from stages.stage1.health import CollapseWatch, FaultRateError, FaultWatch
from stages.stage1.rollouts import Asked
from stages.stage1.training import CollapseError


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoint" / "model.safetensors")


def assert_same(left: Path, right: Path) -> None:
    a, b = weights(left), weights(right)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


class DyingSource(ScriptedSource):
    """Samples differently each time, and dies when it is asked for a step."""

    def __init__(self, dies_at: int | None, salt: int) -> None:
        super().__init__()
        self._dies_at = dies_at
        self._random = random.Random(salt)

    def sample(self, asked: Sequence[Asked]) -> list[Trajectory]:
        if asked[0].step == self._dies_at:
            raise Killed
        self.steps.append(asked[0].step)
        return [scripted(one, reward=float(self._random.random() < 0.5)) for one in asked]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with a checkpoint every 2."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(folder / "run", max_steps=6)
    return folder / "run"


# --- exact resume -------------------------------------------------------------------------------


@pytest.mark.parametrize("dies_at", [2, 4, 5])
def test_a_resumed_run_ends_with_the_parameters_of_an_undisturbed_one(
    dies_at: int, undisturbed: Path, tmp_path: Path
) -> None:
    class Once(ScriptedSource):
        def sample(self, asked: Sequence[Asked]) -> list[Trajectory]:
            if asked[0].step == dies_at:
                raise Killed
            return super().sample(asked)

    with pytest.raises(Killed):
        run(tmp_path / "run", Once(), max_steps=6)
    torch.rand(7)  # another process would have another generator state
    source = ScriptedSource()
    run(tmp_path / "run", source, max_steps=6)
    assert source.steps == list(range(dies_at, 7)), "stored steps are replayed, not sampled"
    assert_same(tmp_path / "run", undisturbed)
    lines = RunDir.load(tmp_path / "run").metrics()
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    before = RunDir.load(undisturbed).metrics()
    assert [line["loss"] for line in lines] == [line["loss"] for line in before]


def test_replayed_rollouts_are_the_stored_ones_even_if_sampling_would_differ(
    tmp_path: Path,
) -> None:
    with pytest.raises(Killed):
        run(tmp_path / "run", DyingSource(4, salt=1), max_steps=4)
    store = TrajectoryStore(tmp_path / "run" / "trajectories")
    assert store.shards() == ["step-00001", "step-00002", "step-00003"]
    kept = store.load()
    source = DyingSource(None, salt=2)
    run(tmp_path / "run", source, max_steps=4)
    assert source.steps == [4]
    assert store.load()[: len(kept)] == kept


def test_a_half_written_trainer_checkpoint_is_passed_over(
    undisturbed: Path, tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        run(tmp_path / "run", DyingAfter(5), max_steps=6)
    newest = tmp_path / "run" / "trainer" / "checkpoint-4"
    (newest / "trainer_state.json").unlink()  # it is written last
    (newest / "optimizer.pt").write_bytes(b"torn")
    run(tmp_path / "run", max_steps=6)
    assert_same(tmp_path / "run", undisturbed)


class DyingAfter(ScriptedSource):
    def __init__(self, dies_at: int) -> None:
        super().__init__()
        self._dies_at = dies_at

    def sample(self, asked: Sequence[Asked]) -> list[Trajectory]:
        if asked[0].step == self._dies_at:
            raise Killed
        return super().sample(asked)


@pytest.mark.slow
def test_a_run_that_is_killed_with_sigkill_resumes_exactly(tmp_path: Path) -> None:
    program = Path(__file__).with_name("stage1_world.py")
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root)}

    def start(folder: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, str(program), str(folder), "12"], env=env)

    assert start(tmp_path / "whole").wait() == 0
    killed = 0
    for shard in ("step-00003", "step-00008", "step-00011"):
        process = start(tmp_path / "killed")
        path = tmp_path / "killed" / "trajectories" / f"{shard}.parquet"
        while process.poll() is None and not path.exists():
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
    assert killed >= 2
    assert start(tmp_path / "killed").wait() == 0
    assert_same(tmp_path / "killed", tmp_path / "whole")


def test_a_store_of_another_run_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "a", max_steps=1)
    shard = TrajectoryStore(tmp_path / "a" / "trajectories").read_shard("step-00001")
    with pytest.raises(Killed):
        run(tmp_path / "b", DyingAfter(1), max_steps=1)
    TrajectoryStore(tmp_path / "b" / "trajectories").write("step-00001", shard[::-1])
    with pytest.raises(StoreError, match=r"step-00001.parquet: holds other rollouts than step 1"):
        run(tmp_path / "b", max_steps=1)


# --- the folder ---------------------------------------------------------------------------------


def test_a_finished_run_leaves_a_checkpoint_that_loads_and_is_not_overwritten(
    undisturbed: Path,
) -> None:
    checkpoint = undisturbed / "checkpoint"
    names = {path.name for path in checkpoint.iterdir()}
    assert {"config.json", "model.safetensors", "rivet.json", "tokenizer.json"} <= names
    assert ProtocolSettings.load(checkpoint) == build_start().settings
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.isfinite(model(input_ids=ids).logits).all()
    results = RunDir.load(undisturbed, stage="stage1").results
    assert results["steps"] == 6 and 0 <= results["reward/mean"] <= 1
    with pytest.raises(RunFinishedError, match="finished"):
        run(undisturbed, max_steps=6)
    with pytest.raises(RunDirError, match="max_steps was 6, is 7"):
        run(undisturbed, max_steps=7)


def test_overwriting_starts_again(tmp_path: Path) -> None:
    run(tmp_path / "run", max_steps=2)
    source = ScriptedSource()
    run(tmp_path / "run", source, max_steps=1, overwrite=True)
    assert source.steps == [1]
    assert TrajectoryStore(tmp_path / "run" / "trajectories").shards() == ["step-00001"]


def test_metrics_are_json_lines_without_nan(undisturbed: Path) -> None:
    text = (undisturbed / "metrics.jsonl").read_text()
    for line in text.splitlines():
        assert "NaN" not in line
        assert {"step", "reward/mean", "expert/logp", "route/accuracy"} <= json.loads(line).keys()


def test_ctrl_c_finishes_the_step_and_the_same_command_goes_on(
    undisturbed: Path, tmp_path: Path
) -> None:
    class Interrupting(ScriptedSource):
        def sample(self, asked: Sequence[Asked]) -> list[Trajectory]:
            if asked[0].step == 3:
                signal.raise_signal(signal.SIGINT)
            return super().sample(asked)

    with pytest.raises(Interrupted, match="stopped after step 3"):
        run(tmp_path / "run", Interrupting(), max_steps=6)
    source = ScriptedSource()
    run(tmp_path / "run", source, max_steps=6)
    assert source.steps == [4, 5, 6]
    assert_same(tmp_path / "run", undisturbed)


# --- alarms -------------------------------------------------------------------------------------


def malformed(asked: Asked) -> Trajectory:
    t = scripted(asked)
    return replace(t, well_formed=asked.step < 3, malformed_reason="x")


def alarms(folder: Path) -> list[int]:
    return [line["step"] for line in RunDir.load(folder).metrics() if "alarm" in line]


def test_a_collapse_stops_the_run_and_says_why(tmp_path: Path) -> None:
    source = ScriptedSource(malformed)
    with pytest.raises(CollapseError, match=r"step 7: only 0% of the rollouts are well formed"):
        run(tmp_path / "run", source, max_steps=9)
    assert source.steps == list(range(1, 8))  # 5 bad steps in a row
    assert alarms(tmp_path / "run") == [7]
    assert (tmp_path / "run" / "collapsed" / "model.safetensors").is_file()
    assert not (tmp_path / "run" / "checkpoint").exists()
    assert not RunDir.load(tmp_path / "run").is_finished


def test_the_same_command_again_does_not_train_a_collapsed_run_further(tmp_path: Path) -> None:
    # A collapse at the last step is one too: nothing is left to train, and it is not finished.
    for max_steps in (9, 7):
        folder, message = tmp_path / str(max_steps), r"step 7: only 0% of the rollouts"
        with pytest.raises(CollapseError, match=message):
            run(folder, ScriptedSource(malformed), max_steps=max_steps)
        again = ScriptedSource(malformed)
        with pytest.raises(CollapseError, match=message):
            run(folder, again, max_steps=max_steps)
        assert again.steps == [] and alarms(folder) == [7]
        assert not RunDir.load(folder).is_finished


@pytest.mark.parametrize("alarm", ["warn", "off"])
def test_a_collapse_is_borne_if_asked(
    alarm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path / "run", ScriptedSource(malformed), max_steps=8, collapse_alarm=alarm)
    assert RunDir.load(tmp_path / "run").is_finished
    assert ("collapse:" in caplog.text) == (alarm == "warn")
    assert alarms(tmp_path / "run") == ([7] if alarm == "warn" else [])  # where it began


def test_a_fault_storm_aborts_and_the_step_is_sampled_again_later(tmp_path: Path) -> None:
    def failing(asked: Asked) -> Trajectory:
        if asked.step < 2:
            return scripted(asked)
        return scripted(asked, fault="expert_timeout", outcome=None)

    def without_reward(asked: Asked) -> Trajectory:
        t = failing(asked)
        return t if t.fault is None else replace(t, reward=None)

    with pytest.raises(FaultRateError, match="repair the experts"):
        run(tmp_path / "run", ScriptedSource(without_reward), max_steps=3)
    source = ScriptedSource()
    run(tmp_path / "run", source, max_steps=3)
    assert source.steps == [2, 3]


def test_the_collapse_watch_wants_steps_in_a_row() -> None:
    watch = CollapseWatch(min_well_formed=0.7, max_expert_rise=None, patience=2)
    rates = [0.6, 0.8, 0.6, 0.69]
    found = [watch.update({"rollout/well_formed": rate, "expert/logp": -9.0}) for rate in rates]
    assert found[:3] == [None] * 3
    assert "below 70% for 2 steps" in str(found[3])


def test_the_collapse_watch_compares_expert_text_with_the_first_steps() -> None:
    watch = CollapseWatch(min_well_formed=0.7, max_expert_rise=1.0, patience=2)
    logps = [-0.4, -0.6, -1.4, -1.6, -1.4, -1.7]  # starts at 0.5, the bound is 1.5
    assert [watch.update({"expert/logp": logp}) for logp in logps] == [None] * 6
    assert "costs 1.80 nats per token, 0.50 at the start" in str(
        watch.update({"expert/logp": -1.8})
    )


def test_expert_text_is_not_watched_where_it_is_not_trained(tmp_path: Path) -> None:
    for expert_loss, is_watched in (("positive", True), ("mask", False)):
        watch = build_config(tmp_path, expert_loss=expert_loss).collapse_watch()
        found = [watch.update({"expert/logp": -float(n)}) for n in range(12)]
        assert any(found) == is_watched


def test_the_fault_watch_bears_a_bad_step_but_not_a_dead_endpoint() -> None:
    watch = FaultWatch(0.2, window=3)
    watch.update(30, 100)  # 30% of one step is 10% of three
    watch.update(0, 100)
    with pytest.raises(FaultRateError, match="60 of 100 .*timeout x60"):
        watch.update(60, 100, ["timeout"] * 60)
    with pytest.raises(FaultRateError):
        FaultWatch(0.2, window=3).update(100, 100)


def test_one_line_a_step_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    values: dict[str, Any] = {"max_steps": 2}
    run(tmp_path / "run", **values)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("step ")]
    assert len(lines) == 2
    assert lines[0].startswith("step 1/2  reward 0.") and "well-formed 100%" in lines[0]


# --- recorded runs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("paper, seed 1", 50),
        ("paper, seed 2", 34),
        ("positive, seed 1", None),
        ("positive, seed 2", None),
    ],
)
def test_the_alarm_stops_the_signed_advantage_at_mini_world_size_and_nothing_else(
    name: str, step: int | None
) -> None:
    """Metrics of whole runs of `study_mini.yaml` (2026-12-01, commit 98f2178), 80 steps each.

    Their alarm was set to `warn`; here it is asked what it would have done with its defaults.
    """
    file = Path(__file__).with_name("recorded_stage1.json")
    recorded = json.loads(file.read_text(encoding="utf-8"))[name]
    assert len(recorded) == 80
    loss: Any = name.partition(",")[0]
    watch = build_config(Path("unused"), expert_loss=loss).collapse_watch()
    alarms = [line["step"] for line in recorded if watch.update(line)]
    assert (alarms[0] if alarms else None) == step
