"""The Stage I objective as pure functions: advantages, and one signed weight per token.

    J = 1/N sum_i z_i sum_t [ 1_ctrl w_t min(r A_i, clip(r) A_i) + 1_exp lambda c(A_i) A_i h(p) ]

Everything that decides how much a token counts ends up in a weight of shape (B*G, T), which the
trainer hands to TRL's loss in the place of the advantages. Departures from GRPO: infrastructure
faults leave the baseline, void trajectories stay in it without being trained, expert tokens have
their own weight, and the environment's output has none. What is not here: the forward pass, the
clipping of the ratio (TRL's), and where the masks come from (`stages.stage1.trainer`).

Shapes: B = prompts, G = generations per prompt, T = completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ExpertLoss = Literal["paper", "positive", "luffy", "ce", "mask"]
Denominator = Literal["all", "controller", "separate"]
Shaping = Literal["none", "negative", "all"]
Scale = Literal["group", "batch", "none"]
# The losses of TRL 1.16. They differ in what a token's ratio to the old policy does, which is TRL's
# code, and in what they divide by, which is `loss_scale`.
LossType = Literal["dapo", "grpo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo"]
RatioLevel = Literal["token", "sequence"]
# Rewards of a group that lie closer together than this are the same: what differs is rounding.
FLAT_SPREAD = 1e-6


@dataclass(frozen=True, slots=True)
class ObjectiveSettings:
    """How tokens are weighted. `preset` fills in what an `expert_loss` stands for.

    Attributes:
        expert_weight: lambda, weight of expert tokens, at least 0.
        expert_negative: nu = c(A) for A < 0, factor of expert tokens of bad trajectories.
        use_constant_expert_weight: Expert tokens of right trajectories weigh lambda whatever
            their advantage, all others 0 (cross-entropy).
        shaping: Where h(p) = p / (p + gamma) replaces log p on expert tokens.
        shaping_gamma: gamma, above 0.
        expert_cap: A trajectory's expert tokens together weigh at most this many tokens
            (sum of lambda over them, before the advantage); None is no bound.
        denominator: N. `all`: controller and expert tokens; `controller`: controller tokens for
            both sums; `separate`: each sum by the number of its own tokens.
        negative_weight: Factor of the controller's tokens of bad trajectories (A < 0), except
            for its route tokens.
        route_weight: Factor of the controller's route tokens.
        route_negative: Factor of route tokens of bad trajectories, on top of `route_weight`;
            names that are made up bear the whole of it.
        route_entropy: The entropy of each of the controller's route tokens counts as much in its
            sum as an advantage of this size.
        drop_void: Trajectories with neither an answer nor an action train nothing; they stay in
            their group's baseline all the same.
        drop_flat_groups: Groups whose rewards are all equal train nothing and are not counted
            in N.
        scale: Standard deviation that advantages are divided by.
        epsilon: Added to that standard deviation.
    """

    expert_weight: float = 0.3
    expert_negative: float = 0.0
    use_constant_expert_weight: bool = False
    shaping: Shaping = "none"
    shaping_gamma: float = 0.1
    expert_cap: float | None = None
    denominator: Denominator = "separate"
    negative_weight: float = 1.0
    route_weight: float = 1.0
    route_negative: float = 1.0
    route_entropy: float = 0.0
    drop_void: bool = True
    drop_flat_groups: bool = True
    scale: Scale = "group"
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        for name in (
            "expert_weight",
            "expert_negative",
            "negative_weight",
            "route_weight",
            "route_negative",
            "route_entropy",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 0")
        if self.shaping_gamma <= 0 or self.epsilon <= 0:
            raise ValueError(
                f"shaping_gamma is {self.shaping_gamma} and epsilon {self.epsilon}; "
                "expected both above 0"
            )
        if self.expert_cap is not None and self.expert_cap <= 0:
            raise ValueError(f"expert_cap is {self.expert_cap}; expected above 0, or none")


# What each word stands for; every knob can be set on top of it.
_PRESETS: dict[ExpertLoss, dict[str, object]] = {
    # The paper's shared signed advantage: expert tokens count as if the controller wrote them.
    "paper": {"expert_weight": 1.0, "expert_negative": 1.0, "denominator": "all"},
    # Imitate experts in good trajectories, never push away from them in bad ones.
    "positive": {"expert_weight": 0.3, "expert_negative": 0.0, "denominator": "separate"},
    # Policy shaping of LUFFY, arXiv:2504.14945: rare tokens are learnt, not surprising ones.
    "luffy": {
        "expert_weight": 1.0,
        "expert_negative": 1.0,
        "denominator": "all",
        "shaping": "all",
    },
    "ce": {
        "expert_weight": 0.3,
        "expert_negative": 0.0,
        "denominator": "separate",
        "use_constant_expert_weight": True,
        # A group that is right throughout has no advantage, but good replies to imitate.
        "drop_flat_groups": False,
    },
    "mask": {"expert_weight": 0.0, "expert_negative": 0.0, "denominator": "separate"},
}


def preset(expert_loss: ExpertLoss, **knobs: object) -> ObjectiveSettings:
    """Settings that an `expert_loss` stands for, with knobs on top; a knob of None is not set."""
    chosen = {name: value for name, value in knobs.items() if value is not None}
    return ObjectiveSettings(**(_PRESETS[expert_loss] | chosen))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages of a batch of groups, each tensor of shape (B*G,).

    Attributes:
        values: A_i; 0 where the reward is unknown.
        is_valid: True where the reward is known: the trajectory is in its group's baseline.
        is_flat: True where the valid rewards of the group do not differ.
    """

    values: Tensor
    is_valid: Tensor
    is_flat: Tensor

    def rows(self, start: int, stop: int) -> Advantages:
        """The trajectories of one process."""
        return Advantages(*(x[start:stop] for x in (self.values, self.is_valid, self.is_flat)))


