"""Stage II as a user runs it: files, resume, refusal, and a kill at any moment."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stage2_world import SETTINGS, faulty, save_checkpoint, trajectories
from transformers import AutoModelForCausalLM, TrainerCallback

from rivet.checkpoints import CheckpointError
from rivet.config import load_config
from rivet.interrupt import Interrupted
from rivet.runs import RunDir, RunFinishedError
from rivet.settings import ProtocolSettings, SettingsError
from rivet.store import TrajectoryStore
from rivet.tokenization import ProtocolTokenizer
from stages.checkpointing import last_checkpoint, list_files
from stages.stage2 import training
from stages.stage2.config import Stage2Config
from stages.stage2.dataset import read_dataset
from stages.stage2.main import Stage2Error, prepare_dataset, run
from stages.stage2.objective import Objective


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tag_tokenizer: ProtocolTokenizer) -> Path:
    """A checkpoint and a store of trajectories."""
    folder = tmp_path_factory.mktemp("inputs")
    save_checkpoint(folder / "model", tag_tokenizer)
    good = trajectories(tag_tokenizer, 20)
    store = TrajectoryStore(folder / "store")
    store.write("part-00000", good[:12])
    store.write("part-00001", [*good[12:], *faulty(good[0]).values()])
    return folder


def settings_of(inputs: Path, output: Path, **overrides: Any) -> dict[str, Any]:
    return {
        "model": str(inputs / "model"), "trajectories": str(inputs / "store"),
        "output_dir": str(output), "max_steps": 8, "per_device_train_batch_size": 4,
        "learning_rate": 1e-2, "gradient_checkpointing": False, "save_steps": 2,
        "max_length": 150, "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "dataloader_pin_memory": False, **overrides,
    }  # fmt: skip


def config_of(inputs: Path, output: Path, **overrides: Any) -> Stage2Config:
    return load_config(Stage2Config, None, **settings_of(inputs, output, **overrides))


def test_the_settings_are_the_objective(inputs: Path, tmp_path: Path) -> None:
    config = config_of(
        inputs,
        tmp_path,
        controller_weight=0.5,
        expert_weight=0.25,
        format_weight="focal",
        format_alpha=5.0,
        route_weight=8.0,
        train_reply_tags=False,
        normalization="tokens",
    )
    assert config.objective() == Objective(
        controller=0.5,
        expert=0.25,
        format_weight="focal",
        format_alpha=5.0,
        route=8.0,
        train_reply_tags=False,
        normalization="tokens",
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoint" / "model.safetensors")


@pytest.fixture(scope="module")
def finished(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    output = tmp_path_factory.mktemp("runs") / "stage2"
    run(config_of(inputs, output))
    return output


def test_run_writes_checkpoint_dataset_and_metrics(finished: Path) -> None:
    names = {path.name for path in finished.iterdir() if not path.name.startswith(".")}
    assert names == {
        "checkpoint", "config.json", "dataset", "finished.json", "log.txt", "metrics.jsonl",
        "trainer",
    }  # fmt: skip
    assert {path.name for path in (finished / "checkpoint").iterdir()} == {
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "rivet.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert {path.name for path in (finished / "dataset").iterdir()} == {
        "README.md", "funnel.json", "train.parquet",
    }  # fmt: skip
    steps = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert {"loss", "loss/controller", "loss/expert", "loss/format"} <= set(steps[0])


def test_filter_runs_before_training(finished: Path) -> None:
    assert len(read_dataset(finished / "dataset")) == 20
    funnel = json.loads((finished / "dataset" / "funnel.json").read_text())
    assert funnel["read"] == 27 and funnel["kept"] == 20
    results = json.loads((finished / "finished.json").read_text())["results"]
    assert (results["kept"], results["steps"]) == (20, 8)
    steps = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert (results["loss"], results["num_tokens"]) == (steps[-1]["loss"], steps[-1]["num_tokens"])


def test_training_lowers_the_loss_of_experts_text_and_tags(finished: Path) -> None:
    steps = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss/controller", "loss/expert", "loss/format"):
        assert steps[-1][name] < steps[0][name]


def test_checkpoint_reloads_and_speaks_the_same_protocol(finished: Path, inputs: Path) -> None:
    folder = finished / "checkpoint"
    assert ProtocolSettings.load(folder) == SETTINGS
    tokenizer = ProtocolTokenizer.from_pretrained(folder)
    before = ProtocolTokenizer.from_pretrained(inputs / "model")
    assert tokenizer.token_bytes == before.token_bytes and tokenizer.eos_ids == before.eos_ids
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model(torch.tensor([tokenizer.encode("<answer>1")])).logits.isfinite().all()


def test_the_same_run_gives_the_same_weights(finished: Path, inputs: Path, tmp_path: Path) -> None:
    run(config_of(inputs, tmp_path / "again"))
    torch.testing.assert_close(weights(tmp_path / "again"), weights(finished), rtol=0, atol=0)


def test_finished_run_is_not_overwritten_unless_told(
    finished: Path, inputs: Path, tmp_path: Path
) -> None:
    with pytest.raises(RunFinishedError, match="--overwrite true"):
        run(config_of(inputs, finished))
    run(config_of(inputs, tmp_path / "run", max_steps=1))
    run(config_of(inputs, tmp_path / "run", max_steps=2, overwrite=True))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2


def test_interrupted_run_resumes_to_the_same_weights(
    finished: Path, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class InterruptAt(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 4:
                signal.raise_signal(signal.SIGINT)

    output = tmp_path / "run"
    with monkeypatch.context() as patched:
        original = training.Stage2Trainer.__init__

        def with_interruption(self: Any, *args: Any, callbacks: Any, **kwargs: Any) -> None:
            original(self, *args, callbacks=[InterruptAt(), *callbacks], **kwargs)

        patched.setattr(training.Stage2Trainer, "__init__", with_interruption)
        with pytest.raises(Interrupted, match="stopped after step 5"):
            run(config_of(inputs, output))
    assert not (output / "finished.json").exists()
    run(config_of(inputs, output))
    torch.testing.assert_close(weights(output), weights(finished), rtol=0, atol=0)
    steps = [json.loads(s)["step"] for s in (output / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 9))


def test_run_cut_before_its_checkpoint_is_written_trains_no_further_step(
    finished: Path, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk gone")

    with monkeypatch.context() as patched:
        patched.setattr(training, "save_controller", fail)
        with pytest.raises(OSError, match="disk gone"):
            run(config_of(inputs, tmp_path / "run"))
    run(config_of(inputs, tmp_path / "run"))
    torch.testing.assert_close(weights(tmp_path / "run"), weights(finished), rtol=0, atol=0)
    before, after = (
        json.loads((folder / "finished.json").read_text())["results"]
        for folder in (finished, tmp_path / "run")
    )
    assert after == before


def test_what_was_cut_short_is_made_again_to_the_same_weights(
    finished: Path, inputs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "run"
    shutil.copytree(finished, output)
    (output / "finished.json").unlink()
    shutil.rmtree(output / "checkpoint")
    cut = ["dataset/train.parquet", "dataset/funnel.json", "trainer/checkpoint-8/optimizer.pt"]
    for name in cut:
        (output / name).write_bytes((output / name).read_bytes()[:-10])
    run(config_of(inputs, output))
    assert f"{output / cut[0]}: missing or cut short" in caplog.text
    assert f"{output / cut[2]}: cut short" in caplog.text
    torch.testing.assert_close(weights(output), weights(finished), rtol=0, atol=0)
    for name in cut[:2]:
        assert (output / name).read_bytes() == (finished / name).read_bytes()
    steps = [json.loads(s)["step"] for s in (output / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 9))


def test_a_lost_optimizer_state_is_noticed_and_made_again(
    finished: Path, inputs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "run"
    shutil.copytree(finished, output)
    (output / "finished.json").unlink()
    shutil.rmtree(output / "checkpoint")
    lost = output / "trainer" / "checkpoint-8" / "optimizer.pt"
    lost.unlink()
    run(config_of(inputs, output))
    assert f"{lost}: missing" in caplog.text
    torch.testing.assert_close(weights(output), weights(finished), rtol=0, atol=0)


def test_half_written_trainer_checkpoint_is_not_resumed_from(tmp_path: Path) -> None:
    for step, state in ((2, '{"global_step": 2}'), (4, '{"global_st'), (6, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
        list_files(folder)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    assert len(list(tmp_path.iterdir())) == 3
    last_checkpoint(tmp_path, clean=True)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_lora_is_merged_into_the_checkpoint(inputs: Path, tmp_path: Path) -> None:
    run(config_of(inputs, tmp_path / "run", use_peft=True, lora_r=2, max_steps=2))
    before = load_file(inputs / "model" / "model.safetensors")
    after = weights(tmp_path / "run")
    assert after.keys() == before.keys()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed and not any("embed" in name or "norm" in name for name in changed)


def test_evaluation_problems_are_left_out(inputs: Path, tmp_path: Path) -> None:
    held_out = tmp_path / "test.jsonl"
    held_out.write_text('{"id": "x", "problem": "What is 3 + 31?", "answer": "34"}\n')
    run(config_of(inputs, tmp_path / "run", decontaminate=[str(held_out)], max_steps=1))
    assert "3+31" not in read_dataset(tmp_path / "run" / "dataset")["problem_id"][:]
    assert len(read_dataset(tmp_path / "run" / "dataset")) == 19


def test_empty_store_and_empty_filter_say_what_to_do(
    inputs: Path, tmp_path: Path, tag_tokenizer: ProtocolTokenizer
) -> None:
    with pytest.raises(Stage2Error, match="no trajectory here; expected parquet shards"):
        run(config_of(inputs, tmp_path / "a", trajectories=str(tmp_path / "nowhere")))
    broken = list(faulty(trajectories(tag_tokenizer, 1)[0]).values())
    TrajectoryStore(tmp_path / "store").write("part-00000", broken)
    with pytest.raises(Stage2Error, match="no trajectory passes the filter") as error:
        run(config_of(inputs, tmp_path / "b", trajectories=str(tmp_path / "store")))
    assert "right answer" in str(error.value)


def test_a_model_without_its_tokenizer_is_refused_before_the_run_folder(
    inputs: Path, tmp_path: Path
) -> None:
    shutil.copytree(inputs / "model", tmp_path / "model")
    for file in (tmp_path / "model").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="its tokenizer cannot be loaded"):
        run(config_of(inputs, tmp_path / "run", model=str(tmp_path / "model")))
    assert not (tmp_path / "run").exists()


def test_a_finished_collection_that_lost_a_shard_is_refused(
    inputs: Path, tmp_path: Path, tag_tokenizer: ProtocolTokenizer
) -> None:
    rows = trajectories(tag_tokenizer, 6)
    with RunDir.open(tmp_path / "collect", {}, stage="collect") as collection:
        store = TrajectoryStore(collection.path / "trajectories")
        for number in range(3):
            store.write(f"part-{number:05d}", rows[2 * number : 2 * number + 2])
        prepare = functools.partial(prepared, inputs, tmp_path, store.folder)
        lost = store.folder / "part-00001.parquet"
        kept = lost.read_bytes()
        lost.unlink()
        assert prepare("unfinished")["read"] == 4  # the run goes on and may bring more
        collection.finish({"rows": 6})
    told = f"{store.folder}: 4 rows, but {collection.path}/finished.json says 6.*--overwrite true"
    with pytest.raises(Stage2Error, match=told):
        prepare("lost")
    lost.write_bytes(kept)
    assert prepare("whole")["read"] == 6
    store.write("part-00003", rows[:1])
    with pytest.raises(Stage2Error, match="7 rows, but .* says 6: shards were lost or added"):
        prepare("more")


def prepared(inputs: Path, folder: Path, store: Path, name: str) -> dict[str, Any]:
    """The funnel of what Stage II makes of a store."""
    config = config_of(inputs, folder / name, trajectories=str(store))
    tokenizer = ProtocolTokenizer.from_pretrained(config.model)
    with RunDir.open(folder / name, config, stage="stage2") as opened:
        return prepare_dataset(config, opened, tokenizer, ProtocolSettings.load(config.model))


def test_folder_without_rivet_json_is_no_checkpoint(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"rivet\.json: no such file"):
        run(config_of(inputs, tmp_path / "run", model=str(tmp_path)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model": ""}, "model is not set"),
        ({"trajectories": ""}, "trajectories is not set"),
        ({"near_duplicate": 0.0}, "near_duplicate is 0.0; expected above 0 and at most 1"),
        ({"max_per_problem": 0}, "max_per_problem is 0; expected at least 1"),
        ({"format_alpha": -1.0}, "format_alpha is -1.0; expected a finite weight"),
        ({"seed": -1}, "seed is -1; expected 0 to"),
        ({"save_total_limit": 1}, "save_total_limit is 1; expected at least 2"),
        ({"save_only_model": True}, "save_only_model is true; expected false"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size is true; expected false"),
        ({"packing": True, "max_length": None}, "max_length is null; expected the length"),
        ({"max_length": 0}, "max_length is 0; expected at least 1"),
        (
            {
                "packing": True,
                "model_init_kwargs": {"attn_implementation": "kernels-community/flash-attn2"},
            },
            "flash-attn2' with packing; expected sdpa",
        ),
        ({"loss_type": "dft"}, "loss_type is 'dft'; expected 'nll'"),
        ({"padding_free": True}, "padding_free is True; expected False"),
        ({"train_sampling_strategy": "sorted"}, "'sorted'; expected one of group_by_length"),
        ({"gradient_accumulation_steps": 0}, "accumulation_steps is 0; expected at least 1"),
        ({"eval_strategy": "steps", "eval_steps": 5}, "expected no: use `rivet eval`"),
        ({"format_wieght": "focal"}, "format_weight"),
    ],
)
def test_bad_settings_fail_before_anything_starts(
    inputs: Path, tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(inputs, tmp_path / "run", **overrides)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kill_after", ["dataset/train.parquet", "trainer/checkpoint-2", "log:5"])
def test_killed_run_resumes_to_the_same_weights(
    finished: Path, inputs: Path, tmp_path: Path, kill_after: str
) -> None:
    """SIGKILL once the dataset, a trainer checkpoint, or step 5 is on disk."""
    output = tmp_path / "run"
    arguments = settings_of(inputs, output)
    command = [sys.executable, "-m", "stages.stage2.main"]
    for name, value in arguments.items():
        command += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    root = Path(__file__).parents[2]

    def has_happened() -> bool:
        if kill_after.startswith("log:"):
            metrics = output / "metrics.jsonl"
            return metrics.exists() and f'"step": {kill_after[4:]},' in metrics.read_text()
        return (output / kill_after).exists()

    process = subprocess.Popen(command, cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while not has_happened() and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (output / "finished.json").exists()
    subprocess.run(command, cwd=root, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    torch.testing.assert_close(weights(output), weights(finished), rtol=0, atol=0)
    steps = [json.loads(s)["step"] for s in (output / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 9))
