"""A decode step of Llama-shaped models without the overhead of their modules.

For a model of half a million parameters the module calls of `transformers` cost more than the
arithmetic. The step below does the same arithmetic on the same parameters. Small float32 layers are
packed: query, key and value are one product, so are gate and up, and the weights of the norms
before them are multiplied in. Packs are made again when a parameter has changed. Larger layers,
other types, and layers with adapters are read from their modules at each step. Other architectures,
and prefill, take the model's own forward; a test compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from transformers import LlamaForCausalLM, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from rivet.rollout.kv_cache import SlotCache, attend

# Packs are a second copy of the weights; above this size the calls that they save no longer count.
_MAX_PACKED_BYTES = 64 << 20
# Rotary frequencies of these kinds do not depend on how long the sequence is.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")

Project = Callable[[torch.Tensor], torch.Tensor]


def is_supported(model: Any) -> bool:
    """Whether a model has exactly the shape that `FastStep` computes, on one device."""
    if type(model) not in (LlamaForCausalLM, Qwen3ForCausalLM):
        return False
    norms = [m for name, m in model.named_modules() if name.endswith("norm")]
    return (
        model.config.hidden_act == "silu"
        and getattr(model, "hf_device_map", None) is None
        and all(type(norm) in (LlamaRMSNorm, Qwen3RMSNorm) for norm in norms)
    )


class FastStep:
    """One more token of every row of a cache.

    Args:
        model: One that `is_supported`; in evaluation mode whenever a step is run.
        max_context: Positions lie below it.
    """

    def __init__(self, model: Any, max_context: int) -> None:
        self._model = model
        self._max_context = max_context
        self._layers: list[_Layer] = []
        self._versions: list[tuple[int, int]] = []
        self._rotary: tuple[torch.Tensor, torch.Tensor] | None = None

    def refresh(self) -> None:
        """Take up weights that have changed: call it before the first of several steps."""
        parameters = list(self._model.parameters())
        # A change in place moves the version on, a new tensor the address.
        versions = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in parameters]
        if versions == self._versions:
            return
        self._versions = versions
        decoder = self._model.model
        size = sum(p.numel() * p.element_size() for p in decoder.layers.parameters())
        is_packed = size <= _MAX_PACKED_BYTES and {p.dtype for p in parameters} == {torch.float32}
        self._layers = [_Layer(layer, is_packed) for layer in decoder.layers]
        self._rotary = self._rotary_table()

    def forget(self) -> None:
        """Weights have changed in a way that leaves no trace, such as through `.data`."""
        self._versions = []

    def __call__(
        self, ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor, cache: SlotCache
    ) -> torch.Tensor:
        """Logits of the next token.

        Args:
            ids: Shape (B, 1).
            position_ids: Shape (B, 1).
            mask: Additive, shape (B, 1, 1, L), from `SlotCache.begin`.
            cache: Takes the new keys and values.

        Returns:
            Shape (B, V).
        """
        model = self._model.model
        x = model.embed_tokens(ids)[:, 0]  # (B, hidden)
        if self._rotary is not None:
            positions = position_ids[:, 0]
            cos, sin = (table.index_select(0, positions) for table in self._rotary)
        else:
            cos, sin = _signed(*model.rotary_emb(x, position_ids))
        for n, layer in enumerate(self._layers):
            both, value = layer.heads(x)
            both = torch.addcmul(both * cos, both.roll(sin.shape[-1] // 2, -1), sin)
            keys, values = cache.update(
                both[:, layer.query_heads :, None], value.unflatten(-1, (-1, 1, layer.width)), n
            )
            mixed = attend(both[:, : layer.query_heads], keys, values, mask, layer.scaling)
            x = x + layer.mix(mixed.flatten(1))
            gate, up = layer.gate_up(x).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate).mul_(up))
        return self._model.lm_head(_norm(model.norm, x))

    def _rotary_table(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Cosines and signed sines by position, both (max_context, 1, D), where they are fixed."""
        rotary = self._model.model.rotary_emb
        if getattr(rotary, "rope_type", None) not in _FIXED_ROPE:
            return None
        like = self._model.get_input_embeddings().weight[:1]
        positions = torch.arange(self._max_context, device=like.device)[None]
        cos, sin = _signed(*rotary(like, positions))
        return cos[0, :, None].contiguous(), sin[0, :, None].contiguous()


