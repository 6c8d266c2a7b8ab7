"""The Stage II objective against numbers worked by hand and against autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stages.stage2.objective import (
    AUTHOR_CODES,
    KIND_CODES,
    Objective,
    focal_weights,
    normalizer,
    token_weights,
    weighted_nll,
)

# One token of each sort that a trajectory in `experts` mode can hold.
TOKENS = [
    ("prompt", "prompt"),
    ("controller", "reasoning"),
    ("controller", "format"),
    ("controller", "route"),
    ("controller", "request"),
    ("expert", "format"),
    ("expert", "route"),
    ("expert", "reply"),
    ("expert", "code"),
    ("environment", "format"),
    ("environment", "output"),
    ("controller", "answer"),
]


def weights_of(objective: Objective, expert_scale: float = 1.0) -> list[float]:
    authors = np.array([AUTHOR_CODES.index(a) for a, _ in TOKENS], np.uint8)
    kinds = np.array([KIND_CODES.index(k) for _, k in TOKENS], np.uint8)
    return token_weights(objective.table(), authors, kinds, expert_scale).tolist()


def test_the_default_weighs_everything_but_prompt_and_environment_by_one() -> None:
    assert weights_of(Objective()) == [0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1]


def test_alpha_weighs_format_and_leaves_prompt_and_output_out() -> None:
    assert weights_of(Objective(format_alpha=2.0)) == [0, 1, 2, 1, 1, 2, 1, 1, 1, 0, 0, 1]


def test_decisions_only_masks_the_whole_reply() -> None:
    assert weights_of(Objective.decisions_only()) == [0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1]


def test_beta_zero_keeps_the_tags_of_the_reply() -> None:
    assert weights_of(Objective(expert=0.0, format_alpha=2.0)) == [
        0,
        1,
        2,
        1,
        1,
        2,
        1,
        0,
        0,
        0,
        0,
        1,
    ]


def test_each_weight_reaches_its_own_tokens() -> None:
    objective = Objective(controller=0.5, expert=0.25, format_alpha=5.0, route=8.0)
    expected = [0, 0.5, 5, 8, 0.5, 5, 8, 0.25, 0.25, 0, 0, 0.5]
    assert weights_of(objective) == expected


def test_expert_scale_of_zero_masks_the_experts_words_in_one_row_but_not_its_tags() -> None:
    objective = Objective(format_alpha=2.0)
    assert weights_of(objective, expert_scale=0.0) == [0, 1, 2, 1, 1, 2, 1, 0, 0, 0, 0, 1]


def test_the_first_token_of_a_row_is_never_trained() -> None:
    table = Objective().table()
    codes = np.zeros(3, np.uint8)
    assert token_weights(table, codes, codes).tolist() == [0, 1, 1]


def test_output_tags_are_never_trained_whatever_the_weights() -> None:
    objective = Objective(controller=9, expert=9, format_alpha=9, route=9)
    weights = dict(zip(TOKENS, weights_of(objective), strict=True))
    assert weights["environment", "format"] == weights["environment", "output"] == 0


def test_z_is_the_sum_of_weights_or_the_number_of_trained_tokens() -> None:
    weights = torch.tensor([[0.0, 2.0, 0.5], [1.0, 0.0, 5.0]])
    assert normalizer(weights, "weights").item() == 8.5
    assert normalizer(weights, "tokens").item() == 4


def test_loss_by_hand() -> None:
    log_probs = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64)
    weights = torch.tensor([[2.0, 0.0, 1.0]])
    # (2 * 1 + 1 * 0.5) / 3
    assert weighted_nll(log_probs, weights, 3.0).item() == pytest.approx(2.5 / 3, abs=1e-12)


def test_focal_weight_is_alpha_where_unexpected_and_one_where_learnt() -> None:
    p = torch.tensor([[1.0, 0.5, 1e-9, 0.5]], dtype=torch.float64)
    is_format = torch.tensor([[True, True, True, False]])
    weights = torch.ones(1, 4, dtype=torch.float64)
    focal = focal_weights(weights, p.log(), is_format, alpha=5.0)
    assert focal[0].tolist() == pytest.approx([1.0, 3.0, 5.0, 1.0], abs=1e-8)


def test_focal_leaves_masked_tokens_masked() -> None:
    focal = focal_weights(
        torch.zeros(1, 1), torch.tensor([[-3.0]]), torch.tensor([[True]]), alpha=5.0
    )
    assert focal.item() == 0


@pytest.mark.parametrize("alpha", [0.5, 2.0, 5.0])
def test_gradient_of_the_logits_is_weight_times_softmax_minus_target(alpha: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 7, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.randint(7, (2, 4), generator=generator)
    is_format = torch.rand(2, 4, generator=generator) < 0.5
    base = torch.tensor([[1.0, 0.0, 0.5, 1.0], [0.0, 1.0, 2.0, 1.0]], dtype=torch.float64)
    log_probs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    weights = focal_weights(base, log_probs, is_format, alpha)
    weighted_nll(log_probs, weights, base.sum()).backward()

    p = logits.detach().softmax(-1)
    p_target = p.gather(-1, targets[..., None])[..., 0]
    factor = torch.where(is_format, 1 + (alpha - 1) * (1 - p_target), 1.0)
    one_hot = torch.nn.functional.one_hot(targets, 7).double()
    expected = (base * factor / base.sum())[..., None] * (p - one_hot)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=1e-14)
    assert (logits.grad[0, 1] == 0).all() and (logits.grad[1, 0] == 0).all()


def test_nothing_to_train_is_a_finite_zero() -> None:
    log_probs = torch.tensor([[-1.0]], requires_grad=True)
    loss = weighted_nll(log_probs, torch.zeros(1, 1), 0.0)
    loss.backward()
    assert loss.item() == 0 and log_probs.grad is not None and log_probs.grad.item() == 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("expert", -1.0, "expert is -1.0; expected a finite weight of at least 0"),
        ("format_alpha", float("inf"), "format_alpha is inf"),
        ("format_weight", "linear", "format_weight is 'linear'; expected one of constant, focal"),
        ("normalization", "mean", "normalization is 'mean'; expected one of weights, tokens"),
    ],
)
def test_impossible_weights_are_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**{field: value})  # type: ignore[arg-type]


def test_focal_weights_that_weight_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="focal at format_alpha 1, where every weight is 1"):
        Objective(format_weight="focal")
