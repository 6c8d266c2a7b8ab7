"""Small random experts of different kinds, and a policy that listens to them."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from rivet.latent.adapter import AdapterSettings
from rivet.latent.experts import ExpertSpec, FrozenExpert
from rivet.latent.policy import LatentPolicy
from rivet.latent.prompts import add_placeholder, fit_embeddings
from rivet.tokenization import ProtocolTokenizer
from tests.conftest import build_tokenizer

NUM_CONTEXT, LAST_K = 3, 2


def tiny_llama(vocab: int, *, width: int = 32, layers: int = 2, seed: int = 0) -> LlamaForCausalLM:
    """A random language model in float32."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=2 * width,
        tie_word_embeddings=True,
        initializer_range=0.2,
        eos_token_id=1,
        pad_token_id=1,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def tokenizer() -> ProtocolTokenizer:
    """The policy's tokenizer, with a placeholder."""
    return add_placeholder(build_tokenizer(["<|im_start|>", "<|im_end|>"], []))[0]


@pytest.fixture
def experts() -> list[FrozenExpert]:
    """A Llama and a GPT-2 of other widths, depths and tokenizers than the policy."""
    first, second = build_tokenizer(["<|im_end|>"], []), build_tokenizer(["<|im_end|>"], ["12"])
    llama = tiny_llama(len(first.hf), width=48, layers=3, seed=1)
    torch.manual_seed(2)
    gpt = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(second.hf), n_embd=24, n_layer=2, n_head=2, n_positions=64, n_inner=24
        )
    )
    return [
        FrozenExpert(ExpertSpec("llama", "unused", last_k=LAST_K), llama, first.hf),
        FrozenExpert(ExpertSpec("gpt", "unused", last_k=LAST_K, reading="plain"), gpt, second.hf),
    ]


@pytest.fixture
def policy(tokenizer: ProtocolTokenizer, experts: list[FrozenExpert]) -> LatentPolicy:
    """A policy that listens to both."""
    placeholder = add_placeholder(tokenizer)[1]
    model = tiny_llama(len(tokenizer.hf) - 1)
    fit_embeddings(model, len(tokenizer.hf))
    settings = AdapterSettings(
        tuple(expert.spec.name for expert in experts),
        tuple(expert.width for expert in experts),
        num_slots=LAST_K,
        output_width=model.config.hidden_size,
        num_context_tokens=NUM_CONTEXT,
        width=16,
        num_heads=2,
    )
    return LatentPolicy.from_causal_lm(model, placeholder_id=placeholder, adapter=settings).eval()