def group_advantages(
    rewards: Tensor, num_generations: int, *, scale: Scale = "group", epsilon: float = 1e-4
) -> Advantages:
    """A_i = (R_i - mean_V) / (std_V + epsilon), V the valid trajectories of the group.

    Args:
        rewards: Shape (B*G,), the G of one prompt side by side; NaN for infrastructure faults.
        num_generations: G.
        scale: Divide by the group's standard deviation, the whole batch's, or not.
        epsilon: Added to the standard deviation (unbiased, as in TRL).
    """
    groups = rewards.view(-1, num_generations)  # (B, G)
    known = ~torch.isnan(groups)
    count = known.sum(1, keepdim=True).clamp(min=1)
    filled = torch.where(known, groups, 0.0)
    mean = filled.sum(1, keepdim=True) / count
    centred = torch.where(known, groups - mean, 0.0)
    std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    least = torch.where(known, groups, torch.inf).amin(1, keepdim=True)
    most = torch.where(known, groups, -torch.inf).amax(1, keepdim=True)
    flat = (most - least < FLAT_SPREAD).expand_as(groups)
    values = torch.where(flat, 0.0, centred)
    if scale == "group":
        values = values / (std + epsilon)
    elif scale == "batch":
        everything = rewards[~torch.isnan(rewards)]
        batch_std = everything.std() if everything.numel() > 1 else everything.new_zeros(())
        values = values / (batch_std + epsilon)
    return Advantages(values.reshape(-1), known.reshape(-1), flat.reshape(-1))


@dataclass(frozen=True, slots=True)
class TokenRoles:
    """Who wrote which completion token: boolean masks of shape (B*G, T), False on padding.

    Tokens of the environment are in none of them.

    Attributes:
        controller: Sampled by the controller.
        expert: Spliced in from an expert, the reply's tags included.
        route: The controller's choice of an expert; a part of `controller`.
        made_up: Choices of an expert that there is not; a part of `route`.
    """

    controller: Tensor
    expert: Tensor
    route: Tensor
    made_up: Tensor


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """What enters the loss. Its gradient is -1/num_items sum_t weights_t grad log pi(t).

    Attributes:
        weights: Signed weight per token, shape (B*G, T).
        mask: 1.0 for tokens that are in the loss, else 0.0, shape (B*G, T).
        entropy_weights: Coefficient of each token's entropy in J, shape (B*G, T).
        num_items: Denominator over all processes, a scalar of at least 1.
    """

    weights: Tensor
    mask: Tensor
    entropy_weights: Tensor
    num_items: Tensor