class _Layer:
    """The projections of one decoder layer, packed or as they are."""

    def __init__(self, layer: Any, is_packed: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.width: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.query_heads: int = attention.config.num_attention_heads
        self._both_heads = self.query_heads + attention.config.num_key_value_heads
        self.qkv = _joined(
            layer.input_layernorm,
            [attention.q_proj, attention.k_proj, attention.v_proj],
            is_packed,
        )
        self.gate_up = _joined(
            layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj], is_packed
        )
        self.mix = _plain(attention.o_proj)
        self.down = _plain(mlp.down_proj)
        self._norms = None
        self._head_weights = None
        if hasattr(attention, "q_norm"):
            self._norms = attention.q_norm, attention.k_norm
            if is_packed:
                counts = torch.tensor(
                    [self.query_heads, self._both_heads - self.query_heads],
                    device=attention.q_norm.weight.device,
                )
                weights = torch.stack([norm.weight for norm in self._norms])
                scale = self.width**0.5
                self._head_weights = weights.repeat_interleave(counts, dim=0) * scale  # (H, D)
                self._floor = _floor(attention.q_norm, self.width)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys, normed where the model does, (B, H + heads, D); values, flat."""
        projected = self.qkv(x)
        edge = self._both_heads * self.width
        both = projected[:, :edge].unflatten(-1, (-1, self.width))
        if self._head_weights is not None:
            both = _unit(both, self._floor) * self._head_weights
        elif self._norms is not None:
            queries, keys = both[:, : self.query_heads], both[:, self.query_heads :]
            both = torch.cat([_norm(self._norms[0], queries), _norm(self._norms[1], keys)], dim=1)
        return both, projected[:, edge:]


def _joined(norm: Any, modules: Sequence[Any], is_packed: bool) -> Project:
    """A norm and the linear layers behind it, side by side, as one function."""
    if not (is_packed and all(_is_plain(module) for module in modules)):
        return lambda x: torch.cat([m(h) for h in [_norm(norm, x)] for m in modules], dim=-1)
    width = norm.weight.shape[0]
    weight = torch.cat([module.weight for module in modules]) * (norm.weight * width**0.5)
    biases = [
        torch.zeros_like(module.weight[:, 0]) if module.bias is None else module.bias
        for module in modules
    ]
    bias = torch.cat(biases) if any(module.bias is not None for module in modules) else None
    floor = _floor(norm, width)
    return lambda x: F.linear(_unit(x, floor), weight, bias)


def _plain(module: Any) -> Project:
    """A linear layer without the call of its module, where that is all it does."""
    if not _is_plain(module):
        return module
    weight, bias = module.weight, module.bias
    return lambda x: F.linear(x, weight, bias)


def _is_plain(module: Any) -> bool:
    """Whether calling it is a matrix product and nothing else."""
    return type(module) is torch.nn.Linear and not (
        module._forward_hooks or module._forward_pre_hooks
    )


def _floor(norm: Any, width: int) -> torch.Tensor:
    """What the norm's epsilon is beside a vector's length: sqrt(epsilon * width)."""
    return torch.tensor((norm.variance_epsilon * width) ** 0.5, device=norm.weight.device)


def _unit(x: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """RMS norm without weight, divided by sqrt(width): x / sqrt(sum(x^2) + epsilon * width)."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(floor)


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


def _signed(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotating halves, [a, b] -> [-b, a], is a roll with the sign moved into the sine."""
    half = sin.shape[-1] // 2
    return cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
