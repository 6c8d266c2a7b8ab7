"""Every loss type and ratio through the real trainer has the gradient of its formula by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stage1_world import ScriptedSource, build_model, build_trainer, scripted

from rivet.store import TrajectoryStore
from rivet.trajectory import Trajectory
from stages.stage1.rollouts import Asked

LIMIT = 64  # max_completion_length of the test runs
REWARDS = [1.0, 0.0, 0.0, 0.0]
DEVIATION = math.sqrt((9 / 16 + 3 / 16) / 3)
Surrogate = Callable[[torch.Tensor, Trajectory, float], torch.Tensor]


def rollouts(asked: Asked) -> Trajectory:
    return scripted(asked, reward=REWARDS[asked.sample_index])


def trained_gradient(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Gradient of one step of 2 groups of 4, in two micro-batches, of which padding differs."""
    values: dict[str, Any] = {
        "expert_loss": "paper",
        "importance_clip": None,
        "max_grad_norm": 1e9,
        **changes,
    }
    trainer = build_trainer(
        folder, source=ScriptedSource(rollouts), max_steps=1, save_strategy="no", **values
    )
    kept: dict[str, torch.Tensor] = {}
    step = trainer.training_step

    def keeping(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        kept.update({n: p.grad.clone() for n, p in trainer.model.named_parameters()})
        return result

    trainer.training_step = keeping  # type: ignore[method-assign]
    trainer.train()
    return kept


def written_gradient(
    folder: Path, divisor: Callable[[int, int, int], float], surrogate: Surrogate
) -> dict[str, torch.Tensor]:
    """Gradient of -J, trajectory by trajectory and unpadded.

    Args:
        folder: Of the run, whose rollouts are read.
        divisor: Of a token, from tokens of its trajectory, all tokens, and trajectories.
        surrogate: Of each token that is trained, shape (T,), before the division.
    """
    model = build_model()
    stored = TrajectoryStore(folder / "trajectories").load()
    everything = sum(sum(a != "environment" for a in t.authors) for t in stored)
    total = torch.zeros(())
    for t in stored:
        assert t.reward is not None
        advantage = (t.reward - 0.25) / (DEVIATION + 1e-4)
        ids = torch.tensor([[*t.prompt_ids, *t.completion_ids]])
        logits = model(input_ids=ids).logits[0, len(t.prompt_ids) - 1 : -1]
        logps = logits.log_softmax(-1).gather(1, torch.tensor(t.completion_ids)[:, None])[:, 0]
        is_trained = torch.tensor([a != "environment" for a in t.authors])
        values = surrogate(logps, t, advantage)[is_trained]
        total = total - values.sum() / divisor(int(is_trained.sum()), everything, len(stored))
    total.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=2e-6)


def on_policy(logps: torch.Tensor, t: Trajectory, advantage: float) -> torch.Tensor:
    """With the trainer's policy as the old one the ratio is 1, and the gradient A grad log p."""
    return advantage * logps


@pytest.mark.parametrize(
    ("loss_type", "divisor"),
    [
        ("dapo", lambda n, all_tokens, rows: all_tokens),
        ("bnpo", lambda n, all_tokens, rows: all_tokens),
        ("cispo", lambda n, all_tokens, rows: all_tokens),
        ("vespo", lambda n, all_tokens, rows: all_tokens),
        ("grpo", lambda n, all_tokens, rows: n * rows),
        ("sapo", lambda n, all_tokens, rows: n * rows),
        ("dr_grpo", lambda n, all_tokens, rows: LIMIT * rows),
        ("luspo", lambda n, all_tokens, rows: rows),
    ],
)
def test_each_loss_type_has_the_gradient_of_its_formula(
    loss_type: str, divisor: Any, tmp_path: Path
) -> None:
    # For CISPO the bound is one of the ratio itself, not of its distance from 1.
    bound = {"epsilon_high": 5.0} if loss_type == "cispo" else {}
    got = trained_gradient(tmp_path, loss_type=loss_type, **bound)
    assert_equal(got, written_gradient(tmp_path, divisor, on_policy))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_clipped_ratio_to_the_engine_is_of_tokens_or_of_the_whole_trajectory(
    level: str, tmp_path: Path
) -> None:
    """Spliced tokens have a ratio of 1; a token's gradient has its own weight at either level."""

    def clipped(logps: torch.Tensor, t: Trajectory, advantage: float) -> torch.Tensor:
        known = torch.tensor([value is not None for value in t.logprobs])
        sampling = torch.tensor([0.0 if value is None else value for value in t.logprobs])
        gap = torch.where(known, logps.detach() - sampling, 0.0)
        if level == "sequence":
            gap = torch.where(known, gap.sum() / known.sum(), 0.0)
        ratio = (logps - logps.detach() + gap).exp()
        return torch.min(ratio * advantage, ratio.clamp(0.5, 1.5) * advantage)

    got = trained_gradient(
        tmp_path,
        ratio_to="engine",
        importance_sampling_level=level,
        epsilon=0.5,
        epsilon_high=0.5,
    )
    assert_equal(got, written_gradient(tmp_path, lambda n, tokens, rows: tokens, clipped))


def test_void_trajectories_are_trained_when_the_filter_is_off(tmp_path: Path) -> None:
    def void(asked: Asked) -> Trajectory:
        fields: dict[str, Any] = {"answer": None, "expert_calls": ()} if asked.sample_index else {}
        return scripted(asked, reward=REWARDS[asked.sample_index], **fields)

    rates = []
    for name, drop in (("on", True), ("off", False)):
        trainer = build_trainer(
            tmp_path / name, source=ScriptedSource(void), max_steps=1, save_strategy="no",
            expert_loss="mask", drop_void=drop,
        )  # fmt: skip
        trainer.train()
        rates.append(trainer.state.log_history[0]["grad_norm"])
    assert rates[0] != pytest.approx(rates[1], rel=1e-3)
