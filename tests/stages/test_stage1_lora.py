"""Stage I with a LoRA adapter: the engine samples from it, the run resumes, the result is whole."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stage1_world import (
    ScriptedSource,
    build_config,
    build_model,
    build_tokenizer,
    build_trainer,
    parameters,
    run,
)

from data.problems import Problem
from rivet.checkpoints import load_model
from rivet.rewards import CostTerm
from rivet.rollout.types import RolloutLimits
from rivet.settings import ProtocolSettings
from rivet.store import TrajectoryStore
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Trajectory
from stages.stage1.rollouts import Asked, StepRollouts
from stages.stage1.sampling import engine_source
from stages.stage1.trainer import Stage1Trainer

LORA: dict[str, Any] = {"use_peft": True, "lora_r": 4, "lora_alpha": 8}


def adapted(trainer: Stage1Trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


def test_only_the_adapter_is_trained_and_the_lm_head_has_none(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, max_steps=1, save_strategy="no", **LORA)
    start = parameters(trainer.model)
    before = adapted(trainer)
    trainer.train()
    assert all("lora_" in name and "lm_head" not in name for name in before)
    changed = {n for n, p in trainer.model.named_parameters() if not torch.equal(start[n], p)}
    assert changed and changed <= before.keys()


def test_the_engine_samples_from_the_adapter_that_is_trained(tmp_path: Path) -> None:
    """After every update the engine's log-probabilities are those of the trainer."""
    plain = build_tokenizer()
    plain.chat_template = "{{ messages[0].content }}"
    tokenizer, model = ProtocolTokenizer(plain), build_model()
    settings = ProtocolSettings("bare", "", (), RolloutLimits(max_completion_length=12))
    problems = [Problem(f"p{n}", f"{n}", "4", "tests") for n in range(8)]
    args = build_config(tmp_path, max_steps=3, collapse_alarm="off", learning_rate=0.05, **LORA)
    with engine_source(
        model, tokenizer, settings, [], batch_size=8, temperature=1.0, seed=0, cost=CostTerm()
    ) as source:

        class Rewarded:
            """Random text is never right; every other one is rewarded all the same."""

            def sample(self, asked: Sequence[Asked]) -> list[Trajectory]:
                return [
                    replace(t, reward=float(n % 2), answer="4")
                    for n, t in enumerate(source.sample(asked))
                ]

        trainer = Stage1Trainer(
            model=model,
            args=args,
            problems=problems,
            rollouts=StepRollouts(Rewarded(), TrajectoryStore(tmp_path / "trajectories")),
            tokenizer=tokenizer,
            experts=[],
        )
        before = adapted(trainer)
        trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    moved = max((p - before[n]).abs().max().item() for n, p in adapted(trainer).items())
    assert moved > 0.05
    assert [line["sampling/logp_difference"] for line in logged] == pytest.approx([0] * 3, abs=1e-4)


def source_over(model: Any, length: int, **changes: Any) -> Any:
    """What samples from a model, completions of so many tokens at most."""
    plain = build_tokenizer()
    plain.chat_template = "{{ messages[0].content }}"
    return engine_source(
        model,
        ProtocolTokenizer(plain),
        ProtocolSettings("bare", "", (), RolloutLimits(max_completion_length=length)),
        [],
        batch_size=8,
        temperature=1.0,
        seed=0,
        cost=CostTerm(),
        **changes,
    )


def test_a_late_rollout_gives_the_model_back_before_the_trainer_goes_on() -> None:
    model = build_model().train()

    def take_longer_than_a_rollout_may(*_: Any) -> None:
        threading.Event().wait(0.5)

    model.lm_head.register_forward_pre_hook(take_longer_than_a_rollout_may)
    with source_over(model, 12, deadline_s=0.05) as source:
        (late,) = source.sample([Asked(Problem("p0", "1", "4", "tests"), 0, 0)])
        assert model.training
    assert late.fault == "late:deadline"


def test_the_engines_context_holds_the_longest_completion() -> None:
    model = build_model()
    model.config.max_position_embeddings = 40_960
    with source_over(model, 8192) as source:
        assert source._runner.engine.max_context == 8192 + 2048


def test_a_resumed_adapter_ends_as_an_undisturbed_one_and_is_merged(tmp_path: Path) -> None:
    class Once(ScriptedSource):
        def sample(self, asked: Sequence[Asked]) -> list[Trajectory]:
            if asked[0].step == 4:
                raise KeyboardInterrupt
            return super().sample(asked)

    run(tmp_path / "whole", max_steps=5, **LORA)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", Once(), max_steps=5, **LORA)
    run(tmp_path / "cut", max_steps=5, **LORA)
    for folder, file in (("checkpoint", "model"), ("adapter", "adapter_model")):
        a, b = (
            load_file(tmp_path / name / folder / f"{file}.safetensors") for name in ("whole", "cut")
        )
        assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_the_merged_checkpoint_is_the_base_plus_the_adapter(tmp_path: Path) -> None:
    base = tmp_path / "base"
    build_model().save_pretrained(base)
    checkpoint = run(tmp_path / "run", max_steps=2, **LORA)
    ids = torch.arange(2, 40)[None]
    merged = load_model(checkpoint)
    beside = load_model(tmp_path / "run" / "adapter", base_model=str(base))
    plain = load_model(base)
    torch.testing.assert_close(merged(ids).logits, beside(ids).logits, rtol=0, atol=1e-5)
    assert (merged(ids).logits - plain(ids).logits).abs().max() > 1e-3
    assert not any("lora" in name for name in merged.state_dict())


def test_dropout_in_the_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lora_dropout is 0.1; expected 0: the policy"):
        build_config(tmp_path, use_peft=True, lora_dropout=0.1)
