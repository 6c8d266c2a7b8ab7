"""Loading what training starts from, and finding where it goes on."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from stage1_world import build_model, build_tokenizer
from transformers import TrainingArguments

from rivet.checkpoints import CheckpointError, is_adapter, load_tokenizer
from rivet.runs import RunDir
from rivet.settings import ProtocolSettings
from rivet.tokenization import ProtocolTokenizer
from stages.checkpointing import (
    TRAINER,
    WorldSizeError,
    last_checkpoint,
    list_files,
    load_controller,
    resume_point,
    save_controller,
)


def test_missing_and_broken_weights_are_named(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True)
    with pytest.raises(CheckpointError, match=f"{tmp_path}: no weights; expected"):
        load_controller(str(tmp_path), args)
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(CheckpointError, match="model.safetensors: broken weights"):
        load_controller(str(tmp_path), args)


def test_arguments_of_the_model_reach_that_of_an_adapter(tmp_path: Path) -> None:
    base = build_model()
    base.save_pretrained(tmp_path / "base")
    get_peft_model(base, LoraConfig(r=2, target_modules="all-linear")).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "base")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    args: Any = SimpleNamespace(
        model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "eager"}
    )
    model = load_controller(str(tmp_path), args)
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("is_spread", [False, True])
def test_every_saved_checkpoint_ends_its_turn_as_the_base_does(
    tmp_path: Path, is_spread: bool
) -> None:
    plain, base = build_tokenizer(), build_model()
    tokenizer = ProtocolTokenizer(plain, [5])
    assert base.generation_config is not None
    base.generation_config.eos_token_id = sorted(tokenizer.eos_ids)
    model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear"))
    trainer: Any = SimpleNamespace(
        accelerator=SimpleNamespace(
            unwrap_model=lambda m: m, get_state_dict=lambda m: m.state_dict()
        ),
        model=model,
        model_wrapped=model,
        is_fsdp_enabled=is_spread,
        is_deepspeed_enabled=False,
    )
    settings = ProtocolSettings("bare", "")
    with RunDir.open(tmp_path / "run", {"seed": 3}, stage="stage1") as run:
        save_controller(run, run.checkpoint, trainer, tokenizer, settings)
    assert is_adapter(run.checkpoint) == is_spread
    for folder in (run.checkpoint, run.path / "adapter"):
        assert load_tokenizer(folder).eos_ids == tokenizer.eos_ids != {tokenizer.eos_id}


def trainer_checkpoint(folder: Path, step: int) -> Path:
    """A checkpoint as the trainer lays it out; DeepSpeed's shards lie in a folder below."""
    path = folder / f"checkpoint-{step}"
    (path / f"global_step{step}").mkdir(parents=True)
    for name in (
        "optimizer.pt",
        "scheduler.pt",
        "rng_state_0.pth",
        "training_args.bin",
        f"global_step{step}/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ):
        torch.save({"state": torch.arange(9)}, path / name)
    torch.save([1], path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    save_file({"weight": torch.ones(3, 3)}, path / "adapter_model.safetensors")
    save_file({"weight": torch.ones(3, 3)}, path / "model-00001-of-00001.safetensors")
    (path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (path / "latest").write_text(f"global_step{step}")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    list_files(path)
    return path


@pytest.mark.parametrize(
    "name",
    [
        "optimizer.pt",
        "scheduler.pt",
        "rng_state_0.pth",
        "training_args.bin",
        "global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "adapter_model.safetensors",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    ],
)
@pytest.mark.parametrize("is_empty", [True, False])
def test_a_checkpoint_with_a_file_cut_short_is_put_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, is_empty: bool
) -> None:
    whole, cut = trainer_checkpoint(tmp_path, 2), trainer_checkpoint(tmp_path, 4)
    assert last_checkpoint(tmp_path) == str(cut)
    content = (cut / name).read_bytes()
    (cut / name).write_bytes(b"" if is_empty else content[:-1])
    with caplog.at_level(logging.WARNING):
        assert last_checkpoint(tmp_path, clean=True) == str(whole)
    assert f"{cut / name}: cut short" in caplog.text
    assert not cut.exists()
    assert (tmp_path / "damaged-checkpoint-4" / "optimizer.pt").exists()
    assert last_checkpoint(tmp_path, clean=True) == str(whole)


def test_a_run_goes_on_with_as_many_processes_as_it_began_with(tmp_path: Path) -> None:
    with RunDir.open(tmp_path / "run", {"seed": 3}, stage="stage1") as run:
        saved = trainer_checkpoint(run.path / TRAINER, 4)  # with one random generator's state
        assert resume_point(run, 1) == str(saved)
        with pytest.raises(WorldSizeError, match="saved by 1 processes, this run has 2"):
            resume_point(run, 2)


def test_a_checkpoint_that_other_processes_had_not_finished_is_removed(tmp_path: Path) -> None:
    whole, unfinished = trainer_checkpoint(tmp_path, 2), trainer_checkpoint(tmp_path, 4)
    (unfinished / "files.json").unlink()  # killed before every process had saved its part
    assert last_checkpoint(tmp_path, clean=True) == str(whole)
    assert not unfinished.exists()


def test_copies_of_checkpoints_under_other_names_are_left_alone(tmp_path: Path) -> None:
    last = trainer_checkpoint(tmp_path, 4)
    for name in ("checkpoint-4-backup", "checkpoint-best"):
        shutil.copytree(last, tmp_path / name)
    assert last_checkpoint(tmp_path, clean=True) == str(last)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state_0.pth", "latest"])
def test_a_checkpoint_that_lost_a_file_is_put_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    whole, robbed = trainer_checkpoint(tmp_path, 2), trainer_checkpoint(tmp_path, 4)
    assert last_checkpoint(tmp_path, clean=True) == str(robbed)
    (robbed / name).unlink()
    with caplog.at_level(logging.WARNING):
        assert last_checkpoint(tmp_path, clean=True) == str(whole)
    assert f"{robbed / name}: missing" in caplog.text
    assert (tmp_path / "damaged-checkpoint-4").is_dir()


@pytest.mark.parametrize("state", ["", "{}", "[]", '{"global_step": 3}'])
def test_a_checkpoint_without_the_state_of_its_step_is_removed(tmp_path: Path, state: str) -> None:
    (trainer_checkpoint(tmp_path, 4) / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path, clean=True) is None
    assert not any(tmp_path.iterdir())
