"""Stage I with a LoRA controller that samples in a real vLLM, and everything else real too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rivet.config import load_config
from rivet.store import TrajectoryStore
from stages.stage1 import weight_sync
from stages.stage1.config import Stage1Config
from stages.stage1.main import run
from stages.stage1.weight_sync import WeightSyncError

RECIPE = Path(__file__).parents[2] / "stages" / "recipes" / "stage1_mini.yaml"


def settings(checkpoint: Path, folder: Path, **changes: Any) -> Stage1Config:
    values: dict[str, Any] = {
        "model": str(checkpoint),
        "output_dir": str(folder),
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "problems_per_family": 2,
        "collapse_alarm": "off",
        "disable_tqdm": True,
        "use_peft": True,
        "lora_r": 4,
        "lora_alpha": 8,
        "learning_rate": 0.02,
        # A random controller answers nothing: its groups are flat, and all are trained at a loss
        # that needs no advantage.
        "drop_flat_groups": False,
        "route_entropy": 0.5,
        "backend": "vllm",
    }
    return load_config(Stage1Config, RECIPE, **(values | changes))


def shaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the adapter move a lot before each step: a random controller earns no gradient."""
    import torch

    usual = weight_sync.AdapterSender.send

    def send(self: Any, trainer: Any, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                if parameter.requires_grad:
                    parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        usual(self, trainer, step)

    monkeypatch.setattr(weight_sync.AdapterSender, "send", send)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_steps_are_sampled_with_the_trainers_weights(
    server: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shaken(monkeypatch)
    folder = tmp_path / "run"
    run(settings(checkpoint, folder, vllm_urls=[server]))
    logged = lines(folder)
    print("canary", [(m["sync/canary_error"], m["sync/canary_largest"]) for m in logged])
    assert [m["step"] for m in logged] == [1, 2]
    for metrics in logged:
        assert metrics["sync/canary_largest"] < 1e-3
        # Where anything is trained, what vLLM drew with is what the trainer computes.
        assert metrics.get("sampling/logp_difference", 0.0) < 1e-3
    trajectories = TrajectoryStore(folder / "trajectories").load()
    assert len(trajectories) == 16 and all(t.fault is None for t in trajectories)
    assert all(len(t.logprobs) == len(t.completion_ids) for t in trajectories)
    assert (folder / "checkpoint" / "model.safetensors").is_file()
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()


def test_a_server_that_keeps_old_weights_stops_the_run(
    server: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rivet.rollout.vllm_server import VLLMServer

    shaken(monkeypatch)
    usual, seen = VLLMServer.load_adapter, []

    async def stale(self: VLLMServer, name: str, folder: str) -> None:
        """Says yes, and loads what the first step had."""
        if not seen:
            import shutil

            seen.append(shutil.copytree(folder, tmp_path / "first"))
        await usual(self, name, str(tmp_path / "first"))

    monkeypatch.setattr(VLLMServer, "load_adapter", stale)
    with pytest.raises(WeightSyncError, match="step 2: .*differs from the trainer"):
        run(settings(checkpoint, tmp_path / "run", vllm_urls=[server]))
    stored = TrajectoryStore(tmp_path / "run" / "trajectories").load()
    assert {t.step for t in stored} == {1}
