"""Tiny random models: they decode in milliseconds, and their text is noise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rivet.tokenization import ProtocolTokenizer

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    # Large weights: a random model of the default scale is nearly uniform and tests nothing.
    "initializer_range": 0.3,
}


def build(tokenizer: ProtocolTokenizer, kind: str = "qwen3") -> torch.nn.Module:
    """A random causal language model over the tokenizer's vocabulary."""
    torch.manual_seed(0)
    vocab_size = len(tokenizer.token_bytes)
    config, model = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),  # no fast step: its own forward decodes
        "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),  # sliding windows, two kinds of rotary
    }[kind]
    extra = {}
    if kind == "gemma3":
        extra = {"sliding_window": 256, "layer_types": ["sliding_attention", "full_attention"]}
    return model(config(vocab_size=vocab_size, **SHAPE, **extra)).eval()


@pytest.fixture(scope="session")
def build_model() -> Callable[..., torch.nn.Module]:
    """`build_model(tokenizer, kind)`: a new model, for tests that change it."""
    return build


@pytest.fixture(scope="session", params=["qwen3", "llama", "qwen2", "gemma3"])
def model(request: pytest.FixtureRequest, tag_tokenizer: ProtocolTokenizer) -> torch.nn.Module:
    """A model of each architecture that a controller may have."""
    return build(tag_tokenizer, request.param)


@pytest.fixture(scope="session")
def qwen3(tag_tokenizer: ProtocolTokenizer) -> torch.nn.Module:
    """One Qwen3; a test that changes its weights builds its own."""
    return build(tag_tokenizer)
