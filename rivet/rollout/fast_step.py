"""A decode step of Llama-shaped models without the overhead of their modules.

For a model of half a million parameters the module calls of `transformers` cost more than the
arithmetic. The step below does the same arithmetic on the same parameters, read anew at each step.
Linear layers are still called as modules, so that adapters in them count. Other architectures, and
prefill, take the model's own forward; a test compares both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import LlamaForCausalLM, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from rivet.rollout.kv_cache import SlotCache, attend


def is_supported(model: Any) -> bool:
    """Whether a model has exactly the shape that `fast_step` computes, on one device."""
    if type(model) not in (LlamaForCausalLM, Qwen3ForCausalLM):
        return False
    norms = [m for name, m in model.named_modules() if name.endswith("norm")]
    return (
        model.config.hidden_act == "silu"
        and getattr(model, "hf_device_map", None) is None
        and all(type(norm) in (LlamaRMSNorm, Qwen3RMSNorm) for norm in norms)
    )


def fast_step(
    model: Any,
    ids: torch.Tensor,
    position_ids: torch.Tensor,
    mask: torch.Tensor,
    cache: SlotCache,
) -> torch.Tensor:
    """Logits of one more token of every row.

    Args:
        model: One that `is_supported`, in evaluation mode.
        ids: Shape (B, 1).
        position_ids: Shape (B, 1).
        mask: Additive, shape (B, 1, 1, L), from `SlotCache.begin`.
        cache: Takes the new keys and values.

    Returns:
        Shape (B, V).
    """
    decoder = model.model
    x = decoder.embed_tokens(ids)[:, 0]  # (B, hidden)
    cos, sin = decoder.rotary_emb(x, position_ids)  # (B, 1, D)
    half = sin.shape[-1] // 2
    # Rotating halves, [a, b] -> [-b, a], is a roll with the sign moved into the sine.
    sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
    for n, layer in enumerate(decoder.layers):
        attention = layer.self_attn
        width = attention.head_dim
        h = _norm(layer.input_layernorm, x)
        query = attention.q_proj(h).unflatten(-1, (-1, width))  # (B, H, D)
        key = attention.k_proj(h).unflatten(-1, (-1, width))
        value = attention.v_proj(h).unflatten(-1, (-1, 1, width))
        if hasattr(attention, "q_norm"):
            query, key = _norm(attention.q_norm, query), _norm(attention.k_norm, key)
        both = torch.cat([query, key], dim=1)
        both = torch.addcmul(both * cos, both.roll(half, -1), sin)
        heads = query.shape[1]
        keys, values = cache.update(both[:, heads:, None], value, n)
        mixed = attend(both[:, :heads], keys, values, mask, attention.scaling)
        x = x + attention.o_proj(mixed.flatten(1))
        h = _norm(layer.post_attention_layernorm, x)
        mlp = layer.mlp
        x = x + mlp.down_proj(F.silu(mlp.gate_proj(h)).mul_(mlp.up_proj(h)))
    return model.lm_head(_norm(decoder.norm, x))


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)
