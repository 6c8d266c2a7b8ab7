"""The adapter g_phi: hidden states of several experts become K context tokens.

A Perceiver-style cross-attention (arXiv:2103.03206) as in n-Musketeers (arXiv:2602.09173): learned
latents ask, the experts' states, projected from each expert's own width, answer. Departures, ours:
no self-attention among the latents; a learned empty slot that is always there to attend to, so that
masking every expert is defined; the context has the size of the policy's own token embeddings.

`routing` makes the controls of the same module: `attention` (the system), `static` (a learned
mixture that is the same for every problem), `constant` (no experts at all).

Shapes: B = problems, E = experts, S = slots per expert, K = context tokens, d = width inside,
D = width of the policy, A = attention heads, T = E * S + 1 tokens to attend to, the empty one last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Routing = Literal["attention", "static", "constant"]
ROUTINGS = ("attention", "static", "constant")


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Shape of an adapter.

    Attributes:
        expert_names: The experts, in the order of their states.
        expert_widths: Width of each expert's states.
        num_slots: S.
        output_width: D.
        num_context_tokens: K, at least 1.
        width: d, a multiple of num_heads.
        num_blocks: Blocks of cross-attention and feed-forward, at least 1.
        num_heads: A.
        mlp_ratio: Inner width of the feed-forward, in units of d.
        routing: Which variant.
    """

    expert_names: tuple[str, ...]
    expert_widths: tuple[int, ...]
    num_slots: int
    output_width: int
    num_context_tokens: int = 4
    width: int = 96
    num_blocks: int = 2
    num_heads: int = 4
    mlp_ratio: int = 2
    routing: Routing = "attention"

    def __post_init__(self) -> None:
        object.__setattr__(self, "expert_names", tuple(self.expert_names))
        object.__setattr__(self, "expert_widths", tuple(self.expert_widths))
        if self.routing not in ROUTINGS:
            raise ValueError(f"routing is {self.routing!r}; expected one of {', '.join(ROUTINGS)}")
        if len(self.expert_names) != len(self.expert_widths):
            raise ValueError(
                f"{len(self.expert_names)} experts with {len(self.expert_widths)} widths"
            )
        if self.routing != "constant" and (not self.expert_names or self.num_slots < 1):
            raise ValueError(f"routing {self.routing} needs experts with at least one slot")
        if min(self.width, self.num_heads) < 1 or self.width % self.num_heads:
            raise ValueError(
                f"width {self.width} is no multiple of {self.num_heads} heads, at least one"
            )
        if min(self.num_context_tokens, self.num_blocks, self.output_width) < 1:
            raise ValueError("expected at least one context token, block and output dimension")

    @property
    def num_tokens(self) -> int:
        """T, tokens that a latent can attend to."""
        return len(self.expert_names) * self.num_slots + 1

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        values = asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


@dataclass(frozen=True, slots=True)
class Context:
    """What the adapter makes of the experts' states.

    Attributes:
        tokens: C, shape (B, K, D).
        attention: Weights of every block, shape (B, blocks, A, K, T); each row sums to 1. None
            for `constant`, which attends to nothing.
    """

    tokens: Tensor
    attention: Tensor | None