def trained(advantages: Advantages, is_void: Tensor, settings: ObjectiveSettings) -> Tensor:
    """z_i as booleans, shape (B*G,): not a fault, not void, not in a dropped flat group."""
    keep = advantages.is_valid & ~is_void if settings.drop_void else advantages.is_valid
    return keep & ~advantages.is_flat if settings.drop_flat_groups else keep


def token_counts(roles: TokenRoles, is_trained: Tensor) -> Tensor:
    """Numbers of controller tokens, expert tokens and trajectories that are trained, shape (3,).

    With many processes, sum them before `token_weights`.
    """
    row = is_trained.unsqueeze(1)
    masks = (roles.controller & row, roles.expert & row, is_trained)
    return torch.stack([mask.sum() for mask in masks])


def token_weights(
    settings: ObjectiveSettings,
    roles: TokenRoles,
    advantages: Tensor,
    *,
    is_right: Tensor,
    is_trained: Tensor,
    counts: Tensor,
    loss_type: LossType = "dapo",
    max_completion_length: int = 1,
) -> TokenWeights:
    """Weight every token.

    Args:
        settings: See `ObjectiveSettings`.
        roles: Masks of shape (B*G, T).
        advantages: A_i, shape (B*G,).
        is_right: Verdict of the grader, shape (B*G,).
        is_trained: z_i from `trained`, shape (B*G,).
        counts: From `token_counts`, over all processes, shape (3,).
        loss_type: Decides what is divided by, see `loss_scale`.
        max_completion_length: Limit of a completion, for `dr_grpo`.
    """
    num_controller, num_expert, num_rows = counts.to(advantages.dtype)
    row = is_trained.unsqueeze(1)
    controller, expert = roles.controller & row, roles.expert & row
    own = _controller_weights(settings, roles, advantages)
    spliced = _expert_weights(settings, roles, advantages, is_right)
    num_items = num_controller
    if settings.denominator == "all" and settings.expert_weight:
        num_items = num_items + num_expert
    elif settings.denominator == "separate":
        spliced = spliced * num_controller.clamp(min=1) / num_expert.clamp(min=1)
    num_items = num_items.clamp(min=1)  # what is divided by: an empty step has a loss of 0
    weights = torch.where(controller, own, torch.where(expert, spliced, 0.0))
    in_loss = controller | expert if settings.expert_weight else controller
    scale = loss_scale(
        loss_type, in_loss.sum(1), num_items, num_rows.clamp(min=1), max_completion_length
    ).unsqueeze(1)
    entropy = (roles.route & row) * scale * (settings.route_entropy / num_items)
    return TokenWeights(weights * scale, in_loss.to(weights.dtype), entropy, num_items)


def loss_scale(
    loss_type: LossType,
    lengths: Tensor,
    num_items: Tensor,
    num_rows: Tensor,
    max_completion_length: int,
) -> Tensor:
    """Factor of a trajectory's weights that turns the division by N into that of a loss type.

    Tokens and trajectories are counted over the whole optimizer step and all processes, so that
    the loss depends on neither the micro-batches nor the number of processes; TRL takes means of
    each micro-batch instead. With N tokens, S trajectories, n_i tokens in trajectory i:

    | loss type | divides a token of trajectory i by | source |
    |---|---|---|
    | `dapo`, `bnpo`, `cispo`, `vespo` | N | arXiv:2503.14476, 2506.13585, 2602.10693 |
    | `grpo`, `sapo` | n_i S | arXiv:2402.03300, 2511.20347 |
    | `dr_grpo` | S max_completion_length | arXiv:2503.20783 |
    | `luspo` | S | arXiv:2602.05261 |

    Args:
        loss_type: See the table.
        lengths: n_i, tokens of each trajectory that are in the loss, shape (B*G,).
        num_items: N, a scalar.
        num_rows: S, trained trajectories, a scalar.
        max_completion_length: Limit of a completion.

    Returns:
        Shape (B*G,).
    """
    if loss_type in ("grpo", "sapo"):
        return num_items / (num_rows * lengths.clamp(min=1))
    if loss_type == "dr_grpo":
        return (num_items / (num_rows * max_completion_length)).expand(lengths.shape)
    if loss_type == "luspo":
        return (num_items / num_rows).expand(lengths.shape)
    return torch.ones_like(lengths, dtype=num_items.dtype)


