"""The latent world's specialists and policy: tiny language models trained from scratch.

Each specialist knows one family. They differ in width, depth, tokenizer and in how they are asked,
so that nothing of the interface can rest on what they share. The policy learns to read a number off
and what an answer to a hard problem looks like, from the answers of *other* problems: the form, not
the answer.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from data.latentworld.tasks import FAMILIES
from data.problems import Problem
from rivet.latent.prompts import LatentPrompts
from rivet.latent.sampling import pad_right

logger = logging.getLogger(__name__)

Row = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Specialist:
    """How one specialist is built and trained.

    Attributes:
        family: What it knows.
        hidden_size: Its width.
        num_layers: Its depth.
        digits: Its tokenizer takes up to this many digits as one token.
        steps: Training steps.
        learning_rate: Greatest learning rate.
        template: Its chat template; empty for none.
    """

    family: str
    hidden_size: int
    num_layers: int
    digits: int
    steps: int
    learning_rate: float
    template: str = ""


SPECIALISTS = (
    Specialist("primes", 96, 3, 2, 500, 3e-3),
    Specialist(
        "equations",
        64,
        2,
        3,
        900,
        4e-3,
        "{% for m in messages %}? {{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %} ={% endif %}",
    ),
    Specialist("sums", 128, 2, 2, 600, 3e-3),
)


def word_tokenizer(texts: Sequence[str], *, digits: int, template: str = "") -> Any:
    """A tokenizer of words, signs and numbers.

    Args:
        texts: What it must be able to read.
        digits: Numbers are cut into tokens of up to this many digits, from the left.
        template: Chat template; empty for none.
    """
    pattern = rf"\d{{1,{digits}}}|[A-Za-z]+|[^\sA-Za-z\d]"
    found = sorted({word for text in [*texts, "? ="] for word in re.findall(pattern, text)})
    numbers = [str(n) for n in range(10 ** min(digits, 2))]
    words = ["<unk>", "<end>", *dict.fromkeys([*numbers, *found])]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<end>", pad_token="<end>"
    )
    if template:
        tokenizer.chat_template = template
    return tokenizer


def build_specialist(specialist: Specialist, tokenizer: Any, seed: int) -> PreTrainedModel:
    """An untrained specialist in float32."""
    width = specialist.hidden_size
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=specialist.num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=width // 4,
        intermediate_size=3 * width,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def policy_rows(
    problems: Sequence[Problem], plain: LatentPrompts, listening: LatentPrompts, seed: int
) -> list[Row]:
    """What the policy learns first: prompt and completion.

    A third of the prompts has no context, a third placeholders, here ordinary tokens, and a third
    a hint: a number in the place of the context. In a hard family the completion is the answer of
    another problem, and where there is a hint, the hint: so the policy learns to follow what stands
    there, which tells it nothing about the problem. What it can read off itself it learns to read,
    whatever the hint says.
    """
    generator = random.Random(f"policy\x1f{seed}")
    tokenizer = listening.tokenizer
    answers: dict[str, list[str]] = {}
    for problem in problems:
        answers.setdefault(problem.meta["family"], []).append(problem.answer)
    rows: list[Row] = []
    for n, problem in enumerate(problems):
        family = problem.meta["family"]
        other = generator.choice(answers[family])
        answer = other if FAMILIES[family].is_hard else problem.answer
        # Families take turns, so that the kind of prompt must not go with n alone.
        kind = (n // len(answers)) % 3
        if kind == 0:
            prompt = plain.build(problem.problem)
        elif kind == 1:
            prompt = listening.build(problem.problem)
        else:
            hint = tokenizer.encode_untrusted(other)
            context = listening.context
            at = generator.randrange(max(len(context) - len(hint), 0) + 1)
            context[at : at + len(hint)] = hint
            prompt = listening.build(problem.problem, context=context)
        rows.append((prompt, answer_ids(listening, answer)))
    generator.shuffle(rows)
    return rows


def answer_ids(prompts: LatentPrompts, answer: str) -> list[int]:
    """A completion that answers: a box and the end of the turn."""
    tokenizer = prompts.tokenizer
    ids = [*tokenizer.encode("\\boxed{"), *tokenizer.encode_untrusted(answer)]
    return [*ids, *tokenizer.encode("}"), tokenizer.eos_id]


def fit(
    model: PreTrainedModel,
    rows: Sequence[Row],
    *,
    steps: int,
    learning_rate: float,
    seed: int,
    batch_size: int = 64,
    warmup: int = 50,
    name: str = "",
) -> float:
    """Train on the completions of rows.

    Args:
        model: Trained in place.
        rows: Prompt and completion.
        steps: AdamW steps; the rate rises over `warmup` steps and falls to 2% at the end.
        learning_rate: The greatest.
        seed: Of the order of rows.
        batch_size: Rows of a step.
        warmup: Steps until the greatest rate.
        name: For the log.

    Returns:
        Mean loss of the last 20 steps, nats per completion token.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, weight_decay=0.1, betas=(0.9, 0.98)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / warmup) * max(0.02, 1 - step / steps)
    )
    losses: list[float] = []
    model.train()
    for step in range(steps):
        chosen = torch.randint(len(rows), (batch_size,), generator=generator).tolist()
        loss = completion_loss(model, [rows[n] for n in chosen])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if name and (step + 1) % 100 == 0:
            recent = sum(losses[-20:]) / len(losses[-20:])
            logger.info("%s: step %d/%d  loss %.3f", name, step + 1, steps, recent)
    model.eval()
    return sum(losses[-20:]) / max(len(losses[-20:]), 1)


def completion_loss(model: PreTrainedModel, rows: Sequence[Row], **inputs: Tensor | None) -> Tensor:
    """Mean negative log-likelihood of completions given their prompts, in nats per token.

    Args:
        model: A causal language model.
        rows: Prompt and completion.
        **inputs: Further inputs of the model, such as `expert_states`.
    """
    device = next(model.parameters()).device
    padded = pad_right([[*prompt, *completion] for prompt, completion in rows], 0)
    ids, mask = (x.to(device) for x in padded)
    lengths = [len(prompt) for prompt, _ in rows]
    first, starts = min(lengths), torch.tensor(lengths, device=device)
    places = torch.arange(ids.size(1), device=device)
    is_completion = mask.bool() & (places >= starts[:, None])
    # Only what predicts a completion token goes through the head.
    logits = model(
        input_ids=ids,
        attention_mask=mask,
        logits_to_keep=places[first - 1 : -1],
        **inputs,
    ).logits
    labels = ids.masked_fill(~is_completion, -100)[:, first:]
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


@torch.no_grad()
def completion_accuracy(model: PreTrainedModel, rows: Sequence[Row]) -> float:
    """Share of rows whose completion is the most likely one, token by token given the right ones
    before it.
    """
    right = 0
    for start in range(0, len(rows), 256):
        part = rows[start : start + 256]
        ids, mask = pad_right([[*prompt, *completion] for prompt, completion in part], 0)
        best = model(input_ids=ids, attention_mask=mask).logits.argmax(-1)
        for n, (prompt, completion) in enumerate(part):
            at = len(prompt) - 1
            right += best[n, at : at + len(completion)].tolist() == list(completion)
    return right / len(rows)
