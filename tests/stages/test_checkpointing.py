"""Loading what training starts from."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import TrainingArguments

from rivet.checkpoints import CheckpointError
from stages.checkpointing import load_controller


def test_missing_and_broken_weights_are_named(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True)
    with pytest.raises(CheckpointError, match=f"{tmp_path}: no weights; expected"):
        load_controller(str(tmp_path), args)
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(CheckpointError, match="model.safetensors: broken weights"):
        load_controller(str(tmp_path), args)
