r"""The Stage II objective of RIVET (arXiv:2609.12578): weighted log-likelihood by author and kind.

    L = - sum_t w_t log pi(t) / Z

| token | weight |
|---|---|
| prompt, `<output>` and its tags (author `environment`) | 0 |
| controller text, and whatever the controller wrote that is no tag | `controller` (1) |
| expert text and code | `expert` (beta) |
| format tokens: tags, `\boxed{`, end of turn | alpha |
| the expert's name (kind `route`) | `route` (1) |

A name is *not* a format token: it is the routing decision, and weighting it by alpha would mix
two effects in one ablation. The tags of the reply, and those of the program in it, *are* trained
although the engine wrote them, because the deployed controller must write them itself;
`train_reply_tags=False` masks the reply span whole.

Z is the sum of the weights (`weights`) or the number of trained tokens (`tokens`), over the whole
optimizer step: all accumulated micro-batches, all processes. Focal weights depend on the model, so
there Z counts a format token with the weight that it has once learnt (p = 1): known before the
forward pass, hence exact under accumulation. Trained tokens are those of weight above 0; the others
get no gradient at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from rivet.trajectory import AUTHORS, KINDS

FormatWeight = Literal["constant", "focal"]
Normalization = Literal["weights", "tokens"]

# Codes of a token's author and kind in a Stage II dataset: the trajectory's own, and the prompt.
AUTHOR_CODES: tuple[str, ...] = (*AUTHORS, "prompt")
KIND_CODES: tuple[str, ...] = (*KINDS, "prompt")
EXPERT = AUTHOR_CODES.index("expert")
FORMAT = KIND_CODES.index("format")
ROUTE = KIND_CODES.index("route")
PROMPT_AUTHOR = AUTHOR_CODES.index("prompt")
PROMPT_KIND = KIND_CODES.index("prompt")


@dataclass(frozen=True, slots=True)
class Objective:
    """Weights of the loss, all at least 0.

    Attributes:
        controller: Weight of the controller's text.
        expert: Beta, weight of the expert's text and code; 0 masks them.
        format_weight: `constant` gives format tokens alpha; `focal` gives 1 + (alpha - 1)(1 - p),
            which is alpha for a format token that the model does not expect and 1 once learnt.
        format_alpha: Alpha.
        route: Weight of the expert's name.
        train_reply_tags: Whether tags and name of a spliced reply are trained.
        normalization: What Z is.
    """

    controller: float = 1.0
    expert: float = 1.0
    format_weight: FormatWeight = "constant"
    format_alpha: float = 1.0
    route: float = 1.0
    train_reply_tags: bool = True
    normalization: Normalization = "weights"

    def __post_init__(self) -> None:
        for name in ("controller", "expert", "format_alpha", "route"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} is {value}; expected a finite weight of at least 0")
        for name, choices in (
            ("format_weight", get_args(FormatWeight)),
            ("normalization", get_args(Normalization)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; expected one of {', '.join(choices)}"
                )
        if self.is_focal and self.format_alpha == 1:
            raise ValueError(
                "format_weight is focal at format_alpha 1, where every weight is 1; expected "
                "another alpha, or constant"
            )

    @classmethod
    def decisions_only(cls) -> Objective:
        """What the controller decided and nothing of the reply."""
        return cls(expert=0.0, train_reply_tags=False)

    @property
    def is_focal(self) -> bool:
        """Whether format weights depend on the model's probabilities."""
        return self.format_weight == "focal"

    def table(self) -> np.ndarray:
        """Weight per (author, kind) code, shape (authors, kinds); focal ones as at p = 1."""
        table = np.zeros((len(AUTHOR_CODES), len(KIND_CODES)), np.float32)
        base = {"controller": self.controller, "expert": self.expert}
        structure = 1.0 if self.is_focal else self.format_alpha
        for author, weight in base.items():
            row = table[AUTHOR_CODES.index(author)]
            row[: len(KINDS)] = weight
            is_masked = author == "expert" and not self.train_reply_tags
            row[FORMAT] = 0.0 if is_masked else structure
            row[ROUTE] = 0.0 if is_masked else self.route
        return table


def named_weights(objective: Objective) -> dict[str, float]:
    """The table by `author/kind`, for whoever looks at a trajectory later."""
    table = objective.table()
    return {
        f"{author}/{kind}": round(
            float(table[AUTHOR_CODES.index(author), KIND_CODES.index(kind)]), 6
        )
        for author in AUTHORS
        for kind in KINDS
    }


def token_weights(
    table: np.ndarray, authors: np.ndarray, kinds: np.ndarray, expert_scale: float = 1.0
) -> np.ndarray:
    """Weight of each token of one row.

    Args:
        table: From `Objective.table`.
        authors: Author codes, shape (T,).
        kinds: Kind codes, shape (T,).
        expert_scale: Multiplies the weights of the expert's text and code in this row; those of
            the reply's tags and name stay.

    Returns:
        Shape (T,), float32. The first token has weight 0: nothing predicts it.
    """
    weights = table[authors, kinds]
    if expert_scale != 1.0:
        is_content = (authors == EXPERT) & (kinds != FORMAT) & (kinds != ROUTE)
        weights = np.where(is_content, weights * np.float32(expert_scale), weights)
    weights[:1] = 0.0
    return weights


def normalizer(weights: torch.Tensor, normalization: Normalization) -> torch.Tensor:
    """Z of some tokens: the sum of their weights, or how many have a weight above 0."""
    return weights.sum() if normalization == "weights" else (weights > 0).sum()


def focal_weights(
    weights: torch.Tensor, log_probs: torch.Tensor, is_format: torch.Tensor, alpha: float
) -> torch.Tensor:
    """Multiply format weights by 1 + (alpha - 1)(1 - p), p a constant to the gradient.

    Args:
        weights: As at p = 1, shape (B, T).
        log_probs: Log-probability of each token, shape (B, T).
        is_format: True for format tokens, shape (B, T).
        alpha: Weight at p = 0.
    """
    factor = 1 + (alpha - 1) * (1 - log_probs.detach().exp())
    return torch.where(is_format, weights * factor, weights)


def weighted_nll(
    log_probs: torch.Tensor, weights: torch.Tensor, z: torch.Tensor | float
) -> torch.Tensor:
    """- sum_t w_t log pi(t) / Z; 0 where nothing is trained.

    Args:
        log_probs: Shape (B, T), finite.
        weights: Shape (B, T); 0 = the token does not count.
        z: Z of the whole optimizer step.
    """
    z = torch.as_tensor(z, device=log_probs.device, dtype=log_probs.dtype)
    total = -(log_probs * weights.to(log_probs.dtype)).sum()
    # The tiny floor keeps a step without any trained token at a finite zero.
    return total / z.clamp(min=torch.finfo(log_probs.dtype).tiny)
