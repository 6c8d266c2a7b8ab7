"""The Stage I objective against numbers worked by hand and against autograd in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rivet.trajectory import Trajectory
from stages.stage1.fates import is_flat
from stages.stage1.objective import (
    ObjectiveSettings,
    TokenRoles,
    group_advantages,
    importance_factor,
    log_ratio_to_engine,
    preset,
    shaping_factor,
    token_counts,
    token_weights,
    trained,
)

NAN = float("nan")


def f64(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- advantages ---------------------------------------------------------------------------------


def test_advantages_of_a_group_are_standardised_with_the_unbiased_deviation() -> None:
    # mean 1/4; squares 9/16 + 3/16 = 12/16; /3 = 1/4; deviation 1/2.
    advantages = group_advantages(f64([1, 0, 0, 0]), 4, epsilon=0.5)
    assert advantages.values.tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25])
    assert not advantages.is_flat.any()


def test_a_fault_leaves_the_baseline_and_has_no_advantage() -> None:
    # Valid rewards 1, 0, 0: mean 1/3, deviation sqrt((4/9 + 1/9 + 1/9) / 2) = 1/sqrt(3).
    advantages = group_advantages(f64([1, NAN, 0, 0]), 4, epsilon=1e-12)
    root = math.sqrt(3)
    assert advantages.values.tolist() == pytest.approx([2 / 3 * root, 0, -root / 3, -root / 3])
    assert advantages.is_valid.tolist() == [True, False, True, True]


def test_groups_do_not_see_each_other_and_flat_ones_have_no_advantage() -> None:
    advantages = group_advantages(f64([1, 1, 0, 1, NAN, NAN, NAN, 1]), 2, epsilon=1e-12)
    half = math.sqrt(0.5)
    assert advantages.values.tolist() == pytest.approx([0, 0, -half, half, 0, 0, 0, 0])
    assert advantages.is_flat.tolist() == [True] * 2 + [False] * 2 + [True] * 4


def test_rounding_does_not_make_equal_rewards_differ() -> None:
    assert group_advantages(torch.full((8,), 0.9), 8).is_flat.all()


def test_batch_and_no_scaling() -> None:
    rewards = f64([1, 0, 0, 0])
    assert group_advantages(rewards, 2, scale="none").values.tolist() == [0.5, -0.5, 0, 0]
    # The whole batch's deviation is 1/2.
    batch = group_advantages(rewards, 2, scale="batch", epsilon=0.5)
    assert batch.values.tolist() == [0.5, -0.5, 0, 0]


def test_void_trajectories_are_in_the_baseline_but_not_trained() -> None:
    # The third is void (reward 0), the fourth a fault. Baseline over 1, 0, 0.
    advantages = group_advantages(f64([1, 0, 0, NAN]), 4)
    is_void = torch.tensor([False, False, True, False])
    assert trained(advantages, is_void, ObjectiveSettings()).tolist() == [True, True, False, False]
    assert advantages.values[0] == pytest.approx(2 / 3 * math.sqrt(3), rel=1e-3)


def test_flat_groups_are_dropped_only_if_asked() -> None:
    advantages = group_advantages(f64([1, 1]), 2)
    nothing = torch.tensor([False, False])
    assert not trained(advantages, nothing, ObjectiveSettings()).any()
    assert trained(advantages, nothing, ObjectiveSettings(drop_flat_groups=False)).all()


# --- weights ------------------------------------------------------------------------------------

# Two trajectories of one group: good (A = 2) and bad (A = -1); letters name the author:
# c controller, r its route token, m a made-up route, e expert, o environment, . padding.
LAYOUT = ["crceeoc", "creeoo."]


def roles(layout: list[str] = LAYOUT) -> TokenRoles:
    letters = [list(row) for row in layout]
    sets = ("crm", "e", "rm", "m")
    masks = [torch.tensor([[x in chosen for x in row] for row in letters]) for chosen in sets]
    return TokenRoles(*masks)


def weigh(settings: ObjectiveSettings, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "roles": roles(),
        "advantages": f64([2.0, -1.0]),
        "is_right": torch.tensor([True, False]),
        "is_trained": torch.tensor([True, True]),
    } | changes
    arguments["counts"] = token_counts(arguments["roles"], arguments["is_trained"])
    return token_weights(settings, **arguments)


def rows(weights: torch.Tensor) -> list[list[float]]:
    return [[round(x, 9) for x in row] for row in weights.tolist()]


def test_counts_are_of_tokens_by_author_and_of_trained_rows() -> None:
    # Row 0: c r c c = 4 controller, 2 expert; row 1: c r = 2 controller, 2 expert.
    assert token_counts(roles(), torch.tensor([True, True])).tolist() == [6, 4, 2]
    assert token_counts(roles(), torch.tensor([True, False])).tolist() == [4, 2, 1]


def test_paper_gives_every_token_the_shared_signed_advantage() -> None:
    result = weigh(preset("paper"))
    assert rows(result.weights) == [[2, 2, 2, 2, 2, 0, 2], [-1, -1, -1, -1, 0, 0, 0]]
    assert rows(result.mask) == [[1, 1, 1, 1, 1, 0, 1], [1, 1, 1, 1, 0, 0, 0]]
    assert result.num_items == 10  # 6 controller tokens and 4 expert tokens


def test_positive_trains_expert_tokens_of_good_trajectories_only() -> None:
    result = weigh(preset("positive"))
    # lambda 0.3 x A 2 x (6 controller tokens / 4 expert tokens) = 0.9; divided by 6 later.
    assert rows(result.weights) == [[2, 2, 2, 0.9, 0.9, 0, 2], [-1, -1, 0, 0, 0, 0, 0]]
    assert result.num_items == 6


def test_separate_sums_are_each_divided_by_their_own_tokens() -> None:
    result = weigh(preset("positive"))
    per_token = result.weights / result.num_items
    controller = per_token[roles().controller].sum()
    expert = per_token[roles().expert].sum()
    assert controller.item() == pytest.approx((2 * 4 - 1 * 2) / 6)
    assert expert.item() == pytest.approx(0.3 * (2 * 2) / 4)


def test_mask_leaves_expert_tokens_out_of_loss_and_denominator() -> None:
    for denominator in ("all", "controller", "separate"):
        result = weigh(preset("mask", denominator=denominator))
        assert rows(result.weights) == [[2, 2, 2, 0, 0, 0, 2], [-1, -1, 0, 0, 0, 0, 0]]
        assert result.mask[roles().expert].eq(0).all()
        assert result.num_items == 6


def test_ce_gives_right_trajectories_a_constant_weight() -> None:
    settings = preset("ce", denominator="controller")
    # A right trajectory with a negative advantage (costs can do that) is imitated all the same.
    result = weigh(settings, advantages=f64([-0.5, 1.0]))
    assert rows(result.weights)[0][3:5] == [0.3, 0.3]
    assert rows(result.weights)[1][2:4] == [0, 0]


def test_luffy_has_the_signed_advantage_before_shaping() -> None:
    result = weigh(preset("luffy"))
    assert rows(result.weights) == [[2, 2, 2, 2, 2, 0, 2], [-1, -1, -1, -1, 0, 0, 0]]


def test_nu_scales_expert_tokens_of_bad_trajectories() -> None:
    result = weigh(preset("positive", expert_negative=0.1, denominator="controller"))
    assert rows(result.weights)[1] == [-1, -1, -0.03, -0.03, 0, 0, 0]


def test_denominators() -> None:
    expected = {"all": (10, 0.6), "controller": (6, 0.6), "separate": (6, 0.9)}
    for denominator, (num_items, weight) in expected.items():
        result = weigh(preset("positive", denominator=denominator))
        assert result.num_items == num_items
        assert result.weights[0, 3].item() == pytest.approx(weight)


def test_the_cap_bounds_what_the_expert_tokens_of_one_trajectory_weigh_together() -> None:
    layout = ["c" + "e" * 10, "cee" + "." * 8]
    settings = preset("positive", expert_weight=1.0, expert_cap=4.0, denominator="controller")
    result = weigh(settings, roles=roles(layout), advantages=f64([1.0, 1.0]))
    assert result.weights[0].tolist() == pytest.approx([1] + [0.4] * 10)  # 10 x 0.4 = 4
    assert result.weights[1, :3].tolist() == [1, 1, 1]  # 2 tokens are below the cap


def test_negative_advantages_of_other_tokens_are_softened_and_routes_amplified() -> None:
    result = weigh(preset("mask", negative_weight=0.5, route_weight=8.0))
    assert rows(result.weights) == [[2, 16, 2, 0, 0, 0, 2], [-0.5, -8, 0, 0, 0, 0, 0]]


def test_negative_advantages_of_route_tokens_have_a_factor_of_their_own() -> None:
    result = weigh(preset("mask", negative_weight=0.5, route_weight=8.0, route_negative=0.25))
    assert rows(result.weights) == [[2, 16, 2, 0, 0, 0, 2], [-0.5, -2, 0, 0, 0, 0, 0]]


def test_a_made_up_name_bears_the_whole_of_its_negative_advantage() -> None:
    settings = preset("mask", route_weight=8.0, route_negative=0.25)
    result = weigh(settings, roles=roles(["cm", "cm"]))
    assert rows(result.weights) == [[2, 16], [-1, -8]]


def test_entropy_acts_on_route_tokens_of_trained_rows_in_the_controllers_sum() -> None:
    result = weigh(preset("positive", route_entropy=0.06))  # 6 controller tokens
    assert rows(result.entropy_weights) == [[0, 0.01, 0, 0, 0, 0, 0]] + [[0, 0.01] + [0] * 5]
    half = weigh(preset("positive", route_entropy=0.06), is_trained=torch.tensor([True, False]))
    assert rows(half.entropy_weights) == [[0, 0.015, 0, 0, 0, 0, 0], [0] * 7]


@pytest.mark.parametrize("expert_loss", ["paper", "positive", "luffy", "ce", "mask"])
def test_the_environment_padding_and_untrained_rows_have_exactly_no_weight(
    expert_loss: Any,
) -> None:
    result = weigh(
        preset(expert_loss, route_weight=8.0, route_entropy=0.1),
        is_trained=torch.tensor([True, False]),
    )
    nobody = ~(roles().controller | roles().expert)
    for tensor in (result.weights, result.mask, result.entropy_weights):
        assert tensor[nobody].eq(0).all()
        assert tensor[1].eq(0).all()


def test_a_batch_without_any_trained_row_is_a_zero_and_not_a_division_by_zero() -> None:
    result = weigh(preset("positive", route_entropy=0.1), is_trained=torch.tensor([False, False]))
    assert result.weights.eq(0).all() and result.num_items == 1


def test_settings_out_of_range_are_refused() -> None:
    for bad in ({"expert_weight": -1.0}, {"shaping_gamma": 0.0}, {"expert_cap": 0.0}):
        with pytest.raises(ValueError, match="expected"):
            preset("positive", **bad)


# --- what depends on current probabilities ------------------------------------------------------


def test_shaping_reproduces_the_autograd_of_h() -> None:
    logps = f64([[-0.01, -0.7, -3.0, -9.0]]).requires_grad_()
    weights = f64([[2.0, -1.0, 0.5, 3.0]])
    p = logps.exp()
    (weights * p / (p + 0.1)).sum().backward()
    settings = preset("luffy")
    factor = shaping_factor(settings, logps, weights)
    assert torch.allclose(logps.grad, weights * factor, atol=1e-14)  # type: ignore[arg-type]
    assert not factor.requires_grad


def test_shaping_by_hand_and_where_it_applies() -> None:
    logps = f64([[math.log(0.1), math.log(0.1)]])
    weights = f64([[1.0, -1.0]])
    # gamma p / (p + gamma)^2 at p = gamma = 0.1 is 1/4.
    assert shaping_factor(preset("luffy"), logps, weights).tolist() == [[0.25, 0.25]]
    only = preset("positive", shaping="negative")
    assert shaping_factor(only, logps, weights).tolist() == [[1.0, 0.25]]
    assert shaping_factor(preset("paper"), logps, weights).tolist() == [[1.0, 1.0]]


def test_the_importance_ratio_is_truncated_and_leaves_spliced_tokens_alone() -> None:
    logps = f64([[-1.0, -1.0, -1.0, -1.0]])
    sampling = f64([[-1.0 + math.log(2), -9.0, NAN, -5.0]])
    is_sampled = torch.tensor([[True, True, True, False]])
    gap = log_ratio_to_engine(logps, sampling, is_sampled)
    assert gap.tolist() == [pytest.approx([-math.log(2), 8.0, 0.0, 0.0])]
    assert importance_factor(gap, 2.0).tolist() == [pytest.approx([0.5, 2.0, 1.0, 1.0])]


def test_the_ratio_of_a_sequence_is_the_geometric_mean_over_its_sampled_tokens() -> None:
    logps = f64([[-1.0, -2.0, -3.0, -1.0], [-1.0, -1.0, -1.0, -1.0]])
    sampling = f64([[-1.5, -1.0, NAN, -1.0], [NAN, NAN, NAN, NAN]])
    is_sampled = torch.tensor([[True, True, False, True], [False] * 4])
    gap = log_ratio_to_engine(logps, sampling, is_sampled, "sequence")
    # (0.5 - 1 + 0) / 3 for each of the three sampled tokens; nothing for the spliced one.
    third = -0.5 / 3
    assert gap.tolist() == [pytest.approx([third, third, 0.0, third]), [0.0] * 4]


# --- loss types ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_type", "first", "second"),
    [
        # 10 tokens in the loss: 6 in the first trajectory, 4 in the second; limit of 20.
        ("dapo", 1 / 10, 1 / 10),
        ("bnpo", 1 / 10, 1 / 10),
        ("cispo", 1 / 10, 1 / 10),
        ("vespo", 1 / 10, 1 / 10),
        ("grpo", 1 / (2 * 6), 1 / (2 * 4)),
        ("sapo", 1 / (2 * 6), 1 / (2 * 4)),
        ("dr_grpo", 1 / (2 * 20), 1 / (2 * 20)),
        ("luspo", 1 / 2, 1 / 2),
    ],
)
def test_each_loss_type_divides_by_what_its_paper_says(
    loss_type: Any, first: float, second: float
) -> None:
    result = weigh(preset("paper"), loss_type=loss_type, max_completion_length=20)
    per_token = result.weights / result.num_items  # advantages 2 and -1
    assert per_token[0, 0].item() == pytest.approx(2 * first)
    assert per_token[1, 0].item() == pytest.approx(-second)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "sapo", "dr_grpo", "luspo"])
def test_the_entropy_of_a_name_counts_like_an_advantage_of_its_size_under_every_loss(
    loss_type: Any,
) -> None:
    result = weigh(
        preset("paper", route_entropy=2.0), loss_type=loss_type, max_completion_length=20
    )
    per_token = result.weights / result.num_items  # the first advantage is 2
    is_route = roles().route[0]
    assert torch.allclose(result.entropy_weights[0][is_route], per_token[0][is_route])


def test_a_step_without_expert_text_is_divided_by_its_own_tokens_alone() -> None:
    alone = replace(roles(), expert=torch.zeros_like(roles().expert))
    counts = token_counts(alone, torch.tensor([True, True]))
    result = token_weights(
        preset("paper"),
        alone,
        group_advantages(f64([1, 0]), 2).values,
        is_right=torch.tensor([True, False]),
        is_trained=torch.tensor([True, True]),
        counts=counts,
    )
    assert result.num_items == alone.controller.sum()


def test_rewards_that_differ_by_rounding_are_one_reward_for_all_who_ask() -> None:
    rewards = [1.0, 1.0 - 5e-7]
    assert group_advantages(f64(rewards), 2).is_flat.all()
    rollout = Trajectory("t", "p", "experts", (), (), "answer", True, outcome="right")
    assert is_flat([replace(rollout, reward=reward) for reward in rewards])


def test_rows_that_are_not_trained_do_not_count_as_trajectories() -> None:
    only = torch.tensor([True, False])
    result = weigh(preset("paper"), loss_type="luspo", is_trained=only)
    assert (result.weights / result.num_items)[0, 0].item() == pytest.approx(2.0)


def test_void_trajectories_are_trained_only_if_asked() -> None:
    advantages = group_advantages(f64([1, 0]), 2)
    is_void = torch.tensor([False, True])
    assert trained(advantages, is_void, ObjectiveSettings()).tolist() == [True, False]
    assert trained(advantages, is_void, ObjectiveSettings(drop_void=False)).all()


def test_weights_give_the_gradient_of_the_objective_in_float64() -> None:
    """J written out as in the module's first lines, against the weights times d log p."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 7, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(5, (2, 7), generator=generator)
    advantages, gamma = f64([2.0, -1.0]), 0.1
    settings = preset(
        "luffy", expert_weight=0.7, expert_negative=0.4, negative_weight=0.5, route_weight=8.0,
        denominator="separate", route_entropy=0.08,
    )  # fmt: skip
    logps = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    entropies = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    objective = f64(0.0)
    layout = [list(row) for row in LAYOUT]
    for i, a in enumerate(advantages):
        for t, author in enumerate(layout[i]):
            ratio = (logps[i, t] - logps[i, t].detach()).exp()
            surrogate = torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)
            if author == "r":
                objective = objective + (8.0 * surrogate + 0.08 * entropies[i, t]) / 6
            elif author == "c":
                objective = objective + (1.0 if a > 0 else 0.5) * surrogate / 6
            elif author == "e":
                p = logps[i, t].exp()
                objective = objective + 0.7 * (1.0 if a > 0 else 0.4) * a * p / (p + gamma) / 4
    (expected,) = torch.autograd.grad(objective, logits, retain_graph=True)

    result = weigh(settings, advantages=advantages)
    factor = torch.where(roles().expert, shaping_factor(settings, logps, result.weights), 1.0)
    loss = -(result.weights * factor * logps).sum() / result.num_items
    loss = loss - (result.entropy_weights * entropies).sum()
    (gradient,) = torch.autograd.grad(-loss, logits)
    assert torch.allclose(gradient, expected, atol=1e-14)
