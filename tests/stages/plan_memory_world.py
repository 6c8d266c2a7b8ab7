"""One training run of a Stage II trainer whose peak memory is measured; prints JSON.

python plan_memory_world.py '{"hidden": 512, ...}'
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import SFTConfig

from stages.bench_trainers import tokenizer
from stages.memory_use import PeakMemory
from stages.stage2.objective import AUTHOR_CODES, KIND_CODES, Objective
from stages.stage2.trainer import Stage2Trainer
from stages.training_settings import TrainingSettings


def config_of(case: dict[str, Any]) -> Qwen3Config:
    """The model of a case."""
    return Qwen3Config(
        vocab_size=case["vocabulary"],
        hidden_size=case["hidden"],
        intermediate_size=case["mlp"],
        num_hidden_layers=case["layers"],
        num_attention_heads=case["hidden"] // 64,
        num_key_value_heads=max(1, case["hidden"] // 256),
        head_dim=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


def measure(case: dict[str, Any]) -> float:
    """Bytes at the peak of the third step, above what imports take."""
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    rows, length = case["rows"], case["length"]
    author, kind = AUTHOR_CODES.index("controller"), KIND_CODES.index("reasoning")
    data = Dataset.from_dict(
        {
            "input_ids": [random.integers(2, 600, length).astype(np.int32) for _ in range(rows)],
            "authors": [np.full(length, author, np.uint8)] * rows,
            "kinds": [np.full(length, kind, np.uint8)] * rows,
            "length": [length] * rows,
        }
    )
    peft = TrainingSettings.peft(case_settings(case)) if case.get("lora_r") else None
    hf = tokenizer().hf
    with tempfile.TemporaryDirectory() as scratch:
        memory = PeakMemory()

        class FromThird(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step == 2:
                    memory.restart()

        trainer = Stage2Trainer(
            Qwen3ForCausalLM(config_of(case)),
            SFTConfig(
                output_dir=str(Path(scratch)), max_steps=3, per_device_train_batch_size=rows,
                bf16=False, gradient_checkpointing=case.get("checkpointing", False),
                report_to="none", save_strategy="no", disable_tqdm=True,
                dataloader_pin_memory=False, train_sampling_strategy="sequential",
            ),
            objective=Objective(),
            train_dataset=data,
            processing_class=hf,
            callbacks=[FromThird()],
            peft_config=peft,
        )  # fmt: skip
        trainer.train()
        return memory.peak()


def case_settings(case: dict[str, Any]) -> Any:
    """The adapter's settings, without a trainer's configuration around them."""
    settings: Any = object.__new__(TrainingSettings)
    for name, item in TrainingSettings.__dataclass_fields__.items():
        setattr(settings, name, item.default)
    settings.use_peft, settings.lora_r = True, case["lora_r"]
    return settings


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