class LatentAdapter(nn.Module):
    """g_phi.

    Args:
        settings: Its shape.
        embedding_rms: Root mean square of the policy's token embeddings, which C starts with.
    """

    def __init__(self, settings: AdapterSettings, *, embedding_rms: float = 1.0) -> None:
        super().__init__()
        self.settings = settings
        d = settings.width
        self.log_gain = nn.Parameter(torch.tensor(float(embedding_rms)).log())
        if settings.routing == "constant":
            shape = (settings.num_context_tokens, settings.output_width)
            self.constant = nn.Parameter(torch.randn(shape))
            return
        self.norms = nn.ModuleList(nn.RMSNorm(w) for w in settings.expert_widths)
        self.projections = nn.ModuleList(nn.Linear(w, d) for w in settings.expert_widths)
        # Of the size of projected states: latents can tell experts and slots from the start.
        self.expert_embedding = nn.Parameter(0.5 * torch.randn(len(settings.expert_widths), d))
        self.slot_embedding = nn.Parameter(0.5 * torch.randn(settings.num_slots, d))
        self.empty = nn.Parameter(0.5 * torch.randn(d))
        # Small, or the context would begin as a constant with a little of H added to it.
        self.latents = nn.Parameter(0.1 * torch.randn(settings.num_context_tokens, d))
        self.blocks = nn.ModuleList(_Block(settings) for _ in range(settings.num_blocks))
        self.norm = nn.RMSNorm(d)
        self.output = nn.Linear(d, settings.output_width)

    def forward(self, expert_states: Tensor | None, expert_mask: Tensor | None) -> Context:
        """Make context tokens.

        Args:
            expert_states: Shape (B, E, S, W), W at least the greatest width of an expert.
            expert_mask: True where there is a state, shape (B, E, S).

        Raises:
            ValueError: The states do not fit the adapter's experts and slots.
        """
        if self.settings.routing == "constant":
            batch = 1 if expert_states is None else expert_states.size(0)
            tokens = self._scaled(self.constant)
            return Context(tokens.expand(batch, -1, -1), None)
        keys, mask = self._experts(expert_states, expert_mask)
        x = self.latents.expand(keys.size(0), -1, -1)
        attention = []
        for block in self.blocks:
            x, weights = block(x, keys, mask)
            attention.append(weights)
        return Context(self._scaled(self.output(self.norm(x))), torch.stack(attention, 1))

    def _experts(self, states: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Tokens to attend to, (B, T, d), and where there is one, (B, T)."""
        s = self.settings
        expected = (len(s.expert_widths), s.num_slots)
        if states is None or mask is None:
            raise ValueError("this policy listens to experts; expected expert_states, expert_mask")
        if tuple(states.shape[1:3]) != expected or states.size(3) < max(s.expert_widths):
            raise ValueError(
                f"expert_states have shape {tuple(states.shape)}; expected (B, {expected[0]} "
                f"experts, {expected[1]} slots, {max(s.expert_widths)} or more)"
            )
        if mask.shape != states.shape[:3]:
            raise ValueError(f"expert_mask has shape {tuple(mask.shape)}, expected (B, E, S)")
        dtype = self.output.weight.dtype
        projected = [
            project(norm(states[:, e, :, :width].to(dtype)))
            for e, (norm, project, width) in enumerate(
                zip(self.norms, self.projections, s.expert_widths, strict=True)
            )
        ]
        tokens = torch.stack(projected, 1)  # (B, E, S, d)
        tokens = tokens + self.expert_embedding[:, None] + self.slot_embedding
        batch = tokens.size(0)
        tokens = torch.cat([tokens.flatten(1, 2), self.empty.expand(batch, 1, -1)], 1)
        there = torch.cat([mask.flatten(1).bool(), mask.new_ones(batch, 1).bool()], 1)
        return tokens, there

    def _scaled(self, tokens: Tensor) -> Tensor:
        """Tokens whose root mean square is the learned gain: a context of any other size would be
        noise or nothing to the policy."""
        return functional.rms_norm(tokens, tokens.shape[-1:]) * self.log_gain.exp()


class _Block(nn.Module):
    """Cross-attention to the experts, then a feed-forward, each on a residual."""

    def __init__(self, settings: AdapterSettings) -> None:
        super().__init__()
        d, heads, latents = settings.width, settings.num_heads, settings.num_context_tokens
        self.heads = heads
        self.is_static = settings.routing == "static"
        self.norm_latents, self.norm_tokens = nn.RMSNorm(d), nn.RMSNorm(d)
        self.norm_mlp = nn.RMSNorm(d)
        self.value, self.merge = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        if self.is_static:
            self.scores = nn.Parameter(torch.zeros(heads, latents, settings.num_tokens))
        else:
            self.query, self.key = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(d, settings.mlp_ratio * d), nn.GELU(), nn.Linear(settings.mlp_ratio * d, d)
        )

    def forward(self, x: Tensor, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Latents (B, K, d) over tokens (B, T, d): new latents, weights (B, A, K, T)."""
        tokens = self.norm_tokens(tokens)
        value = self._split(self.value(tokens))  # (B, A, T, d / A)
        if self.is_static:
            scores = self.scores.expand(x.size(0), -1, -1, -1)
        else:
            query, key = (
                self._split(self.query(self.norm_latents(x))),
                self._split(self.key(tokens)),
            )
            scores = query @ key.transpose(-1, -2) / key.size(-1) ** 0.5
        weights = scores.masked_fill(~mask[:, None, None], float("-inf")).softmax(-1)
        x = x + self.merge((weights @ value).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x)), weights

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def expert_shares(attention: Tensor, num_experts: int) -> Tensor:
    """Attention of each expert, the empty slot last.

    Args:
        attention: Shape (..., T), T = E * S + 1.
        num_experts: E.

    Returns:
        Shape (..., E + 1), summing to 1.
    """
    experts = attention[..., :-1].unflatten(-1, (num_experts, -1)).sum(-1)
    return torch.cat([experts, attention[..., -1:]], -1)


def embedding_rms(weight: Tensor, ids: Sequence[int] | None = None) -> float:
    """Root mean square of a table of token embeddings."""
    rows = weight if ids is None else weight[torch.as_tensor(ids)]
    return float(rows.detach().float().square().mean().sqrt())
