r"""The mini-world's controller, built from scratch: a byte-level BPE and a half-million Qwen3.

Digits are split in ones and twos, left to right, so that a number is cut the same way wherever it
stands and copying it is copying tokens. Each tag is one control token; a tag with an expert's name
is three (`<expert name="`, the name, `">`), of which the middle one is the routing decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rivet.tokenization import ProtocolTokenizer

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
TAGS = (
    "<think>",
    "</think>",
    '<expert name="',
    '<reply name="',
    '">',
    "</expert>",
    "</reply>",
    "<python>",
    "</python>",
    "<output>",
    "</output>",
    "<answer>",
    "</answer>",
    "\\boxed{",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer(
    corpus: Iterable[str], *, vocab_size: int = 650, words: Sequence[str] = ()
) -> ProtocolTokenizer:
    """Train the tokenizer.

    Args:
        corpus: Texts as they stand between two tags.
        vocab_size: Tokens in all, control tokens included; the corpus may support fewer.
        words: Texts that must be one token each, such as the experts' names.
    """
    control = (USER, ASSISTANT, END, *TAGS)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,2}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(control),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Every pair of digits and every word must be a token, however rare in this sample of text.
    pairs = [f"{number:02d}" for number in range(100)]
    backend.train_from_iterator([*corpus, *[*pairs, *words] * 1000], trainer)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=END,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    protocol = ProtocolTokenizer(tokenizer)
    split = [word for word in [*pairs, *words] if len(protocol.encode(word)) != 1]
    if split:
        raise ValueError(
            f"vocab_size {vocab_size} is too small: {split[0]!r} is not one token; raise it"
        )
    return protocol


def build_model(tokenizer: ProtocolTokenizer, *, seed: int, **overrides: Any) -> Qwen3ForCausalLM:
    """A fresh controller in float32.

    Args:
        tokenizer: Gives the vocabulary and the end of turn.
        seed: Of the initial weights.
        **overrides: Fields of `Qwen3Config`, such as `hidden_size`.
    """
    eos = tokenizer.eos_id
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer.hf),
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 256,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        # At this width 0.02 makes copying appear hundreds of steps later.
        "initializer_range": 0.04,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": eos,
    }
    config = Qwen3Config(**{**settings, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=eos)
    return model
