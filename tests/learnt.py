"""A tiny model that has learnt a few trajectories by heart: what it answers is known exactly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rivet.prompts import PromptBuilder
from rivet.rollout.types import RolloutLimits
from rivet.settings import ExpertCard, ProtocolSettings
from rivet.tokenization import ProtocolTokenizer

SETTINGS = ProtocolSettings(
    prompt="bare",
    after_tag="",
    experts=(ExpertCard("calc"),),
    limits=RolloutLimits(max_completion_length=96),
)
# The program computes what the text does not say, so a right answer proves that it ran.
PROBLEMS = {"What is the greatest common divisor of 12 and 18?": 6, "Compute 3 + 4 * 5": 23}
PROGRAMS = {
    "What is the greatest common divisor of 12 and 18?": "from math import gcd\nprint(gcd(12, 18))",
    "Compute 3 + 4 * 5": "print(3 + 4 * 5)",
}


def script(program: str, answer: int) -> list[tuple[str, bool]]:
    """One trajectory as text, and whether the controller writes it."""
    return [
        (f'<expert name="calc">{program}</expert>', True),
        (f'<reply name="calc">Compute <python>{program}</python>', True),
        (f"<output>{answer}</output>", False),
        (f"</reply><answer>\\boxed{{{answer}}}</answer><|im_end|>", True),
    ]


def learn(model: Any, batch: list[tuple[list[int], list[int]]], *, steps: int = 200) -> None:
    """Fit a few sequences, given as ids and labels."""
    longest = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([row + [0] * (longest - len(row)) for row, _ in batch])
    labels = torch.tensor([row + [-100] * (longest - len(row)) for _, row in batch])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.01:
            break


def save_learnt(
    folder: Path,
    tokenizer: ProtocolTokenizer,
    problems: Mapping[str, int] = PROBLEMS,
    programs: Mapping[str, str] = PROGRAMS,
    *,
    steps: int = 200,
) -> Path:
    """Train the model on the problems and save it as a checkpoint."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer.hf),
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            intermediate_size=96,
            tie_word_embeddings=True,
            initializer_range=0.05,
            max_position_embeddings=512,
            eos_token_id=tokenizer.eos_id,
        )
    )
    prompts = PromptBuilder(tokenizer, SETTINGS)
    batch = []
    for problem, answer in problems.items():
        ids = list(prompts.build(problem, "local"))
        labels = [-100] * len(ids)
        for text, is_trained in script(programs[problem], answer):
            piece = tokenizer.encode(text)
            ids += piece
            labels += piece if is_trained else [-100] * len(piece)
        batch.append((ids, labels))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads crowd each other out on a busy machine
    learn(model, batch, steps=steps)
    torch.set_num_threads(threads)
    model.save_pretrained(folder)
    tokenizer.hf.save_pretrained(folder)
    SETTINGS.save(folder)
    return folder