def _controller_weights(
    settings: ObjectiveSettings, roles: TokenRoles, advantages: Tensor
) -> Tensor:
    """Signed weight as if every token were the controller's, shape (B*G, T)."""
    other = torch.where(advantages < 0, settings.negative_weight, 1.0) * advantages
    made_up = settings.route_weight * advantages
    route = torch.where(advantages < 0, settings.route_negative, 1.0) * made_up
    choice = torch.where(roles.made_up, made_up.unsqueeze(1), route.unsqueeze(1))
    return torch.where(roles.route, choice, other.unsqueeze(1))


def _expert_weights(
    settings: ObjectiveSettings, roles: TokenRoles, advantages: Tensor, is_right: Tensor
) -> Tensor:
    """Signed weight of a trajectory's expert tokens, before shaping, shape (B*G, 1)."""
    if settings.use_constant_expert_weight:
        signed = is_right.to(advantages.dtype)
    else:
        signed = torch.where(advantages < 0, settings.expert_negative, 1.0) * advantages
    weight = torch.full_like(advantages, settings.expert_weight)
    if settings.expert_cap is not None:
        number = roles.expert.sum(1).clamp(min=1)
        weight = weight.clamp(max=settings.expert_cap / number)
    return (weight * signed).unsqueeze(1)


def shaping_factor(settings: ObjectiveSettings, logps: Tensor, weights: Tensor) -> Tensor:
    """Factor that turns the gradient of log p into that of h(p) = p / (p + gamma).

    d h / d log p = gamma p / (p + gamma)^2, at most 1/4: certain tokens and hopeless ones both
    fade. No gradient flows through the factor.

    Args:
        settings: See `ObjectiveSettings`.
        logps: log p of each token under the controller, shape (B*G, T).
        weights: Signed weights, shape (B*G, T); tells good trajectories from bad ones.
    """
    if settings.shaping == "none":
        return torch.ones_like(weights)
    p = logps.detach().exp()
    factor = settings.shaping_gamma * p / (p + settings.shaping_gamma).square()
    if settings.shaping == "negative":
        factor = torch.where(weights < 0, factor, 1.0)
    return factor


def log_ratio_to_engine(
    logps: Tensor, sampling_logps: Tensor, is_sampled: Tensor, level: RatioLevel = "token"
) -> Tensor:
    """Log of the ratio of the trainer's policy to the sampling engine's, without gradient.

    Args:
        logps: log p under the trainer's policy, shape (B*G, T).
        sampling_logps: log p that the engine reported, NaN where it reported none, (B*G, T).
        is_sampled: True for the controller's tokens, shape (B*G, T).
        level: `token`, or `sequence`: the mean over a trajectory's sampled tokens, for all of them
            (the length-normalised ratio of GSPO, Eq. 7, arXiv:2507.18071).

    Returns:
        Shape (B*G, T); 0 where nothing was sampled.
    """
    known = is_sampled & ~torch.isnan(sampling_logps)
    gap = torch.where(known, logps.detach() - sampling_logps, 0.0)
    if level == "sequence":
        mean = gap.sum(1, keepdim=True) / known.sum(1, keepdim=True).clamp(min=1)
        gap = torch.where(known, mean, 0.0)
    return gap


def importance_factor(log_ratio: Tensor, clip: float) -> Tensor:
    """Truncated importance ratio, in (0, clip], from `log_ratio_to_engine`; 1 at a ratio of 1."""
    return log_ratio.exp().clamp(max=clip)
