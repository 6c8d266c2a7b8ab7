"""Tokenizers that tests build themselves: one with a token per tag, one in the style of Qwen."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from rivet.tokenization import ProtocolTokenizer

CORPUS = [
    "What is the greatest common divisor of 12 and 18? Compute 3 + 4 * 5 = 23.",
    "from math import gcd\nprint(gcd(12, 18))\n<b>bold</b> x<y>z </ <| |> calc numth algebra sage",
] * 20
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer(
    special: list[str], added: list[str], *, normalizer: normalizers.Normalizer | None = None
) -> ProtocolTokenizer:
    """A byte-level BPE tokenizer with control tokens and ordinary added tokens."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    fast.chat_template = CHATML
    return ProtocolTokenizer(fast)


@pytest.fixture(scope="session")
def tag_tokenizer() -> ProtocolTokenizer:
    """Each tag is one control token, as in the mini-world."""
    tags = [f"<{s}{t}>" for t in ("think", "python", "output", "answer") for s in ("", "/")]
    tags += ["</expert>", "</reply>", '<expert name="', '<reply name="', '">', "\\boxed{"]
    return build_tokenizer(["<|im_start|>", "<|im_end|>", *tags], [])


@pytest.fixture(scope="session")
def qwen_tokenizer() -> ProtocolTokenizer:
    """Plain-text tags; `<think>` and `<tool_call>` are added tokens with special=False; NFC."""
    return build_tokenizer(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        ["<tool_call>", "</tool_call>", "<think>", "</think>", "    "],
        normalizer=normalizers.NFC(),
    )


@pytest.fixture(scope="session", params=["tags", "qwen", "nfkc"])
def tokenizer(request: pytest.FixtureRequest) -> ProtocolTokenizer:
    """Every tokenizer that the protocol must hold under."""
    if request.param == "nfkc":
        return build_tokenizer(
            ["<|im_start|>", "<|im_end|>"], ["<think>"], normalizer=normalizers.NFKC()
        )
    name = {"tags": "tag_tokenizer", "qwen": "qwen_tokenizer"}[request.param]
    return request.getfixturevalue(name)


@pytest.fixture(scope="session")
def learnt_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, tag_tokenizer: ProtocolTokenizer
) -> Path:
    """A tiny checkpoint that answers `learnt.PROBLEMS`; tests must not change it."""
    from learnt import save_learnt

    return save_learnt(tmp_path_factory.mktemp("learnt") / "checkpoint", tag_tokenizer)
