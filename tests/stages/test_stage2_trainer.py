"""The Stage II trainer on a tiny model: equal to TRL where it should be, exact where it differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import SFTConfig, SFTTrainer

from rivet.tokenization import ProtocolTokenizer
from stages.stage2.objective import AUTHOR_CODES, FORMAT, KIND_CODES, Objective
from stages.stage2.trainer import Stage2Trainer

CODES = {(a, k): (AUTHOR_CODES.index(a), KIND_CODES.index(k)) for a, k in [
    ("prompt", "prompt"), ("controller", "request"), ("controller", "format"),
    ("controller", "route"), ("controller", "answer"), ("expert", "format"), ("expert", "route"),
    ("expert", "reply"), ("expert", "code"), ("environment", "format"), ("environment", "output"),
]}  # fmt: skip
LAYOUT = list(CODES)


def tiny_model(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=360, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, intermediate_size=24, tie_word_embeddings=True,
            initializer_range=0.2,
        )
    )  # fmt: skip


def rows(count: int, seed: int = 0) -> Dataset:
    """Ragged rows in which every sort of token occurs."""
    random = np.random.default_rng(seed)
    data: dict[str, list[Any]] = {"input_ids": [], "authors": [], "kinds": [], "length": []}
    for _ in range(count):
        runs = random.integers(1, 4, len(LAYOUT))
        sorts = np.repeat(np.arange(len(LAYOUT)), runs)
        codes = np.array([CODES[LAYOUT[s]] for s in sorts], np.uint8)
        data["input_ids"].append(random.integers(0, 360, len(sorts)).astype(np.int32))
        data["authors"].append(codes[:, 0])
        data["kinds"].append(codes[:, 1])
        data["length"].append(len(sorts))
    return Dataset.from_dict(data)


def arguments(folder: Path, **overrides: Any) -> SFTConfig:
    settings: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 4,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "bf16": False,
        "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no",
        "logging_steps": 1, "disable_tqdm": True, "train_sampling_strategy": "sequential",
        "use_cpu": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return SFTConfig(**{**settings, **overrides})


def trainer_of(
    folder: Path,
    tokenizer: ProtocolTokenizer,
    objective: Objective,
    *,
    dataset: Dataset | None = None,
    **overrides: Any,
) -> Stage2Trainer:
    return Stage2Trainer(
        tiny_model(),
        arguments(folder, **overrides),
        objective=objective,
        train_dataset=rows(12) if dataset is None else dataset,
        processing_class=tokenizer.hf,
    )


def parameters(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def batch_of(trainer: Stage2Trainer, count: int = 4) -> dict[str, torch.Tensor]:
    return trainer.data_collator([trainer.train_dataset[n] for n in range(count)])


@pytest.mark.parametrize("accumulation", [1, 3])
def test_plain_sft_equals_trl(
    tmp_path: Path, tag_tokenizer: ProtocolTokenizer, accumulation: int
) -> None:
    overrides: dict[str, Any] = {"gradient_accumulation_steps": accumulation}
    ours = trainer_of(tmp_path / "ours", tag_tokenizer, Objective(), **overrides)

    def labelled(row: dict[str, Any]) -> dict[str, Any]:
        ignored = {AUTHOR_CODES.index("prompt"), AUTHOR_CODES.index("environment")}
        labels = [
            -100 if author in ignored else token
            for token, author in zip(row["input_ids"], row["authors"], strict=True)
        ]
        return {"labels": labels}

    theirs = SFTTrainer(
        tiny_model(),
        arguments(tmp_path / "theirs", dataset_kwargs={"skip_prepare_dataset": True}, **overrides),
        train_dataset=rows(12).map(labelled).select_columns(["input_ids", "labels"]),
        processing_class=tag_tokenizer.hf,
    )
    ours.train()
    theirs.train()
    assert losses(ours) == pytest.approx(losses(theirs), abs=1e-6)
    torch.testing.assert_close(parameters(ours), parameters(theirs), rtol=0, atol=1e-6)


@pytest.mark.parametrize("normalization", ["weights", "tokens"])
@pytest.mark.parametrize("format_weight", ["constant", "focal"])
def test_loss_equals_the_formula_on_full_logits(
    tmp_path: Path, tag_tokenizer: ProtocolTokenizer, normalization: str, format_weight: str
) -> None:
    objective = Objective(
        expert=0.5, format_weight=format_weight, format_alpha=5.0, normalization=normalization
    )  # type: ignore[arg-type]
    trainer = trainer_of(tmp_path, tag_tokenizer, objective)
    batch = batch_of(trainer)
    loss = trainer.compute_loss(trainer.model, batch)

    logits = tiny_model()(input_ids=batch["input_ids"]).logits[:, :-1].double()
    targets = batch["input_ids"][:, 1:]
    log_probs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    total, z = 0.0, 0.0
    for n, t in np.ndindex(*targets.shape):
        author, kind = int(batch["authors"][n, t + 1]), int(batch["kinds"][n, t + 1])
        if author == 255 or AUTHOR_CODES[author] in ("prompt", "environment"):
            continue
        log_p = log_probs[n, t].item()
        weight = 0.5 if AUTHOR_CODES[author] == "expert" else 1.0
        at_one = weight
        if kind == FORMAT:
            weight = 5.0 if format_weight == "constant" else 1 + 4 * (1 - np.exp(log_p))
            at_one = 5.0 if format_weight == "constant" else 1.0
        elif KIND_CODES[kind] == "route":
            weight = at_one = 1.0
        total -= weight * log_p
        z += at_one if normalization == "weights" else 1
    assert loss.item() == pytest.approx(total / z, rel=1e-6)


@pytest.mark.parametrize(
    "objective",
    [
        Objective(),
        Objective.decisions_only(),
        Objective(expert=0.0, format_weight="focal", format_alpha=5.0),
    ],
    ids=["full", "decisions", "focal without content"],
)
@pytest.mark.parametrize("packing", [False, True])
def test_gradient_reaches_trained_tokens_and_no_others(
    tmp_path: Path, tag_tokenizer: ProtocolTokenizer, objective: Objective, packing: bool
) -> None:
    trainer = trainer_of(tmp_path, tag_tokenizer, objective, packing=packing, max_length=64)
    batch = batch_of(trainer)
    hidden: list[torch.Tensor] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        output.last_hidden_state.retain_grad()
        hidden.append(output.last_hidden_state)

    trainer.model.model.register_forward_hook(keep)
    trainer.compute_loss(trainer.model, batch).backward()
    # The last hidden state at t - 1 is used for predicting token t and for nothing else.
    gradient = hidden[0].grad
    assert gradient is not None
    receives = (gradient != 0).any(-1)[:, :-1]
    table = objective.table()
    seen = set()
    for n, t in np.ndindex(*receives.shape):
        author, kind = int(batch["authors"][n, t + 1]), int(batch["kinds"][n, t + 1])
        sort = "padding" if author == 255 else (AUTHOR_CODES[author], KIND_CODES[kind])
        expected = author != 255 and table[author, kind] > 0
        assert bool(receives[n, t]) == expected, (sort, n, t)
        seen.add(sort)
    assert seen == {"padding", *LAYOUT}


def test_accumulated_micro_batches_equal_one_batch(
    tmp_path: Path, tag_tokenizer: ProtocolTokenizer
) -> None:
    whole = trainer_of(
        tmp_path / "a", tag_tokenizer, Objective(), per_device_train_batch_size=6, max_steps=2
    )
    parts = trainer_of(
        tmp_path / "b",
        tag_tokenizer,
        Objective(),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        max_steps=2,
    )
    whole.train()
    parts.train()
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)
    torch.testing.assert_close(parameters(parts), parameters(whole), rtol=0, atol=1e-5)


def test_packed_rows_train_like_padded_ones(
    tmp_path: Path, tag_tokenizer: ProtocolTokenizer
) -> None:
    padded = trainer_of(tmp_path / "a", tag_tokenizer, Objective())
    packed = trainer_of(tmp_path / "b", tag_tokenizer, Objective(), packing=True, max_length=80)
    assert len(batch_of(packed)["input_ids"]) < len(batch_of(padded)["input_ids"])
    padded.train()
    packed.train()
    assert losses(packed) == pytest.approx(losses(padded), rel=1e-5)
    torch.testing.assert_close(parameters(packed), parameters(padded), rtol=0, atol=1e-5)


def test_expert_scale_column_masks_single_rows(
    tmp_path: Path, tag_tokenizer: ProtocolTokenizer
) -> None:
    dataset = rows(4).add_column("expert_scale", [0.0, 1.0, 0.0, 0.0])
    batch = batch_of(trainer_of(tmp_path, tag_tokenizer, Objective(), dataset=dataset))
    is_text = batch["kinds"] == KIND_CODES.index("reply")
    assert (is_text & (batch["weights"] > 0)).any(-1).tolist() == [False, True, False, False]


def test_metrics_are_told_apart_by_author(tmp_path: Path, tag_tokenizer: ProtocolTokenizer) -> None:
    trainer = trainer_of(tmp_path, tag_tokenizer, Objective.decisions_only(), max_steps=1)
    trainer.train()
    entry = trainer.state.log_history[0]
    assert {"loss/controller", "loss/format", "entropy", "mean_token_accuracy"} <= set(entry)
    assert "loss/expert" not in entry  # nothing of it is trained
    assert entry["num_tokens"] == sum(rows(12)["length"][:4])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"loss_type": "dft"}, "loss_type is 'dft'; Stage II knows 'nll' only"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is not supported"),
        ({"packing": True, "max_length": None}, "packing needs max_length"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(
    tmp_path: Path, tag_tokenizer: ProtocolTokenizer, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, tag_tokenizer, Objective(), **overrides)


class OneOfTwo(Stage2Trainer):
    """Sees the batches that the first of two processes would, and notes their ids."""

    def get_train_dataloader(self) -> Any:
        return prepare_data_loader(
            super().get_train_dataloader(), num_processes=2, process_index=0, put_on_device=False
        )

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen = [*getattr(self, "seen", []), inputs["input_ids"].tolist()]
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.parametrize("strategy", ["group_by_length", "random"])
def test_a_process_of_several_resumes_within_a_later_epoch_in_its_order(
    tmp_path: Path, tag_tokenizer: ProtocolTokenizer, strategy: str
) -> None:
    def build() -> OneOfTwo:
        settings = arguments(
            tmp_path,
            max_steps=14,  # 8 make an epoch
            save_strategy="steps",
            save_steps=10,
            train_sampling_strategy=strategy,
        )
        return OneOfTwo(
            tiny_model(),
            settings,
            objective=Objective(),
            train_dataset=rows(64),
            processing_class=tag_tokenizer.hf,
        )

    whole, resumed = build(), build()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert len(whole.seen) == 14 and whole.seen[10:] != whole.seen[2:6]
    assert resumed.seen == whole.seen[10:]


def test_lora_trains_the_adapter_only(tmp_path: Path, tag_tokenizer: ProtocolTokenizer) -> None:
    from peft import LoraConfig

    trainer = Stage2Trainer(
        tiny_model(),
        arguments(tmp_path, max_steps=1),
        objective=Objective(),
        train_dataset=rows(4),
        processing_class=tag_tokenizer.hf,
        peft_config=LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    changed = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed and all("lora_" in name for name in changed)
